"""What tells a model where a token stands: added to it, or turned into its queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from polyattn import scores
from polyattn.arrays import Array, cast, library_of, numbers_like
from polyattn.expressions.scores import Score
from polyattn.nn.layers import Embedding, draws
from polyattn.nn.module import Draws, Module

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
    """Sines and cosines of positions, to be added to the tokens there.

    Attributes
    ----------
    size : int
        Of a token's vector, even.
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
        if self.size % 2 or self.size < 2:
            raise ValueError(f"size must be even and at least 2; got {self.size}")

    def check(self, length: int) -> None:
        """Accept a sequence of any length.

        Parameters
        ----------
        length : int
            Of the sequence.
        """

    def __call__(self, positions: Array, *, like: Array) -> Array:
        """Return a vector for each position.

        Parameters
        ----------
        positions : Array of int
            Shape (...).
        like : Array
            An array of the dtype that is wanted.

        Returns
        -------
        Array
            Shape (..., size): sines at even places, cosines at odd ones.
        """
        xp = library_of(positions, "positions").xp
        wide = like.dtype if like.dtype == xp.float64 else xp.float32
        places = cast(xp, positions, wide)
        angles = places[..., None] * numbers_like(
            xp, frequencies_of(self.size, self.base), wide, positions
        )
        both = xp.stack((xp.sin(angles), xp.cos(angles)), axis=-1)
        return cast(xp, xp.reshape(both, (*positions.shape, self.size)), like.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class LearnedPositions(Module):
    """A vector for each position, to be added to the token there.

    Attributes
    ----------
    weight : Array
        Shape (positions, size).
    """

    weight: Array

    @classmethod
    def init(
        cls, positions: int, size: int, *, like: Array, seed: int | Draws = 0
    ) -> LearnedPositions:
        """Begin with small uniform vectors, as BERT and GPT-2 begin with small normal ones."""
        return cls(draws(like, seed).uniform((positions, size), 0.02 * math.sqrt(3)))

    def check(self, length: int) -> None:
        """Refuse a sequence that is longer than there are positions.

        Parameters
        ----------
        length : int
            Of the sequence.
        """
        if length > self.weight.shape[0]:
            raise ValueError(
                f"there are {self.weight.shape[0]} learned positions; got {length} tokens"
            )

    def __call__(self, positions: Array, *, like: Array | None = None) -> Array:
        """Return the vectors of positions of any shape (...), shape (..., size)."""
        return Embedding(self.weight)(positions)


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(Module):
    """A number for each head and how far a key is away, to be added to the scores, as T5 has it.

    Attributes
    ----------
    weight : Array
        Shape (buckets, H); near keys have buckets of their own, far ones share them.
    bidirectional : bool
        Whether keys before and after a row have buckets of their own.
    max_distance : int
        From where on all keys share one.

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
        seed: int | Draws = 0,
        bidirectional: bool = True,
        max_distance: int = 128,
    ) -> RelativeBias:
        """Begin with small uniform numbers.

        Parameters
        ----------
        heads : int
            H.
        buckets : int
            How many distances are told apart.
        like : Array
            An array of the library, device and dtype that the parameters are to have.
        seed : int or Draws
            The same one gives the same weights in every library.
        bidirectional : bool
            Whether keys before and after a row have buckets of their own.
        max_distance : int
            From where on all keys share one.

        Returns
        -------
        RelativeBias
            For all blocks of a model, as T5 has it, or for one.
        """
        weight = draws(like, seed).uniform((buckets, heads), 0.02 * math.sqrt(3))
        return cls(weight, bidirectional, max_distance)

    def __call__(self) -> Score:
        """Return the value for ``score_mod=``, which composes with others by ``>>``."""
        return scores.relative_bias(
            self.weight, bidirectional=self.bidirectional, max_distance=self.max_distance
        )


# ---- rotary ------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Rotary(Module):
    """Turn pairs of numbers of queries and keys by angles that grow with the position.

    Attributes
    ----------
    size : int
        How many numbers of each vector are turned, from the first on; even.
    base : float
        The longest wavelength over 2π.
    pairing : {"halves", "neighbours"}
        What makes a pair: number n and n + size / 2 (Llama in transformers, GPT-NeoX), or 2n and
        2n + 1 (the paper, GPT-J, Llama as published).
    frequencies : tuple of float, optional
        The angle a pair turns by from one position to the next, size / 2 of them, where it is not
        base ** (−2n / size): see `linear_scaling`, `ntk_scaling` and `yarn_scaling`.
    magnitude : float
        What multiplies the turned vectors, for YaRN.

    References
    ----------
    .. [1] Su et al., "RoFormer", 2021, arXiv:2104.09864.
    """

    size: int
    base: float = 10000.0
    pairing: str = "halves"
    frequencies: tuple[float, ...] | None = field(default=None)
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        if self.size % 2 or self.size < 2:
            raise ValueError(f"size must be even and at least 2; got {self.size}")
        if self.pairing not in ("halves", "neighbours"):
            raise ValueError(f"pairing must be 'halves' or 'neighbours'; got {self.pairing!r}")
        if self.frequencies is not None and len(self.frequencies) != self.size // 2:
            raise ValueError(
                f"there must be size / 2 = {self.size // 2} frequencies; got"
                f" {len(self.frequencies)}"
            )

    def __call__(self, x: Array, positions: Array) -> Array:
        """Turn vectors.

        Parameters
        ----------
        x : Array
            Queries or keys, shape (..., H, L, D), D at least `size`.
        positions : Array of int
            Where the tokens stand, shape (L,) or (..., L).

        Returns
        -------
        Array
            The shape and dtype of `x`.
        """
        xp = library_of(x).xp
        wide = x.dtype if x.dtype == xp.float64 else xp.float32
        places = cast(xp, positions, wide)
        angles = places[..., None] * numbers_like(xp, self._all_frequencies(), wide, x)
        if len(positions.shape) > 1:
            angles = angles[..., None, :, :]
        cosine, sine = (cast(xp, f(angles) * self.magnitude, x.dtype) for f in (xp.cos, xp.sin))
        turned, rest = x[..., : self.size], x[..., self.size :]
        half = self.size // 2
        if self.pairing == "halves":
            one, other = turned[..., :half], turned[..., half:]
            result = xp.concat((one * cosine - other * sine, other * cosine + one * sine), axis=-1)
        else:
            one, other = turned[..., ::2], turned[..., 1::2]
            pairs = (one * cosine - other * sine, other * cosine + one * sine)
            result = xp.reshape(xp.stack(pairs, axis=-1), turned.shape)
        return xp.concat((result, rest), axis=-1) if rest.shape[-1] else result

    def _all_frequencies(self) -> tuple[float, ...]:
        return (
            frequencies_of(self.size, self.base) if self.frequencies is None else self.frequencies
        )


def frequencies_of(size: int, base: float = 10000.0) -> tuple[float, ...]:
    """Return the angle that each pair turns by from one position to the next."""
    return tuple([base ** (-2 * n / size) for n in range(size // 2)])


def linear_scaling(size: int, factor: float, *, base: float = 10000.0) -> tuple[float, ...]:
    """Return frequencies for sequences `factor` times as long: positions are pressed together.

    Parameters
    ----------
    size : int
        Of what is turned.
    factor : float
        How many times as long.
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
    """Return frequencies for sequences `factor` times as long: fast pairs keep theirs.

    Parameters
    ----------
    size : int
        Of what is turned.
    factor : float
        How many times as long.
    base : float
        The longest wavelength over 2π.

    Returns
    -------
    tuple of float
        For ``Rotary(frequencies=)``: those of the base times factor ** (size / (size − 2)).
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
    """Return frequencies and magnitude by YaRN, between keeping them and pressing them together.

    Parameters
    ----------
    size : int
        Of what is turned.
    factor : float
        How many times as long.
    base : float
        The longest wavelength over 2π.
    trained : int
        The length that the model was trained on.
    fast, slow : float
        Pairs that turn more often than `fast` times over that length keep their frequency; those
        that turn less often than `slow` times have it divided by `factor`.

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

    def pair_that_turns(times: float) -> float:
        return size * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(fast)), 0)
    high = min(math.ceil(pair_that_turns(slow)), size - 1)
    found = []
    for n, frequency in enumerate(frequencies_of(size, base)):
        pressed = min(max((n - low) / max(high - low, 0.001), 0.0), 1.0)
        found.append(frequency / factor * pressed + frequency * (1 - pressed))
    return tuple(found), 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
