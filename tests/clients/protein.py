"""A protein model: attention with a bias of all pairs, by xFormers, and gates."""

import torch
import xformers.ops as xops
from by_hand import sdpa
from torch import nn


class Model(nn.Module):
    """Triangle attention around the starting node: rows are items, the bias has a gradient."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.gate = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias, self.out = nn.Linear(width, heads, bias=False), nn.Linear(width, width)

    def forward(self, pairs, mask):
        x = self.norm(pairs)  # (N, N, width), and the mask is (N, N)
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)) for one in (self.q, self.k, self.v))
        hidden = torch.where(mask, 0.0, -1e9)[:, None, None, :].to(x.dtype)
        bias = self.bias(x).permute(2, 0, 1)[None] + hidden
        y = self.attend(q, k, v, bias).flatten(2)
        return pairs + self.out(self.gate(x).sigmoid() * y)

    def attend(self, q, k, v, bias):
        return xops.memory_efficient_attention(q, k, v, attn_bias=bias)


class ByHand(Model):
    def attend(self, q, k, v, bias):
        return sdpa(q, k, v, mask=bias)


def inputs(residues=24, width=32):
    mask = torch.rand(residues, residues) < 0.9
    mask[:, 0] = True
    return torch.randn(residues, residues, width), mask
