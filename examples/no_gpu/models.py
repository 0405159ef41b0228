"""Three models in the style of public model files, which are written for GPUs.

They import `flash_attn` and `xformers`, which `polyattn run` brings to any machine.
"""

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from torch import nn
from xformers.ops import fmha, memory_efficient_attention

HEADS, SIZE, LONGEST = 4, 16, 64
WIDTH = HEADS * SIZE


def rotary(longest=LONGEST, size=SIZE):
    """Return the cosines and sines of positions, (positions, size / 2)."""
    rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(longest)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x, places):
    """Rotate (T, H, D) by the position of each token."""
    cos, sin = (table[places][:, None] for table in rotary())
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


class CausalAttention(nn.Module):
    """Causal self-attention of a padded batch, which is packed, or of one step with a cache."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, attention_mask):
        """Return (B, S, M), with zeros where the mask, (B, S), is 0."""
        tokens, indices, cu_seqlens, longest, _ = unpad_input(x, attention_mask)
        places = (torch.cumsum(attention_mask, -1) - 1).flatten()[indices]
        q, k, v = self.qkv(tokens).unflatten(-1, (3, HEADS, SIZE)).unbind(1)
        output = flash_attn_varlen_func(
            rotate(q, places), rotate(k, places), v, cu_seqlens, cu_seqlens, longest, longest,
            causal=True,
        )  # fmt: skip
        return pad_input(self.out(output.flatten(1)), indices, *x.shape[:2])

    @torch.no_grad()
    def step(self, x, k_cache, v_cache, lengths):
        """Return (B, 1, M) for the next token; its key and value go into the caches."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        cos, sin = rotary()
        output = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            causal=True, rotary_interleaved=False,
        )  # fmt: skip
        return self.out(output.flatten(2))


class ImageAttention(nn.Module):
    """Self-attention of the patches of images of several sizes, one after another."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, images):
        """Return a list of (batch, patches, M), of such a list."""
        bias, x = fmha.BlockDiagonalMask.from_tensor_list(images)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        return bias.split(self.out(memory_efficient_attention(q, k, v, attn_bias=bias).flatten(2)))
