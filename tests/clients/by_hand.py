"""Attention by torch's own functions, in the layout of FlashAttention."""

import itertools

import torch
import torch.nn.functional as F


def sdpa(q, k, v, *, mask=None):
    """Return attention of (B, L, H, D) to (B, S, G, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2)


def band(length, left, right):
    """Return the mask of a window, (L, L); an end below 0 is open."""
    at = torch.arange(length) - torch.arange(length)[:, None]
    seen = torch.ones(length, length, dtype=torch.bool)
    if left >= 0:
        seen &= at >= -left
    if right >= 0:
        seen &= at <= right
    return seen


def each(starts, q, k, v, window=(-1, -1)):
    """Return attention of packed sequences (T, H, D), one after another."""
    parts = [
        sdpa(*(x[None, i:j] for x in (q, k, v)), mask=band(j - i, *window))[0]
        for i, j in itertools.pairwise(starts.tolist())
    ]
    return torch.cat(parts)
