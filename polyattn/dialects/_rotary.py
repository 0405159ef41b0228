"""Rotate pairs of entries by angles, in float32 at least."""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array, cast, index_range, library_of


def positions_from(first: Any, length: int, like: Array) -> Array:
    """Return the positions of so many tokens from the first on, (B or 1, L)."""
    xp = library_of(like).xp
    steps = index_range(xp, 0, length, like)[None, :]
    if isinstance(first, int):
        return steps + first
    return steps + xp.reshape(cast(xp, first, steps.dtype), (-1, 1))


def rotated(x: Array, tables: tuple[Array, Array], places: Any, interleaved: bool) -> Array:
    """Return x, (B, L, H, D), rotated by cosines and sines of places, a slice or (B or 1, L or 1).

    Only the first entries are rotated where tables are narrower than x.
    """
    xp = library_of(x).xp
    half, wide = tables[0].shape[-1], xp.float64 if x.dtype == xp.float64 else xp.float32
    if isinstance(places, slice):
        found = [table[None, places, None, :] for table in tables]
    else:
        flat, shape = xp.reshape(places, (-1,)), (*places.shape, 1, half)
        found = [xp.reshape(xp.take(table, flat, axis=0), shape) for table in tables]
    cos, sin = (cast(xp, table, wide) for table in found)
    axis, shape = (-1, (half, 2)) if interleaved else (-2, (2, half))
    pairs = xp.reshape(cast(xp, x[..., : 2 * half], wide), (*x.shape[:-1], *shape))
    one, other = (pairs[..., n] if axis == -1 else pairs[..., n, :] for n in (0, 1))
    turned = xp.stack((one * cos - other * sin, one * sin + other * cos), axis=axis)
    turned = cast(xp, xp.reshape(turned, (*x.shape[:-1], 2 * half)), x.dtype)
    return xp.concat((turned, x[..., 2 * half :]), axis=-1) if 2 * half < x.shape[-1] else turned
