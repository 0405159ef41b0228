"""Check that a row has the same bits, however its sequence is cut: the promise ``cut_invariant``.

The whole call is a causal one, of one sequence. Each cut makes calls that have rows of it, some
beside other sequences. Rows are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

import polyattn
from polyattn import masks, scores
from polyattn._base.slices import Slice
from polyattn._core.call.parts import options_of_part
from polyattn._core.expressions.parts import Part
from polyattn.conformance.cases.cache_cases import Arguments
from polyattn.conformance.cases.case import Array, make_case
from polyattn.conformance.checks.lazy import is_lazy
from polyattn.conformance.checks.target import KernelVariant, Target

#: Kernels begin blocks and fold sums at powers of two: the rows and ends are around these.
LENGTH, HEADS, KEY_HEADS = 1030, 4, 2
ROWS = (0, 1, 2, 7, 31, 32, *(n + d for n in (64, 256, 512, 768, 1024) for d in (-1, 0, 1)), 1029)
CHUNKS = (0, 1, 8, 24, 124, 255, 512, 613, LENGTH)
WINDOW, FIRST = 300, 4  # the keys that a row sees behind it, and those that all rows see
_RNG = np.random.default_rng(57)
_SHOWN = _RNG.random((LENGTH, LENGTH)) < 0.7
#: The options of the whole call, with a size D.
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (16, {}),
    "window": (64, {"window": (WINDOW, 0)}),
    "streaming": (40, {"mask": masks.window(WINDOW, 0) | masks.prefix(FIRST)}),
    "hidden keys": (8, {"mask": _SHOWN[None]}),
    "softcap": (128, {"softcap": 2.0}),
    "sinks": (16, {"sinks": _RNG.normal(size=HEADS).astype("float32")}),
    "ALiBi": (64, {"score_mod": scores.alibi(HEADS)}),
    "bias": (40, {"bias": _RNG.normal(size=(1, LENGTH, LENGTH)).astype("float32")}),
    "dropout": (8, {"dropout": (0.2, 7, (0, 0, 0, 0))}),
    "weights that underflow": (128, {"scale": 10.0}),
}
#: A call, which of its rows are compared, and with which rows of the whole call.
Piece = tuple[Arguments, Any, Any]
Run = Callable[[Arguments], tuple[Array, ...]]


def _part(call: Arguments, rows: range, keys: range, heads: range = range(HEADS)) -> Piece:
    """Return the call over some rows, keys and query heads, with options as dask cuts them."""
    (query, *pair), options = call
    spans = [Slice(along.start, len(along)) for along in (heads, rows, keys)]
    ours, times = slice(heads.start, heads.stop), HEADS // pair[0].shape[1]
    theirs = slice(heads.start // times, -(-heads.stop // times))
    key, value = (x[:, theirs, keys.start : keys.stop] for x in pair)
    given = options_of_part(options, Part((1,), (Slice(0, 1),), *spans))
    rows_of_query = np.s_[:, ours, rows.start : rows.stop]
    return ((query[rows_of_query], key, value), given), ..., rows_of_query


def _beside(call: Arguments, before: int, after: int, **more: Any) -> Piece:
    """Return the call with other rows and keys before and after."""
    parts = ([x[:, :, LENGTH - before :], x, x[:, :, :after]] for x in call[0])
    query, key, value = (np.concatenate(some, axis=2) for some in parts)
    return ((query, key, value), call[1] | more), np.s_[:, :, before : before + LENGTH], ...


def _packed(call: Arguments, *ends: int) -> Piece:
    ids = np.repeat((0, 1, 2), (ends[0], LENGTH, ends[1]))
    return _beside(call, *ends, mask=masks.segments(ids[None]))


def _padded_left(call: Arguments, before: int) -> Piece:
    return _beside(call, before, 0, mask=np.arange(before + LENGTH)[None, None, None] >= before)


def _in_a_batch(call: Arguments) -> Piece:
    query, key, value = (np.concatenate([x[:, :, ::-1], x, -x]) for x in call[0])
    return ((query, key, value), call[1]), np.s_[1:2], ...


def _in_pages(call: Arguments, size: int, rows: int) -> Piece:
    """Return the newest rows over shuffled pages; a second sequence shares the first half."""
    n = -(-LENGTH // size)
    ((query, *pair), options), _, _ = _beside(call, 0, n * size - LENGTH)
    places = np.random.default_rng(size).permutation(n)
    key, value = (
        np.swapaxes(x[0].reshape(-1, n, size, x.shape[-1]), 0, 1)[np.argsort(places)] for x in pair
    )
    table = np.stack([places, np.where(np.arange(n) < n // 2, places, places[::-1])])
    given = {"block_table": table, "key_lengths": np.array([LENGTH] * 2)}
    newest = np.repeat(query[:, :, LENGTH - rows : LENGTH], 2, axis=0)
    options = options | given | {"query_offset": LENGTH - rows}
    return ((newest, key, value), options), np.s_[:1], np.s_[:, :, -rows:]


def _seen_keys(call: Arguments, i: int) -> Piece:
    """Return a row over the keys that it sees, without a mask, as where others are evicted."""
    (query, key, value), options = call
    mask, j = options.get("mask"), np.arange(LENGTH)
    seen = j <= i
    if isinstance(mask, np.ndarray):
        seen &= _SHOWN[i]
    elif mask is not None or "window" in options:
        seen &= (j >= i - WINDOW) | (j < (0 if mask is None else FIRST))
    row = np.s_[:, :, i : i + 1]
    return ((query[row], key[:, :, seen], value[:, :, seen]), {}), ..., row


#: The options and the dtype of the cuts of which the gradient is compared too.
_PLAIN = "causal", "float32"
_ALL, _PAGES = range(LENGTH), [(size, rows) for size in (1, 2, 7, 16, 64, 256) for rows in (1, 40)]
#: Those of the first three take all options.
CUTS: dict[str, Callable[[Arguments], Iterable[Piece]]] = {
    "decoded": lambda call: (_part(call, range(i, i + 1), range(i + 1)) for i in ROWS),
    "in chunks": lambda call: (_part(call, range(*ab), range(ab[1])) for ab in pairwise(CHUNKS)),
    "by heads": lambda call: (_part(call, _ALL, _ALL, range(h, h + 1)) for h in range(HEADS)),
    "packed": lambda call: (_packed(call, *ends) for ends in ((3, 0), (256, 40), (77, 50))),
    "padded left": lambda call: (_padded_left(call, before) for before in (1, 100)),
    "padded right": lambda call: [_beside(call, 0, 70, key_lengths=np.array([LENGTH]))],
    "in pages": lambda call: (_in_pages(call, *one) for one in _PAGES),
    "in a batch": lambda call: [_in_a_batch(call)],
    "keys evicted": lambda call: (_seen_keys(call, i) for i in ROWS),
}


def cut_cases(dtypes: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield cuts, options and dtypes: every option in float32, and every cut in all dtypes."""
    for options in OPTIONS:
        count = len(CUTS) - 1 if options in ("causal", "window") else 3
        evicted = ["keys evicted"] * (options in ("window", "streaming", "hidden keys"))
        yield from ((cut, options, "float32") for cut in [*list(CUTS)[:count], *evicted])
    for dtype in dtypes:
        for cut in CUTS if dtype != "float32" else ():
            yield cut, "window" if cut == "keys evicted" else "causal", dtype


def differing(
    cut: str, options: str, dtype: str, run: Run, heads: int = KEY_HEADS, size: int = 0
) -> tuple[int, int]:
    """Return how many rows of a cut have other bits than in the whole call, and of how many."""
    rng, (usual, given) = np.random.default_rng(0), OPTIONS[options]
    shapes = [(1, h, LENGTH, size or usual) for h in (HEADS, heads, heads)]
    query, key, value = (rng.normal(size=shape).astype(np.dtype(dtype)) for shape in shapes)
    call = (query, key, value), {"is_causal": True, "query_offset": 0} | given
    expected, different, rows = run(call), 0, 0
    for arguments, own, whole in CUTS[cut](call):
        same = True
        for one, other in zip(run(arguments), expected, strict=True):
            pair = (np.ascontiguousarray(x).view("u1") for x in (one[own], other[whole]))
            same &= np.all(np.equal(*pair), axis=-1)
        different, rows = different + int(np.sum(~same)), rows + np.size(same)
    return different, rows


def check_cut_invariance(target: Target, variant: KernelVariant) -> None:
    """Check that a row has the same bits, however its sequence is cut."""
    checked, run = 0, _runner(target, variant)
    differentiates = "backward" in target.declared(variant.kernel)
    with_gradient = _runner(target, variant, backward=True) if differentiates else run
    # A library that compiles each shape takes half a minute for all.
    for case in list(cut_cases(target.dtypes))[:: 5 if is_lazy(target) else 1]:
        try:
            with polyattn.same_bits():
                of, rows = differing(*case, with_gradient if case[1:] == _PLAIN else run)
        except polyattn.UnsupportedError:
            continue
        text = f"{', '.join(case)}: {of} of {rows} rows have other bits than in the whole call"
        assert not of, text
        checked += 1
    assert checked, "it declares cut_invariant, but supports no call to check it with"


def _runner(target: Target, variant: KernelVariant, *, backward: bool = False) -> Run:
    """Return a function that runs a kernel: its output, and its logsumexp if it has one.

    With the gradient of the query if asked, for an output gradient that is the query.
    """
    case = make_case("cut", H=HEADS, L=LENGTH, S=LENGTH)
    partial = "logsumexp" in target.declared(variant.kernel)

    def run(arguments: Arguments) -> tuple[Array, ...]:
        placed = target.placed(arguments)
        output, logsumexp, *more = target.call(case, variant.for_case(case), compute, placed)
        others = [logsumexp[..., None]] if partial else []
        return tuple(np.asarray(target.back(x)) for x in (output, *others, *more))

    def compute(query: Any, key: Any, value: Any, **options: Any) -> list[Any]:
        if partial:
            result = polyattn.attention_partial(query, key, value, **options)
        else:
            result = polyattn.Partial(polyattn.attention(query, key, value, **options), None)
        if not backward:
            return list(result)
        given = query, key, value, result, query
        return [*result, polyattn.attention_backward(*given, **options).query]

    return run
