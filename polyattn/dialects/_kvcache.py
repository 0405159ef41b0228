"""Attention over a cache of keys and values, into which new ones are written before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from polyattn import masks
from polyattn._api.run import check_ahead, is_known
from polyattn._base.arrays import Array, ArrayFacts, facts_of, index_range, library_of
from polyattn._base.slices import spans
from polyattn._base.tracing import is_transformed
from polyattn.dialects._flash import attended, by_position, joined, options_of
from polyattn.dialects._packed import check_pages, is_on_host, numbers_of
from polyattn.dialects._rotary import positions_from, rotated
from polyattn.dialects._shared import bounds, check_axes, integers, scaled, shape_of

#: The libraries whose arrays can be written in place.
_MUTABLE = ("numpy", "torch", "cupy")
#: New tokens whose places are found as numbers in less time than as arrays, at most.
SHORT = 64
_AXES = (
    "q BLHD, k_cache CSGD, v_cache CSGE, k? BNGD, v? BNGE, rotary_cos? RF, rotary_sin? RF,"
    " cache_seqlens B, rotary_seqlens B, cache_batch_idx B, cache_leftpad B, block_table BM,"
    " qv? BLHE, alibi_slopes H|BH"
)


class Cache(NamedTuple):
    """A cache, and where the sequences of a batch are in it."""

    key: Array  # (B', S, G, D), or with a table (pages, page, G, D)
    value: Array
    lengths: Any = None  # (B,), or an integer for all
    items: Array | None = None  # (B,), the item of the cache for each sequence
    leftpad: Array | None = None  # (B,), the first key of each sequence
    table: Array | None = None  # (B, pages)


class Rotation(NamedTuple):
    """Cosines and sines of positions, (positions, D' / 2), and how pairs are formed."""

    tables: tuple[Array, Array] | None
    interleaved: bool
    lengths: Any = None  # the first positions; None for the lengths of the cache


def with_kvcache(
    q: Array, new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation, **options: Any
) -> Any:
    """Write the new keys and values, and return attention of q, (B, L, H, D), to all of them."""
    return checked(q, new, cache, rotation, **options)()


def checked(
    q: Array, new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation, *,
    scale: float | None, causal: bool, window: Any, softcap: float, slopes: Array | None = None,
    chunk: int = 0, qv: Array | None = None, logsumexp: bool = False,
) -> Callable[[], Any]:  # fmt: skip
    """Check all of a call, and return what writes and computes."""
    near = bounds(window)
    _check_combination(new, cache, rotation)
    cache, rotation = _placed(cache, rotation, q)
    if getattr(cache.lengths, "shape", None) == ():
        same = library_of(q).xp.broadcast_to(cache.lengths[None], (q.shape[0],))
        cache = cache._replace(lengths=same)
    _check_shapes_and_numbers(q, new, cache, rotation, qv, slopes)
    cache = _with_one_length(cache, 0 if new is None else new[0].shape[1])
    if new is not None:
        facts = _facts_when_written(new, cache)
        first = cache.lengths if rotation.lengths is None else rotation.lengths
        key, value = _rotated(new[0], rotation, first, moves=True), new[1]
        q = _rotated(q, rotation, first, moves=bool(causal or near))
        places = _slots(cache, key.shape[1], q.shape[0])
        cache = cache._replace(lengths=cache.lengths + key.shape[1])
    (q, scale), capacity = scaled(joined(q, qv), scale), _capacity(cache)
    lengths = capacity if cache.lengths is None else cache.lengths
    options = options_of(scale, softcap) | {"is_causal": bool(causal), "window": near}
    many = lengths if isinstance(lengths, int) and cache.table is None else capacity
    if slopes is not None or chunk:
        options |= by_position(q, many, lengths - q.shape[1], slopes, chunk, cache.leftpad)
    if cache.table is not None or not isinstance(lengths, int):
        options |= {"key_lengths": lengths, "block_table": cache.table}
    if cache.leftpad is not None:
        after = ~masks.prefix(cache.leftpad)
        options["mask"] = options["mask"] & after if chunk else after

    def arrays() -> tuple[Array, Array]:
        keys, values = (_read(cache, pool, q.shape[0]) for pool in cache[:2])
        return joined(keys, None if qv is None else values), values

    if new is None:
        return lambda: attended(q, *arrays(), options, logsumexp)
    is_copied = cache.items is not None or facts[0].requires_grad or facts[1].requires_grad
    if is_copied or not is_known(q, *arrays(), layout="...LHD", logsumexp=logsumexp, **options):
        lead = (q.shape[0], many) if cache.table is None else cache.key.shape[:2]
        sizes = zip(facts, (q.shape[-1], value.shape[-1]), strict=True)
        arrays_then = [one._replace(shape=(*lead, key.shape[2], size)) for one, size in sizes]
        check_ahead(q, *arrays_then, layout="...LHD", logsumexp=logsumexp, **options)

    def write_and_compute() -> Any:
        cache.key[places], cache.value[places] = key, value
        return attended(q, *arrays(), options, logsumexp)

    return write_and_compute


def with_packed(
    q: Array, new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation,
    ends_q: Array | None, ends_new: Array | None, *, qv: Array | None, logsumexp: bool,
    **options: Any,
) -> Any:  # fmt: skip
    """Return `with_kvcache` of packed queries, (T, H, D), or of packed new keys, or of both."""
    library = library_of(q, "q")
    shape_of(q, "q")  # which refuses a nested tensor
    if library.traced or is_transformed():
        raise NotImplementedError(
            "cu_seqlens_q and cu_seqlens_k_new are read by the host, which cannot read them in a"
            " traced program: pass q, k and v padded, (B, L, H, D)"
        )
    ends, other = (None if x is None else numbers_of(x) for x in (ends_q, ends_new))
    own, added = ("B" if x is None else "" for x in (ends, other))
    key, value = new or (None, None)
    check_axes(f"q {own}LHD, qv? {own}LHE, k? {added}NGD, v? {added}NGE", q, qv, key, value)
    _check_ends("cu_seqlens_q", ends, "q", q)
    _check_ends("cu_seqlens_k_new", other, "k", key)
    cache, rotation = _placed(cache, rotation, q)
    has_own_pools = cache.items is None and cache.table is None
    padded = (x if at is None else None for x, at in ((q, ends), (key, other)))
    count = _count_of_sequences(cache, ends, other, *padded)

    def parts(x: Any, ends: list[int] | None = None) -> list[Any]:
        """Return what belongs to each sequence as a batch of one; the parts have one gradient."""
        if not getattr(x, "shape", ()):  # None, or one number for all
            return [x] * count
        cut = spans(x, [(at, end - at) for at, end in pairwise(ends or range(count + 1))])
        return cut if ends is None else [one[None, ...] for one in cut]

    own_parts = (parts(q, ends), parts(qv, ends), parts(key, other), parts(value, other))
    places = map(parts, (rotation.lengths, *cache[2:]))
    calls = []
    for n, (x, x_v, k, v, first, *its) in enumerate(zip(*own_parts, *places, strict=True)):
        pools = [x[n : n + 1, ...] if has_own_pools else x for x in cache[:2]]
        written = None if new is None else (k, v)
        turned, more = rotation._replace(lengths=first), {"qv": x_v, **options}
        calls.append(checked(x, written, Cache(*pools, *its), turned, logsumexp=True, **more))
    results = [call() for call in calls]  # nothing is written before all are checked
    axes = (0, 0) if ends is None else (1, 2)  # of the items, or of the rows
    joined = (
        library.xp.concat(parts, axis=axis)
        for parts, axis in zip(zip(*results, strict=True), axes, strict=True)
    )
    output, total = joined if ends is None else (x[0, ...] for x in joined)
    return (output, total) if logsumexp else output


def _count_of_sequences(
    cache: Cache, ends: list[int] | None, other: list[int] | None, q: Array | None,
    key: Array | None,
) -> int:  # fmt: skip
    """Return the number of sequences, or raise; `q` and `key` are given unless they are packed."""
    given = {
        "cu_seqlens_q": ends and ends[1:], "cu_seqlens_k_new": other and other[1:], "q": q,
        "k": key, "page_table": cache.table, "cache_batch_idx": cache.items,
    }  # fmt: skip
    counts = {
        name: len(one) if isinstance(one, list) else int(one.shape[0])
        for name, one in given.items()
        if one is not None
    }
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"the numbers of sequences differ: {shown}")
    count = next(iter(counts.values()))
    if cache.items is None and cache.table is None and count > cache.key.shape[0]:
        raise ValueError(f"{count} sequences for the {cache.key.shape[0]} items of k_cache")
    return count


def _check_ends(name: str, ends: list[int] | None, of: str, array: Array | None) -> None:
    if ends is None or array is None:
        return
    if len(ends) < 2 or [0, *sorted(ends), array.shape[0]] != [ends[0], *ends, ends[-1]]:
        raise ValueError(
            f"{name} must rise from 0 to the {array.shape[0]} tokens of {of}, with the end of one"
            f" sequence at least; got {ends}"
        )


def _check_shapes_and_numbers(
    q: Array, new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation, *more: Array | None
) -> None:
    """Raise unless shapes agree, and numbers of the host are in the cache."""
    key, value = new or (None, None)
    cos, sin = rotation.tables or (None, None)
    lengths, first = (None if isinstance(x, int) else x for x in (cache.lengths, rotation.lengths))
    check_axes(_AXES, q, *cache[:2], key, value, cos, sin, lengths, first, *cache[3:], *more)
    if cos is not None and 2 * cos.shape[1] > q.shape[3]:
        raise ValueError(
            f"rotary_cos of {tuple(cos.shape)} rotates more than the {q.shape[3]} of q"
        )
    count, capacity = cache.key.shape[0], _capacity(cache)
    if cache.items is not None:
        _check_range("cache_batch_idx", cache.items, count - 1, f"k_cache has {count} items")
    elif cache.table is None and count < q.shape[0]:
        raise ValueError(f"{q.shape[0]} sequences for the {count} items of k_cache")
    length = 0 if key is None else key.shape[1]
    if new is not None or isinstance(cache.lengths, int):
        added = f", {length} of them new" if length else ""
        why = f"k_cache holds {capacity} tokens of a sequence{added}"
        _check_range("cache_seqlens", cache.lengths, capacity - length, why)
    if new is not None and cache.table is not None:
        check_pages(cache.table, cache.lengths + length, count, cache.key.shape[1])


def _check_combination(new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation) -> None:
    if rotation.tables is not None and new is None:
        raise ValueError("rotary_cos and rotary_sin need k and v, the new keys and values")
    if cache.table is not None and cache.items is not None:
        raise ValueError("give block_table or cache_batch_idx, not both")
    if new is None:
        return
    if cache.lengths is None:
        raise ValueError("k and v need cache_seqlens, the lengths that they are written behind")
    name = library_of(cache.key, "k_cache").name
    if name not in _MUTABLE:
        raise NotImplementedError(
            f"k and v are written into k_cache and v_cache, and arrays of {name} cannot be written:"
            " make the new caches first, such as by polyattn.nn.KVCache, and call without k and v,"
            " with cache_seqlens as they are then"
        )


def _facts_when_written(new: tuple[Array, Array], cache: Cache) -> list[ArrayFacts]:
    """Return facts of keys and values for the cache, which a write neither casts nor moves."""
    expected = []
    for name, x, pool in zip(("k", "v"), new, cache[:2], strict=True):
        one, own = facts_of(x, name), facts_of(pool, f"{name}_cache")
        if one[:3] != own[:3]:
            kinds = (" ".join(facts[:3]) for facts in (own, one))
            raise TypeError("{} must be as {}_cache, {}; got {}".format(name, name, *kinds))
        expected.append(own if own.requires_grad else one)
    return expected


def _check_range(name: str, given: Any, most: int, why: str) -> None:
    """Raise unless numbers that the host can read are from 0 to the greatest."""
    if not is_on_host(given) or 0 in getattr(given, "shape", ()):
        return
    numbers = [given] if isinstance(given, int) else numbers_of(given)
    if wrong := [n for n in numbers if not 0 <= n <= most]:
        raise ValueError(f"{name} must be from 0 to {most}, since {why}; got {wrong[0]}")


def _placed(cache: Cache, rotation: Rotation, q: Array) -> tuple[Cache, Rotation]:
    """Return lengths and places as integers or as arrays beside q."""
    given = (*cache[2:], rotation.lengths)
    if all(x is None or type(x) is int for x in given):
        return cache, rotation
    names = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "rotary_seqlens")
    *placed, first = (integers(name, x, q) for name, x in zip(names, given, strict=True))
    return Cache(*cache[:2], *placed), Rotation(*rotation[:2], first)


def _with_one_length(cache: Cache, more: int) -> Cache:
    """Return the cache with an integer for its lengths, if the host reads that all are the same.

    So the keys are a slice, without a mask, and the new ones are written to one.
    """
    lengths = cache.lengths
    is_fixed = lengths is None or isinstance(lengths, int) or cache.table is not None
    if is_fixed or not is_on_host(lengths):
        return cache
    numbers = {*numbers_of(lengths)}
    if len(numbers) != 1 or not 0 < max(numbers) + more <= _capacity(cache):
        return cache
    return cache._replace(lengths=numbers.pop())


def _capacity(cache: Cache) -> int:
    """Return how many tokens of a sequence the cache holds."""
    return int(cache.key.shape[1]) * (1 if cache.table is None else int(cache.table.shape[1]))


def _slots(cache: Cache, length: int, batch: int) -> tuple[Any, Any]:
    """Return the indices of the slots for so many new tokens of each sequence."""
    if isinstance(cache.lengths, int) and cache.items is cache.table is None:
        return slice(batch), slice(cache.lengths, cache.lengths + length)
    table, given, size = cache.table, cache.lengths, cache.key.shape[1]
    is_short = 0 < batch * length <= SHORT
    if table is not None and is_short and is_on_host(given) and is_on_host(table):
        starts = [given] * batch if isinstance(given, int) else numbers_of(given)
        at = [[divmod(start + n, size) for n in range(length)] for start in starts]
        rows: Any = numbers_of(table)
        pages = [[row[n] for n, _ in one] for row, one in zip(rows, at, strict=True)]
        slots = [[slot for _, slot in one] for one in at]
        (page, *_), (slot, *_) = pages[0], slots[0]
        if batch == 1 and slot + length <= size:
            # A slice is written to in less time than places by arrays.
            return slice(page, page + 1), slice(slot, slot + length)
        return pages, slots
    xp = library_of(cache.key).xp
    places = positions_from(cache.lengths, length, cache.key)
    items = index_range(xp, 0, batch, cache.key)[:, None]
    if cache.table is not None:
        return cache.table[items, places // size], places % size
    return items if cache.items is None else cache.items[:, None], places


def _read(cache: Cache, pool: Array, batch: int) -> Array:
    """Return the keys or values of the sequences, (B, S, G, D), or the pool of their pages."""
    if cache.table is not None:
        return pool
    if cache.items is not None:
        pool = library_of(pool).xp.take(pool, cache.items, axis=0)
    elif pool.shape[0] != batch:
        pool = pool[:batch, ...]
    return pool[:, : cache.lengths, ...] if isinstance(cache.lengths, int) else pool


def _rotated(x: Array, rotation: Rotation, first: Any, *, moves: bool) -> Array:
    """Return x, (B, L, H, D), rotated by its positions; by the first one if it does not move."""
    if rotation.tables is None:
        return x
    places = positions_from(first, x.shape[1] if moves else 1, x)
    return rotated(x, rotation.tables, places, rotation.interleaved)
