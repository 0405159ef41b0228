"""Encode positions: vectors added to tokens, and rotations of queries and keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyattn import scores
from polyattn._base.arrays import Array, cast, index_range, library_of, numbers_like, with_rank
from polyattn._base.tracing import is_compiling
from polyattn._core.expressions.scores import Score
from polyattn.nn.angles import Angles, frequencies_of, ntk_scaling
from polyattn.nn.ids import for_each_token, look_up
from polyattn.nn.layers import initializer
from polyattn.nn.module import Initializer, Module
from polyattn.nn.shapes import broadcastable, with_last_axes


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
        self._angles  # noqa: B018 -- computed now, and not while torch traces

    @functools.cached_property
    def _angles(self) -> Angles:
        return Angles(frequencies_of(self.size, self.base))

    def __call__(self, positions: Array, *, like: Array) -> Array:
        """Return a vector for each position, shape (..., size), in the dtype of `like`.

        The positions are integers of any shape (...). Sines are at even indices, cosines at odd
        ones.
        """
        xp = library_of(positions, "positions").xp
        angles = self._angles.of(xp, positions, like.dtype, positions)
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
        return look_up(self.weight, positions, "position", self.offset)


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
    dynamic : tuple of float and int, optional
        In place of ``frequencies``, a factor and the length of training: `ntk_scaling` by
        ``1 + factor * (length / trained - 1)`` for each item of a call whose length is above that
        of training. That length is its largest position plus 1, without the padding that
        ``counts``, or without a cache ``key_lengths``, leaves out. Keys in a cache keep the angles
        of their own call. Where positions are an array, far angles are products in float32.

    References
    ----------
    .. [1] Su et al., "RoFormer", 2021, arXiv:2104.09864.
    """

    size: int
    base: float = 10000.0
    pairing: str = "halves"
    frequencies: tuple[float, ...] | None = None
    magnitude: float = 1.0
    dynamic: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        _check_even(self.size)
        if self.frequencies is not None and self.dynamic is not None:
            raise ValueError("dynamic scaling computes the frequencies: give one of them")
        if self.pairing not in ("halves", "neighbours"):
            raise ValueError(f"pairing must be 'halves' or 'neighbours'; got {self.pairing!r}")
        if self.frequencies is not None:
            object.__setattr__(self, "frequencies", tuple(map(float, self.frequencies)))
            if (given := len(self.frequencies)) != self.size // 2:
                wanted = self.size // 2
                raise ValueError(f"there must be size / 2 = {wanted} frequencies; got {given}")
        self._angles  # noqa: B018 -- computed now, and not while torch traces

    @functools.cached_property
    def _angles(self) -> Angles:
        return Angles(self.frequencies or frequencies_of(self.size, self.base))

    def __call__(self, x: Array, positions: Array) -> Array:
        """Rotate queries or keys, shape (..., H, L, D) with D at least `size`.

        The tokens' positions are integers, shape (L,) or (..., L).
        """
        tokens = x[..., 0, :, :] if len(x.shape) > 2 else x
        return self.rotate(x, *self.tables(for_each_token("positions", positions, tokens), like=x))

    def tables(
        self, positions: Array | range | SharedAngles, *, like: Array, counts: Any = None
    ) -> tuple[Array, Array]:
        """Return the cosines and sines of positions, which queries and keys share.

        Parameters
        ----------
        positions : Array of int, range or SharedAngles
            As in a call; for a range the largest position is known, so that less is computed.
        like : Array
            An array of the library, device and dtype of the result.
        counts : int, Array of int or sequence of int, optional
            How many of the first tokens of each item are not padding, for dynamic scaling; then
            `like` is as the tokens, (..., L, any size).

        Returns
        -------
        cosines, sines : Array
            The arguments of `rotate`.
        """
        xp = library_of(like).xp
        angles = self._angles_of(xp, positions, like, counts)
        if len(angles.shape) > 2:
            angles = angles[..., None, :, :]
        cosine, sine = xp.cos(angles) * self.magnitude, xp.sin(angles) * self.magnitude
        return cast(xp, cosine, like.dtype), cast(xp, sine, like.dtype)

    def _angles_of(self, xp: Any, positions: Any, like: Array, counts: Any = None) -> Array:
        """Return the angles, shape (..., size / 2)."""
        if isinstance(positions, SharedAngles):
            return next(angles for rotary, angles in positions.angles if rotary == self)
        angles, is_range = self._angles, isinstance(positions, range) and counts is None
        if self.dynamic is not None and is_range and not is_compiling():
            factor, trained = self.dynamic
            if positions.stop > trained:
                stretch = 1 + factor * (positions.stop / trained - 1)
                angles = Angles(ntk_scaling(self.size, stretch, base=self.base))
        elif self.dynamic is not None:
            # torch.compile would make a program for each length that is a constant of it.
            if isinstance(positions, range):
                positions = index_range(xp, positions.start, positions.stop, like)
            if 0 not in positions.shape:  # else no position is the largest
                return self._stretched(xp, positions, like, counts)
        return angles.of(xp, positions, like.dtype, like)

    def _stretched(self, xp: Any, positions: Array, like: Array, counts: Any) -> Array:
        """Return the angles by dynamic scaling to the largest position of each item."""
        own, (factor, trained) = positions, self.dynamic or (0.0, 1)
        if counts is not None:
            counts = for_each_token("counts or key_lengths", counts, like, "item")
            own = positions = with_rank(positions, len(counts.shape) + 1)
            indices = broadcastable(own, index_range(xp, 0, own.shape[-1], like))
            own = xp.where(indices < broadcastable(own, counts[..., None]), own, xp.zeros_like(own))
        wide = like.dtype if like.dtype == xp.float64 else xp.float32
        length = cast(xp, xp.max(own, axis=-1, keepdims=True), wide)[..., None] + 1
        beyond = xp.where(length > trained, length / trained - 1, xp.zeros_like(length))
        powers = [-2 * n / max(self.size - 2, 1) for n in range(self.size // 2)]
        made = powers, frequencies_of(self.size, self.base)
        powers, rates = (broadcastable(length, numbers_like(xp, x, wide, like)) for x in made)
        return cast(xp, positions, wide)[..., None] * (rates * (beyond * factor + 1) ** powers)

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
        if x.shape[-1] is not None and x.shape[-1] < self.size:  # an open length of ONNX is None
            raise ValueError(
                f"vectors of {x.shape[-1]} components have no {self.size} to rotate: give Rotary"
                " another size"
            )
        whole = x.shape[-1] == self.size
        rotated = x if whole else x[..., : self.size]
        cosine, sine = (broadcastable(x, table) for table in (cosine, sine))
        half, adjacent = self.size // 2, self.pairing == "neighbours"
        a = rotated[..., ::2] if adjacent else rotated[..., :half]
        b = rotated[..., 1::2] if adjacent else rotated[..., half:]
        pairs = (a * cosine - b * sine, b * cosine + a * sine)
        result = (xp.stack if adjacent else xp.concat)(pairs, axis=-1)
        result = with_last_axes(result, 2, self.size) if adjacent else result
        return result if whole else xp.concat((result, x[..., self.size :]), axis=-1)


class SharedAngles(NamedTuple):
    """The angles of positions that were checked, once for all layers: a step is a fifth faster."""

    angles: tuple[tuple[Rotary, Array], ...]

    @classmethod
    def of(
        cls, positions: Array, rotaries: Sequence[Any], like: Array, counts: Any
    ) -> SharedAngles:
        """Return the angles of positions, once for equal encodings."""
        xp, distinct = library_of(like).xp, []
        for rotary in rotaries:
            if rotary is not None and rotary not in distinct:
                distinct.append(rotary)
        return cls(tuple([(one, one._angles_of(xp, positions, like, counts)) for one in distinct]))


def _check_even(size: int) -> None:
    if size % 2 or size < 2:
        raise ValueError(f"size must be even and at least 2; got {size}")
