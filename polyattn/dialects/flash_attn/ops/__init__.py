"""The part of `flash_attn.ops` that code imports."""

from polyattn.dialects.flash_attn.ops import triton as triton
