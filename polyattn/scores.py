"""Create score modifications, and replacements for the dot product, the scale and softmax.

Score modifications are for ``score_mod=`` and compose by ``>>``, in the order of application::

    scores.temperature(2.0) >> scores.softcap(30.0) >> scores.alibi(8)

Similarities are for ``similarity=``, scale rules for ``scale=``, normalizers for ``normalizer=``.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

from polyattn._base.arguments import check_int, got
from polyattn._base.arrays import Array, is_array
from polyattn._base.host import as_array
from polyattn._base.tracing import as_number
from polyattn._core.expressions.replacements import (
    Additive,
    ByNorm,
    Cosine,
    Distance,
    LongSequence,
    Normalizer,
    ScaleRule,
    Sigmoid,
    Similarity,
    Sparsemax,
)
from polyattn._core.expressions.scores import (
    Alibi,
    RelativeBias,
    Score,
    Softcap,
    Temperature,
    as_score,
)

__all__ = [
    "Normalizer",
    "ScaleRule",
    "Score",
    "Similarity",
    "additive",
    "alibi",
    "by_norm",
    "cosine",
    "distance",
    "function",
    "long_sequence",
    "relative_bias",
    "sigmoid",
    "softcap",
    "sparsemax",
    "temperature",
]
__dir__ = __all__.copy


def _above_zero(name: str, value: Any) -> float:
    value = as_number(name, value)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:
        number = math.inf
    # The range of float32, the dtype of scores for all inputs but float64.
    if not 1.2e-38 <= number <= 3.4e38:
        raise ValueError(f"{name} must be a number above 0 in the range of float32; {got(value)}")
    return number


# ---- score modifications -----------------------------------------------------------------------


def softcap(cap: float) -> Score:
    """Bound the scores smoothly: ``cap · tanh(s / cap)``.

    Parameters
    ----------
    cap : float
        The bound, above 0.

    Returns
    -------
    Score

    References
    ----------
    .. [1] Gemma Team, "Gemma 2", 2024, arXiv:2408.00118, section 2.
    """
    return Softcap(_above_zero("scores.softcap: cap", cap))


def temperature(t: float) -> Score:
    """Divide the scores: above 1 the weights become more alike, below 1 less.

    Parameters
    ----------
    t : float
        The temperature, above 0.

    Returns
    -------
    Score
    """
    return Temperature(_above_zero("scores.temperature: t", t))


def alibi(slopes: int | Array) -> Score:
    """Lower each score by its key's distance from the row, ``s − slope · |p − j|`` (ALiBi).

    Parameters
    ----------
    slopes : int or Array of float
        A slope for each query head, shape (H,); or H, for the published slopes.

    Returns
    -------
    Score

    References
    ----------
    .. [1] Press et al., "Train Short, Test Long", 2022, arXiv:2108.12409.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, scores
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> attention(x, x, x, is_causal=True, score_mod=scores.alibi(8)).shape
    (8, 5, 64)
    """
    slopes = as_array("scores.alibi: slopes", slopes)
    if is_array(slopes) and len(slopes.shape):  # NumPy's integers are arrays too
        return Alibi(slopes)
    kinds = "the number of query heads, or an array of a slope for each"
    return Alibi(operator.index(check_int("scores.alibi: slopes", slopes, kinds, least=1)))


def relative_bias(table: Array, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """Add a learned bias by the distance of the key from the row, in T5's buckets.

    Parameters
    ----------
    table : Array of float
        The biases, shape (buckets, H): T5's ``relative_attention_bias.weight``.
    bidirectional : bool
        Whether half of the buckets are for keys after the row; otherwise these share bucket 0.
    max_distance : int
        The distance from which on all keys share one bucket.

    Returns
    -------
    Score

    References
    ----------
    .. [1] Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
       Transformer", 2020, arXiv:1910.10683, section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, scores
    >>> x, table = np.ones((8, 5, 64), dtype=np.float32), np.zeros((32, 8), dtype=np.float32)
    >>> attention(x, x, x, score_mod=scores.relative_bias(table)).shape
    (8, 5, 64)
    """
    table = as_array("scores.relative_bias: table", table)
    if not is_array(table) or len(table.shape) != 2 or table.shape[0] is None:
        raise TypeError(
            "scores.relative_bias takes an array of shape (buckets, H) with a known number of"
            f" buckets; got {getattr(table, 'shape', None) or table!r}"
        )
    if not isinstance(bidirectional, bool):
        raise TypeError(
            f"scores.relative_bias: bidirectional must be True or False; {got(bidirectional)}"
        )
    # A number for which torch.compile makes a program: its powers decide the steps.
    max_distance = operator.index(check_int("scores.relative_bias: max_distance", max_distance))
    exact = table.shape[0] // (4 if bidirectional else 2)
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"scores.relative_bias needs at least {4 if bidirectional else 2} buckets and a"
            f" max_distance above {exact}; got {table.shape[0]} and {max_distance!r}"
        )
    return RelativeBias(table, bidirectional, max_distance)


def function(rule: Callable[..., Array], derivative: Callable[..., Array] | None = None) -> Score:
    """Turn a function as FlexAttention takes it into a score modification that composes.

    Parameters
    ----------
    rule : callable
        A function ``(score, b, h, i, j) -> score`` of index arrays that broadcast with the scores.
    derivative : callable, optional
        A function of the same arrays: the derivative of `rule` with respect to ``score``. Gradients
        need it in a library that does not differentiate functions itself, such as NumPy.

    Returns
    -------
    Score

    Examples
    --------
    >>> from polyattn import scores
    >>> def squared(score, b, h, i, j):
    ...     return score * score
    >>> scores.temperature(2.0) >> squared
    scores.temperature(2.0) >> scores.function(squared)
    >>> def doubled(score, b, h, i, j):
    ...     return 2 * score
    >>> scores.function(squared, derivative=doubled)
    scores.function(squared, doubled)
    """
    return as_score(rule, derivative)


# ---- similarities ------------------------------------------------------------------------------


def cosine() -> Similarity:
    """Compare by the cosine of the angle, q·k / (‖q‖ ‖k‖), which is 0 for a zero vector.

    Returns
    -------
    Similarity
        For ``similarity=``, best with a ``scale=`` of about 10, as it is in [−1, 1].

    References
    ----------
    .. [1] Liu et al., "Swin Transformer V2", 2022, arXiv:2111.09883, section 3.2.
    """
    return Cosine()


def distance(p: int = 2) -> Similarity:
    """Compare by the negative distance, −‖q − k‖.

    Parameters
    ----------
    p : {1, 2}
        The norm: the sum of absolute differences, or the root of the sum of their squares.

    Returns
    -------
    Similarity
    """
    p = as_number("scores.distance: p", p)
    if not isinstance(p, numbers.Real) or p not in (1, 2) or isinstance(p, bool):
        raise ValueError(f"scores.distance: p must be 1 or 2; {got(p)}")
    return Distance(int(p))


def additive(weight: Array) -> Similarity:
    """Compare projected queries and keys by ``weight · tanh(q + k)``, as Bahdanau does.

    Parameters
    ----------
    weight : Array of float
        The vector, shape (D,).

    Returns
    -------
    Similarity
        For ``similarity=``.

    References
    ----------
    .. [1] Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and
       Translate", 2015, arXiv:1409.0473, appendix A.1.2.
    """
    weight = as_array("scores.additive: weight", weight)
    if not is_array(weight) or len(weight.shape) != 1:
        raise TypeError(
            "scores.additive takes an array of shape (D,); got"
            f" {getattr(weight, 'shape', None) or weight!r}"
        )
    return Additive(weight)


# ---- scale rules -------------------------------------------------------------------------------


def long_sequence() -> ScaleRule:
    """Scale by 1 / (√D · √S), which flattens the weights as the number of keys grows.

    S is ``key_lengths`` if that is an integer; an array of lengths is refused.

    Returns
    -------
    ScaleRule
    """
    return LongSequence()


def by_norm(factor: float = 1.0) -> ScaleRule:
    """Divide each row's scores by their Euclidean norm over the visible keys.

    Parameters
    ----------
    factor : float
        Multiplies the quotients, and is thus the norm of each row's scores.

    Returns
    -------
    ScaleRule
        For ``scale=``.
    """
    return ByNorm(_above_zero("scores.by_norm: factor", factor))


# ---- normalizers -------------------------------------------------------------------------------


def sigmoid() -> Normalizer:
    """Weight each key independently, 1 / (1 + exp(−s)); the weights of a row do not sum to 1.

    Returns
    -------
    Normalizer
        For ``normalizer=``, best with a ``bias=`` of about −log S.

    References
    ----------
    .. [1] Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
       2024, arXiv:2409.04431.
    """
    return Sigmoid()


def sparsemax() -> Normalizer:
    """Project the scores onto the simplex, which gives many keys a weight of exactly 0.

    Returns
    -------
    Normalizer
        For ``normalizer=``.

    References
    ----------
    .. [1] Martins and Astudillo, "From Softmax to Sparsemax", 2016, arXiv:1602.02068.
    """
    return Sparsemax()
