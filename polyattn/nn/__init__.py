"""Provide the layers around attention, for any array library.

Parameters are plain arrays in frozen dataclasses, and the functions are pure.
"""

from polyattn.nn import load
from polyattn.nn.angles import linear_scaling, ntk_scaling, yarn_scaling
from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import DecoderBlock, EncoderBlock, Stack
from polyattn.nn.cache import KVCache
from polyattn.nn.generation import generate
from polyattn.nn.inputs import FrameEmbedding, PatchEmbedding
from polyattn.nn.layers import Embedding, FeedForward, LayerNorm, Linear, RMSNorm
from polyattn.nn.models import Transformer
from polyattn.nn.module import Module
from polyattn.nn.paged_cache import PagedCache
from polyattn.nn.positions import LearnedPositions, RelativeBias, Rotary, Sinusoidal
from polyattn.nn.quantized_cache import QuantizedCache
from polyattn.nn.saving import save

__all__ = [
    "DecoderBlock",
    "Embedding",
    "EncoderBlock",
    "FeedForward",
    "FrameEmbedding",
    "KVCache",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "Module",
    "MultiHeadAttention",
    "PagedCache",
    "PatchEmbedding",
    "QuantizedCache",
    "RMSNorm",
    "RelativeBias",
    "Rotary",
    "Sinusoidal",
    "Stack",
    "Transformer",
    "generate",
    "linear_scaling",
    "load",
    "ntk_scaling",
    "save",
    "yarn_scaling",
]
__dir__ = __all__.copy
