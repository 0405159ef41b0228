"""Rotate queries and keys by their positions, as `flash_attn.ops.triton.rotary` does."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

from polyattn._base.arrays import Array, cast, library_of
from polyattn.dialects._packed import Packed, is_on_host, numbers_of, places_of
from polyattn.dialects._rotary import positions_from, rotated
from polyattn.dialects._shared import check_axes, integers

__all__ = ["apply_rotary"]
__dir__ = __all__.copy


def apply_rotary(
    x: Array, cos: Array, sin: Array, seqlen_offsets: int | Array = 0,
    cu_seqlens: Array | None = None, max_seqlen: int | None = None,
    interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Array:  # fmt: skip
    """Rotate pairs of entries by the angles of their positions.

    Parameters
    ----------
    x, cos, sin : Array
        Shapes (B, L, H, D), or (T, H, D) with `cu_seqlens`, and (positions, D'/2) of both others.
    seqlen_offsets : int or Array of int
        The position of the first token, of all sequences or of each, shape (B,).
    cu_seqlens, max_seqlen : Array of int, int
        Where each sequence begins, and the last one ends, shape (B + 1,). The second is ignored.
    interleaved, inplace, conjugate : bool
        Whether the pairs are neighbours, or one of each half; whether to write the result into `x`;
        whether to rotate back.

    Returns
    -------
    Array
        The shape of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flash_attn.ops.triton.rotary import apply_rotary
    >>> cos, sin = np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])
    >>> apply_rotary(np.array([1.0, 2.0, 1.0, 2.0]).reshape(1, 2, 1, 2), cos, sin)[0, :, 0]
    array([[ 1.,  2.],
           [-2.,  1.]])
    """
    xp, first = library_of(x, "x").xp, integers("seqlen_offsets", seqlen_offsets, x)
    ends = integers("cu_seqlens", cu_seqlens, x)
    check_axes(
        f"x {'BLHD' if ends is None else 'THD'}, cos RF, sin RF, seqlen_offsets B",
        x, cos, sin, None if isinstance(first, int) else first,
        **({} if ends is None else {"B": ends.shape[0] - 1}),
    )  # fmt: skip
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[1]} angles, of pairs, for the {x.shape[-1]} entries of x: at most"
            f" {x.shape[-1] // 2} are possible"
        )
    rows: Array = x
    places: Any
    is_one, length = isinstance(first, int), x.shape[1]
    known = [first] if is_one else numbers_of(first) if is_on_host(first) else []
    edges = [0, length] if ends is None else numbers_of(ends) if is_on_host(ends) else []
    many = [stop - start for start, stop in pairwise(edges)]
    is_crossed = is_one or ends is None
    for start, count in product(known, many) if is_crossed else zip(known, many, strict=False):
        if not 0 <= start <= cos.shape[0] - count:
            raise ValueError(
                f"cos has {cos.shape[0]} positions, and x the {count} from seqlen_offsets ="
                f" {start} on: make the tables longer"
            )
    if ends is None:
        places = slice(first, first + length) if is_one else positions_from(first, length, x)
    else:
        rows = x[None, ...]
        sequence, places, _ = places_of(xp, Packed(ends), x.shape[0], x)
        if not isinstance(first, int):
            sequence = xp.maximum(sequence, xp.zeros_like(sequence))  # −1 in none
            first = xp.take(cast(xp, first, places.dtype), sequence, axis=0)
        places = (places + first)[None, :]
    turned = xp.reshape(
        rotated(rows, (cos, -sin if conjugate else sin), places, interleaved), x.shape
    )
    if not inplace:
        return turned
    x[...] = turned
    return x
