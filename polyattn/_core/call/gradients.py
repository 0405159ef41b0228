"""The gradients of the arguments of a call, which users see too."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn._base.arrays import Array, facts_of, is_array
from polyattn._core.expressions.expression import Expression


class Gradients(NamedTuple):
    """The gradients of the arguments of a call; None where an argument has none.

    It prints their shapes and dtypes.

    Attributes
    ----------
    query, key, value, bias, sinks : Array or None
        Each in the shape of the argument.
    score_mod, similarity : Score, Similarity or None
        The expression with a gradient in place of each of its arrays, if it has some.
    scale, softcap : Array or None
        Of the number, an array without axes; of the scale unless a rule gives it.
    """

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    score_mod: Any = None
    similarity: Any = None
    scale: Array | None = None
    softcap: Array | None = None

    def __repr__(self) -> str:
        there = [(name, x) for name, x in zip(self._fields, self, strict=True) if x is not None]
        return f"Gradients({', '.join(f'{name}: {_shown(x)}' for name, x in there)})"


def _shown(gradient: Any) -> str:
    if isinstance(gradient, Expression):
        return repr(gradient.spec())
    return str(facts_of(gradient)) if is_array(gradient) else repr(gradient)
