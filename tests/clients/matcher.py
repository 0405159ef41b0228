"""A matcher of key points: FlashAttention's layers within an image and across two of them."""

import torch
from by_hand import sdpa
from flash_attn.modules.mha import MHA, FlashCrossAttention
from flash_attn.ops.rms_norm import RMSNorm
from torch import nn


class Model(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads, self.norm = heads, RMSNorm(width)
        self.within = MHA(width, heads, causal=False, use_flash_attn=True, rotary_emb_dim=0)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.across = FlashCrossAttention(softmax_scale=0.2)

    def forward(self, one, other):
        one, other = (x + self.attend_within(self.norm(x)) for x in (one, other))
        q = self.q(one).unflatten(-1, (self.heads, -1))
        kv = self.kv(other).unflatten(-1, (2, self.heads, -1))
        return one + self.attend_across(q, kv).flatten(2)

    def attend_within(self, x):
        return self.within(x)

    def attend_across(self, q, kv):
        return self.across(q, kv)


class ByHand(Model):
    def attend_within(self, x):
        qkv = self.within.Wqkv(x).unflatten(-1, (3, self.heads, -1))
        return self.within.out_proj(sdpa(*qkv.unbind(2)).flatten(2))

    def attend_across(self, q, kv):
        return sdpa(q, *kv.unbind(2), scale=0.2)


def inputs(points=33, others=21, width=64):
    return torch.randn(2, points, width), torch.randn(2, others, width)
