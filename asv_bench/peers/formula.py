"""The textbook's formula with any options, and the table of options in polyattn's words and in its.

In the table, `given` returns the arguments of a call from its arrays. `textbook` returns what the
formula's step does, from the arrays and, in the later steps, the scores.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from polyattn import masks, scores

Array = Any
SIZE = 64
LOGSUMEXP = "logsumexp"  # in place of an argument: `attention_partial`


class Option(NamedTuple):
    """An option of the call, and the same in a step of the textbook's formula.

    `prepare` returns arrays that replace others before the call. An option in `pairs` is timed with
    others; for a `small` one the formula is too slow for the largest size.
    """

    name: str
    given: Callable[[Any], dict[str, Any]]
    textbook: Callable[..., Any]
    step: str = "scores"
    pairs: bool = True
    small: bool = False
    prepare: Callable[[Any, dict[str, Array]], dict[str, Array]] = lambda xp, given: {}


def arrays(heads: int, length: int, keys: int) -> dict[str, np.ndarray]:
    """Return the arrays that some call reads, by name."""
    rng = np.random.default_rng(0)
    rows, columns = np.arange(keys - length, keys)[:, None], np.arange(keys)
    return {
        "i": rows,
        "j": columns,
        "q": rng.standard_normal((1, heads, length, SIZE), dtype=np.float32),
        "k": rng.standard_normal((1, heads, keys, SIZE), dtype=np.float32),
        "v": rng.standard_normal((1, heads, keys, SIZE), dtype=np.float32),
        "allowed": np.logical_or(rng.random((length, keys)) > 0.5, np.arange(keys) == 0),
        "bias": rng.standard_normal((length, keys), dtype=np.float32),
        "key_bias": rng.standard_normal(keys, dtype=np.float32),
        "lengths": np.asarray([keys * 3 // 4]),
        "offset": np.asarray([keys - length]),
        "ids": np.arange(keys) // max(1, keys // 8),
        "sinks": rng.standard_normal(heads, dtype=np.float32),
        "table": rng.standard_normal((32, heads), dtype=np.float32),
        "vector": rng.standard_normal(SIZE, dtype=np.float32) / 8,
    }


def textbook(x: Any, options: Iterable[Option]) -> Array:
    """Compute softmax(query·keyᵀ/√D)·value with what some options change."""
    steps: dict[str, list[Any]] = {}
    for option in options:
        steps.setdefault(option.step, []).append(option.textbook)
    for change in steps.get("inputs", []):
        x = change(x)
    s = steps.get("similarity", [lambda x: dot(x) / math.sqrt(SIZE)])[0](x)
    x.seen = [seen(x) for seen in steps.get("mask", [])]
    for change in steps.get("scores", []):
        s = change(x, s)
    for seen in x.seen:
        s = x.xp.where(seen, s, x.low)
    w = steps.get("softmax", [softmax])[0](x, s)
    for change in steps.get("weights", []):
        w = change(x, w)
    return w @ x.v


def dot(x: Any) -> Array:
    """Return query·keyᵀ."""
    return x.q @ x.xp.matrix_transpose(x.k)


def softmax(x: Any, s: Array, sinks: Array | None = None) -> Array:
    """Return the weights of scores."""
    most = x.xp.max(s, axis=-1, keepdims=True)
    w = x.xp.exp(s - most)
    total = x.xp.sum(w, axis=-1, keepdims=True)
    return w / (total if sinks is None else total + x.xp.exp(sinks[:, None, None] - most))


def sparsemax(x: Any, s: Array) -> Array:
    """Return the projection of scores onto the simplex."""
    z = x.xp.sort(s, axis=-1, descending=True)
    z = x.xp.where(z == x.low, x.low, z)
    count = x.xp.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    sums = x.xp.cumulative_sum(x.xp.where(z == x.low, x.zero, z), axis=-1)
    inside = 1 + count * z > sums
    size = x.xp.sum(x.xp.astype(inside, s.dtype), axis=-1, keepdims=True)
    total = x.xp.sum(x.xp.where(inside, z, x.zero), axis=-1, keepdims=True)
    return x.xp.maximum(s - (total - 1) / size, x.zero)


def away(x: Any) -> Array:
    """Return how far keys are behind the rows."""
    return x.i - x.j


def relative_bias(x: Any, s: Array) -> Array:
    """Add T5's bias."""
    behind = x.xp.abs(away(x))
    far = 8 + x.xp.astype(
        x.xp.log(x.xp.maximum(behind, 1 + 0 * behind) / 8) / math.log(16) * 8, behind.dtype
    )
    bucket = x.xp.where(behind < 8, behind, x.xp.minimum(far, 15 + 0 * behind))
    bucket = bucket + 16 * x.xp.astype(away(x) < 0, bucket.dtype)
    return s + x.xp.permute_dims(x.table[bucket, :], (2, 0, 1))


def by_norm(x: Any, s: Array) -> Array:
    """Divide scores by the norm of those that their row sees."""
    counted = s
    for seen in x.seen:
        counted = x.xp.where(seen, counted, x.zero)
    return s / x.xp.sqrt(x.xp.sum(counted * counted, axis=-1, keepdims=True))


def euclidean(x: Any) -> Array:
    """Return the negative distances of queries and keys."""
    squares = [x.xp.sum(a * a, axis=-1) for a in (x.q, x.k)]
    square = squares[0][..., :, None] + squares[1][..., None, :] - 2 * dot(x)
    return -x.xp.sqrt(x.xp.maximum(square, x.zero))


def cosine(x: Any) -> Array:
    """Return the cosines of queries and keys."""
    q, k = (a / x.xp.sqrt(x.xp.sum(a * a, axis=-1, keepdims=True)) for a in (x.q, x.k))
    return q @ x.xp.matrix_transpose(k)


def by_component(x: Any, change: Callable[[Array, Array, int], Array]) -> Array:
    """Return the sum over the components of queries and keys of a function of two."""
    parts = (change(x.q[..., n, None], x.k[..., None, :, n], n) for n in range(SIZE))
    return functools.reduce(operator.add, parts)


def changed(x: Any, **values: Array) -> Any:
    """Return a call's arrays, some of them replaced."""
    return SimpleNamespace(**{**vars(x), **values})


def repeated(x: Any) -> Any:
    """Repeat key and value heads for the query heads that read them."""
    times = x.q.shape[1] // x.k.shape[1]
    return changed(x, **{n: x.xp.repeat(getattr(x, n), times, axis=1) for n in "kv"})


def widened(x: Any) -> Any:
    """Return a call's arrays in float32."""
    return changed(x, **{n: x.xp.astype(getattr(x, n), x.xp.float32) for n in "qkv"})


def rule(b: Array, h: Array, i: Array, j: Array) -> Array:
    """Show the first key and every third."""
    return (j % 3 == 0) | (j == 0)


def steeper(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
    """Add a number that grows with the key's index."""
    return s + 0.001 * j


def compiled(x: Any) -> Any:
    """Return the rule, compiled."""
    return masks.compile(rule, x.q.shape[-2], x.k.shape[-2])


def mask(name: str, given: Any, seen: Callable[[Any], Array], pairs: bool = False) -> Option:
    """Return an option that hides keys."""
    return Option(name, given, seen, "mask", pairs)


def like(argument: str, value: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that gives one argument."""
    return lambda x: {argument: value(x)}


def inside(x: Any) -> Array:
    """Return which keys a window of 129 shows."""
    return (away(x) >= 0) & (away(x) <= 128)


def slopes(x: Any) -> Array:
    """Return ALiBi's slopes, for a number of heads that is a power of two."""
    heads = x.q.shape[1]
    return x.xp.asarray([2.0 ** (-8 * (n + 1) / heads) for n in range(heads)], dtype=x.xp.float32)


def few_heads(xp: Any, given: dict[str, Array]) -> dict[str, Array]:
    """Return a fourth of the key heads."""
    return {n: given[n][:, : max(1, given[n].shape[1] // 4)] for n in "kv"}


def halves(name: str, pairs: bool = False) -> Option:
    """Return the call in 16 bits."""

    def prepare(xp: Any, given: dict[str, Array]) -> dict[str, Array]:
        return {n: xp.astype(given[n], getattr(xp, name)) for n in "qkv"}

    return Option(name, lambda x: {}, widened, "inputs", pairs, prepare=prepare)


OPTIONS = (
    mask("is_causal", like("is_causal", lambda x: True), lambda x: away(x) >= 0, True),
    mask("window=(128, 0)", like("window", lambda x: (128, 0)), inside, True),
    mask(
        "query_offset=array, is_causal",
        lambda x: {"query_offset": x.offset, "is_causal": True},
        lambda x: away(x) >= 0,
        True,
    ),
    mask("mask=array (L, S)", like("mask", lambda x: x.allowed), lambda x: x.allowed, True),
    mask("mask=array (S,)", like("mask", lambda x: x.j < x.lengths), lambda x: x.j < x.lengths),
    mask(
        "masks.padding(array)",
        like("mask", lambda x: masks.padding(x.lengths)),
        lambda x: x.j < x.lengths,
        True,
    ),
    mask("masks.prefix(8)", like("mask", lambda x: masks.prefix(8)), lambda x: x.j < 8),
    mask(
        "masks.segments",
        like("mask", lambda x: masks.segments(x.ids[x.ids.shape[0] - x.q.shape[-2] :], x.ids)),
        lambda x: x.ids[x.ids.shape[0] - x.q.shape[-2] :, None] == x.ids,
        True,
    ),
    mask(
        "masks.dilated(2)",
        like("mask", lambda x: masks.dilated(2)),
        lambda x: away(x) % 2 == 0,
    ),
    mask(
        "masks.window | global_tokens",
        like("mask", lambda x: masks.window(128, 0) | masks.global_tokens(0, 1)),
        lambda x: inside(x) | (x.j < 2) | (x.i < 2),
    ),
    mask(
        "~masks.window",
        like("mask", lambda x: ~masks.window(8, 0)),
        lambda x: (away(x) < 0) | (away(x) > 8),
    ),
    mask("mask=function", like("mask", lambda x: rule), lambda x: rule(0, 0, x.i, x.j), True),
    mask("masks.compile", like("mask", compiled), lambda x: rule(0, 0, x.i, x.j)),
    Option(
        "scale=0.2", like("scale", lambda x: 0.2), lambda x, s: s * (0.2 * SIZE**0.5), pairs=False
    ),
    Option(
        "scale=long_sequence()",
        like("scale", lambda x: scores.long_sequence()),
        lambda x, s: s / math.sqrt(x.k.shape[-2]),
        pairs=False,
    ),
    Option("scale=by_norm()", like("scale", lambda x: scores.by_norm()), by_norm),
    Option("softcap=30", like("softcap", lambda x: 30.0), lambda x, s: 30 * x.xp.tanh(s / 30)),
    Option(
        "scores.temperature(2)",
        like("score_mod", lambda x: scores.temperature(2.0)),
        lambda x, s: s / 2,
        pairs=False,
    ),
    Option(
        "scores.alibi",
        like("score_mod", lambda x: scores.alibi(x.q.shape[1])),
        lambda x, s: s - slopes(x)[:, None, None] * x.xp.astype(x.xp.abs(away(x)), s.dtype),
    ),
    Option(
        "scores.relative_bias",
        like("score_mod", lambda x: scores.relative_bias(x.table)),
        relative_bias,
    ),
    Option(
        "score_mod=function",
        like("score_mod", lambda x: steeper),
        lambda x, s: steeper(s, 0, 0, x.i, x.j),
    ),
    Option("bias=array (L, S)", like("bias", lambda x: x.bias), lambda x, s: s + x.bias),
    Option(
        "bias=array (S,)",
        like("bias", lambda x: x.key_bias),
        lambda x, s: s + x.key_bias,
        pairs=False,
    ),
    Option(
        "sinks", like("sinks", lambda x: x.sinks), lambda x, s: softmax(x, s, x.sinks), "softmax"
    ),
    Option(
        "normalizer=sigmoid()",
        like("normalizer", lambda x: scores.sigmoid()),
        lambda x, s: 1 / (1 + x.xp.exp(-s)),
        "softmax",
    ),
    Option(
        "normalizer=sparsemax()",
        like("normalizer", lambda x: scores.sparsemax()),
        sparsemax,
        "softmax",
    ),
    Option(
        "dropout=(0.1, 7)",
        like("dropout", lambda x: (0.1, 7)),
        lambda x, w: x.xp.where(x.random(x, w.shape) >= 0.1, w / 0.9, x.zero),
        "weights",
    ),
    Option(
        "similarity=cosine()", like("similarity", lambda x: scores.cosine()), cosine, "similarity"
    ),
    Option(
        "similarity=distance()",
        like("similarity", lambda x: scores.distance()),
        euclidean,
        "similarity",
    ),
    Option(
        "similarity=distance(1)",
        like("similarity", lambda x: scores.distance(1)),
        lambda x: -by_component(x, lambda q, k, n: x.xp.abs(q - k)),
        "similarity",
        pairs=False,
        small=True,
    ),
    Option(
        "similarity=additive",
        like("similarity", lambda x: scores.additive(x.vector)),
        lambda x: by_component(x, lambda q, k, n: x.vector[n] * x.xp.tanh(q + k)),
        "similarity",
        pairs=False,
        small=True,
    ),
    Option("4 query heads a key head", lambda x: {}, repeated, "inputs", prepare=few_heads),
    halves("float16", pairs=True),
    halves("bfloat16"),
    Option("logsumexp", lambda x: {LOGSUMEXP: True}, lambda x, w: w, "weights"),
)
