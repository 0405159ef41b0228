"""The options of a call: one table, and the check of each by itself.

Whatever handles options reads the table, so an option that it does not know is refused by name.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from polyattn._base.arguments import check_int, check_signature, check_window, got
from polyattn._base.arrays import as_facts, is_array, library_of
from polyattn._base.tracing import as_constant, as_index, as_number
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.replacements import Normalizer, ScaleRule, Similarity
from polyattn._core.expressions.scores import Score

#: The flat batch item, query head, query row and key that a part of a call begins with.
Start = tuple[int, int, int, int]
FROM_ZERO: Start = (0, 0, 0, 0)


def check_causal(value: Any) -> bool:
    value = as_number("is_causal", value)
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"is_causal must be True or False; {got(value)}")


def check_finite(
    name: str, value: Any, what: str = "a number", advice: Callable[[Any], str] = lambda value: ""
) -> float:
    value = as_number(name, value)
    if not isinstance(value, (int, float, numbers.Real)) or isinstance(value, bool):
        raise TypeError(f"{name} must be {what}; {got(value)}{advice(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite; {got(value)}")
    return as_constant(number)


def check_softcap(value: Any) -> float:
    number = check_finite("softcap", value, advice=_softcap_advice)
    if number <= 0:
        raise ValueError(f"softcap must be above 0; {got(value)}. None means no cap")
    return number


def _softcap_advice(value: Any) -> str:
    """Return a hint for a softcap that is an array."""
    if not is_array(value):
        return ""
    rule = "score_mod=lambda s, b, h, i, j: softcap * tanh(s / softcap)"
    if library_of(value).traced:
        return f". Its value is not known in a trace: make it a static argument, or pass {rule}"
    if tuple(value.shape) == ():
        return f". Pass float(softcap), or to differentiate it {rule}"
    return f". For one of each head pass {rule.replace('softcap', 'softcap[h]')}"


def check_scale(value: Any) -> float | ScaleRule:
    if isinstance(value, ScaleRule):
        return value
    _check_place("scale", value)
    what = "a number, or a rule such as scores.long_sequence()"
    return check_finite("scale", value, what, lambda _: ". An array can scale query itself")


def _integers(name: str, what: str, value: Any, *, least_rank: int = 0) -> Any:
    """Return an integer as a Python integer and an array of integers as it is, or raise."""
    if not least_rank and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return as_index(value)
    # An array of NumPy that torch.compile traces has no dtype yet.
    is_integers = hasattr(value, "shape") and "int" in str(getattr(value, "dtype", "int"))
    if not is_integers or len(value.shape) < least_rank:
        # A traced array has no repr under torch.compile.
        given = as_facts(value, name) if is_array(value) else repr(value)
        raise TypeError(f"{name} must be {what}; got {given}")
    return value


_NUMBERS = "an integer or an integer array of the batch"
check_offset = partial(_integers, "query_offset", _NUMBERS)
check_key_lengths = partial(
    _integers, "key_lengths", f"{_NUMBERS}, the number of keys of each item"
)
_PAGES = "an integer array (..., pages of an item), the numbers of pages in key and value"
check_block_table = partial(_integers, "block_table", _PAGES, least_rank=1)


def check_mask(value: Any) -> Any:
    if isinstance(value, Mask):
        for _, thing in value.carried():
            if not is_array(thing):
                check_signature("the mask function", thing, "b, h, i, j")
        return value
    _check_place("mask", value)
    if isinstance(value, str):
        raise TypeError(
            f"mask must be an array, a function, or an expression of polyattn.masks; {got(value)}"
        )
    if callable(value):
        check_signature("the mask function", value, "b, h, i, j")
    return value


def check_score_mod(value: Any) -> Any:
    if isinstance(value, Score):
        for name, thing in value.carried():
            if not is_array(thing):
                of = "the derivative of score_mod" if name == "derivative" else "score_mod"
                check_signature(of, thing, "score, b, h, i, j")
        return value
    _check_place("score_mod", value)
    if not callable(value):
        raise TypeError(
            "score_mod must be a function (score, b, h, i, j) -> score, or an expression of"
            f" polyattn.scores; {got(value)}"
        )
    check_signature("score_mod", value, "score, b, h, i, j")
    return value


def _of_kind(name: str, kind: type, example: str, value: Any) -> Any:
    if not isinstance(value, kind):
        _check_place(name, value)
        raise TypeError(
            f"{name} must be an expression of polyattn.scores such as {example}; {got(value)}"
        )
    return value


check_similarity = partial(_of_kind, "similarity", Similarity, "scores.cosine()")
check_normalizer = partial(_of_kind, "normalizer", Normalizer, "scores.sparsemax()")


def _check_place(name: str, value: Any) -> None:
    """Raise if an expression belongs in another argument."""
    if isinstance(value, Expression):
        place = next(
            row.name for row in OPTIONS.values() if row.kind and isinstance(value, row.kind)
        )
        raise TypeError(f"{value!r} goes in {place}=, not in {name}=")


def check_dropout(value: Any) -> tuple[float, Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
        raise TypeError(
            "dropout must be a pair (rate, seed), since nothing is random without a seed, or"
            f" (rate, seed, start); {got(value)}"
        )
    start = _check_start(value[2]) if len(value) == 3 else FROM_ZERO
    rate, seed = check_finite("dropout rate", value[0]), as_number("dropout seed", value[1])
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate must be in [0, 1); {got(value)}")
    # What NumPy holds can be read, and then goes with arrays of any library.
    if is_array(seed) and type(seed).__module__ != "numpy":
        if tuple(seed.shape) != () or "int" not in str(seed.dtype):
            is_key = "key" in str(seed.dtype)
            how = ": of a jax.random.key pass jax.random.bits(key)" if is_key else ""
            raise TypeError(f"a dropout seed must be one integer; {got(value)}{how}")
        return rate, seed, start
    try:
        number = as_index(seed)
    except TypeError:
        raise TypeError(f"a dropout seed must be one integer; {got(value)}") from None
    if not 0 <= number < 2**64:
        raise ValueError(f"a dropout seed must be in [0, 2**64); {got(value)}")
    return rate, number, start


_WRONG_START = (
    "the start of dropout must be four integers of at least 0, the first batch item, head, row and"
    " key of this part of a call, or an array of them; "
)


def _check_start(value: Any) -> Any:
    if is_array(value):
        if tuple(value.shape) != (4,) or "int" not in str(value.dtype):
            raise TypeError(_WRONG_START + got(value))
        if type(value).__module__ != "numpy":
            return value
        value = value.tolist()
    if not isinstance(value, (tuple, list)) or len(value) != 4:
        raise TypeError(_WRONG_START + got(value))
    item, head, row, key = (check_int("the start of dropout", number) for number in value)
    if min(item, head, row, key) < 0:
        raise ValueError(_WRONG_START + got(value))
    return item, head, row, key


# ---- the table ---------------------------------------------------------------------------------


class Option(NamedTuple):
    """A row of the table: everything about an option but its step of the formula."""

    name: str
    #: Checks a value by itself, and returns it in a plain form.
    read: Callable[[Any], Any] = lambda value: value
    #: The kind of expressions that it may be.
    kind: type[Expression] | None = None
    #: The last axes of the scores that its array follows, after a dot if batch axes may come before
    #: them; None for an option that is never an array. `-` is an axis that the scores do not have.
    axes: str | None = None
    #: Whether an integer may stand for an array, and stays a number of the host.
    host_integer: bool = False
    #: The dtype of an array that is given to `explain` by its shape; that of the query if None.
    dtype: str | None = None
    #: Whether torch.autocast casts it: only what torch's own function has.
    autocast: bool = False
    #: What has a gradient: its "array", the arrays "carried" by its expression, or its "number".
    gradient: str | None = None
    default: Any = None


#: The options, in the order of the signature of `attention`.
OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("mask", check_mask, kind=Mask, axes=".HLS", dtype="bool"),
        Option("bias", axes=".HLS", autocast=True, gradient="array"),
        Option("is_causal", check_causal, default=False),
        Option("window", check_window),
        Option("query_offset", check_offset, axes=".", host_integer=True, dtype="int64"),
        # `describe` turns it into a mask and the offset, which all kernels compute.
        Option("key_lengths", check_key_lengths, axes=".", host_integer=True, dtype="int64"),
        Option("block_table", check_block_table, axes=".-", dtype="int64"),
        Option("scale", check_scale, kind=ScaleRule, gradient="number"),
        Option("softcap", check_softcap, gradient="number"),
        Option("score_mod", check_score_mod, kind=Score, gradient="carried"),
        Option("sinks", axes="H", gradient="array"),
        Option("dropout", check_dropout),
        Option("similarity", check_similarity, kind=Similarity, gradient="carried"),
        Option("normalizer", check_normalizer, kind=Normalizer),
    )
}


def with_gradient(what: str) -> tuple[str, ...]:
    """Return the names of the options of which this has a gradient."""
    return tuple([name for name, option in OPTIONS.items() if option.gradient == what])


#: The arguments that torch.autocast casts, and their tangents.
AUTOCAST = ("query", "key", "value", *[name for name, row in OPTIONS.items() if row.autocast])
AUTOCAST += tuple([f"{name}_tangent" for name in AUTOCAST])

#: The arguments that are arrays with a gradient, the options whose expressions carry such, and the
#: options that are a number with one.
GRADIENT_ARRAYS = ("query", "key", "value", *with_gradient("array"))
GRADIENT_EXPRESSIONS = with_gradient("carried")
GRADIENT_NUMBERS = with_gradient("number")


def option_of(name: str) -> Option:
    """Return the option of a name, or raise."""
    try:
        return OPTIONS[name]
    except KeyError:
        raise TypeError(f"attention has no option {name!r}") from None
