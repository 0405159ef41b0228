"""Attention by torch's own functions, in the layout of FlashAttention."""

import itertools

import torch
import torch.nn.functional as F


def sdpa(q, k, v, *, mask=None, scale=None):
    """Return attention of (B, L, H, D) to (B, S, G, D), with a mask or a bias (..., L, S)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2)


def band(rows, keys, *, left=None, right=None):
    """Return the mask of a window, (L, S); the last row is at the last key."""
    at = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        seen &= at >= -left
    if right is not None:
        seen &= at <= right
    return seen


def each(starts, q, k, v, **options):
    """Return attention of packed sequences (T, H, D), one after another."""
    ends = starts.tolist()
    parts = [
        sdpa(*(x[None, i:j] for x in (q, k, v)), **options)[0] for i, j in itertools.pairwise(ends)
    ]
    return torch.cat(parts)
