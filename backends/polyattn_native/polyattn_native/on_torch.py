"""The compiled kernel of the torch backend, for tensors on the CPU, which it reads in place.

It is for real tensors: those of a transform, second derivatives by torch.func and all forward
derivatives are left to the kernel `tiled`, as is what torch.jit.trace records. A program of
torch.compile gets an operator instead, as does a mode that sees operators: selective checkpoints
and FlopCounterMode enter one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Expression,
    Gradients,
    Operands,
    Problem,
    Quantized,
    Residuals,
)
from polyattn_native import torch_operators
from polyattn_native.arrays import is_readable
from polyattn_native.kernel import Native
from polyattn_native.library import library
from polyattn_native.product import product
from polyattn_native.visible import kind_of

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
# By names of their own, since each call asks for them.
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state

# What torch's engine computes without a mask that is made for it.
_OF_ENGINE = frozenset({
    "batch_broadcast", "bias", "causal", "grouped_heads", "mask", "query_offset", "scale",
    "value_size",
})  # fmt: skip
_OF_LENGTHS = {"mask_expression", "query_offset_array"}
# Few rows of a key head fill a vector by their elements, if these are a multiple of the lanes: one
# row took 0.5 to 0.9 of the engine's time, and 1.3 below so many products. Of other sizes, one row
# took 2.0, four 0.6 (float32, 64 to 4096 keys). The engine converts 16-bit numbers one by one.
FEW_ROWS, LANES, FEW_PRODUCTS = 4, 16, 2**16
# Gradients took 1.5 of the engine's time with 12 * 32 * 32 scores, 1.1 with 12 * 128 * 128.
FEW_TRAINED = 2**16
# With a bias 1.1 to 1.4 with 12 * 128 * 128, 0.9 with 12 * 192 * 192.
FEW_TRAINED_BIASED = 2**18
# Results in bfloat16 took 1.3 with 12 * 32 * 32 scores, 0.8 with 12 * 128 * 128.
FEW_OF_BFLOAT16 = 2**15


# Whether the processor multiplies tiles of bfloat16 (AMX), which only torch uses.
_HAS_TILES: bool = getattr(torch.cpu, "_is_amx_tile_supported", bool)()


class NativeOnTorch(Native):
    """Tiles of the scores in vectors, with the rows as lanes."""

    devices = frozenset({"cpu"})
    features = Native.features - {"mask_mod"}

    def threads(self) -> int:
        """Return how many threads a call may use: as many as torch."""
        return torch.get_num_threads()

    def bytes_of(self, array: Array) -> bytes:
        """Return what a tensor holds, or an array of NumPy, as programs have for lengths."""
        is_tensor = isinstance(array, torch.Tensor)
        held: bytes = (_array(array, as_bits=True) if is_tensor else array).tobytes()
        return held

    def in_numpy(self, operands: Operands) -> Operands:
        """Return operands with arrays of NumPy beside query, key and value."""
        return _rest_in_numpy(operands)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why an expression is left to tiles, or torch's transforms and programs are."""
        reasons = super().reasons_against(problem)
        if torch.compiler.is_compiling():
            return reasons + torch_operators.reasons_against(problem)
        if problem.traced or _tracing() is not None:
            reasons.append("it needs real tensors, not fake or meta ones")
        if "vmap" in problem.transforms:
            reasons.append("it does not support torch.func.vmap")
        elif "jvp" in problem.transforms:
            reasons.append("it does not support forward derivatives")
        elif problem.same_bits and problem.transforms:
            reasons.append("in same_bits() it does not support torch.func")
        elif problem.same_bits and _modes():
            reasons += torch_operators.reasons_against(problem)
        return reasons

    def only_on_request(self, problem: Problem) -> str | None:
        """Leave to torch's engine what it computes in less time."""
        features, mask = problem.features, problem.mask_spec
        if mask is not None and kind_of(mask) == "padding" and not torch.compiler.is_compiling():
            features -= _OF_LENGTHS  # the engine gets the keys within the lengths
        if problem.is_symbolic or not features <= _OF_ENGINE:
            return None
        if problem.dtype == "bfloat16" and _HAS_TILES:
            return "torch's engine multiplies bfloat16 by AMX"
        is_whole = problem.dtype == problem.accumulator
        # torch.compile would make a condition of the next lengths.
        is_plain = not torch.compiler.is_compiling() and features == problem.features
        scores = math.prod(problem.scores) if is_plain else 0
        if is_whole and problem.query_length * problem.group_size < FEW_ROWS:
            has_lanes = problem.head_size % LANES == problem.value_size % LANES == 0
            if not has_lanes or scores * problem.head_size < FEW_PRODUCTS:
                return f"fewer than {FEW_ROWS} rows read a key head, too few for a vector"
        if not is_plain:
            return None
        few = FEW_TRAINED if problem.bias is None else FEW_TRAINED_BIASED
        if is_whole and problem.requires_grad and scores < few:
            return f"gradients of {scores:,} scores take less time in torch's engine"
        if problem.dtype == "bfloat16" and not problem.requires_grad and scores < FEW_OF_BFLOAT16:
            return f"{scores:,} scores in bfloat16 take less time in torch's engine"
        return None

    def reads_quantized(self, problem: Problem) -> bool:
        """Return whether tensors have numbers, and nobody records what is done to them."""
        is_traced = torch.compiler.is_compiling() or _is_recorded()
        return not is_traced and super().reads_quantized(problem)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        if torch.compiler.is_compiling():
            return torch_operators.attend(problem, operands)
        if isinstance(operands.key, Quantized):
            output, logsumexp = super().__call__(problem, _in_numpy(operands), backend)
            return _tensor(output), None if logsumexp is None else _tensor(logsumexp)
        if _are_readable(operands):
            if not _modes():
                return self.attend(problem, operands)
            if _is_operator(problem):
                return torch_operators.attend(problem, operands)
        return backend.tiled(problem, operands, backend)

    def attend(self, problem: Problem, operands: Operands) -> tuple[Array, Array | None]:
        """Return output and logsumexp of tensors with numbers."""
        query, key, value = operands[:3]
        logsumexp = None
        if "logsumexp" in problem.features:
            dtype = getattr(torch, problem.accumulator)
            logsumexp = query.new_empty(problem.scores[:-1], dtype=dtype)
        kind = id(problem), query.stride(), key.stride(), value.stride()
        ready = self._ready.get(kind)
        if ready is not None and ready.problem is problem:
            output = query.new_empty_strided(*ready.output)
            of_logsumexp = None if logsumexp is None else logsumexp.data_ptr()
            if ready.run(
                self, query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(),
                of_logsumexp, x=operands,
            ):  # fmt: skip
                return output, logsumexp
        shape = (*problem.scores[:-1], problem.value_size)
        output = torch_operators.empty_beside(query, shape, query.dtype)
        x = _in_numpy(operands)
        arrays = output, logsumexp
        written = [None if one is None else _array(one, as_bits=True) for one in arrays]
        native = self._prepared(problem, x, *written)
        native.run(library().polyattn_attend)
        if all(map(is_readable, x[:3])):
            laid_out = output.shape, output.stride()
            self._keep(kind, native, function="attend_at", output=laid_out)
        return output, logsumexp

    def multiply(self, x: Array, weight: Array, bias: Array | None) -> Array | None:
        """Return x · weight + bias, whose rows have the same bits in every product."""
        given = [one for one in (x, weight, bias) if one is not None]
        if torch.compiler.is_compiling() or not _hold_numbers(given):
            return None
        if torch.is_grad_enabled() and any(one.requires_grad for one in given):
            apply: Any = _Product.apply
            return apply(x, weight, bias)
        return _product(x, weight, bias)

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients."""
        given = operands, residuals, cotangents
        lacks = Native.reasons_against(self, problem)
        if torch.compiler.is_compiling():
            if not lacks + torch_operators.reasons_against(problem):
                return torch_operators.differentiate(problem, *given)
        elif not lacks and _are_readable(*given):
            if not _modes():
                return self.differentiate(problem, *given, backend)
            if _is_operator(problem):
                return torch_operators.differentiate(problem, *given)
        return backend.tiled.backward(problem, *given, backend)

    def differentiate(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend | None = None,
    ) -> Gradients:  # fmt: skip
        """Return the gradients of tensors with numbers."""
        of_numpy: Any = super().backward
        given = _in_numpy(operands), _numbers(residuals), _numbers(cotangents)
        found = of_numpy(problem, *given, backend)
        named = zip(found._fields, _tensors(found), strict=True)
        return Gradients(**dict(named))._replace(score_mod=_tensors(found.score_mod))


class _Product(torch.autograd.Function):
    """The product x · weight + bias and its gradients, of which all are sums in one order."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _product(gradient, weight.mT, None) if of_x else None,
            _product(x.reshape(-1, x.shape[-1]).mT, rows, None) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _product(x: Any, weight: Any, bias: Any) -> Any:
    x, weight, bias = [one if one is None else _array(one) for one in (x, weight, bias)]
    found: Any = product(x, weight, bias, torch.get_num_threads())
    return torch.from_numpy(found)


def _hold_numbers(tensors: list[Any]) -> bool:
    """Return whether all are tensors on the CPU of one dtype, float32 or float64, with numbers."""
    dtypes, devices = ({getattr(one, of) for one in tensors} for of in ("dtype", "device"))
    is_one = len(dtypes) == 1 and devices == {torch.device("cpu")}
    is_plain = is_one and dtypes <= {torch.float32, torch.float64} and not _is_recorded()
    return is_plain and not any(type(one) not in _ORDINARY or _is_wrapped(one) for one in tensors)


def _is_recorded() -> bool:
    """Return whether somebody records what is done to tensors."""
    modes: int = _modes()
    return modes > 0 or _tracing() is not None


def _is_operator(problem: Problem) -> bool:
    """Return whether the entered modes see a call as an operator, and let them count it."""
    torch_operators.let_count()
    return not torch_operators.reasons_against(problem)


def _are_readable(*groups: Any) -> bool:
    """Return whether tensors have numbers in memory, or will have when an operator gets them."""
    if _tracing() is not None:
        return False
    records = torch.is_grad_enabled()
    for group in groups:
        for one in group:
            if one is None:  # as most are: torch takes its time to say that it is no tensor
                continue
            if type(one) in _ORDINARY:
                if (records and one.requires_grad) or one.is_neg() or _is_wrapped(one):
                    return False
            elif isinstance(one, Expression):
                if not _are_readable(one.form[1] if one.form else [x for _, x in one.carried()]):
                    return False
            elif isinstance(one, torch.Tensor):
                return False
    return True


def _array(tensor: torch.Tensor, *, as_bits: bool = False) -> Any:
    """Return a tensor as an array; one of bfloat16 is converted unless its bits are asked for."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return (tensor.view(torch.int16) if as_bits else tensor.float()).numpy()
    return tensor.numpy()


def _in_numpy(x: Operands) -> Operands:
    """Return operands as arrays; query, key and value of bfloat16 as arrays of its bits."""
    arrays: list[Any] = [
        Quantized(*map(_array, one)) if isinstance(one, Quantized) else _array(one, as_bits=True)
        for one in x[:3]
    ]
    query, key, value = arrays
    return _rest_in_numpy(x)._replace(query=query, key=key, value=value)


def _rest_in_numpy(x: Operands) -> Operands:
    """Return operands with arrays in place of tensors, but for query, key and value."""
    changed: dict[str, Any] = {}
    for name, one in zip(x._fields[3:], x[3:], strict=True):
        if isinstance(one, Expression):
            changed[name] = one.map(_array_of_field)
        elif one is not None:
            changed[name] = _array_of_field("", one)
    return x._replace(**changed)


def _array_of_field(_: str, thing: Any) -> Any:
    return _array(thing) if isinstance(thing, torch.Tensor) else thing


def _numbers(group: Any) -> Any:
    return type(group)(*[None if one is None else _array(one) for one in group])


def _tensors(group: Any) -> list[Any]:
    """Return the arrays of a group as tensors."""
    return [_tensor(one) if isinstance(one, np.ndarray) else one for one in group]


def _tensor(array: Any) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


# One for the process: torch refuses to register an operator twice.
_kernel = NativeOnTorch()
torch_operators.register(_kernel.attend, _kernel.differentiate)
