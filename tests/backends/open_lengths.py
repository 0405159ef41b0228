"""Arrays of any size, calls on them, and a module for torch: for programs with open lengths."""

import numpy as np
import torch
from arrays import draw

from polyattn import attention, attention_weights, masks

H, G, D, E = 4, 2, 8, 6


def numbers(batch, length, keys):
    """Return query, key and value."""
    return draw((batch, H, length, D), (batch, G, keys, D), (batch, G, keys, E))


def padded(query, key, value, each):
    """Attend to as many keys of each item as it has."""
    return attention(query, key, value, mask=masks.padding(each))


def offset(query, key, value, each):
    """Attend causally from an offset of each item."""
    return attention(query, key, value, query_offset=each, is_causal=True)


def weighted(query, key, value):
    """Return the sums of the weights of some heads for each key."""
    sinks = np.linspace(-1, 1, H, dtype=np.float32)
    return attention_weights(query, key, sinks=sinks, window=(2, 1), heads=[3, 0], per_key=True)


#: Functions of query, key, value and a number for each item.
OF_ITEMS = {"padding": padded, "offsets": offset}


class Calls(torch.nn.Module):
    """A module that calls a function of tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, query, key, value, *more):
        return self.function(query, key, value, *more)
