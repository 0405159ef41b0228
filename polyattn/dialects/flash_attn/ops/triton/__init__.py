"""The part of `flash_attn.ops.triton` that code imports, computed without Triton."""

from polyattn.dialects.flash_attn.ops.triton import rotary as rotary
