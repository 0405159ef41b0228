"""The node of torch's flash attention on the CPU, which is not twice differentiable.

The engine computes the output and the first derivative. The array-API kernel `tiled` computes all
else: second and forward derivatives, and the gradient of a mask of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyattn.plugin import Backend, Operands, Problem
from polyattn_torch.attn_mask import as_bias
from polyattn_torch.autograd import (
    AutogradNode,
    GradientRequest,
    Optionals,
    Tensors,
    is_recorded,
    record,
)
from polyattn_torch.engines import in_rows, operator
from polyattn_torch.kernel_node import KernelNode, template_of
from polyattn_torch.workarounds import EngineInputs, padded

_QKV = ("query", "key", "value")
_OPTIONS = ("dropout_p", "is_causal", "attn_mask", "scale")
_forward = operator("_scaled_dot_product_flash_attention_for_cpu", *_QKV, *_OPTIONS)
_backward = operator(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "grad_out", *_QKV, "out", "logsumexp", *_OPTIONS,
)  # fmt: skip


def takes(problem: Problem) -> bool:
    """Return whether the node can compute a problem."""
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
    output, _ = record(FusedNode(problem, is_causal, backend), tensors)
    output = output.to(x.query.dtype)
    return output if size == value_size else output[..., :value_size]


class FusedNode(AutogradNode):
    """A call of the engine: of query, key and value, and a mask of numbers if there is one."""

    def __init__(self, problem: Problem, is_causal: bool, backend: Backend) -> None:
        self.problem = problem
        self._is_causal, self._backend = is_causal, backend

    def results(self, tensors: Tensors) -> Tensors:
        """Return output and logsumexp; unrounded if the gradient of the mask will need that."""
        # Then by tiles, and so are the gradients: the output of the engine lacks digits.
        query, key, value, *mask = tensors
        is_narrow = self.problem.dtype != self.problem.accumulator
        if mask and mask[0].requires_grad and is_narrow:
            return self._by_tiles(tensors).results(tensors)
        return _forward(  # type: ignore[no-any-return]
            query, key, value, 0.0, self._is_causal,
            attn_mask=mask[0] if mask else None, scale=self.problem.scale,
        )  # fmt: skip

    def gradients(self, request: GradientRequest) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the tensors that are wanted, in their dtypes."""
        # `recorded` returns the output only, so there is no gradient of the logsumexp.
        tensors, results, cotangents, wanted, by_operations = request
        is_unrounded = results[0].dtype != tensors[0].dtype
        if by_operations or is_unrounded or any(wanted[3:]):
            node = self._by_tiles(tensors)
            if not by_operations and results[0].dtype != results[1].dtype:
                # Under torch.func `results` was not told, and the engine computed them.
                request = request._replace(results=node.results(tensors))
            return node.gradients(request)
        query, key, value, *mask = tensors
        gradients: Sequence[torch.Tensor] = _backward(
            cotangents[0], query, key, value, *results, 0.0, self._is_causal,
            attn_mask=mask[0] if mask else None, scale=self.problem.scale,
        )  # fmt: skip
        return tuple([one for one, is_wanted in zip(gradients, wanted, strict=False) if is_wanted])

    def tangents(self, tensors: Tensors, results: Tensors, tangents: Optionals) -> Tensors:
        """Return the tangents of output and logsumexp, in their dtypes."""
        return self._by_tiles(tensors).tangents(tensors, results, tangents)

    def _by_tiles(self, tensors: Tensors) -> KernelNode:
        """Return the node of the kernel `tiled` for the same tensors."""
        # The mask holds all that hides keys but the engine's causal, which counts from the first
        # key: with L rows and S keys its square scores have the offset S − L = 0.
        query, key, value, *mask = tensors
        bias = mask[0] if mask else None
        features = {"causal"} if self._is_causal else set()
        features |= set() if bias is None else {"bias"}
        problem = self.problem._replace(
            batch=(query.shape[0],),
            key_heads=key.shape[1],
            head_size=query.shape[-1],
            value_size=value.shape[-1],
            is_causal=self._is_causal,
            window=(None, None),
            query_offset=key.shape[-2] - query.shape[-2],
            mask=None,
            mask_spec=None,
            bias=None if bias is None else tuple(bias.shape),
            features=frozenset(features),
        )
        template, _ = template_of(Operands(query, key, value, bias=bias))
        return KernelNode(self._backend.tiled, problem, self._backend, template)
