"""The part of `flash_attn.losses` that code imports."""
