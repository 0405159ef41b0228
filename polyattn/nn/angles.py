"""Compute the angles of positions, for rotary and sinusoidal encodings."""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array, cast, index_range, numbers_like
from polyattn.nn.ids import are_known_below
from polyattn.nn.shapes import beside

#: The first position whose angles are exact to 1e-6 in float32; those before it are products.
FAR = 2**13
#: A digit of a position, so short that float32 holds its product with a number of as many bits.
BASE = 2**11

Table = tuple[tuple[float, ...], ...]


class Angles:
    """Positions times frequencies, modulo 2π where float32 would lose too many digits."""

    def __init__(self, frequencies: tuple[float, ...]) -> None:
        self.frequencies = frequencies
        # By how many turns the unit of each digit rotates, less the whole turns. `_coarse` has as
        # many bits of them as a digit has, `_rest` the others. They are computed here because
        # torch.compile may compute % and round of floats wrongly in `of`.
        turns = [[rate / (2 * math.pi) * BASE**n % 1 for rate in frequencies] for n in range(3)]
        self._coarse = tuple(
            [tuple([round(turn * BASE) / BASE for turn in line]) for line in turns]
        )
        self._rest = tuple(
            [
                tuple([turn - part for turn, part in zip(*lines, strict=True)])
                for lines in zip(turns, self._coarse, strict=True)
            ]
        )

    def of(self, xp: Any, positions: Array | range, dtype: Any, like: Array) -> Array:
        """Return the angles, shape (..., frequencies), in float64 if `dtype` is, else float32."""
        is_near = isinstance(positions, range) and positions.stop <= FAR
        if isinstance(positions, range):
            positions = index_range(xp, positions.start, positions.stop, like)
        wide = dtype if dtype == xp.float64 else xp.float32
        rates = numbers_like(xp, self.frequencies, wide, like)
        places = cast(xp, positions, wide)[..., None]
        near = places * beside(places, rates)
        if is_near or wide == xp.float64 or "int" not in str(positions.dtype):
            return near
        positions = cast(xp, positions, xp.asarray(0).dtype)  # which holds the divisors
        if are_known_below(FAR, positions):
            return near
        return xp.where((positions >= FAR)[..., None], self._remainders(xp, positions, like), near)

    def _remainders(self, xp: Any, positions: Array, like: Array) -> Array:
        """Return the angles modulo 2π in float32, to 1e-6 for positions below 2³³.

        A position is split into three digits, and the turns of a digit's unit into two parts.
        Products of digits with the first part are exact, and so is their sum.
        """
        digits = (positions % BASE, positions // BASE % BASE, positions // BASE**2)
        numbers = cast(xp, xp.stack(digits, axis=-1), xp.float32)[..., None]

        def summed(table: Table) -> Array:
            turns = numbers_like(xp, table, xp.float32, like)
            return xp.sum(numbers * beside(numbers, turns), axis=-2)

        coarse = summed(self._coarse)
        turn = coarse - xp.floor(coarse) + summed(self._rest)
        return 2 * math.pi * (turn - xp.round(turn))
