"""Attention over packed sequences (a ragged batch in one array), and over pages of a cache.

Where the host can read the lengths, each run of sequences of one length is a call of its own, which
spends nothing on the other sequences. Short ones are documents of one call where the kernel skips
the other documents. A traced program has one call with masks instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial
from polyattn._api.run import kernel_for, kind_of
from polyattn._base.arguments import check_int, short
from polyattn._base.arrays import Array, cast, index_range, library_of, numbers_like
from polyattn._base.slices import spans
from polyattn._base.tracing import is_recording, is_transformed, outside_inference
from polyattn.dialects._shared import alibi, joined_axes, lowered

Arrays = tuple[Array, Array, Array]
Spans = list[tuple[int, int]]
#: The number of a sequence, and the start and length of its rows and of its keys.
Run = tuple[int, tuple[int, int], tuple[int, int]]
# Beyond so many multiply-adds of a row of a sequence, of the mean length, calls of their own are
# not slower than one for all, which computes more at the borders of documents. It took 0.55 to 0.95
# of their time with 2**14 to 2**18.6 (Intel with AVX-512, one thread).
SHORT = 2**18
MOST_KEPT = 64  # plans
_INTEGER = frozenset([int])


class Packed(NamedTuple):
    """The starts of the sequences of a packed array, and the number of used tokens of each."""

    starts: Array | Sequence[int]  # (B + 1,)
    used: Array | Sequence[int] | None = None  # (B,); None for all tokens up to the next start


class PositionRule(NamedTuple):
    """The options by position, which count from the start of each sequence."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    from_first: bool = False  # whether row 0 is at key 0, and not the last row at the last key
    chunk: int = 0  # keys of the same chunk of so many positions only; 0 for all
    slopes: Array | None = None  # of ALiBi, (H,) or (B, H)
    logsumexp: bool = False  # whether it is returned too, (H, T)


def packed_attention(
    query: Array, key: Array, value: Array, rows: Packed, keys: Packed, rule: PositionRule,
    **options: Any,
) -> Any:  # fmt: skip
    """Return the output, (T, H, E), 0 in rows of no sequence, and the logsumexp by the rule."""
    xp = library_of(query, "query").xp
    compute = _one_by_one if _is_readable(*rows, *keys) else _at_once
    output, *logsumexp = compute(xp, (query, key, value), rows, keys, rule, options)
    return (output, xp.permute_dims(logsumexp[0], (1, 0))) if rule.logsumexp else output


def from_pages(
    key: Array, value: Array, table: Array, used: Any, first: Sequence[int] | None = None
) -> tuple[Array, Array, Packed]:
    """Return a pool of pages as packed arrays, where a sequence begins at `first` in its pages."""
    xp = library_of(key, "key").xp
    if used is not None and not any(first or ()):
        check_pages(table, used, *key.shape[:2])
    if used is not None and _is_readable(used):
        used = numbers_of(used)
        ends = map(sum, zip(used, first or itertools.repeat(0), strict=False))
        table = table[:, : -(-max(ends, default=0) // key.shape[1])]
    # Entries beyond the length of a sequence may hold anything.
    least, most = (numbers_like(xp, n, table.dtype, table) for n in (0, key.shape[0] - 1))
    indices = xp.reshape(xp.minimum(xp.maximum(table, least), most), (-1,))
    flat = (joined_axes(xp.take(x, indices, axis=0), 0, 2) for x in (key, value))
    batch, length = table.shape[0], table.shape[1] * key.shape[1]
    starts = [n * length + (first[n] if first else 0) for n in range(batch)]
    return *flat, Packed([*starts, batch * length], used)


def check_pages(table: Array, used: Any, pages: int, page: int) -> None:
    """Raise if a table on the host names a page that is not there, for the used keys of an item."""
    if not is_on_host(table) or not is_on_host(used):
        return
    if table.shape[0] * table.shape[1] <= 256:  # as numbers, in less time than as arrays
        rows: Any = numbers_of(table)
        if all(0 <= one < pages for row in rows for one in row):
            return
    elif 0 <= int(table.min()) <= int(table.max()) < pages:
        return  # all of it, which takes less time to check
    xp = library_of(table).xp
    ends = used if isinstance(used, int) else numbers_like(xp, used, table.dtype, table)[:, None]
    begun = index_range(xp, 0, table.shape[1], table) * page < ends
    wrong = table[begun & ((table < 0) | (table >= pages))]
    if wrong.shape[0]:
        raise ValueError(
            f"a table must name pages from 0 to {pages - 1} for the keys of a sequence; got"
            f" {int(wrong[0])}"
        )


def is_on_host(numbers: Any) -> bool:
    """Return whether numbers can be read without a wait."""
    if isinstance(numbers, (int, list)):
        return True
    is_cpu = str(getattr(numbers, "device", "cpu")) == "cpu"
    return is_cpu and library_of(numbers).name in ("numpy", "torch") and _is_readable(numbers)


def chunked(positions: Array, columns: Array, chunk: int) -> masks.Mask:
    """Return the mask of the keys in the chunk of a row's position."""
    chunk = check_int("attention_chunk", chunk, least=1)
    return masks.segments(positions // chunk, columns // chunk)


def _results(arrays: Sequence[Array], rule: PositionRule, options: Any) -> tuple[Array, ...]:
    """Return the output, and the logsumexp if the rule asks for it."""
    if rule.logsumexp:
        return attention_partial(*arrays, layout="...LHD", **options)
    return (attention(*arrays, layout="...LHD", **options),)


# ---- one call for each run of sequences --------------------------------------------------------


def _is_readable(*given: Any) -> bool:
    """Return whether the host can read integers, in arrays or lists, without a wait for a trace."""
    arrays = [one for one in given if not (one is None or isinstance(one, (list, tuple)))]
    for one in arrays:
        library = library_of(one, "cu_seqlens")
        if library.name == "dask":
            raise TypeError("the lengths of sequences must be known: compute() those of dask first")
        # Each length would be another program of JAX.
        if library.name == "jax" or library.traced:
            return False
    return not arrays or not (is_transformed() or is_recording())


def _one_by_one(
    xp: Any, arrays: Arrays, rows: Packed, keys: Packed, rule: PositionRule, options: Any
) -> list[Array]:
    runs, given = _kept_plan(xp, arrays, rows, keys, rule, options)
    if given is not None:
        return list(_results(arrays, rule, given))
    of_query = [(at, len(run) * n) for run in runs for _, (at, n), _ in run[:1]]
    of_key = [(at, len(run) * n) for run in runs for _, _, (at, n) in run[:1]]
    cut = zip(*map(spans, arrays, (of_query, of_key, of_key)), strict=True)
    pieces = [_run(xp, parts, run, rule, options) for parts, run in zip(cut, runs, strict=True)]
    return [
        parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)
        for parts in zip(*pieces, strict=True)
    ]


#: The runs of a packed array, and the options of one call for all sequences; None for one for each.
PackedPlan = tuple[list[list[Run]], dict[str, Any] | None]
_plans: dict[Any, PackedPlan] = {}  # which all layers share


def _kept_plan(
    xp: Any, arrays: Arrays, rows: Packed, keys: Packed, rule: PositionRule, options: Any
) -> PackedPlan:
    """Return the plan of a call, the same for arrays of one kind and sequences of these lengths."""
    kind = kind_of(*arrays, **options)
    numbers = [() if one is None else (*numbers_of(one),) for one in (*rows, *keys)]
    if kind is None or not all(_INTEGER.issuperset(map(type, one)) for one in numbers):
        return _plan(xp, arrays, rows, keys, rule, options)
    is_used = rows.used is None, keys.used is None
    kind = *kind, *rule[:4], rule.slopes is None, *is_used, *numbers
    plan = _plans.get(kind)
    if plan is None:
        plan = _plan(xp, arrays, rows, keys, rule, options)
        if len(_plans) >= MOST_KEPT:
            _plans.clear()
        _plans[kind] = plan
    return plan


def _plan(
    xp: Any, arrays: Arrays, rows: Packed, keys: Packed, rule: PositionRule, options: Any
) -> PackedPlan:
    query, key, value = arrays
    own, other = spans_of("query", rows, query), spans_of("key", keys, key)
    if len(own) != len(other):
        raise ValueError(f"query has {len(own)} sequences, and key {len(other)}")
    runs = list(_runs(own, other, query.shape[0]))
    length, size = key.shape[0], query.shape[1] * (query.shape[2] + value.shape[2])
    used = sum(n for _, n in own), sum(n for _, n in other)
    saved = len(runs) * (2 if getattr(query, "requires_grad", False) else 1)
    is_long = len(runs) == 1 or length * size > SHORT * saved or used != (query.shape[0], length)
    # Positions count from the start of a sequence.
    by_position = rule.causal or rule.window != (None, None)
    by_sequence = rule.chunk or rule.slopes is not None or (by_position and own != other)
    if is_long or by_sequence or "dropout" in options:
        return runs, None
    parts = [(query, own)] if own == other else [(query, own), (key, other)]
    with outside_inference():
        given = {"mask": masks.segments(*[_ids(xp, *part) for part in parts]), **options}
    if rule.causal:
        given["is_causal"] = True
    if rule.window != (None, None):
        given["window"] = rule.window
    kernel = kernel_for(*arrays, layout="...LHD", **given)
    return runs, given if "skips_documents" in kernel.promises else None


def _ids(xp: Any, array: Array, spans: Spans) -> Array:
    """Return the number of the sequence of each token, from 1 on."""
    tokens = index_range(xp, 0, array.shape[0], array)
    starts = numbers_like(xp, [start for start, _ in spans], tokens.dtype, array)
    return xp.searchsorted(starts, tokens, side="right")


def _run(xp: Any, arrays: Arrays, run: list[Run], rule: PositionRule, options: Any) -> list[Array]:
    """Return the rows of neighbouring sequences of one length, which are a batch."""
    (first, rows, keys), count = run[0], len(run)
    parts = [xp.reshape(x, (count, x.shape[0] // count, *x.shape[1:])) for x in arrays]
    offset = 0 if rule.from_first else keys[1] - rows[1]
    given = {"is_causal": rule.causal, "window": rule.window, "query_offset": offset, **options}
    if rule.slopes is not None:
        own = rule.slopes if len(rule.slopes.shape) == 1 else rule.slopes[first : first + count]
        given["score_mod"] = alibi(own, offset)
    if rule.chunk:
        places, columns = (index_range(xp, 0, n, arrays[0]) for n in (rows[1], keys[1]))
        given["mask"] = chunked(places + offset, columns, rule.chunk)
    if "dropout" in given:
        given["dropout"] = (*options["dropout"], (first, 0, 0, 0))
    total = count * rows[1]
    return [xp.reshape(x, (total, *x.shape[2:])) for x in _results(parts, rule, given)]


def spans_of(name: str, packed: Packed, array: Array) -> list[tuple[int, int]]:
    """Return the start and the number of used tokens of each sequence."""
    starts, total = numbers_of(packed.starts), array.shape[0]
    given = [] if packed.used is None else numbers_of(packed.used)
    if not all(isinstance(one, Integral) for one in (*starts[:1], *given[:1])):
        raise TypeError(f"the starts and lengths of {name} must be integers; got {short(starts)}")
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    used = lengths if packed.used is None else given
    spans = list(zip(starts, used, strict=False))
    edges = starts
    if packed.used is not None:
        edges = [edge for start, length in spans for edge in (start, start + length)]
    edges = [0, *edges, *starts[-1:], total]
    if len(used) != len(lengths) or edges != sorted(edges):
        lengths_used = "" if packed.used is None else f", of which {short(used)} are used"
        raise ValueError(
            f"the sequences of {name} must be packed in order in its {total} tokens; they begin"
            f" and the last ends at {short(starts)}{lengths_used}"
        )
    return spans


def numbers_of(numbers: Any) -> list[int]:
    """Return integers of any library as a list."""
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    if isinstance(numbers, (list, tuple)):
        return list(numbers)
    return [int(numbers[n]) for n in range(numbers.shape[0])]


def _runs(
    rows: list[tuple[int, int]], keys: list[tuple[int, int]], total: int
) -> Iterator[list[Run]]:
    """Yield neighbours of one length, without gaps between them; rows of no sequence see no key."""
    run: list[Run] = []
    done = end = 0  # the rows that are yielded or in the run, and the end of their keys
    for number, ((start, length), own) in enumerate(zip(rows, keys, strict=True)):
        following = [(at + len(run) * n, n) for at, n in run[0][1:]] if run else []
        if run and [(start, length), own] != following:
            yield run
            run = []
        if length:
            if start > done:
                yield [(0, (done, start - done), (end, 0))]
            run.append((number, (start, length), own))
            done, end = start + length, sum(own)
    if run:
        yield run
    if done < total or not done:
        yield [(0, (done, total - done), (end, 0))]


# ---- one call for all --------------------------------------------------------------------------


def places_of(xp: Any, packed: Packed, total: int, like: Array) -> tuple[Array, Array, Array]:
    """Return the sequence of each token, −1 if not used, its position, and all lengths."""
    tokens = index_range(xp, 0, total, like)

    def integers(numbers: Any) -> Array:
        is_list = isinstance(numbers, (list, tuple))
        array = numbers_like(xp, numbers, tokens.dtype, like) if is_list else numbers
        return cast(xp, array, tokens.dtype)

    starts = integers(packed.starts)
    lengths = starts[1:] - starts[:-1] if packed.used is None else integers(packed.used)
    after = cast(xp, xp.searchsorted(starts[1:], tokens, side="right"), tokens.dtype)
    sequence = xp.minimum(after, integers([lengths.shape[0] - 1]))
    position = tokens - xp.take(starts, sequence, axis=0)
    is_used = (position < xp.take(lengths, sequence, axis=0)) & (after == sequence)
    return xp.where(is_used, sequence, -1 - xp.zeros_like(sequence)), position, lengths


def _at_once(
    xp: Any, arrays: Arrays, rows: Packed, keys: Packed, rule: PositionRule, options: Any
) -> tuple[Array, ...]:
    query, key, _ = arrays
    own, position, many_rows = places_of(xp, rows, query.shape[0], query)
    other, place, many_keys = places_of(xp, keys, key.shape[0], query)
    sequence = xp.maximum(own, xp.zeros_like(own))
    if not rule.from_first:
        position = position + xp.take(many_keys - many_rows, sequence, axis=0)
    # A row of no sequence is in another one than the keys of none.
    mask = masks.segments(xp.where(own < 0, own - 1, own), other)
    near = masks.window(*rule.window)
    mask = mask & masks.positions(position, place, near & masks.causal() if rule.causal else near)
    if rule.chunk:
        mask = mask & chunked(position, place, rule.chunk)
    given = {"mask": mask, **options}
    if rule.slopes is not None:
        given["score_mod"] = lowered(
            rule.slopes, lambda b, i: sequence[i], lambda b, i, j: position[i] - place[j]
        )
    return _results(arrays, rule, given)
