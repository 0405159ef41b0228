"""A model of retrieval: queries and passages packed together, mean vectors, late interaction."""

import torch
import torch.nn.functional as F
from by_hand import each
from torch import nn
from xformers.ops import memory_efficient_attention
from xformers.ops.fmha.attn_bias import BlockDiagonalMask

VOCABULARY = 71


class Model(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads, self.embedding = heads, nn.Embedding(VOCABULARY, width)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, queries, passages):
        """Return the score of each query with its passage, and the vectors of all."""
        texts = [*queries, *passages]
        sizes = [len(text) for text in texts]
        x = self.embedding(torch.cat(texts))
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.out(self.attend(*(y[None] for y in qkv.unbind(1)), sizes)[0].flatten(1))
        parts = F.normalize(x, dim=-1).split(sizes)
        pairs = zip(parts[: len(queries)], parts[len(queries) :], strict=True)
        scores = torch.stack([(one @ other.T).amax(1).mean() for one, other in pairs])
        return scores, torch.stack([part.mean(0) for part in parts])

    def attend(self, q, k, v, sizes):
        return memory_efficient_attention(q, k, v, BlockDiagonalMask.from_seqlens(sizes))


class ByHand(Model):
    def attend(self, q, k, v, sizes):
        return each(torch.tensor([0, *sizes]).cumsum(0), q[0], k[0], v[0])[None]


def inputs(longest=40):
    texts = [torch.randint(VOCABULARY, (size,)) for size in (5, 7, longest, longest // 2)]
    return texts[:2], texts[2:]
