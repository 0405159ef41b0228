"""A weather model: nodes of a grid on the globe, a window of neighbours, softcap and ALiBi."""

import torch
from flash_attn import flash_attn_func
from torch import nn

WINDOW, SOFTCAP = 64, 15.0


class Model(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("slopes", 2.0 ** -torch.arange(3.0, 3.0 + heads))

    def forward(self, nodes):
        x = self.norm(nodes)
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)) for one in (self.q, self.k, self.v))
        return nodes + self.out(self.attend(q, k, v).flatten(2))

    def attend(self, q, k, v):
        window = (WINDOW, WINDOW)
        return flash_attn_func(
            q, k, v, causal=False, window_size=window, softcap=SOFTCAP,
            alibi_slopes=self.slopes.float(),
        )  # fmt: skip


class ByHand(Model):
    def attend(self, q, k, v):
        """Attend from blocks of rows to the keys that their windows reach."""
        count, parts = q.shape[1], []
        for start in range(0, count, WINDOW):
            stop, first, last = (
                start + WINDOW,
                max(start - WINDOW, 0),
                min(start + 2 * WINDOW, count),
            )
            rows = torch.arange(start, min(stop, count))[:, None]
            away = (torch.arange(first, last) - rows).abs()
            y = torch.einsum("blhd,bshd->bhls", q[:, start:stop], k[:, first:last])
            y = SOFTCAP * torch.tanh(y * q.shape[-1] ** -0.5 / SOFTCAP)
            y = y - self.slopes.to(y.dtype)[:, None, None] * away
            weights = y.masked_fill(away > WINDOW, -torch.inf).softmax(-1)
            parts.append(torch.einsum("bhls,bshd->blhd", weights, v[:, first:last]))
        return torch.cat(parts, dim=1)


def inputs(nodes=500, width=32):
    return (torch.randn(1, nodes, width),)
