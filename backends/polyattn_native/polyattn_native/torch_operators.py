"""The compiled kernel as operators of torch, which a program of torch.compile calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from polyattn.plugin import CachePadding, Cotangents, Gradients, Operands, Problem, Residuals
from polyattn_native.kernel import PLAIN
from polyattn_native.visible import kind_of

# Arguments that a program passes on beside numbers.
_ARRAYS = ("mask", "bias", "sinks", "query_offset", "key_lengths", "block_table")
_TENSORS = 3 + len(_ARRAYS)
_BIAS = 3 + _ARRAYS.index("bias")
_TAKEN = PLAIN | {"mask", "bias", "sinks", "query_offset_array", "block_table", "backward"}
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? sinks,"
    " Tensor? query_offset, Tensor? key_lengths, Tensor? block_table, bool is_causal,"
    " SymInt? left, SymInt? right, SymInt? offset, float scale, float? softcap"
)
# torch's functions for it have no types.
_torch: Any = torch
_library = _torch.library.Library("polyattn_native", "DEF")
_library.define(f"attend({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    "differentiate(Tensor output, Tensor logsumexp, Tensor of_output, Tensor? of_logsumexp,"
    f" {_ARGUMENTS}, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def reasons_against(problem: Problem) -> list[str]:
    """Return why a program of torch.compile cannot call an operator."""
    if torch.compiler.is_exporting():
        return ["a program that torch.export writes would need it where it runs"]
    if torch._C._are_functorch_transforms_active():
        return ["it does not support torch.func under torch.compile"]
    others = sorted(problem.features - _TAKEN - _of_lengths(problem))
    return [f"under torch.compile it does not compute {', '.join(others)}"] if others else []


def _of_lengths(problem: Problem) -> set[str]:
    """Return the feature that a mask is if it is one of lengths of keys only."""
    spec: Any = problem.mask_spec
    is_one = kind_of(spec) == "padding" and spec.query_lengths is None
    return {"mask_expression"} if is_one else set()


def attend(problem: Problem, x: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output and logsumexp by the operator."""
    if problem.requires_grad and torch.is_grad_enabled() and problem.dtype != problem.accumulator:
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
    query, key, value, bias, sinks = found
    return Gradients(
        query=query,
        key=key,
        value=value,
        bias=bias if of_bias else None,
        sinks=None if x.sinks is None else sinks,
        score_mod=[],
        similarity=[],
    )


def _arguments(problem: Problem, x: Operands) -> tuple[Any, ...]:
    offset = x.query_offset if problem.query_offset is None else None
    mask: Any = x.mask
    lengths = None
    if problem.mask_spec is not None:
        mask, lengths = None, torch.as_tensor(mask.key_lengths)
    return (
        x.query, x.key, x.value, mask, x.bias, x.sinks, offset, lengths, x.block_table,
        problem.is_causal, *problem.window, problem.query_offset, problem.scale, problem.softcap,
    )  # fmt: skip


# ---- what the operators do ----


def register(
    attend: Callable[[Problem, Operands], tuple[Any, Any]],
    differentiate: Callable[[Problem, Operands, Residuals, Cotangents], Gradients],
) -> None:
    """Let functions of tensors with numbers compute what the operators do."""

    def attend_to(*arguments: Any) -> tuple[Any, Any]:
        return attend(*_call(*arguments))

    def gradients(
        output: Any, logsumexp: Any, of_output: Any, of_logsumexp: Any, *arguments: Any
    ) -> tuple[Any, ...]:
        residuals = Residuals(output=output, logsumexp=logsumexp)
        cotangents = Cotangents(output=of_output, logsumexp=of_logsumexp)
        problem, x = _call(*arguments[:-1])
        if not arguments[-1]:  # whether the gradient of the bias is asked for
            problem = problem._replace(constants=frozenset(["bias"]))
        found = differentiate(problem, x, residuals, cotangents)[:5]
        return tuple([logsumexp.new_empty(0) if one is None else one for one in found])

    for name, compute, fake in (
        ("attend", attend_to, _attend_fake),
        ("differentiate", gradients, _differentiate_fake),
    ):
        _torch.library.impl(_library, name, "CPU")(compute)
        _torch.library.register_fake(f"polyattn_native::{name}", lib=_library)(fake)
    _torch.library.register_autograd(
        "polyattn_native::attend", _gradients, setup_context=_save, lib=_library
    )


def _attend_fake(query: Any, key: Any, value: Any, *rest: Any) -> Any:
    table = rest[len(_ARRAYS) - 1]
    batch = _batch(*[None if x is None else x.shape for x in (query, key, value, table)])
    rows = (*batch, *query.shape[-3:-1])
    logsumexp = query.new_empty(rows, dtype=_accumulator(query.dtype))
    return query.new_empty((*rows, value.shape[-1])), logsumexp


def _batch(query: Any, key: Any, value: Any, table: Any) -> Any:
    keys = [key[:-3], value[:-3]] if table is None else [table[:-1]]
    return _torch.broadcast_shapes(query[:-3], *keys)


def _differentiate_fake(
    output: Any, logsumexp: Any, of_output: Any, of_logsumexp: Any,
    query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any, *rest: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dtype = _accumulator(query.dtype)
    found = query, key, value, bias if rest[-1] else None, sinks
    shapes = [0 if one is None else one.shape for one in found]
    return tuple([query.new_empty(shape, dtype=dtype) for shape in shapes])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors, ctx.numbers = inputs[:_TENSORS], inputs[_TENSORS:]
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, of_output: Any, of_logsumexp: Any) -> tuple[Any, ...]:
    *tensors, output, logsumexp = ctx.saved_tensors
    if of_output is None:
        of_output = torch.zeros_like(output)
    needed = ctx.needs_input_grad
    given = output, logsumexp, of_output, of_logsumexp, *tensors, *ctx.numbers, needed[_BIAS]
    query, key, value, bias, sinks = torch.ops.polyattn_native.differentiate(*given)
    found = [query, key, value, None, bias, sinks]
    rest = [None] * (len(needed) - len(found))
    return *[one if needs else None for one, needs in zip(found, needed, strict=False)], *rest


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _call(query: Any, key: Any, value: Any, *rest: Any) -> tuple[Problem, Operands]:
    """Return the call of an operator's arguments."""
    arrays, numbers = rest[: len(_ARRAYS)], rest[len(_ARRAYS) :]
    options = dict(zip(_ARRAYS, arrays, strict=True))
    shapes = [tuple(one.shape) for one in (query, key, value)]
    facts = [None if one is None else (tuple(one.shape), one.dtype) for one in arrays]
    problem = _problem(*shapes, query.dtype, *facts, *numbers)
    if options["key_lengths"] is not None:
        options["mask"] = CachePadding(options["key_lengths"])
    return problem, Operands(query, key, value, **options)


@lru_cache(maxsize=4096)
def _problem(
    query: Any, key: Any, value: Any, dtype: Any, mask: Any, bias: Any, sinks: Any, positions: Any,
    lengths: Any, table: Any, is_causal: bool, left: Any, right: Any, offset: Any, scale: float,
    softcap: float | None,
) -> Problem:  # fmt: skip
    arrays = {"mask": mask, "bias": bias, "sinks": sinks, "query_offset_array": positions}
    arrays |= {"mask_expression": lengths, "block_table": table}
    given = [name for name, one in arrays.items() if one is not None]
    return Problem(
        library="torch",
        device="cpu",
        dtype=str(dtype).removeprefix("torch."),
        batch=tuple(_batch(query, key, value, table and table[0])),
        heads=query[-3],
        key_heads=key[-3],
        query_length=query[-2],
        key_length=key[-2] * (table[0][-1] if table else 1),
        head_size=query[-1],
        value_size=value[-1],
        is_causal=is_causal,
        window=(left, right),
        query_offset=offset,
        scale=scale,
        softcap=softcap,
        mask=mask and mask[0],
        bias=bias and bias[0],
        bias_dtype=bias and str(bias[1]).removeprefix("torch."),
        features=frozenset(["logsumexp", *given]),
        requires_grad=False,
        transforms=frozenset(),
    )
