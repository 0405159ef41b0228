"""Take the padding out of a batch, and put it back, as `flash_attn.bert_padding` does."""

from __future__ import annotations

from polyattn._base.arrays import Array, cast, index_range, library_of, numbers_like

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Array, indices: Array) -> Array:
    """Return some rows of an array.

    Parameters
    ----------
    input : Array
        Shape (N, ...).
    indices : Array of int
        The rows, shape (T,).

    Returns
    -------
    Array
        Shape (T, ...).
    """
    return library_of(input, "input").xp.take(input, indices, axis=0)


def index_put_first_axis(values: Array, indices: Array, first_axis_dim: int) -> Array:
    """Return an array of zeros with some rows replaced.

    Parameters
    ----------
    values : Array
        Shape (T, ...).
    indices : Array of int
        The row of each value, all different, shape (T,).
    first_axis_dim : int
        N, the number of rows.

    Returns
    -------
    Array
        Shape (N, ...).
    """
    xp = library_of(values, "values").xp
    # By a look-up, which every library differentiates.
    rows = index_range(xp, 0, first_axis_dim, values)
    if not values.shape[0]:
        zeros = numbers_like(xp, 0, values.dtype, values)
        return xp.broadcast_to(zeros, (first_axis_dim, *values.shape[1:]))
    order = xp.argsort(indices)
    ordered = cast(xp, xp.take(indices, order, axis=0), rows.dtype)
    place = xp.searchsorted(ordered, rows)
    last = numbers_like(xp, max(values.shape[0] - 1, 0), rows.dtype, values)
    place = xp.minimum(cast(xp, place, rows.dtype), last)
    found = xp.take(ordered, place, axis=0) == rows
    filled = xp.take(values, xp.take(order, place, axis=0), axis=0)
    found = xp.reshape(found, (-1, *(1,) * (len(values.shape) - 1)))
    return xp.where(found, filled, xp.zeros_like(filled))


def unpad_input(
    hidden_states: Array, attention_mask: Array, unused_mask: Array | None = None
) -> tuple[Array, Array, Array, int, Array]:
    """Return the tokens that are not padding, one sequence after another.

    The contents of the mask decide shapes, so that no traced program can call this.

    Parameters
    ----------
    hidden_states : Array
        Shape (B, S, ...).
    attention_mask : Array of bool or int
        1 for a token, shape (B, S).
    unused_mask : Array of bool or int, optional
        1 for a place that is kept though it holds no token.

    Returns
    -------
    tuple of Array, Array, Array, int and Array
        The tokens, (T, ...), their indices in the flat batch, (T,), where each sequence begins,
        (B + 1,) of int32, the length of the longest, and the number of tokens of each, (B,).
    """
    xp = library_of(attention_mask, "attention_mask").xp
    tokens = attention_mask != 0
    kept = tokens if unused_mask is None else tokens | (unused_mask != 0)
    lengths = xp.sum(cast(xp, kept, xp.int32), axis=-1, dtype=xp.int32)
    used = xp.sum(cast(xp, tokens, xp.int32), axis=-1, dtype=xp.int32)
    return (*_taken(hidden_states, kept, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Array, attention_mask_in_length: Array
) -> tuple[Array, Array, Array, int]:
    """Return the tokens of rows that hold several short sequences each.

    Parameters
    ----------
    hidden_states : Array
        Shape (B, S, ...).
    attention_mask_in_length : Array of int
        The lengths of the sequences of each row, and zeros after them, shape (B, S).

    Returns
    -------
    tuple of Array, Array, Array and int
        The first four results of `unpad_input`.
    """
    xp = library_of(attention_mask_in_length, "attention_mask_in_length").xp
    whole = xp.sum(attention_mask_in_length, axis=-1)
    columns = index_range(xp, 0, attention_mask_in_length.shape[-1], attention_mask_in_length)
    flat = xp.reshape(attention_mask_in_length, (-1,))
    lengths = cast(xp, xp.take(flat, xp.nonzero(flat)[0], axis=0), xp.int32)
    return _taken(hidden_states, columns < whole[:, None], lengths)


def pad_input(hidden_states: Array, indices: Array, batch: int, seqlen: int) -> Array:
    """Return tokens in a padded batch, with zeros for padding.

    Parameters
    ----------
    hidden_states : Array
        The tokens, shape (T, ...).
    indices : Array of int
        Their indices in the flat batch, shape (T,), as from `unpad_input`.
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
    >>> ends
    array([0, 2, 5], dtype=int32)
    >>> pad_input(tokens, indices, 2, 4)[..., 0]
    array([[1., 2., 0., 0.],
           [5., 6., 7., 0.]])
    """
    flat = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return library_of(flat).xp.reshape(flat, (batch, seqlen, *flat.shape[1:]))


def _taken(states: Array, kept: Array, lengths: Array) -> tuple[Array, Array, Array, int]:
    xp = library_of(states, "hidden_states").xp
    indices = xp.nonzero(xp.reshape(kept, (-1,)))[0]
    ends = xp.concat((xp.zeros_like(lengths[:1]), xp.cumulative_sum(lengths, dtype=xp.int32)))
    flat = xp.reshape(states, (-1, *states.shape[2:]))
    return index_first_axis(flat, indices), indices, ends, int(xp.max(lengths))
