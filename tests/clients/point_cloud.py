"""A network for point clouds: points in the order of a curve, cut into patches, packed."""

import flash_attn
import torch
from by_hand import each
from torch import nn

PATCH = 32


class SerializedAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.scale = heads, (width // heads) ** -0.5

    def forward(self, x, order, starts):
        qkv = self.qkv(self.norm(x))[order].unflatten(-1, (3, self.heads, -1))
        y = self.attend(qkv, starts).flatten(1)
        return x + self.out(y[torch.argsort(order)])

    def attend(self, qkv, starts):
        return flash_attn.flash_attn_varlen_qkvpacked_func(
            qkv, starts, max_seqlen=PATCH, dropout_p=0.0, softmax_scale=self.scale
        )


class Model(nn.Module):
    attention = SerializedAttention

    def __init__(self, width=48, heads=3):
        super().__init__()
        self.embedding = nn.Linear(3, width)
        self.layers = nn.ModuleList(self.attention(width, heads) for _ in range(2))

    def forward(self, points, *orders_and_starts):
        x = self.embedding(points)
        for layer, order in zip(self.layers, orders_and_starts[:-1], strict=True):
            x = layer(x, order, orders_and_starts[-1])
        return x


class AttentionByHand(SerializedAttention):
    def attend(self, qkv, starts):
        return each(starts, *qkv.unbind(1), scale=self.scale)


class ByHand(Model):
    attention = AttentionByHand


def inputs(count=150):
    points = torch.rand(count, 3)
    orders = [torch.argsort(points[:, axis]) for axis in (0, 2)]
    starts = torch.tensor([*range(0, count, PATCH), count], dtype=torch.int32)
    return points, *orders, starts
