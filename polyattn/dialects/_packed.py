"""Attention over sequences that lie one after another in one array, and over pages of a cache.

Where the host can read the lengths, each run of sequences of one length is a call of its own, which
spends nothing on the other sequences. A traced program has one call with masks instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial
from polyattn._base.arrays import Array, cast, index_range, library_of, numbers_like
from polyattn._base.tracing import is_recording, is_transformed
from polyattn.dialects._shared import alibi

Arrays = tuple[Array, Array, Array]
#: The number of a sequence, and the start and length of its rows and of its keys.
Run = tuple[int, tuple[int, int], tuple[int, int]]


class Packed(NamedTuple):
    """The starts of the sequences of a packed array, and the number of used tokens of each."""

    starts: Array | Sequence[int]  # (B + 1,)
    used: Array | Sequence[int] | None = None  # (B,); None for all tokens up to the next start


class Rule(NamedTuple):
    """The options by position, which count from the start of each sequence."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    from_first: bool = False  # whether row 0 is at key 0, and not the last row at the last key
    chunk: int = 0  # keys of the same chunk of so many positions only; 0 for all
    slopes: Array | None = None  # of ALiBi, (H,) or (B, H)
    logsumexp: bool = False


def packed_attention(
    query: Array, key: Array, value: Array, rows: Packed, keys: Packed, rule: Rule, **options: Any
) -> tuple[Array, Array | None]:
    """Return the output, (T, H, E), and the logsumexp if the rule asks for it, (H, T).

    Rows of no sequence are 0.
    """
    xp = library_of(query, "query").xp
    is_readable = all(one is None or _is_readable(one) for one in (*rows, *keys))
    compute = _one_by_one if is_readable else _at_once
    output, *logsumexp = compute(xp, (query, key, value), rows, keys, rule, options)
    return output, xp.permute_dims(logsumexp[0], (1, 0)) if rule.logsumexp else None


def pages(pool: Array, table: Array) -> Array:
    """Return the pages of each sequence one after another, (B, pages · page, G, D)."""
    xp = library_of(pool).xp
    # Entries beyond the length of a sequence may hold anything.
    least, most = (numbers_like(xp, n, table.dtype, table) for n in (0, pool.shape[0] - 1))
    indices = xp.reshape(xp.minimum(xp.maximum(table, least), most), (-1,))
    shape = (table.shape[0], table.shape[1] * pool.shape[1], *pool.shape[2:])
    return xp.reshape(xp.take(pool, indices, axis=0), shape)


def from_pages(
    key: Array, value: Array, table: Array, used: Any, first: Sequence[int] | None = None
) -> tuple[Array, Array, Packed]:
    """Return the keys and values of a pool of pages as packed arrays.

    The keys of a sequence begin at `first` among its own pages.
    """
    xp = library_of(key, "key").xp
    batched = [pages(x, table) for x in (key, value)]
    batch, length = batched[0].shape[:2]
    starts = [n * length + (first[n] if first else 0) for n in range(batch)]
    flat = (xp.reshape(x, (batch * length, *x.shape[2:])) for x in batched)
    return *flat, Packed([*starts, batch * length], used)


def chunked(positions: Array, columns: Array, chunk: int) -> masks.Mask:
    """Return the mask of the keys in the chunk of a row's position."""
    return masks.segments(positions // chunk, columns // chunk)


def _results(arrays: Sequence[Array], rule: Rule, options: Any) -> tuple[Array, ...]:
    """Return the output, and the logsumexp if the rule asks for it."""
    if rule.logsumexp:
        return attention_partial(*arrays, layout="...LHD", **options)
    return (attention(*arrays, layout="...LHD", **options),)


# ---- one call for each run of sequences --------------------------------------------------------


def _is_readable(numbers: Any) -> bool:
    if isinstance(numbers, (list, tuple)):
        return True
    library = library_of(numbers, "cu_seqlens")
    if library.name == "dask":
        raise TypeError("the lengths of sequences must be known: compute() those of dask first")
    # Each length would be another program of JAX.
    is_eager = library.name != "jax" and not library.traced and library.recorder is None
    return is_eager and not is_transformed() and not is_recording()


def _one_by_one(
    xp: Any, arrays: Arrays, rows: Packed, keys: Packed, rule: Rule, options: Any
) -> list[Array]:
    pieces = []
    done, total = 0, arrays[0].shape[0]
    for run in _runs(_spans(rows), _spans(keys)):
        start, length = run[0][1]
        pieces += [_zeros(xp, arrays, start - done, rule)] if start > done else []
        pieces.append(_run(xp, arrays, run, rule, options))
        done = start + len(run) * length
    if done < total or not pieces:
        pieces.append(_zeros(xp, arrays, total - done, rule))
    return [
        parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)
        for parts in zip(*pieces, strict=True)
    ]


def _run(xp: Any, arrays: Arrays, run: list[Run], rule: Rule, options: Any) -> list[Array]:
    """Return the rows of neighbouring sequences of one length, which are a batch."""
    (first, rows, keys), count = run[0], len(run)
    parts = [
        xp.reshape(x[at : at + count * n, ...], (count, n, *x.shape[1:]))
        for x, (at, n) in zip(arrays, (rows, keys, keys), strict=True)
    ]
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


def _zeros(xp: Any, arrays: Arrays, length: int, rule: Rule) -> list[Array]:
    """Return the results of rows that belong to no sequence."""
    query, _, value = arrays
    wide = xp.float64 if query.dtype == xp.float64 else xp.float32
    shape = (length, query.shape[1])
    results = [(0, query.dtype, (*shape, value.shape[-1])), (float("-inf"), wide, shape)]
    return [
        xp.broadcast_to(numbers_like(xp, number, dtype, query), shape)
        for number, dtype, shape in results[: 1 + rule.logsumexp]
    ]


def _spans(packed: Packed) -> list[tuple[int, int]]:
    """Return the start and the number of used tokens of each sequence."""
    starts = _numbers(packed.starts)
    if packed.used is not None:
        return list(zip(starts[:-1], _numbers(packed.used), strict=True))
    return [(start, stop - start) for start, stop in itertools.pairwise(starts)]


def _numbers(numbers: Any) -> list[int]:
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    if isinstance(numbers, (list, tuple)):
        return list(numbers)
    return [int(numbers[n]) for n in range(numbers.shape[0])]


def _runs(rows: list[tuple[int, int]], keys: list[tuple[int, int]]) -> Iterator[list[Run]]:
    """Yield neighbouring sequences of one length, whose rows and keys have no gap between them."""
    run: list[Run] = []
    for number, spans in enumerate(zip(rows, keys, strict=True)):
        following = [(at + len(run) * n, n) for at, n in run[0][1:]] if run else []
        if run and list(spans) != following:
            yield run
            run = []
        if spans[0][1]:
            run.append((number, *spans))
    if run:
        yield run


# ---- one call for all --------------------------------------------------------------------------


def _places(xp: Any, packed: Packed, total: int, like: Array) -> tuple[Array, Array, Array]:
    """Return the sequence and the position of each token, and the lengths of the sequences.

    The sequence of a token that is not used is −1.
    """
    tokens = index_range(xp, 0, total, like)

    def beside(numbers: Any) -> Array:
        is_list = isinstance(numbers, (list, tuple))
        array = numbers_like(xp, numbers, tokens.dtype, like) if is_list else numbers
        return cast(xp, array, tokens.dtype)

    starts = beside(packed.starts)
    lengths = starts[1:] - starts[:-1] if packed.used is None else beside(packed.used)
    after = cast(xp, xp.searchsorted(starts[1:], tokens, side="right"), tokens.dtype)
    sequence = xp.minimum(after, beside([lengths.shape[0] - 1]))
    position = tokens - xp.take(starts, sequence, axis=0)
    is_used = (position < xp.take(lengths, sequence, axis=0)) & (after == sequence)
    return xp.where(is_used, sequence, -1 - xp.zeros_like(sequence)), position, lengths


def _at_once(
    xp: Any, arrays: Arrays, rows: Packed, keys: Packed, rule: Rule, options: Any
) -> tuple[Array, ...]:
    query, key, _ = arrays
    own, position, many_rows = _places(xp, rows, query.shape[0], query)
    other, place, many_keys = _places(xp, keys, key.shape[0], query)
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
    slopes = rule.slopes
    if slopes is not None:
        is_per_head = len(slopes.shape) == 1

        def lowered(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
            slope = cast(xp, slopes[h] if is_per_head else slopes[sequence[i], h], score.dtype)
            return score - slope * cast(xp, xp.abs(position[i] - place[j]), score.dtype)

        given["score_mod"] = lowered
    return _results(arrays, rule, given)
