"""Encode positions: vectors added to tokens, and rotations of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyattn import scores
from polyattn.arrays import Array, cast, library_of, numbers_like
from polyattn.expressions.scores import Score
from polyattn.nn.layers import Embedding, initializer
from polyattn.nn.module import Initializer, Module
from polyattn.nn.shapes import with_last_axes

__all__ = [
    "LearnedPositions",
    "RelativeBias",
    "Rotary",
    "Sinusoidal",
    "linear_scaling",
    "ntk_scaling",
    "yarn_scaling",
]


@dataclass(frozen=True, repr=False)
class Sinusoidal(Module):
    """Sines and cosines of positions, to be added to the tokens.

    Attributes
    ----------
    size : int
        Size of a token's vector, even.
    base : float
        The longest wavelength over 2π.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, section 3.5.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> nn.Sinusoidal(16)(np.arange(10), like=np.zeros(1)).shape
    (10, 16)
    """

    size: int
    base: float = 10000.0

    def __post_init__(self) -> None:
        _check_even(self.size)

    def check(self, length: int) -> None:
        """Accept any length.

        Parameters
        ----------
        length : int
            Number of tokens.
        """

    def __call__(self, positions: Array, *, like: Array) -> Array:
        """Return a vector for each position.

        Parameters
        ----------
        positions : Array of int
            Shape (...).
        like : Array
            An array of the dtype of the result.

        Returns
        -------
        Array
            Shape (..., size): sines at even indices, cosines at odd ones.
        """
        xp = library_of(positions, "positions").xp
        angles = _angles(xp, positions, frequencies_of(self.size, self.base), like.dtype, positions)
        both = xp.stack((xp.sin(angles), xp.cos(angles)), axis=-1)
        return cast(xp, with_last_axes(both, 2, self.size), like.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class LearnedPositions(Module):
    """Learned vectors for positions, to be added to the tokens.

    Attributes
    ----------
    weight : Array
        Shape (positions, size).
    offset : int
        The row of position 0; RoBERTa leaves the first ones unused.
    """

    weight: Array
    offset: int = 0

    @classmethod
    def init(
        cls, positions: int, size: int, *, like: Array, seed: int | Initializer = 0
    ) -> LearnedPositions:
        """Create small uniform vectors; `like` and `seed` as for `Linear.init`."""
        return cls(initializer(like, seed).uniform((positions, size), 0.02 * math.sqrt(3)))

    def check(self, length: int) -> None:
        """Raise ValueError if a sequence is longer than the number of positions.

        Parameters
        ----------
        length : int
            Number of tokens.
        """
        number = self.weight.shape[0] - self.offset
        if length > number:
            raise ValueError(f"there are {number} learned positions; got {length} tokens")

    def __call__(self, positions: Array, *, like: Array | None = None) -> Array:
        """Return the vectors of positions of any shape (...), shape (..., size)."""
        return Embedding(self.weight)(positions + self.offset if self.offset else positions)


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(Module):
    """Learned biases by head and distance of the key, to be added to the scores, as in T5.

    Attributes
    ----------
    weight : Array
        Shape (buckets, H); each near distance has its own bucket, far ones share buckets.
    bidirectional : bool
        Whether keys before and after a row have separate buckets.
    max_distance : int
        The distance from which on all keys share one bucket.

    References
    ----------
    .. [1] Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
       Transformer", 2020, arXiv:1910.10683.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> x = np.ones((2, 5, 64))
    >>> relative = nn.RelativeBias.init(8, like=x)
    >>> nn.MultiHeadAttention.init(64, 8, like=x)(x, score_mod=relative()).shape
    (2, 5, 64)
    """

    weight: Array
    bidirectional: bool = True
    max_distance: int = 128

    @classmethod
    def init(
        cls,
        heads: int,
        buckets: int = 32,
        *,
        like: Array,
        seed: int | Initializer = 0,
        bidirectional: bool = True,
        max_distance: int = 128,
    ) -> RelativeBias:
        """Create small uniform biases, for one block or, as in T5, for all blocks of a model.

        Parameters
        ----------
        heads, buckets : int
            The shape of the weight is (buckets, heads).
        like, seed
            As for `Linear.init`.
        bidirectional, max_distance
            As in the class.
        """
        weight = initializer(like, seed).uniform((buckets, heads), 0.02 * math.sqrt(3))
        return cls(weight, bidirectional, max_distance)

    def __call__(self) -> Score:
        """Return the score modification for ``score_mod=``; ``>>`` composes it with others."""
        return scores.relative_bias(
            self.weight, bidirectional=self.bidirectional, max_distance=self.max_distance
        )


# ---- rotary ------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Rotary(Module):
    """Rotate pairs of components of queries and keys by angles that grow with the position.

    Attributes
    ----------
    size : int
        Number of components of each vector to rotate, from the first on; even.
    base : float
        The longest wavelength over 2π.
    pairing : {"halves", "neighbours"}
        The components of a pair: n and n + size / 2 (Llama in transformers, GPT-NeoX), or 2n
        and 2n + 1 (the paper, GPT-J, Llama as published).
    frequencies : tuple of float, optional
        The angle between neighbouring positions for each of the size / 2 pairs, by default
        base ** (−2n / size): see `linear_scaling`, `ntk_scaling` and `yarn_scaling`.
    magnitude : float
        Multiplies the rotated components, for YaRN.

    References
    ----------
    .. [1] Su et al., "RoFormer", 2021, arXiv:2104.09864.
    """

    size: int
    base: float = 10000.0
    pairing: str = "halves"
    frequencies: tuple[float, ...] | None = None
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _check_even(self.size)
        if self.pairing not in ("halves", "neighbours"):
            raise ValueError(f"pairing must be 'halves' or 'neighbours'; got {self.pairing!r}")
        if self.frequencies is not None and len(self.frequencies) != self.size // 2:
            given = len(self.frequencies)
            raise ValueError(f"there must be size / 2 = {self.size // 2} frequencies; got {given}")

    def __call__(self, x: Array, positions: Array) -> Array:
        """Rotate vectors.

        Parameters
        ----------
        x : Array
            Queries or keys, shape (..., H, L, D), D at least `size`.
        positions : Array of int
            The tokens' positions, shape (L,) or (..., L).

        Returns
        -------
        Array
            An array of the shape and dtype of `x`.
        """
        return self.rotate(x, *self.tables(positions, like=x))

    def tables(self, positions: Array, *, like: Array) -> tuple[Array, Array]:
        """Return the cosines and sines of positions, which queries and keys share.

        Parameters
        ----------
        positions : Array of int
            As in a call.
        like : Array
            An array of the library, device and dtype of the result.

        Returns
        -------
        cosines, sines : Array
            The arguments of `rotate`.
        """
        xp = library_of(like).xp
        frequencies = self.frequencies or frequencies_of(self.size, self.base)
        angles = _angles(xp, positions, frequencies, like.dtype, like)
        if len(positions.shape) > 1:
            angles = angles[..., None, :, :]
        cosine, sine = xp.cos(angles) * self.magnitude, xp.sin(angles) * self.magnitude
        return cast(xp, cosine, like.dtype), cast(xp, sine, like.dtype)

    def rotate(self, x: Array, cosine: Array, sine: Array) -> Array:
        """Rotate vectors by the angles of `tables`.

        Parameters
        ----------
        x : Array
            As in a call.
        cosine, sine : Array
            The result of `tables`.

        Returns
        -------
        Array
            An array of the shape and dtype of `x`.
        """
        xp = library_of(x).xp
        whole = x.shape[-1] == self.size
        rotated = x if whole else x[..., : self.size]
        half, adjacent = self.size // 2, self.pairing == "neighbours"
        a = rotated[..., ::2] if adjacent else rotated[..., :half]
        b = rotated[..., 1::2] if adjacent else rotated[..., half:]
        pairs = (a * cosine - b * sine, b * cosine + a * sine)
        result = (xp.stack if adjacent else xp.concat)(pairs, axis=-1)
        result = with_last_axes(result, 2, self.size) if adjacent else result
        return result if whole else xp.concat((result, x[..., self.size :]), axis=-1)


def _check_even(size: int) -> None:
    if size % 2 or size < 2:
        raise ValueError(f"size must be even and at least 2; got {size}")


def _angles(
    xp: Any, positions: Array, frequencies: tuple[float, ...], dtype: Any, like: Array
) -> Array:
    """Return positions times frequencies, shape (..., size / 2), in float32 at least."""
    wide = dtype if dtype == xp.float64 else xp.float32
    return cast(xp, positions, wide)[..., None] * numbers_like(xp, frequencies, wide, like)


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
