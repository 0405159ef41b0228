"""The functions of `xformers.ops.fmha`; its kernels are names that choose nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from polyattn._base.arrays import Array
from polyattn.dialects.xformers import attended, memory_efficient_attention
from polyattn.dialects.xformers.ops.fmha import attn_bias

AttentionBias = attn_bias.AttentionBias
BlockDiagonalMask = attn_bias.BlockDiagonalMask
LowerTriangularMask = attn_bias.LowerTriangularMask
memory_efficient_attention_forward = memory_efficient_attention


def memory_efficient_attention_forward_requires_grad(
    query: Array, key: Array, value: Array, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: Any = None,
) -> Any:  # fmt: skip
    """Return the output, and the logsumexp, (B, H, L), or (1, H, T) of blocks."""
    if p or output_dtype is not None:
        raise NotImplementedError("p and output_dtype are for memory_efficient_attention")
    return attended(query, key, value, attn_bias, 0.0, scale, logsumexp=True)


class AttentionOpBase:
    """A kernel that a program names; polyattn chooses its own."""

    @classmethod
    def supports(cls, inputs: Any) -> bool:
        """Return True: a call says itself what it refuses."""
        return True


Inputs = SimpleNamespace
AttentionOp = tuple[Any, Any]
cutlass = flash = flash3 = triton_splitk = SimpleNamespace(
    FwOp=AttentionOpBase, BwOp=AttentionOpBase
)
MemoryEfficientAttentionOp = MemoryEfficientAttentionCutlassOp = (AttentionOpBase, AttentionOpBase)
MemoryEfficientAttentionCutlassFwdFlashBwOp = MemoryEfficientAttentionCutlassOp
MemoryEfficientAttentionFlashAttentionOp = MemoryEfficientAttentionCutlassOp
