"""Take the padding out of a batch, and put it back, as `flash_attn.bert_padding` does.

The contents of a mask decide shapes, so that no traced program can take padding out.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from polyattn._base.arrays import Array, cast, index_range, library_of, numbers_like
from polyattn._base.scatter import rows_placed
from polyattn.dialects._shared import check_axes, joined_axes, shape_of

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
__dir__ = __all__.copy


def __getattr__(name: str) -> Any:
    """Return a function of einops that code imports from here."""
    if name in ("rearrange", "repeat"):
        return getattr(importlib.import_module("einops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def index_first_axis(input: Array, indices: Array) -> Array:
    """Return the rows `indices`, (T,), of an array, (N, ...), as (T, ...)."""
    library = library_of(input, "input")
    if library.name == "torch":  # in half of the time of `take`, which looks for negative indices
        return input.index_select(0, indices)
    return library.xp.take(input, indices, axis=0)


def index_put_first_axis(values: Array, indices: Array, first_axis_dim: int) -> Array:
    """Return zeros, (N, ...), whose rows `indices`, all different, are `values`, (T, ...)."""
    check_axes("indices T", indices, T=shape_of(values, "values")[0])
    placed = rows_placed(values, indices, first_axis_dim)
    if placed is not None:
        return placed
    xp, count = library_of(values).xp, values.shape[0]
    zero = numbers_like(xp, 0, values.dtype, values)
    values = xp.concat((values, xp.broadcast_to(zero, (1, *values.shape[1:]))), axis=0)
    order = xp.argsort(indices)
    ordered, rows = xp.take(indices, order, axis=0), index_range(xp, 0, first_axis_dim, values)
    place, stop = (xp.searchsorted(ordered, rows, side=side) for side in ("left", "right"))
    order = xp.concat((order, index_range(xp, count, count + 1, values)), axis=0)
    chosen = xp.where(stop > place, place, numbers_like(xp, count, place.dtype, values))
    return xp.take(values, xp.take(order, chosen, axis=0), axis=0)


def index_first_axis_residual(input: Array, indices: Array) -> tuple[Array, Array]:
    """Return the rows as `index_first_axis` does, and the array."""
    return index_first_axis(input, indices), input


#: The same as functions of torch.autograd are called.
IndexFirstAxis = SimpleNamespace(apply=index_first_axis)
IndexFirstAxisResidual = SimpleNamespace(apply=index_first_axis_residual)
IndexPutFirstAxis = SimpleNamespace(apply=index_put_first_axis)


def unpad_input(
    hidden_states: Array, attention_mask: Array, unused_mask: Array | None = None
) -> tuple[Array, Array, Array, int, Array]:
    """Return the tokens that are not padding, one sequence after another.

    Parameters
    ----------
    hidden_states : Array
        Shape (B, S, ...).
    attention_mask, unused_mask : Array of bool or int
        1 for a token, and 1 for a place that is kept though it holds none, shape (B, S).

    Returns
    -------
    tuple of Array, Array, Array, int and Array
        The tokens, (T, ...), their indices in the flat batch, (T,), where each sequence begins,
        (B + 1,) of int32, the length of the longest, and the number of tokens of each, (B,).
    """
    B, S, *_ = shape_of(hidden_states, "hidden_states")  # noqa: N806
    check_axes("attention_mask BS, unused_mask BS", attention_mask, unused_mask, B=B, S=S)
    xp = library_of(hidden_states).xp
    kept = attention_mask if attention_mask.dtype == xp.bool else attention_mask != 0
    lengths = used = xp.sum(cast(xp, kept, xp.int32), axis=-1, dtype=xp.int32)
    if unused_mask is not None:
        kept = kept | (unused_mask != 0)
        lengths = xp.sum(cast(xp, kept, xp.int32), axis=-1, dtype=xp.int32)
    return *_unpadded(xp, hidden_states, kept, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Array, attention_mask_in_length: Array
) -> tuple[Array, Array, Array, int]:
    """Return what `unpad_input` does but the last, where items hold several sequences.

    The mask, (B, S), has the lengths of the sequences of each item, and 0 after them.
    """
    B, S, *_ = shape_of(hidden_states, "hidden_states")  # noqa: N806
    check_axes("attention_mask_in_length BS", attention_mask_in_length, B=B, S=S)
    xp = library_of(hidden_states).xp
    given = cast(xp, attention_mask_in_length, xp.int32)
    kept = index_range(xp, 0, given.shape[1], given) < xp.sum(given, axis=-1, keepdims=True)
    lengths = xp.reshape(given, (-1,))
    lengths = xp.take(lengths, xp.nonzero(lengths)[0], axis=0)
    return _unpadded(xp, hidden_states, kept, lengths)


def _unpadded(
    xp: Any, hidden_states: Array, kept: Array, lengths: Array
) -> tuple[Array, Array, Array, int]:
    indices = xp.nonzero(xp.reshape(kept, (-1,)))[0]
    ends = xp.cumulative_sum(lengths, dtype=xp.int32, include_initial=True)
    longest = int(xp.max(lengths)) if lengths.shape[0] else 0
    return index_first_axis(joined_axes(hidden_states, 0, 2), indices), indices, ends, longest


def pad_input(hidden_states: Array, indices: Array, batch: int, seqlen: int) -> Array:
    """Return tokens in a padded batch, with zeros for padding.

    Parameters
    ----------
    hidden_states, indices : Array
        The tokens, (T, ...), and their indices in the flat batch, (T,), as from `unpad_input`.
    batch, seqlen : int
        B and S.

    Returns
    -------
    Array
        Shape (B, S, ...).

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flash_attn import pad_input, unpad_input
    >>> x = np.arange(1.0, 9.0).reshape(2, 4, 1)
    >>> tokens, indices, ends, longest, _ = unpad_input(x, np.array([[1, 1, 0, 0], [1, 1, 1, 0]]))
    >>> pad_input(tokens, indices, 2, 4)[..., 0]
    array([[1., 2., 0., 0.],
           [5., 6., 7., 0.]])
    """
    flat = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return library_of(flat).xp.reshape(flat, (batch, seqlen, *flat.shape[1:]))
