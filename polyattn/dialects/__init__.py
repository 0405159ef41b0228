"""Offer the signatures of other libraries, implemented by `polyattn.attention`.

Each function translates its arguments and keeps their meaning. Our stronger guarantees hold in all
of them: the output of a row that sees no key is 0.
"""

from polyattn.dialects.jax import dot_product_attention
from polyattn.dialects.onnx import OnnxAttention, onnx_attention
from polyattn.dialects.torch import scaled_dot_product_attention

__all__ = [
    "OnnxAttention",
    "dot_product_attention",
    "onnx_attention",
    "scaled_dot_product_attention",
]
__dir__ = __all__.copy
