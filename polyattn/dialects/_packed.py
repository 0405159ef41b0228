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

#: A sequence, its rows and its keys; each range by its start and length.
Run = tuple[int, tuple[int, int], tuple[int, int]]


class Packed(NamedTuple):
    """Where the sequences of a packed array begin, and how many tokens of each are used."""

    starts: Array | Sequence[int]  # (B + 1,)
    used: Array | Sequence[int] | None = None  # (B,); None for all tokens up to the next start


class Rule(NamedTuple):
    """What decides by positions, which count from the start of each sequence."""

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
    lengths = [*rows, *keys]
    if all(one is None or _is_readable(one) for one in lengths):
        return _one_by_one((query, key, value), rows, keys, rule, options)
    return _at_once((query, key, value), rows, keys, rule, options)


def pages(pool: Array, table: Array) -> Array:
    """Return the pages of each sequence one after another, (B, pages · page, G, D)."""
    xp = library_of(pool).xp
    # Entries beyond the length of a sequence may hold anything.
    least, most = (numbers_like(xp, n, table.dtype, table) for n in (0, pool.shape[0] - 1))
    indices = xp.reshape(xp.minimum(xp.maximum(table, least), most), (-1,))
    count, size = table.shape[1], pool.shape[1]
    shape = (table.shape[0], count * size, *pool.shape[2:])
    return xp.reshape(xp.take(pool, indices, axis=0), shape)


def chunked(positions: Array, columns: Array, chunk: int) -> masks.Mask:
    """Return the mask of the keys in the chunk of a row's position."""
    return masks.segments(positions // chunk, columns // chunk)


# ---- one call for each run of sequences --------------------------------------------------------


def _is_readable(numbers: Any) -> bool:
    if isinstance(numbers, (list, tuple)):
        return True
    library = library_of(numbers, "cu_seqlens")
    # Each length would be another program of JAX.
    is_eager = library.name != "jax" and not library.traced and library.recorder is None
    return is_eager and not is_transformed() and not is_recording()


def _one_by_one(
    arrays: tuple[Array, Array, Array], rows: Packed, keys: Packed, rule: Rule, options: Any
) -> tuple[Array, Array | None]:
    xp = library_of(arrays[0], "query").xp
    pieces: list[tuple[Array, Any]] = []
    done, total = 0, arrays[0].shape[0]
    for run in _runs(_spans(rows), _spans(keys)):
        start, length, count = run[0][1][0], run[0][1][1], len(run)
        if start > done:
            pieces.append(_zeros(xp, arrays, start - done, rule))
        pieces.append(_run(xp, arrays, run, rule, options))
        done = start + count * length
    if done < total or not pieces:
        pieces.append(_zeros(xp, arrays, total - done, rule))
    output, logsumexp = (
        None if parts[0] is None else parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)
        for parts in zip(*pieces, strict=True)
    )
    return output, None if logsumexp is None else xp.permute_dims(logsumexp, (1, 0))


def _run(
    xp: Any, arrays: tuple[Array, Array, Array], run: list[Run], rule: Rule, options: Any
) -> tuple[Array, Any]:
    """Return the rows of neighbouring sequences of one length, which are a batch."""
    first, (row, length), (start, many) = run[0]
    spans = ((row, length), (start, many), (start, many))
    parts = [
        xp.reshape(x[at : at + len(run) * n, ...], (len(run), n, *x.shape[1:]))
        for x, (at, n) in zip(arrays, spans, strict=True)
    ]
    offset = 0 if rule.from_first else many - length
    given = {"is_causal": rule.causal, "window": rule.window, "query_offset": offset, **options}
    if rule.slopes is not None:
        own = rule.slopes if len(rule.slopes.shape) == 1 else rule.slopes[first : first + len(run)]
        given["score_mod"] = alibi(own, offset)
    if rule.chunk:
        rows, columns = (index_range(xp, 0, n, arrays[0]) for n in (length, many))
        given["mask"] = chunked(rows + offset, columns, rule.chunk)
    if options.get("dropout") is not None:
        given["dropout"] = (*options["dropout"], (first, 0, 0, 0))
    if not rule.logsumexp:
        return _flat(xp, attention(*parts, layout="...LHD", **given)), None
    partial = attention_partial(*parts, layout="...LHD", **given)
    return _flat(xp, partial.output), _flat(xp, partial.logsumexp)


def _flat(xp: Any, array: Array) -> Array:
    return xp.reshape(array, (-1, *array.shape[2:]))


def _zeros(xp: Any, arrays: tuple[Array, ...], length: int, rule: Rule) -> tuple[Array, Any]:
    """Return the output of rows that belong to no sequence."""
    query, _, value = arrays
    shape = (length, query.shape[1], value.shape[-1])
    zeros = xp.zeros_like(xp.broadcast_to(query[:1, :, :1], shape)) if query.shape[0] else query
    if not rule.logsumexp:
        return zeros, None
    wide = xp.float64 if query.dtype == xp.float64 else xp.float32
    return zeros, cast(xp, zeros[..., 0], wide) - float("inf")


def _spans(packed: Packed) -> list[tuple[int, int]]:
    """Return the start and the number of used tokens of each sequence."""
    starts = _numbers(packed.starts)
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    if packed.used is not None:
        # An offset of the last sequence may lie beyond it.
        lengths = _numbers(packed.used)
    return list(zip(starts, lengths, strict=False))


def _numbers(numbers: Any) -> list[int]:
    if hasattr(numbers, "tolist"):
        found: list[int] = numbers.tolist()
        return found
    return [int(numbers[n]) for n in range(len(numbers))]


def _runs(rows: list[tuple[int, int]], keys: list[tuple[int, int]]) -> Iterator[list[Run]]:
    """Yield neighbouring sequences of one length, whose rows and keys have no gap between them."""
    run: list[Run] = []
    for number, (own, other) in enumerate(zip(rows, keys, strict=True)):
        if run and not all(
            now == (start + len(run) * length, length)
            for now, (start, length) in zip((own, other), run[0][1:], strict=True)
        ):
            yield run
            run = []
        if own[1]:
            run.append((number, own, other))
        elif run:
            yield run
            run = []
    if run:
        yield run


# ---- one call for all --------------------------------------------------------------------------


class _Places(NamedTuple):
    """The sequence and the position in it of each token, and the lengths of the sequences."""

    sequence: Array
    position: Array
    lengths: Array


def _places(xp: Any, packed: Packed, total: int, like: Array) -> _Places:
    tokens = index_range(xp, 0, total, like)
    starts = cast(xp, _beside(xp, packed.starts, like), tokens.dtype)
    lengths = starts[1:] - starts[:-1]
    if packed.used is not None:
        lengths = cast(xp, _beside(xp, packed.used, like), tokens.dtype)
    after = cast(xp, xp.searchsorted(starts[1:], tokens, side="right"), tokens.dtype)
    sequence = xp.minimum(after, numbers_like(xp, lengths.shape[0] - 1, tokens.dtype, like))
    position = tokens - xp.take(starts, sequence, axis=0)
    is_used = (position < xp.take(lengths, sequence, axis=0)) & (after == sequence)
    return _Places(xp.where(is_used, sequence, -1 - xp.zeros_like(sequence)), position, lengths)


def _beside(xp: Any, numbers: Any, like: Array) -> Array:
    is_list = isinstance(numbers, (list, tuple))
    return numbers_like(xp, numbers, xp.int64, like) if is_list else numbers


def _at_once(
    arrays: tuple[Array, Array, Array], rows: Packed, keys: Packed, rule: Rule, options: Any
) -> tuple[Array, Array | None]:
    query, key, _ = arrays
    xp = library_of(query, "query").xp
    own = _places(xp, rows, query.shape[0], query)
    other = _places(xp, keys, key.shape[0], query)
    clipped = xp.maximum(own.sequence, xp.zeros_like(own.sequence))
    position = own.position
    if not rule.from_first:
        position = position + xp.take(other.lengths - own.lengths, clipped, axis=0)
    # A row of no sequence is in another one than the keys of none.
    mask = masks.segments(
        xp.where(own.sequence < 0, own.sequence - 1, own.sequence), other.sequence
    )
    seen = _near(position, other.position, rule)
    mask = mask if seen is None else mask & masks.rule(seen)
    if rule.chunk:
        mask = mask & chunked(position, other.position, rule.chunk)
    given = {"mask": mask, **options}
    if rule.slopes is not None:
        given["score_mod"] = _lowered(xp, rule.slopes, clipped, position, other.position)
    if not rule.logsumexp:
        return attention(*arrays, layout="...LHD", **given), None
    partial = attention_partial(*arrays, layout="...LHD", **given)
    return partial.output, xp.permute_dims(partial.logsumexp, (1, 0))


def _lowered(xp: Any, slopes: Array, sequence: Array, position: Array, places: Array) -> Any:
    """Return the function of ALiBi by position."""

    def lowered(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        slope = slopes[h] if len(slopes.shape) == 1 else slopes[sequence[i], h]
        away = cast(xp, xp.abs(position[i] - places[j]), score.dtype)
        return score - cast(xp, slope, score.dtype) * away

    return lowered


def _near(position: Array, places: Array, rule: Rule) -> Any:
    """Return the function of the keys that causal and window show, by position."""
    left, right = rule.window
    if rule.causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None

    def seen(b: Array, h: Array, i: Array, j: Array) -> Array:
        away = places[j] - position[i]
        after = away >= -left if left is not None else away == away
        return after if right is None else after & (away <= right)

    return seen
