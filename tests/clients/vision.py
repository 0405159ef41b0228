"""A vision model: pictures of several sizes in one batch by the block-diagonal mask of xFormers."""

import torch
from by_hand import each
from torch import nn

try:
    from xformers.ops import SwiGLU, fmha, memory_efficient_attention, unbind

    XFORMERS_AVAILABLE = True
except ImportError:
    XFORMERS_AVAILABLE = False

CLASSES = 5


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = SwiGLU(width, 2 * width, bias=True)

    def forward(self, x, bias):
        q, k, v = unbind(self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)), 2)
        x = x + self.proj(self.attend(q, k, v, bias).flatten(2))
        return x + self.mlp(self.norm2(x))

    def attend(self, q, k, v, bias):
        return memory_efficient_attention(q, k, v, attn_bias=bias)


class Model(nn.Module):
    block = Block

    def __init__(self, width=48, heads=3):
        super().__init__()
        self.blocks = nn.ModuleList(self.block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, *pictures):
        bias, x = fmha.BlockDiagonalMask.from_tensor_list(list(pictures))
        for block in self.blocks:
            x = block(x, bias)
        return torch.cat([self.head(y[:, 0]) for y in bias.split(x)])


class BlockByHand(Block):
    def attend(self, q, k, v, bias):
        return each(bias.q_seqinfo.seqstart, q[0], k[0], v[0])[None]


class ByHand(Model):
    block = BlockByHand


def inputs(sizes=(9, 30, 17), width=48):
    return tuple(torch.randn(1, size, width) for size in sizes)
