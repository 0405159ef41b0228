"""What code imports from `flash_attn.ops.triton`, computed without Triton."""

from polyattn.dialects.flash_attn.ops.triton import rotary as rotary
