"""The part of `flash_attn.modules` that code imports."""
