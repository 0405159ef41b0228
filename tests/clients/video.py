"""A block of video diffusion: tokens of pictures and of a padded text, packed with padding."""

import torch
from by_hand import each
from torch import nn

try:
    from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = _flash_attn_forward = None


def boundaries(pictures, text_mask):
    """Return where the used and the padded tokens of each item begin, (2 B + 1,)."""
    length = pictures + text_mask.shape[1]
    first = torch.arange(len(text_mask)) * length
    both = torch.stack([first + pictures + text_mask.sum(1), first + length], dim=1).flatten()
    return torch.cat([both.new_zeros(1), both]).int()


class Model(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.pictures, self.text = (nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.Linear(width, width)
        self.modulation = nn.Linear(width, 2 * width)

    def forward(self, pictures, text, time, text_mask):
        shift, scale = self.modulation(time)[:, None].chunk(2, dim=-1)
        pictures = pictures * (1 + scale) + shift
        qkv = torch.cat([self.pictures(pictures), self.text(text)], dim=1)
        q, k, v = (x.flatten(0, 1) for x in qkv.unflatten(-1, (3, self.heads, -1)).unbind(2))
        count, longest = pictures.shape[1], qkv.shape[1]
        y = self.attend(q, k, v, boundaries(count, text_mask), longest)
        y = y.unflatten(0, (len(text), -1)).flatten(2)
        # Rows of padding are computed and not used.
        return self.out(y[:, :count]), y[:, count:] * text_mask[..., None]

    def attend(self, q, k, v, starts, longest):
        return flash_attn_varlen_func(q, k, v, starts, starts, longest, longest)


class ByHand(Model):
    def attend(self, q, k, v, starts, longest):
        return each(starts, q, k, v)


def inputs(pictures=40, text=12, width=64):
    text_mask = torch.arange(text) < torch.tensor([[5], [text]])
    shapes = (2, pictures, width), (2, text, width), (2, width)
    return *map(torch.randn, shapes), text_mask
