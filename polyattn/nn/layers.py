"""What stands around attention: linear maps, norms, activations, feed-forward, embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyattn.arrays import Array, cast, facts_of, library_of
from polyattn.nn.erf import erf
from polyattn.nn.module import Draws, Module
from polyattn.nn.passes import by_rows, mapped

__all__ = [
    "ACTIVATIONS",
    "Embedding",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "Norm",
    "RMSNorm",
    "draws",
]


def draws(like: Array, seed: int | Draws) -> Draws:
    """Return what draws first parameters, so that the parts of a module can share one."""
    return seed if isinstance(seed, Draws) else Draws(like, library_of(like, "like").xp, seed)


def _check(what: str, x: Array, weight: Array) -> None:
    """Raise unless `x` is of the weight's library and its last axis is the weight's first."""
    library, own = library_of(x, "x"), library_of(weight)
    if library.name != own.name or not x.shape or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{what} takes {own.name} arrays whose last axis is {weight.shape[0]};"
            f" got {facts_of(x)} of {library.name}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Linear(Module):
    """A linear map of the last axis, ``x · weight + bias``.

    Attributes
    ----------
    weight : Array
        Shape (inputs, outputs).
    bias : Array or None
        Shape (outputs,).
    """

    weight: Array
    bias: Array | None = None

    @classmethod
    def init(
        cls, inputs: int, outputs: int, *, like: Array, seed: int | Draws = 0, bias: bool = True
    ) -> Linear:
        """Begin with Glorot's uniform weights and a bias of 0.

        Parameters
        ----------
        inputs, outputs : int
            The sizes of the last axis before and after.
        like : Array
            An array of the library, device and dtype that the parameters are to have.
        seed : int or Draws
            The same one gives the same weights in every library.
        bias : bool
            Whether there is a bias.

        Returns
        -------
        Linear
            The map.
        """
        draw = draws(like, seed)
        weight = draw.uniform((inputs, outputs), math.sqrt(6 / (inputs + outputs)))
        return cls(weight, draw.fill((outputs,), 0.0) if bias else None)

    def __call__(self, x: Array) -> Array:
        """Map the last axis of `x`, shape (..., inputs), to (..., outputs)."""
        _check("this map", x, self.weight)
        if x.dtype != self.weight.dtype:
            raise TypeError(
                f"this map has {facts_of(self.weight).dtype} parameters; got x in"
                f" {facts_of(x).dtype}: cast one of them"
            )
        return mapped(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False, repr=False)
class LayerNorm(Module):
    """Subtract the mean of the last axis and divide by its standard deviation.

    Attributes
    ----------
    weight : Array
        What multiplies the result, shape (size,).
    bias : Array or None
        What is added to it, shape (size,).
    epsilon : float
        What is added to the variance.
    """

    weight: Array
    bias: Array | None
    epsilon: float = 1e-5

    @classmethod
    def init(cls, size: int, *, like: Array, epsilon: float = 1e-5) -> LayerNorm:
        """Begin with a weight of 1 and a bias of 0, in the library, device and dtype of `like`."""
        draw = draws(like, 0)
        return cls(draw.fill((size,), 1.0), draw.fill((size,), 0.0), epsilon)

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis of `x`, at least in float32."""
        _check("this norm", x, self.weight)
        return by_rows(self._normalised, x)

    def _normalised(self, x: Array) -> Array:
        xp = library_of(x).xp
        wide = _widened(x, xp)
        wide = wide - xp.mean(wide, axis=-1, keepdims=True)
        variance = xp.mean(wide * wide, axis=-1, keepdims=True)
        y = cast(xp, wide / xp.sqrt(variance + self.epsilon), x.dtype) * self.weight
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, eq=False, repr=False)
class RMSNorm(Module):
    """Divide by the root of the mean square of the last axis.

    Attributes
    ----------
    weight : Array
        What multiplies the result, shape (size,).
    epsilon : float
        What is added to the mean square.
    offset : float
        What is added to the weight; 1 for models that store how far it is from 1.

    References
    ----------
    .. [1] Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.
    """

    weight: Array
    epsilon: float = 1e-6
    offset: float = 0.0

    @classmethod
    def init(cls, size: int, *, like: Array, epsilon: float = 1e-6) -> RMSNorm:
        """Begin with a weight of 1, in the library, device and dtype of `like`."""
        return cls(draws(like, 0).fill((size,), 1.0), epsilon)

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis of `x`, at least in float32."""
        _check("this norm", x, self.weight)
        return by_rows(self._normalised, x)

    def _normalised(self, x: Array) -> Array:
        xp = library_of(x).xp
        wide = _widened(x, xp)
        square = xp.mean(wide * wide, axis=-1, keepdims=True)
        y = cast(xp, wide / xp.sqrt(square + self.epsilon), x.dtype)
        return y * (self.weight + self.offset if self.offset else self.weight)


Norm = LayerNorm | RMSNorm


def _widened(x: Array, xp: Any) -> Array:
    return x if x.dtype == xp.float64 else cast(xp, x, xp.float32)


def _relu(x: Array) -> Array:
    xp = library_of(x).xp
    return xp.where(x < 0, xp.zeros_like(x), x)


def _gelu(x: Array) -> Array:
    return x * (erf(x / math.sqrt(2)) + 1) / 2


def _gelu_tanh(x: Array) -> Array:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x * (library_of(x).xp.tanh(inner) + 1) / 2


def _silu(x: Array) -> Array:
    # By tanh, which overflows nowhere: x times the logistic function of x.
    return x * (library_of(x).xp.tanh(x / 2) + 1) / 2


#: Activations by name. ``gelu`` is exact, ``gelu_tanh`` the approximation of GPT-2.
ACTIVATIONS = {"relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}


@dataclass(frozen=True, eq=False, repr=False)
class FeedForward(Module):
    """Two linear maps with an activation between them; with a gate, SwiGLU and its like.

    Attributes
    ----------
    up, down : Linear
        To the inner size and back.
    gate : Linear or None
        Where there is one, its activation multiplies what `up` gives.
    activation : str
        One of `ACTIVATIONS`.

    References
    ----------
    .. [1] Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
    """

    up: Linear
    down: Linear
    gate: Linear | None = None
    activation: str = "gelu"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}; got {self.activation!r}"
            )

    @classmethod
    def init(
        cls,
        size: int,
        inner: int | None = None,
        *,
        like: Array,
        seed: int | Draws = 0,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
    ) -> FeedForward:
        """Begin with Glorot's uniform weights.

        Parameters
        ----------
        size : int
            The size of the last axis, before and after.
        inner : int, optional
            Between the two maps, 4 · size by default.
        like : Array
            An array of the library, device and dtype that the parameters are to have.
        seed : int or Draws
            The same one gives the same weights in every library.
        activation : {"gelu", "gelu_tanh", "relu", "silu"}
            The activation.
        gated : bool
            Whether there is a gate; with ``"silu"`` that is SwiGLU.
        bias : bool
            Whether the maps have biases.

        Returns
        -------
        FeedForward
            The layer.
        """
        draw = draws(like, seed)
        inner = 4 * size if inner is None else inner
        up = Linear.init(size, inner, like=like, seed=draw, bias=bias)
        down = Linear.init(inner, size, like=like, seed=draw, bias=bias)
        gate = Linear.init(size, inner, like=like, seed=draw, bias=bias) if gated else None
        return cls(up, down, gate, activation)

    def __call__(self, x: Array) -> Array:
        """Map the last axis of `x`, shape (..., size), to the same."""
        up = self.up if self.gate is None else self.gate
        inner = by_rows(ACTIVATIONS[self.activation], up(x))
        if self.gate is not None:
            inner = inner * self.up(x)
        return self.down(inner)


@dataclass(frozen=True, eq=False, repr=False)
class Embedding(Module):
    """A vector for each token.

    Attributes
    ----------
    weight : Array
        Shape (tokens, size).
    """

    weight: Array

    @classmethod
    def init(cls, tokens: int, size: int, *, like: Array, seed: int | Draws = 0) -> Embedding:
        """Begin with uniform vectors of variance 1 / size, as `Linear.init` draws its weights."""
        bound = math.sqrt(3 / size)
        return cls(draws(like, seed).uniform((tokens, size), bound))

    def __call__(self, ids: Array) -> Array:
        """Return the vectors of token ids of any shape (...), shape (..., size)."""
        library, own = library_of(ids, "ids"), library_of(self.weight)
        if library.name != own.name or not own.xp.isdtype(ids.dtype, "integral"):
            raise TypeError(
                f"ids must be an integer array of {own.name}; got {facts_of(ids)} of {library.name}"
            )
        xp = own.xp
        rows = xp.take(self.weight, xp.reshape(ids, (-1,)), axis=0)
        return xp.reshape(rows, (*ids.shape, self.weight.shape[1]))

    def logits(self, x: Array) -> Array:
        """Return how like each token's vector others are: logits, where the output map is tied.

        Parameters
        ----------
        x : Array
            Shape (..., size).

        Returns
        -------
        Array
            Shape (..., tokens).
        """
        xp = library_of(x).xp
        return xp.matmul(x, xp.matrix_transpose(self.weight))
