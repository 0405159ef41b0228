"""Check that a row has the same bits, however its sequence is cut: `Kernel.cut_invariant`.

The whole call is a causal one, of one sequence. Each cut makes calls that have rows of it, some
beside other sequences. Rows are compared bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from polyattn import UnsupportedError, attention, attention_partial, masks, same_bits, scores
from polyattn._base.slices import Slice
from polyattn._core.call.parts import options_of_part
from polyattn._core.expressions.parts import Part
from polyattn.conformance.cases.cache_cases import Arguments
from polyattn.conformance.cases.case import Array, make_case, with_arrays
from polyattn.conformance.checks.target import KernelVariant, Target

#: Kernels begin blocks and fold sums at powers of two: the rows and ends are around these.
LENGTH, HEADS, KEY_HEADS = 1030, 4, 2
ROWS = (0, 1, 2, 7, 31, 32, *(n + d for n in (64, 256, 512, 768, 1024) for d in (-1, 0, 1)), 1029)
CHUNKS = (0, 1, 8, 24, 124, 255, 512, 613, LENGTH)
PAGES = (1, 2, 7, 16, 64, 256)
WINDOW, FIRST = 300, 4  # the keys that a row sees behind it, and those that all rows see
_RNG = np.random.default_rng(57)
_SHOWN = _RNG.random((LENGTH, LENGTH)) < 0.7
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (WINDOW, 0)},
    "streaming": {"mask": masks.window(WINDOW, 0) | masks.prefix(FIRST)},
    "hidden keys": {"mask": _SHOWN[None]},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": _RNG.normal(size=HEADS).astype("float32")},
    "ALiBi": {"score_mod": scores.alibi(HEADS)},
    "bias": {"bias": _RNG.normal(size=(1, LENGTH, LENGTH)).astype("float32")},
    "dropout": {"dropout": (0.2, 7, (0, 0, 0, 0))},
    "weights that underflow": {"scale": 10.0},
}
#: A call, which of its rows are compared, and with which rows of the whole call.
Piece = tuple[Arguments, Any, Any]
Cut = Callable[[Arguments], Iterable[Piece]]
Run = Callable[[Arguments], tuple[Array, ...]]


def _part(call: Arguments, rows: range, keys: range, heads: range = range(HEADS)) -> Piece:
    """Return the call over some rows, keys and query heads, with options as dask cuts them."""
    (query, *pair), options = call
    spans = [Slice(along.start, len(along)) for along in (heads, rows, keys)]
    ours, times = slice(heads.start, heads.stop), HEADS // pair[0].shape[1]
    theirs = slice(heads.start // times, -(-heads.stop // times))
    key, value = (x[:, theirs, keys.start : keys.stop] for x in pair)
    arrays = query[:, ours, rows.start : rows.stop], key, value
    given = options_of_part(options, Part((1,), (Slice(0, 1),), *spans))
    return (arrays, given), ..., np.s_[:, ours, rows.start : rows.stop]


def _beside(call: Arguments, before: int, after: int, **more: Any) -> Piece:
    """Return the call with other rows and keys before and after."""
    (query, key, value), options = call
    query, key, value = (
        np.concatenate([x[:, :, LENGTH - before :], x, x[:, :, :after]], axis=2)
        for x in (query, key, value)
    )
    return ((query, key, value), options | more), np.s_[:, :, before : before + LENGTH], ...


def seen_keys(call: Arguments) -> Iterator[Piece]:
    """Yield rows over the keys that they see, without a mask, as where others are evicted."""
    (query, key, value), options = call
    mask, far = options.get("mask"), np.arange(LENGTH)
    for i in ROWS:
        seen = far <= i
        if isinstance(mask, np.ndarray):
            seen &= _SHOWN[i]
        elif mask is not None or "window" in options:
            seen &= (far >= i - WINDOW) | (far < (0 if mask is None else FIRST))
        arrays = query[:, :, i : i + 1], key[:, :, seen], value[:, :, seen]
        yield (arrays, {}), ..., np.s_[:, :, i : i + 1]


def in_pages(call: Arguments) -> Iterator[Piece]:
    """Yield the newest rows over shuffled pages; a second sequence shares the first half."""
    for size in PAGES:
        n = -(-LENGTH // size)
        ((query, *pair), options), _, _ = _beside(call, 0, n * size - LENGTH)
        places = np.random.default_rng(size).permutation(n)
        shared = np.where(np.arange(n) < n // 2, places, places[::-1])
        key, value = (
            np.swapaxes(x[0].reshape(-1, n, size, x.shape[-1]), 0, 1)[np.argsort(places)]
            for x in pair
        )
        table = {"block_table": np.stack([places, shared]), "key_lengths": np.array([LENGTH] * 2)}
        for rows in (1, 40):
            newest = np.repeat(query[:, :, LENGTH - rows : LENGTH], 2, axis=0)
            given = options | table | {"query_offset": LENGTH - rows}
            yield ((newest, key, value), given), np.s_[:1], np.s_[:, :, -rows:]


def in_a_batch(call: Arguments) -> Iterator[Piece]:
    query, key, value = (np.concatenate([x[:, :, ::-1], x, -x]) for x in call[0])
    yield ((query, key, value), call[1]), np.s_[1:2], ...


def _packed(call: Arguments, *ends: int) -> Piece:
    ids = np.repeat((0, 1, 2), (ends[0], LENGTH, ends[1]))
    return _beside(call, *ends, mask=masks.segments(ids[None]))


def _padded_left(call: Arguments, before: int) -> Piece:
    return _beside(call, before, 0, mask=np.arange(before + LENGTH)[None, None, None] >= before)


_ALL = range(LENGTH)
#: Those that take all options, and those that hold other sequences too.
_PARTS: dict[str, Cut] = {
    "decoded": lambda call: (_part(call, range(i, i + 1), range(i + 1)) for i in ROWS),
    "in chunks": lambda call: (
        _part(call, range(*ends), range(ends[1])) for ends in itertools.pairwise(CHUNKS)
    ),
    "by heads": lambda call: (_part(call, _ALL, _ALL, range(h, h + 1)) for h in range(HEADS)),
}
_BESIDE: dict[str, Cut] = {
    "packed": lambda call: (_packed(call, *ends) for ends in ((3, 0), (256, 40), (77, 50))),
    "padded left": lambda call: (_padded_left(call, before) for before in (1, 100)),
    "padded right": lambda call: [_beside(call, 0, 70, key_lengths=np.array([LENGTH]))],
    "in pages": in_pages,
    "in a batch": in_a_batch,
}
CUTS = _PARTS | _BESIDE | {"keys evicted": seen_keys}


class CutCase(NamedTuple):
    """A cut of a whole call with some options."""

    cut: str
    options: str
    dtype: str
    size: int  #: D

    def __str__(self) -> str:
        return f"{self.cut}, {self.options}, {self.dtype}, D = {self.size}"

    def differing(self, run: Run, heads: int = KEY_HEADS) -> tuple[int, int]:
        """Return how many rows have other bits than in the whole call, and of how many."""
        rng, different, rows = np.random.default_rng(self.size), 0, 0
        query, key, value = (
            rng.normal(size=(1, h, LENGTH, self.size)).astype(np.dtype(self.dtype))
            for h in (HEADS, heads, heads)
        )
        options = {"is_causal": True, "query_offset": 0} | OPTIONS[self.options]
        call = (query, key, value), options
        expected = run(call)
        for arguments, own, whole in CUTS[self.cut](call):
            same = True
            for one, other in zip(run(arguments), expected, strict=True):
                pair = (np.ascontiguousarray(x).view("u1") for x in (one[own], other[whole]))
                same &= np.all(np.equal(*pair), axis=-1)
            different, rows = different + int(np.sum(~same)), rows + np.size(same)
        return different, rows


def cut_cases(dtypes: Iterable[str]) -> Iterator[CutCase]:
    """Yield every cut with the options that it takes, in float32, and in every dtype."""
    for options, size in zip(OPTIONS, itertools.cycle((16, 64, 40, 8, 128)), strict=False):
        cuts = [*_PARTS, *(_BESIDE if options in ("causal", "window") else ())]
        cuts += ["keys evicted"] * (options in ("window", "streaming", "hidden keys"))
        yield from (CutCase(cut, options, "float32", size) for cut in cuts)
    for dtype in dtypes:
        for cut in CUTS if dtype != "float32" else ():
            yield CutCase(cut, "window" if cut == "keys evicted" else "causal", dtype, 32)


def check_cut_invariance(target: Target, variant: KernelVariant) -> None:
    """Check that a row has the same bits, however its sequence is cut."""
    checked = 0
    for case in cut_cases(target.dtypes):
        try:
            with same_bits():
                of, rows = case.differing(_runner(target, variant, str(case)))
        except UnsupportedError:
            continue
        assert not of, f"{case}: {of} of {rows} rows have other bits than in the whole call"
        checked += 1
    assert checked, "it declares cut_invariant, but supports no call to check it with"


def _runner(target: Target, variant: KernelVariant, name: str) -> Run:
    """Return a function that runs a kernel: its output, and its logsumexp if it has one."""
    case = make_case(name, batch=(1,), H=HEADS, L=LENGTH, S=LENGTH)
    has_logsumexp = "logsumexp" in target.declared(variant.kernel)

    def run(arguments: Arguments) -> tuple[Array, ...]:
        arrays, options = arguments
        given = {name: with_arrays(x, target.to) for name, x in options.items()}
        function = attention_partial if has_logsumexp else attention
        called = [target.to(x) for x in arrays], given
        result = target.call(case, variant.for_case(case), function, called)
        if not has_logsumexp:
            return (target.back(result),)
        return target.back(result.output), np.asarray(target.back(result.logsumexp))[..., None]

    return run
