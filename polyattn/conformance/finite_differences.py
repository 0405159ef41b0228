"""Check a gradient of any function, in arrays of any library, by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyattn._base.arrays import Array, facts_of, library_of, numbers_like
from polyattn._dispatch.transfer import as_float64

DIRECTIONS = 4
# Times the largest difference between the results of two steps, which has the errors of both.
MARGIN = 8


def check_gradient(
    loss: Callable[..., Any],
    arguments: Sequence[Array],
    gradients: Sequence[Array | None],
    *,
    seed: int = 0,
) -> None:
    """Check the gradients of a function by finite differences, in a few random directions.

    Differences with two steps say how exact they are, and so what the gradients may differ by: by
    about 1e-9 of their size in float64, and 1e-3 to 1e-2 in float32.

    Parameters
    ----------
    loss : callable
        A function of the arguments that returns one number, as an array or not.
    arguments : sequence of Array
        Where to differentiate: arrays of floats, of any library.
    gradients : sequence of (Array or None)
        The gradient with respect to each argument, in its shape; None to leave one out.
    seed : int
        Equal seeds take equal directions.

    Raises
    ------
    AssertionError
        If a gradient is wrong.
    TypeError
        If an argument or a gradient is not an array of floats, or the loss is not one number.
    ValueError
        If there is not one gradient for each argument, in its shape.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, attention_vjp
    >>> from polyattn.conformance import check_gradient
    >>> arrays = np.random.default_rng(0).normal(size=(3, 4, 6, 8))  # query, key and value
    >>> output, pullback = attention_vjp(*arrays, is_causal=True)
    >>> gradients = pullback(np.ones_like(output))  # of the sum of the output
    >>> check_gradient(lambda *x: attention(*x, is_causal=True).sum(), arrays, gradients[:3])
    """
    if len(arguments) != len(gradients):
        raise ValueError(
            f"there must be a gradient for each of the {len(arguments)} arguments; got"
            f" {len(gradients)}: of Gradients, pass those of the arguments, such as gradients[:3]"
        )
    rng = np.random.default_rng(seed)
    for place, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        if gradient is None:
            continue
        for name, array in (("arguments", argument), ("gradients", gradient)):
            if "float" not in facts_of(array, f"{name}[{place}]").dtype:
                raise TypeError(f"{name}[{place}] must be of floats; got {array.dtype}")
        if tuple(gradient.shape) != tuple(argument.shape):
            raise ValueError(
                f"gradients[{place}] must have the shape {tuple(argument.shape)} of its argument;"
                f" got {tuple(gradient.shape)}"
            )

        def at(shifted: Array, place: int = place) -> float:
            result = _numbers(loss(*arguments[:place], shifted, *arguments[place + 1 :]))
            if result.size != 1:
                raise TypeError(f"loss must return one number; got the shape {result.shape}")
            return float(result.item())

        _check(f"gradients[{place}]", at, argument, gradient, rng)


class Differences(NamedTuple):
    """Slopes in some directions, those of the gradient too, and what they may differ by."""

    given: Any
    expected: Any
    limit: float

    @property
    def are_exact(self) -> bool:
        """Whether a gradient of another size would be found."""
        return bool(self.limit < np.max(np.abs(self.expected)))


def _check(name: str, loss: Callable[[Array], float], x: Array, gradient: Array, rng: Any) -> None:
    """Check one gradient in some directions."""
    start = _numbers(x)
    size = np.where(np.isfinite(start), np.maximum(1, np.abs(start)), 1)
    # In large numbers rounding loses a step of 1e-6; one relative to them may pass over the slope.
    units = (np.ones_like(size), size) if np.any(size > 1) else (size,)
    every = [_differences(loss, x, gradient, unit, size, rng) for unit in units]
    for given, expected, limit in [one for one in every if one.are_exact] or every:
        off = np.abs(given - expected)
        worst = int(np.argmax(off))
        # `not <=` finds NaN too, and a gradient of infinity makes its limit infinite.
        if not off.max() <= limit < np.inf:
            raise AssertionError(
                f"{name} is wrong: in a random direction it gives {given[worst]:.9g}, and"
                f" differences {expected[worst]:.9g} ± {limit:.1g}"
            )


def _differences(
    loss: Callable[[Array], float], x: Array, gradient: Array, unit: Any, size: Any, rng: Any
) -> Differences:
    """Return the slopes in some directions, by steps of so many units in numbers of a size."""
    xp, start, slope = library_of(x).xp, _numbers(x), _numbers(gradient)
    eps = float(xp.finfo(x.dtype).eps)
    step = eps ** (1 / 3)
    given, near, far = np.zeros((3, DIRECTIONS))
    for n in range(DIRECTIONS):
        along = rng.normal(size=start.shape) * unit
        for slopes, length in ((near, step), (far, 2 * step)):
            ends = [numbers_like(xp, start + h * along, x.dtype, x) for h in (length, -length)]
            slopes[n] = (loss(ends[0]) - loss(ends[1])) / (2 * length)
        with np.errstate(invalid="ignore"):  # of gradients of infinity, of both signs
            given[n] = np.sum(slope * along)
    limit = MARGIN * np.max(np.abs(near - far)) + np.finfo(float).eps * np.max(np.abs(near)) * 2**10
    rounding = eps * np.linalg.norm(slope * size) / step  # of the arguments
    return Differences(given, near, limit + rounding)


def _numbers(array: Any) -> Any:
    """Return an array of any library, or a number, as float64 in NumPy."""
    if isinstance(array, (float, int, np.generic)):
        return np.asarray(array, np.float64)
    return as_float64(array)
