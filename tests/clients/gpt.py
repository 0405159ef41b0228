"""A GPT that imports FlashAttention 3: grouped heads, layers with windows, decoding by a cache."""

import torch
import torch.nn.functional as F
from by_hand import band, sdpa
from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache
from torch import nn

VOCABULARY = 97
WINDOWS = ((15, 0), (-1, 0))


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads, window):
        super().__init__()
        self.window, self.size, self.cut = window, width // heads, (heads, heads // 2, heads // 2)
        self.qkv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, rotation, cache=None):
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.size)).split(self.cut, dim=2)
        q, k = (F.rms_norm(rotate(y, *rotation), (self.size,)) for y in (q, k))
        if cache is None:
            y = self.attend(q, k, v)
        else:
            y = flash_attn_with_kvcache(
                q, cache[0], cache[1], k=k, v=v, cache_seqlens=cache[2], causal=True,
                window_size=self.window,
            )  # fmt: skip
        return self.out(y.flatten(2))

    def attend(self, q, k, v):
        return flash_attn_func(q, k, v, causal=True, window_size=self.window)


class Model(nn.Module):
    attention = Attention

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.cached = heads // 2, width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(self.attention(width, heads, window) for window in WINDOWS)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in WINDOWS
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, caches=None, start=0):
        x = self.embedding(tokens)
        rotation = self.rotation(start, tokens.shape[1], x.dtype)
        for number, (layer, mlp) in enumerate(zip(self.layers, self.mlps, strict=True)):
            cache = None if caches is None else caches[number]
            x = x + layer(F.rms_norm(x, x.shape[-1:]), rotation, cache)
            x = x + mlp(F.rms_norm(x, x.shape[-1:]))
        return self.head(F.rms_norm(x, x.shape[-1:]))

    def rotation(self, start, length, dtype):
        size = self.cached[1]
        rates = 100.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(start, start + length, dtype=torch.float64)[:, None, None] * rates
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @torch.no_grad()
    def generate(self, tokens, count):
        """Return the tokens and `count` more, each the most likely, from caches of keys."""
        batch, length = tokens.shape
        shape = (batch, length + count, *self.cached)
        dtype = self.head.weight.dtype
        lengths = torch.zeros(batch, dtype=torch.int32)
        caches = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), lengths)
            for _ in WINDOWS
        ]
        step = tokens
        for _ in range(count):
            logits = self(step, caches, start=int(lengths[0]))
            lengths += step.shape[1]
            step = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, step], dim=1)
        return tokens


class AttentionByHand(Attention):
    def attend(self, q, k, v):
        return sdpa(q, k, v, mask=band(q.shape[1], *self.window))


class ByHand(Model):
    attention = AttentionByHand


def inputs(length=48):
    return (torch.randint(VOCABULARY, (2, length)),)
