"""Define the layers around attention: linear maps, norms, feed-forward layers, embeddings.

Norms and activations compute in float32 at least, and round their result once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, cast, facts_of, library_of
from polyattn._base.autocast import autocast
from polyattn._base.same_bits import keeps_bits
from polyattn._base.tracing import is_autocast_on
from polyattn.nn.erf import gelu
from polyattn.nn.ids import look_up
from polyattn.nn.module import Initializer, Module
from polyattn.nn.passes import affine, by_rows
from polyattn.nn.shapes import broadcastable


def initializer(like: Array, seed: int | Initializer) -> Initializer:
    """Return an initializer for a seed; the parts of a module share one."""
    if isinstance(seed, Initializer):
        return seed
    return Initializer(like, library_of(like, "like").xp, seed)


def _check(layer: str, x: Array, weight: Array) -> None:
    """Raise unless `x` is of the weight's library and its last axis is the weight's first."""
    # Arrays of one class are of one library.
    fits = type(x) is type(weight) or library_of(x, "x").name == library_of(weight).name
    if not fits or not x.shape or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{layer} takes {library_of(weight).name} arrays whose last axis is {weight.shape[0]};"
            f" got {facts_of(x)} of {library_of(x).name}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Linear(Module):
    """Map the last axis linearly, ``x · weight + bias``.

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
        cls,
        inputs: int,
        outputs: int,
        *,
        like: Array,
        seed: int | Initializer = 0,
        bias: bool = True,
    ) -> Linear:
        """Create a layer with Glorot's uniform weights and a bias of 0.

        Parameters
        ----------
        inputs, outputs : int
            The sizes of the last axis before and after.
        like : Array
            An array of the library, device and dtype of the parameters.
        seed : int or Initializer
            Equal seeds give equal weights in every library. The parts of a model share the
            initializer that it makes from its seed.
        bias : bool
            Whether there is a bias.
        """
        create = initializer(like, seed)
        check_int("inputs", inputs, least=0)
        check_int("outputs", outputs, least=0)
        weight = create.uniform((inputs, outputs), math.sqrt(6 / max(1, inputs + outputs)))
        return cls(weight, create.fill((outputs,), 0.0) if bias else None)

    def __call__(self, x: Array) -> Array:
        """Map the last axis of `x`, shape (..., inputs), to (..., outputs)."""
        _check("this map", x, self.weight)
        weight, bias = self.weight, self.bias
        if is_autocast_on():  # asked first, because this takes as long as a small product
            given = {"x": x, "weight": weight, "bias": bias}
            x, weight, bias = autocast(given, tuple(given)).values()
        if x.dtype != weight.dtype:
            raise TypeError(
                f"this map has {facts_of(self.weight).dtype} parameters; got x in"
                f" {facts_of(x).dtype}: cast one of them"
            )
        return affine(x, weight, bias)


@dataclass(frozen=True, eq=False, repr=False)
class LayerNorm(Module):
    """Subtract the mean of the last axis and divide by its standard deviation.

    Attributes
    ----------
    weight : Array
        Multiplies the result, shape (size,).
    bias : Array or None
        Added to the product, shape (size,).
    epsilon : float
        Added to the variance.
    """

    weight: Array
    bias: Array | None
    epsilon: float = 1e-5

    @classmethod
    def init(cls, size: int, *, like: Array, epsilon: float = 1e-5) -> LayerNorm:
        """Create a layer with a weight of 1 and a bias of 0; `like` as for `Linear.init`."""
        create = initializer(like, 0)
        return cls(create.fill((size,), 1.0), create.fill((size,), 0.0), float(epsilon))

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis of `x`, at least in float32."""
        _check("this norm", x, self.weight)
        if _is_for_torch(x, self.weight):
            normalised: Any = sys.modules["torch"].nn.functional.layer_norm
            return normalised(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        return by_rows(self._normalised, x)

    def _normalised(self, x: Array) -> Array:
        xp = library_of(x).xp
        wide = widened(x, xp)
        wide = wide - _mean(wide, xp)
        variance = _mean(wide * wide, xp)
        y = wide / xp.sqrt(variance + self.epsilon) * broadcastable(wide, widened(self.weight, xp))
        y = y if self.bias is None else y + broadcastable(wide, widened(self.bias, xp))
        return cast(xp, y, x.dtype) if self.weight.dtype == x.dtype else y


@dataclass(frozen=True, eq=False, repr=False)
class RMSNorm(Module):
    """Divide by the root of the mean square of the last axis.

    Attributes
    ----------
    weight : Array
        Multiplies the result, shape (size,).
    epsilon : float
        Added to the mean square.
    offset : float
        Added to the weight; 1 for models that store the weight minus 1.

    References
    ----------
    .. [1] Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.
    """

    weight: Array
    epsilon: float = 1e-6
    offset: float = 0.0

    @classmethod
    def init(cls, size: int, *, like: Array, epsilon: float = 1e-6) -> RMSNorm:
        """Create a layer with a weight of 1; `like` as for `Linear.init`."""
        return cls(initializer(like, 0).fill((size,), 1.0), float(epsilon))

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis of `x`, at least in float32."""
        _check("this norm", x, self.weight)
        return by_rows(self._normalised, x)

    def _normalised(self, x: Array) -> Array:
        xp = library_of(x).xp
        wide = widened(x, xp)
        square = _mean(wide * wide, xp)
        weight = broadcastable(wide, widened(self.weight, xp))
        weight = weight + self.offset if self.offset else weight
        y = wide / xp.sqrt(square + self.epsilon) * weight
        return cast(xp, y, x.dtype) if self.weight.dtype == x.dtype else y


Norm = LayerNorm | RMSNorm


def _is_for_torch(x: Array, weight: Array) -> bool:
    """Return whether a function of torch computes as we do, in a fifth of the time of its steps."""
    xp = library_of(x).xp
    if not xp.__name__.endswith("torch") or keeps_bits():
        return False
    return x.dtype == weight.dtype and x.dtype in (xp.float32, xp.float64)


def widened(x: Array, xp: Any) -> Array:
    """Return an array in float32, or as it is in float64."""
    return x if x.dtype == xp.float64 else cast(xp, x, xp.float32)


def _mean(x: Array, xp: Any) -> Array:
    # For a short row NumPy's mean takes twice the time of its sum, with the same bits, and torch's
    # half of it.
    if library_of(x).name == "torch":
        return x.mean(-1, keepdim=True)
    return xp.sum(x, axis=-1, keepdims=True) / x.shape[-1]


def _rounded_once(function: Callable[[Array, Any], Array]) -> Callable[[Array], Array]:
    """Return a function of an array, from one of a widened array and its namespace."""

    def activate(x: Array) -> Array:
        xp = library_of(x).xp
        return cast(xp, function(widened(x, xp), xp), x.dtype)

    return activate


def _relu(x: Array) -> Array:
    xp = library_of(x).xp
    return xp.where(x < 0, xp.zeros_like(x), x)


def _gelu_tanh(x: Array, xp: Any) -> Array:
    # (1 + tanh(u)) / 2 is the logistic function of 2 u, which keeps its digits far below 0.
    return x * _logistic(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x), xp)


def _logistic(x: Array, xp: Any) -> Array:
    """Return 1 / (1 + exp(−x)), and exact derivatives, to a few roundings however small it is."""
    # If an array of JAX exists, JAX has been imported.
    own = sys.modules["jax"].nn if library_of(x).name == "jax" else xp
    if hasattr(own, "sigmoid"):  # in one step: torch, MLX and JAX
        if not keeps_bits():
            return own.sigmoid(x)
        # The bits of torch's depend on where a number lies in memory, those of its exp do not.
        power = xp.exp(xp.clip(x, max=40.0))
        return power / (power + 1)
    # From 40 on it is 1 in float64 too, and no exponential overflows.
    power = xp.exp(xp.minimum(x, 40.0))
    power /= power + 1  # in place where the library can, for NumPy's new memory costs as much
    return power


#: Activations by name. ``gelu`` is exact, ``gelu_tanh`` the approximation of GPT-2.
ACTIVATIONS = {
    "relu": _relu,
    "gelu": _rounded_once(lambda x, xp: gelu(x)),
    "gelu_tanh": _rounded_once(_gelu_tanh),
    "silu": _rounded_once(lambda x, xp: x * _logistic(x, xp)),
}


def check_activation(name: str) -> None:
    """Raise unless this is the name of an activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}")


@dataclass(frozen=True, eq=False, repr=False)
class FeedForward(Module):
    """Apply two linear maps with an activation between them; with a gate, SwiGLU and its kin.

    Attributes
    ----------
    up, down : Linear
        To the inner size and back.
    gate : Linear or None
        If not None, its activated output multiplies the output of `up`.
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
        check_activation(self.activation)

    @classmethod
    def init(
        cls,
        size: int,
        inner: int | None = None,
        *,
        like: Array,
        seed: int | Initializer = 0,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
    ) -> FeedForward:
        """Create a layer with Glorot's uniform weights.

        Parameters
        ----------
        size : int
            Size of the last axis, before and after.
        inner : int, optional
            Size between the two maps, 4 · size by default.
        like, seed
            As for `Linear.init`.
        activation : {"gelu", "gelu_tanh", "relu", "silu"}
            The activation.
        gated : bool
            Whether there is a gate; with ``"silu"`` that is SwiGLU.
        bias : bool
            Whether the maps have biases.
        """
        shared: dict[str, Any] = {"like": like, "seed": initializer(like, seed), "bias": bias}
        inner = 4 * size if inner is None else check_int("inner", inner, least=0)
        up = Linear.init(size, inner, **shared)
        down = Linear.init(inner, size, **shared)
        gate = Linear.init(size, inner, **shared) if gated else None
        return cls(up, down, gate, activation)

    def __call__(self, x: Array) -> Array:
        """Map `x`, shape (..., size), to an array of the same shape."""
        up = self.up if self.gate is None else self.gate
        inner = by_rows(ACTIVATIONS[self.activation], up(x))
        if self.gate is not None:
            inner = inner * self.up(x)
        return self.down(inner)


@dataclass(frozen=True, eq=False, repr=False)
class Embedding(Module):
    """Look up a vector for each token.

    Attributes
    ----------
    weight : Array
        Shape (tokens, size).
    """

    weight: Array

    @classmethod
    def init(cls, tokens: int, size: int, *, like: Array, seed: int | Initializer = 0) -> Embedding:
        """Create uniform vectors of variance 1 / size; `like` and `seed` as for `Linear.init`."""
        bound = math.sqrt(3 / check_int("size", size, least=1))
        return cls(initializer(like, seed).uniform((tokens, size), bound))

    def __call__(self, ids: Array) -> Array:
        """Return the vectors of token ids of any shape (...), shape (..., size)."""
        return look_up(self.weight, ids, "token id")

    def logits(self, x: Array) -> Array:
        """Return the dot products with the vectors: the logits of a model with tied weights.

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
        weight = xp.matrix_transpose(self.weight)
        return affine(x, weight, None) if keeps_bits() else xp.matmul(x, weight)
