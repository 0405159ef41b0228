"""The compiled kernel as operators of torch, which programs call, and calls under a mode.

Beside query, key and value they take the options of the call as `Coded`. What follows from the
contents of arrays, and from lengths that a program leaves open, is computed when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import register_flop_formula

from polyattn.plugin import Cotangents, Expression, Gradients, Mask, Operands, Problem, Residuals
from polyattn_native.arrays import has_rows_first
from polyattn_native.expression_codes import Open, can_code, coded, decoded
from polyattn_native.library import VERSION

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, str code, Tensor[] tensors, Tensor[] floats,"
    " SymInt[] numbers, SymInt[] opened, float scale, float? softcap, float dropout"
)
# Problems that are kept, at most.
MOST_CALLS = 4096
# torch's functions for it have no types.
_torch: Any = torch
_library = _torch.library.Library("polyattn_native", "DEF")
_library.define(f"attend({_ARGUMENTS}) -> (Tensor, Tensor)")
# Without a derivative, which would take as long as all else that torch does to call it.
_library.define(f"output({_ARGUMENTS}) -> Tensor")
_library.define(
    "differentiate(Tensor output, Tensor logsumexp, Tensor of_output, Tensor? of_logsumexp,"
    f" {_ARGUMENTS}, bool of_bias) -> Tensor[]"
)


def reasons_against(problem: Problem) -> list[str]:
    """Return why a program of torch.compile, or a call under a mode, cannot call an operator."""
    if torch.compiler.is_exporting():
        return ["a program that torch.export writes would need it where it runs"]
    if torch._C._are_functorch_transforms_active():
        return ["it does not support torch.func under torch.compile"]
    numbers = problem.query_offset, problem.window, problem.dropout_start
    if not can_code((problem.mask_spec, problem.score_spec, *numbers)):
        return [
            "as an operator of torch it supports numbers of 64 bits, and expressions without"
            " strings whose class a module names"
        ]
    return []


def attend(problem: Problem, x: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output and logsumexp by the operator."""
    has_gradients = problem.requires_grad and torch.is_grad_enabled()
    if not has_gradients and "logsumexp" not in problem.features:
        return torch.ops.polyattn_native.output(*_arguments(problem, x)), None
    if has_gradients and problem.dtype != problem.accumulator:
        # The gradient follows from an output that is not rounded.
        dtype = getattr(torch, problem.accumulator)
        x = x._replace(query=x.query.to(dtype), key=x.key.to(dtype), value=x.value.to(dtype))
    output, logsumexp = torch.ops.polyattn_native.attend(*_arguments(problem, x))
    output = output.to(getattr(torch, problem.dtype))
    return output, logsumexp if "logsumexp" in problem.features else None


def differentiate(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Return the gradients of arrays by the operator."""
    given = residuals.output, residuals.logsumexp, cotangents.output, cotangents.logsumexp
    of_bias = x.bias is not None and "bias" not in problem.constants
    found = torch.ops.polyattn_native.differentiate(*given, *_arguments(problem, x), of_bias)
    query, key, value, scale, softcap, *rest = found
    bias = None if x.bias is None else rest.pop(0)
    return Gradients(
        query=query,
        key=key,
        value=value,
        bias=bias if of_bias else None,
        sinks=None if x.sinks is None else rest.pop(0),
        score_mod=rest,
        similarity=[],
        scale=scale,
        softcap=None if problem.softcap is None else softcap,
    )


def _arguments(problem: Problem, x: Operands) -> tuple[Any, ...]:
    from torch.fx.experimental.symbolic_shapes import has_static_value

    def held(number: int) -> Any:
        return number if has_static_value(number) else Open(number)

    seed, mask = x.seed, x.mask
    if isinstance(mask, Mask):
        mask = mask.with_lengths(held)
    if isinstance(seed, int):  # of 64 bits, where an operator takes 63
        seed = Open(seed % 2**32), Open(seed // 2**32)
    start = problem.dropout_start if x.dropout_start is None else x.dropout_start
    offset = x.query_offset if problem.query_offset is None else held(problem.query_offset)
    options = (
        x.bias, x.sinks, x.score_mod,  # first: those with gradients
        mask, offset, x.key_lengths, x.block_table, seed, start,
        problem.is_causal, problem.window, problem.same_bits,
    )  # fmt: skip
    # Programs that an earlier version compiled, which are kept on disk, are of no use for this one.
    return *x[:3], *coded(VERSION, options), problem.scale, problem.softcap, problem.dropout


# ---- what the operators do ----


def register(
    attend: Callable[[Problem, Operands], tuple[Any, Any]],
    differentiate: Callable[[Problem, Operands, Residuals, Cotangents], Gradients],
) -> None:
    """Let functions of tensors with numbers compute what the operators do."""

    def attend_to(*arguments: Any) -> tuple[Any, Any]:
        return attend(*_call(True, *arguments))

    def output_of(*arguments: Any) -> Any:
        return attend(*_call(False, *arguments))[0]

    def gradients(
        output: Any, logsumexp: Any, of_output: Any, of_logsumexp: Any, *arguments: Any
    ) -> list[Any]:
        residuals = Residuals(output=output, logsumexp=logsumexp)
        cotangents = Cotangents(output=of_output, logsumexp=of_logsumexp)
        problem, x = _call(True, *arguments[:-1])
        if not arguments[-1]:  # whether the gradient of the bias is asked for
            problem = problem._replace(constants=frozenset(["bias"]))
        found = differentiate(problem, x, residuals, cotangents)
        of_bias, of_softcap = [
            logsumexp.new_empty(0) if one is None else one for one in (found.bias, found.softcap)
        ]
        rest = [] if x.bias is None else [of_bias]
        rest += [] if x.sinks is None else [found.sinks]
        laid_out = map(_laid_out, found[:3], x[:3])
        return [*laid_out, found.scale, of_softcap, *rest, *found.score_mod]

    for name, compute, fake in (
        ("attend", attend_to, _attend_fake),
        ("output", output_of, lambda *arguments: _attend_fake(*arguments)[0]),
        ("differentiate", gradients, _differentiate_fake),
    ):
        _torch.library.impl(_library, name, "CPU")(compute)
        _torch.library.register_fake(f"polyattn_native::{name}", lib=_library)(fake)
    _torch.library.register_autograd(
        "polyattn_native::attend", _gradients, setup_context=_save, lib=_library
    )


def _attend_fake(query: Any, key: Any, value: Any, *rest: Any) -> Any:
    x = _operands(query, key, value, *rest[:2], repeat(1.0), rest[3], repeat(0))[0]
    shapes = [None if one is None else one.shape for one in (query, key, value, x.block_table)]
    rows = (*_batch(*shapes), *query.shape[-3:-1])
    logsumexp = query.new_empty(rows, dtype=_accumulator(query.dtype))
    return empty_beside(query, (*rows, value.shape[-1]), query.dtype), logsumexp


def empty_beside(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return a tensor (..., head, row, column) with these axes in memory as another has them."""
    if not has_rows_first(tensor.stride()):
        return tensor.new_empty(shape, dtype=dtype)
    *lead, heads, rows, size = shape
    return tensor.new_empty((*lead, rows, heads, size), dtype=dtype).transpose(-3, -2)


def _laid_out(gradient: Any, tensor: torch.Tensor) -> Any:
    """Return a gradient in memory as a program expects it."""
    expected = empty_beside(tensor, gradient.shape, gradient.dtype)
    return gradient if gradient.stride() == expected.stride() else expected.copy_(gradient)


def _differentiate_fake(
    output: Any, logsumexp: Any, of_output: Any, of_logsumexp: Any, query: Any, key: Any,
    value: Any, code: str, tensors: Any, floats: Any, numbers: Any, opened: Any, *rest: Any,
) -> list[torch.Tensor]:  # fmt: skip
    x = _operands(query, key, value, code, tensors, repeat(1.0), numbers, repeat(0))[0]
    dtype = _accumulator(query.dtype)
    found = [empty_beside(one, one.shape, dtype) for one in (query, key, value)]
    shapes: list[Any] = [(), 0 if rest[1] is None else ()]
    shapes += [] if x.bias is None else [x.bias.shape if rest[-1] else 0]
    shapes += [] if x.sinks is None else [x.sinks.shape]
    if isinstance(x.score_mod, Expression):
        shapes += [one.shape for _, one in x.score_mod.carried()]
    return found + [query.new_empty(shape, dtype=dtype) for shape in shapes]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *arrays, ctx.code, tensors, floats, ctx.numbers, ctx.opened = inputs[:8]
    ctx.factors, ctx.counts = inputs[8:], (len(tensors), len(floats))
    ctx.save_for_backward(*output, *arrays, *tensors, *floats)


def _gradients(ctx: Any, of_output: Any, of_logsumexp: Any) -> tuple[Any, ...]:
    output, logsumexp, *arrays = ctx.saved_tensors
    if of_output is None:
        of_output = torch.zeros_like(output)
    end = 3 + ctx.counts[0]
    lists = arrays[3:end], arrays[end:], ctx.numbers, ctx.opened
    needed = ctx.needs_input_grad
    found = torch.ops.polyattn_native.differentiate(
        output, logsumexp, of_output, of_logsumexp, *arrays[:3], ctx.code, *lists, *ctx.factors,
        any(needed[4][:1]),
    )  # fmt: skip
    del found[3:5]  # of the numbers scale and softcap
    # Of the tensors, those with a gradient come first.
    every = [*needed[:3], *needed[4]]
    found += [None] * (len(every) - len(found))
    given = [one if needs else None for one, needs in zip(found, every, strict=True)]
    # An empty list is one of tensors to torch.
    of_numbers: Any = [None if numbers else [] for numbers in lists[2:]]
    rest = [None] * ctx.counts[1], *of_numbers, *[None] * len(ctx.factors)
    return *given[:3], None, given[3:], *rest


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _batch(query: Any, key: Any, value: Any, table: Any) -> Any:
    """Return the batch axes of arrays of these shapes."""
    keys = [key[:-3], value[:-3]] if table is None else [table[:-1]]
    return _torch.broadcast_shapes(query[:-3], *keys)


def _operands(query: Any, key: Any, value: Any, *coded: Any) -> tuple[Operands, list[Any]]:
    """Return the operands, and start of dropout, causal, window and same bits."""
    bias, sinks, rule, mask, offset, lengths, table, seed, *rest = decoded(*coded)
    if isinstance(seed, tuple):
        seed = int(seed[0]) + (int(seed[1]) << 32)
    if isinstance(offset, np.ndarray):
        offset = offset.reshape(1, 1, 1)
    found = Operands(
        query, key, value, mask=mask, bias=bias, sinks=sinks, query_offset=offset,
        key_lengths=lengths, block_table=table, score_mod=rule, seed=seed,
    )  # fmt: skip
    return found, rest


# ---- what torch counts of them ----


def let_count() -> None:
    """Let the entered counters of FLOPs count the operators, also those older than this module."""
    for mode in _get_current_dispatch_mode_stack():
        counter: Any = getattr(mode, "counter", None)
        for operator, formula in _FORMULAS.items():
            getattr(counter, "flop_registry", {}).setdefault(operator, formula)


def _flops(query: Any, key: Any, value: Any, *coded: Any, out_val: Any, **_: Any) -> Any:
    """Return the FLOPs of all scores, and of their products with the values, as torch does."""
    output = out_val[0] if isinstance(out_val, tuple) else out_val
    return 2 * _scores(output, key, *coded) * (query.shape[-1] + value.shape[-1])


def _gradient_flops(
    output: Any, _: Any, of_output: Any, of_logsumexp: Any, query: Any, key: Any, value: Any,
    *coded: Any, **more: Any,
) -> Any:  # fmt: skip
    """Return the FLOPs of three products with queries or keys, and two with values."""
    return 2 * _scores(output, key, *coded) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(output: Any, key: Any, code: str, tensors: Any, *rest: Any) -> Any:
    x, _ = _operands(None, key, None, code, tensors, repeat(1.0), rest[1], repeat(0))
    pages = 1 if x.block_table is None else x.block_table.shape[-1]
    return math.prod(output.shape[:-1]) * key.shape[-2] * pages


_FORMULAS: Any = {
    _torch.ops.polyattn_native.attend: _flops,
    _torch.ops.polyattn_native.output: _flops,
    _torch.ops.polyattn_native.differentiate: _gradient_flops,
}
for _operator, _formula in _FORMULAS.items():
    register_flop_formula(_operator, get_raw=True)(_formula)


# ---- the calls of operators ----

# By all that a plan depends on: the problem, and the operands if they are numbers only.
_calls: dict[Any, tuple[Problem, Operands | None]] = {}


def _call(
    has_logsumexp: bool, query: Any, key: Any, value: Any, code: str, tensors: Any, floats: Any,
    numbers: Any, opened: Any, *factors: Any,
) -> tuple[Problem, Operands]:  # fmt: skip
    """Return the call of an operator's arguments."""
    values = [one.item() for one in floats]
    facts = [(one.dtype, one.shape) for one in (query, key, value, *tensors)]
    kind = (has_logsumexp, code, *facts, *values, *numbers, *factors)
    problem, x = _calls.get(kind, (None, None))
    if problem is not None and x is not None:
        return problem, x._replace(query=query, key=key, value=value)
    x, (start, is_causal, window, same_bits) = _operands(
        query, key, value, code, tensors, values, numbers, opened
    )
    if isinstance(start, torch.Tensor):
        x, start = x._replace(dropout_start=start), None
    if problem is None:
        given = x.query, x.key, x.value, x.mask, x.bias, x.score_mod, x.query_offset, x.block_table
        more = has_logsumexp, x.sinks is not None, is_causal, window, start, *factors
        problem = _problem(*[_facts(one) for one in given], *more)._replace(same_bits=same_bits)
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        is_fixed = not tensors and not opened
        _calls[kind] = problem, x._replace(query=None, key=None, value=None) if is_fixed else None
    return problem, x


def _facts(x: Any) -> Any:
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return tuple(x.shape), str(x.dtype).removeprefix("torch.")
    return x.spec() if isinstance(x, Expression) else x


def _problem(
    query: Any, key: Any, value: Any, mask: Any, bias: Any, rule: Any, offset: Any, table: Any,
    has_logsumexp: bool, has_sinks: bool, is_causal: bool, window: Any, start: Any, scale: float,
    softcap: float | None, dropout: float,
) -> Problem:  # fmt: skip
    (query, dtype), key, value = query, key[0], value[0]
    mask_spec = mask if isinstance(mask, Mask) else None
    has_offsets = isinstance(offset, tuple)
    needed = {
        "mask": mask is not None and mask_spec is None,
        "mask_expression": mask_spec is not None,
        "bias": bias is not None,
        "score_expression": rule is not None,
        "query_offset_array": has_offsets,
        "block_table": table is not None,
        "sinks": has_sinks,
        "dropout": dropout != 0,
        "logsumexp": has_logsumexp,
    }
    return Problem(
        library="torch",
        device="cpu",
        dtype=dtype,
        batch=tuple(_batch(query, key, value, table and table[0])),
        heads=query[-3],
        key_heads=key[-3],
        query_length=query[-2],
        key_length=key[-2] * (table[0][-1] if table else 1),
        head_size=query[-1],
        value_size=value[-1],
        is_causal=is_causal,
        window=window,
        query_offset=None if has_offsets else offset,
        scale=scale,
        softcap=softcap,
        mask=mask[0] if needed["mask"] else None,
        bias=bias and bias[0],
        bias_dtype=bias and bias[1],
        features=frozenset([name for name, is_needed in needed.items() if is_needed]),
        requires_grad=False,
        transforms=frozenset(),
        mask_spec=mask_spec,
        score_spec=rule,
        dropout=dropout,
        dropout_start=start,
    )
