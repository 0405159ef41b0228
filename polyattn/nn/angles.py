"""Compute the frequencies and angles of positions, and scale them to longer sequences."""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array, cast, index_range, numbers_like
from polyattn.nn.ids import are_known_below
from polyattn.nn.shapes import broadcastable

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
        near = places * broadcastable(places, rates)
        if is_near or wide == xp.float64 or "int" not in str(positions.dtype):
            return near
        positions = cast(xp, positions, xp.asarray(0).dtype)  # which holds the divisors
        if are_known_below(FAR, positions):
            return near
        return xp.where((positions >= FAR)[..., None], self._remainders(xp, positions, like), near)

    def _remainders(self, xp: Any, positions: Array, like: Array) -> Array:
        """Return the angles modulo 2π in float32, to 1e-6 for positions below 2³³."""
        # A position has three digits, and the turns of a digit's unit two parts. Products of digits
        # with the first part are exact, and so is their sum.
        digits = (positions % BASE, positions // BASE % BASE, positions // BASE**2)
        numbers = cast(xp, xp.stack(digits, axis=-1), xp.float32)[..., None]

        def summed(table: Table) -> Array:
            turns = numbers_like(xp, table, xp.float32, like)
            return xp.sum(numbers * broadcastable(numbers, turns), axis=-2)

        coarse = summed(self._coarse)
        turn = coarse - xp.floor(coarse) + summed(self._rest)
        return 2 * math.pi * (turn - xp.round(turn))


# ---- frequencies -------------------------------------------------------------------------------


def frequencies_of(size: int, base: float = 10000.0) -> tuple[float, ...]:
    """Return the angle of each pair between neighbouring positions."""
    return tuple([base ** (-2 * n / size) for n in range(size // 2)])


def linear_scaling(size: int, factor: float, *, base: float = 10000.0) -> tuple[float, ...]:
    """Return frequencies for sequences `factor` times as long, by interpolating positions.

    Parameters
    ----------
    size : int
        Number of components to rotate.
    factor : float
        The new length over the length of training.
    base : float
        The longest wavelength over 2π.

    Returns
    -------
    tuple of float
        For ``Rotary(frequencies=)``.

    References
    ----------
    .. [1] Chen et al., "Extending Context Window of Large Language Models via Position
       Interpolation", 2023, arXiv:2306.15595.
    """
    return tuple([frequency / factor for frequency in frequencies_of(size, base)])


def ntk_scaling(size: int, factor: float, *, base: float = 10000.0) -> tuple[float, ...]:
    """Return frequencies for sequences `factor` times as long, by a larger base.

    Parameters
    ----------
    size, factor, base : int, float, float
        As for `linear_scaling`.

    Returns
    -------
    tuple of float
        For ``Rotary(frequencies=)``, with the base times factor ** (size / (size − 2)): the
        fastest pairs hardly change.
    """
    # The one frequency of a size of 2 is 1 for every base.
    return frequencies_of(size, base * factor ** (size / max(size - 2, 1)))


def yarn_scaling(
    size: int,
    factor: float,
    *,
    base: float = 10000.0,
    trained: int = 4096,
    fast: float = 32.0,
    slow: float = 1.0,
) -> tuple[tuple[float, ...], float]:
    """Return the frequencies and the magnitude of YaRN.

    Parameters
    ----------
    size, factor, base : int, float, float
        As for `linear_scaling`.
    trained : int
        The length that the model was trained on.
    fast, slow : float
        Pairs that make more than `fast` turns over that length keep their frequency; the frequency
        of those that make fewer than `slow` turns is divided by `factor`; between, both are mixed.

    Returns
    -------
    frequencies : tuple of float
        For ``Rotary(frequencies=)``.
    magnitude : float
        For ``Rotary(magnitude=)``.

    References
    ----------
    .. [1] Peng et al., "YaRN", 2023, arXiv:2309.00071.
    """

    def pair_with(turns: float) -> float:
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with(fast)), 0)
    high = min(math.ceil(pair_with(slow)), size - 1)
    frequencies = []
    for n, frequency in enumerate(frequencies_of(size, base)):
        scaled = min(max((n - low) / max(high - low, 0.001), 0.0), 1.0)
        frequencies.append(frequency / factor * scaled + frequency * (1 - scaled))
    return tuple(frequencies), 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
