"""Compute the frequencies of positions, and scale them to sequences longer than in training."""

from __future__ import annotations

import math


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
