"""What code imports from `flash_attn.ops`."""

from polyattn.dialects.flash_attn.ops import triton as triton
