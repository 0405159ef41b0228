"""A language model by masked diffusion: all tokens are seen, and the time modulates."""

import flash_attn
import flash_attn.layers.rotary
import torch
from by_hand import each
from torch import nn

VOCABULARY = 53


def angles(length, size, dtype):
    rates = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    products = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return products.cos().to(dtype), products.sin().to(dtype)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.modulation = nn.Linear(width, 3 * width)

    def forward(self, x, time):
        shift, scale, gate = self.modulation(time)[:, None].chunk(3, dim=-1)
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1))
        batch, length = x.shape[:2]
        qkv = self.rotate(qkv, *angles(length, qkv.shape[-1], x.dtype))
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
        y = self.attend(qkv.flatten(0, 1), starts, length).unflatten(0, (batch, length))
        return x + gate * self.out(y.flatten(2))

    def rotate(self, qkv, cos, sin):
        return flash_attn.layers.rotary.apply_rotary_emb_qkv_(qkv, cos, sin)

    def attend(self, qkv, starts, length):
        return flash_attn.flash_attn_interface.flash_attn_varlen_qkvpacked_func(
            qkv, starts, length, 0.0, causal=False
        )


class Model(nn.Module):
    block = Block

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(self.block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens, time):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)


class BlockByHand(Block):
    def rotate(self, qkv, cos, sin):
        q, k, v = qkv.unbind(2)
        return torch.stack([*(turned(x, cos, sin) for x in (q, k)), v], dim=2)

    def attend(self, qkv, starts, length):
        return each(starts, *qkv.unbind(1))


def turned(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class ByHand(Model):
    block = BlockByHand


def inputs(length=32, width=64):
    return torch.randint(VOCABULARY, (2, length)), torch.randn(2, width)
