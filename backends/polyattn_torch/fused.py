"""The step of torch's flash attention on the CPU, whose own gradient has no gradient.

The first derivative is the engine's. What it has not, the array-API kernel `tiled` computes: a
second or a forward derivative, and the gradient of a mask of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyattn.plugin import (
    Backend,
    Cotangents,
    Gradients,
    Operands,
    Problem,
    Residuals,
    Tangents,
)
from polyattn_torch.attn_mask import as_bias
from polyattn_torch.autograd import Optionals, Tensors, apply, in_transform, is_recorded
from polyattn_torch.engines import in_rows, operator
from polyattn_torch.workarounds import EngineInputs, padded

_QKV = ("query", "key", "value")
_OPTIONS = ("dropout_p", "is_causal", "attn_mask", "scale")
_forward = operator("_scaled_dot_product_flash_attention_for_cpu", *_QKV, *_OPTIONS)
_backward = operator(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "grad_out", *_QKV, "out", "logsumexp", *_OPTIONS,
)  # fmt: skip


def takes(problem: Problem) -> bool:
    """Return whether the step takes a problem."""
    return (
        problem.device_kind == "cpu"
        and 0 not in (*problem.scores, problem.head_size, problem.value_size)
        and _forward is not None
        and _backward is not None
    )


def recorded(
    problem: Problem, x: EngineInputs, backend: Backend, *, is_causal: bool
) -> torch.Tensor | None:
    """Return the output as autograd records it; None if torch's own function can do that."""
    if torch.compiler.is_compiling() or not is_recorded(problem):
        return None
    if problem.transforms == {"vmap"}:  # torch's own function has a rule for it, ours a loop
        return None
    # A switch of torch's, of all devices.
    enabled: Any = torch.backends.cuda.flash_sdp_enabled
    if not enabled() or not takes(problem):
        return None
    size, value_size = x.query.shape[-1], x.value.shape[-1]
    if size != value_size:
        size = max(size, value_size)
        query, key, value = (padded(one, size) for one in x[:3])
        x = EngineInputs(query, key, value, x.mask)
    tensors = [in_rows(x.query), in_rows(x.key), in_rows(x.value)]
    if x.mask is not None:
        tensors.append(as_bias(x.mask, x.query.dtype))
    output, _ = apply(FusedStep(problem, is_causal, backend), tensors)
    output = output.to(x.query.dtype)
    return output if size == value_size else output[..., :value_size]


class FusedStep:
    """A call of the engine: of query, key and value, and a mask of numbers if there is one."""

    def __init__(self, problem: Problem, is_causal: bool, backend: Backend) -> None:
        self.problem = problem
        self._is_causal, self._backend = is_causal, backend

    def result(self, tensors: Tensors, *, by_operations: bool = False) -> Tensors:
        """Return output and logsumexp; unrounded if the gradient of the mask will need that."""
        if by_operations:
            problem = self._in_letters(tensors, "logsumexp", by_operations)
            operands = _operands(tensors)
            return self._backend.tiled(problem, operands, self._backend)  # type: ignore[return-value]
        query, key, value, *mask = tensors
        if mask and mask[0].requires_grad and self.problem.dtype != self.problem.accumulator:
            return self._unrounded(tensors)
        return _forward(  # type: ignore[no-any-return]
            query, key, value, 0.0, self._is_causal,
            attn_mask=mask[0] if mask else None, scale=self.problem.scale,
        )  # fmt: skip

    def gradients(
        self,
        tensors: Tensors,
        results: Tensors,
        of_results: Optionals,
        wanted: Sequence[bool],
        *,
        by_operations: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the tensors that are wanted, in their dtypes."""
        is_unrounded = results[0].dtype != tensors[0].dtype
        if by_operations or is_unrounded or of_results[1] is not None or any(wanted[3:]):
            found: Sequence[Any] = self._by_tiles(
                tensors, results, of_results, wanted, by_operations
            )[:4]
        else:
            query, key, value, *mask = tensors
            found = _backward(
                of_results[0], query, key, value, *results, 0.0, self._is_causal,
                attn_mask=mask[0] if mask else None, scale=self.problem.scale,
            )  # fmt: skip
        dtype = tensors[0].dtype
        return tuple([
            one if one.dtype == dtype else one.to(dtype)
            for one, is_wanted in zip(found, wanted, strict=False)
            if is_wanted
        ])  # fmt: skip

    def _by_tiles(
        self,
        tensors: Tensors,
        results: Tensors,
        of_results: Optionals,
        wanted: Sequence[bool],
        by_operations: bool,
    ) -> Gradients:
        if not by_operations and results[0].dtype != results[1].dtype:
            results = self._unrounded(tensors)
        problem = self._in_letters(tensors, "backward", by_operations)
        named = zip((*_QKV, "bias"), wanted, strict=False)
        constants = frozenset([name for name, is_wanted in named if not is_wanted])
        problem = problem._replace(constants=constants)
        return self._backend.tiled.backward(
            problem,
            _operands(tensors),
            Residuals(output=results[0], logsumexp=results[1]),
            Cotangents(output=of_results[0], logsumexp=of_results[1]),
            self._backend,
        )

    def _unrounded(self, tensors: Tensors) -> Tensors:
        """Return output and logsumexp of 16-bit tensors in float32: the engine's lacks digits."""
        problem = self._in_letters(tensors, "logsumexp", by_operations=False)
        problem = problem._replace(dtype=problem.accumulator)
        operands = _operands([tensor.float() for tensor in tensors])
        return self._backend.tiled(problem, operands, self._backend)  # type: ignore[return-value]

    def tangents(self, tensors: Tensors, results: Tensors, moved: Optionals) -> Tensors:
        """Return the tangents of output and logsumexp, in their dtypes."""
        named: dict[str, Any] = dict(zip((*_QKV, "bias"), moved, strict=False))
        found: Any = self._backend.tiled.jvp(
            self._in_letters(tensors, "jvp", by_operations=True),
            _operands(tensors),
            Residuals(output=results[0], logsumexp=results[1]),
            Tangents(**named),
            self._backend,
        )
        return [tangent.to(result.dtype) for tangent, result in zip(found, results, strict=True)]

    def _in_letters(self, tensors: Tensors, result: str, by_operations: bool) -> Problem:
        """Return the problem of the engine's arrays."""
        query, key, value, *mask = tensors
        features = [result]
        features += ["causal"] if self._is_causal else []
        features += ["bias"] if mask else []
        transforms = self.problem.transforms
        if by_operations or in_transform():
            transforms |= {"grad", "jvp"}
        return self.problem._replace(
            batch=(query.shape[0],),
            key_heads=key.shape[1],
            head_size=query.shape[-1],
            value_size=value.shape[-1],
            is_causal=self._is_causal,
            window=(None, None),
            query_offset=key.shape[-2] - query.shape[-2],
            mask=None,
            mask_spec=None,
            bias=tuple(mask[0].shape) if mask else None,
            features=frozenset(features),
            requires_grad=False,
            transforms=transforms,
        )


def _operands(tensors: Tensors) -> Operands:
    query, key, value, *mask = tensors
    return Operands(query=query, key=key, value=value, bias=mask[0] if mask else None)
