"""Attention over a cache of keys and values, into which new ones are written before."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from polyattn import masks
from polyattn._base.arrays import Array, cast, index_range, library_of
from polyattn._base.tracing import is_transformed
from polyattn.dialects._flash import attended, by_position, options_of
from polyattn.dialects._packed import numbers_of
from polyattn.dialects._shared import bounds

#: The libraries whose arrays can be written in place.
_MUTABLE = ("numpy", "torch", "cupy")


class Cache(NamedTuple):
    """A cache, and where the sequences of a batch are in it."""

    key: Array  # (B', S, G, D), or with a table (pages, page, G, D)
    value: Array
    lengths: int | Array | None = None
    items: Array | None = None  # (B,), the item of the cache for each sequence
    leftpad: Array | None = None  # (B,), the first key of each sequence
    table: Array | None = None  # (B, pages)


class Rotation(NamedTuple):
    """Cosines and sines of positions, (positions, D' / 2), and how pairs are formed."""

    tables: tuple[Array, Array] | None
    interleaved: bool
    lengths: Array | None = None  # the first positions, if they are not the lengths of the cache


def with_kvcache(
    q: Array, new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation, *,
    scale: float | None, causal: bool, window: Any, softcap: float, slopes: Array | None = None,
    chunk: int = 0, qv: Array | None = None, logsumexp: bool = False,
) -> Any:  # fmt: skip
    """Write the new keys and values, and return attention of q, (B, L, H, D), to all of them."""
    near = bounds(window)
    if isinstance(cache.lengths, numbers.Integral):
        cache = cache._replace(lengths=int(cache.lengths))
    _check(new, cache, rotation)
    if new is not None:
        key, value = new
        key = _rotated(key, rotation, cache.lengths, moves=True)
        q = _rotated(q, rotation, cache.lengths, moves=bool(causal or near))
        _write(cache, key, value)
        cache = cache._replace(lengths=cache.lengths + key.shape[1])
    keys, values = (_read(cache, pool, q.shape[0]) for pool in (cache.key, cache.value))
    if qv is not None:
        q, keys, scale = with_qv(q, keys, values, qv, scale)
    q, options = options_of(q, scale, softcap)
    options |= {"is_causal": bool(causal), "window": near}
    many = keys.shape[1] * (1 if cache.table is None else cache.table.shape[1])
    lengths = many if cache.lengths is None else cache.lengths
    if isinstance(lengths, int) and cache.table is None and lengths != many:
        raise ValueError(
            f"cache_seqlens must be from 0 to the {cache.key.shape[1]} tokens of a sequence in"
            f" k_cache; got {lengths}"
        )
    options |= by_position(q, many, lengths - q.shape[1], slopes, chunk, cache.leftpad)
    if cache.table is not None or not isinstance(lengths, int):
        options |= {"key_lengths": lengths, "block_table": cache.table}
    if cache.leftpad is not None:
        after = ~masks.prefix(cache.leftpad)
        options["mask"] = options["mask"] & after if chunk else after
    return attended(q, keys, values, options, logsumexp)


def with_packed(
    q: Array, new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation,
    ends_q: Array | None, ends_new: Array | None, *, qv: Array | None, logsumexp: bool,
    **options: Any,
) -> Any:  # fmt: skip
    """Return `with_kvcache` of packed queries, (T, H, D), or of packed new keys, or of both."""
    library = library_of(q, "q")
    if library.traced or is_transformed():
        raise NotImplementedError(
            "cu_seqlens_q and cu_seqlens_k_new are read by the host, which cannot read them in a"
            " traced program: pass q, k and v padded, (B, L, H, D)"
        )
    ends, other = (None if x is None else numbers_of(x) for x in (ends_q, ends_new))
    _check_ends("cu_seqlens_q", ends, "q", q)
    _check_ends("cu_seqlens_k_new", other, "k", None if new is None else new[0])
    has_own_pools = cache.items is None and cache.table is None
    given = {
        "cu_seqlens_q": None if ends is None else len(ends) - 1,
        "cu_seqlens_k_new": None if other is None else len(other) - 1,
        "q": q.shape[0] if ends is None else None,
        "k": new[0].shape[0] if new is not None and other is None else None,
        "page_table": None if cache.table is None else cache.table.shape[0],
        "cache_batch_idx": None if cache.items is None else cache.items.shape[0],
    }
    counts: dict[str, int] = {name: n for name, n in given.items() if n is not None}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"the numbers of sequences differ: {shown}")
    count = next(iter(counts.values()))
    if has_own_pools and count > cache.key.shape[0]:
        raise ValueError(f"{count} sequences for the {cache.key.shape[0]} items of k_cache")

    def part(x: Any, n: int, ends: list[int] | None = None) -> Any:
        """Return what belongs to a sequence as a batch of one."""
        if not getattr(x, "shape", ()):  # None, or one number for all
            return x
        return x[n : n + 1, ...] if ends is None else x[ends[n] : ends[n + 1], ...][None, ...]

    results = []
    for n in range(count):
        pools = [part(x, n) if has_own_pools else x for x in cache[:2]]
        own = Cache(*pools, *(part(x, n) for x in cache[2:]))
        turned = rotation._replace(lengths=part(rotation.lengths, n))
        added = None if new is None else (part(new[0], n, other), part(new[1], n, other))
        more = {"qv": part(qv, n, ends), "logsumexp": True, **options}
        results.append(with_kvcache(part(q, n, ends), added, own, turned, **more))
    axes = (0, 0) if ends is None else (1, 2)  # of the items, or of the rows
    joined = (
        library.xp.concat(parts, axis=axis)
        for parts, axis in zip(zip(*results, strict=True), axes, strict=True)
    )
    output, total = joined if ends is None else (x[0, ...] for x in joined)
    return (output, total) if logsumexp else output


def _check_ends(name: str, ends: list[int] | None, of: str, array: Array | None) -> None:
    if ends is None:
        return
    if array is None:
        raise ValueError(f"{name} needs {of}")
    if len(ends) < 2 or [0, *sorted(ends), array.shape[0]] != [ends[0], *ends, ends[-1]]:
        raise ValueError(
            f"{name} must rise from 0 to the {array.shape[0]} tokens of {of}, with the end of one"
            f" sequence at least; got {ends}"
        )


def with_qv(
    q: Array, k: Array, v: Array, qv: Array, scale: float | None
) -> tuple[Array, Array, float]:
    """Return query, key and scale such that the products with the values are in the scores too."""
    xp = library_of(q, "q").xp
    size = q.shape[-1] + qv.shape[-1]
    joined = (xp.concat(pair, axis=-1) for pair in ((q, qv), (k, v)))
    return *joined, size**-0.5 if scale is None else scale


def _check(new: tuple[Array, Array] | None, cache: Cache, rotation: Rotation) -> None:
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


def _places(cache_lengths: Any, length: int, like: Array) -> Array:
    """Return the positions of new tokens, shape (B or 1, L)."""
    xp = library_of(like).xp
    steps = index_range(xp, 0, length, like)[None, :]
    if isinstance(cache_lengths, int):
        return steps + cache_lengths
    return steps + cast(xp, cache_lengths, steps.dtype)[:, None]


def _write(cache: Cache, key: Array, value: Array) -> None:
    xp = library_of(cache.key).xp
    places, table = _places(cache.lengths, key.shape[1], cache.key), cache.table
    size = min(cache.key.shape[1], cache.value.shape[1])
    capacity = size * (1 if table is None else table.shape[1])
    on_host = str(getattr(cache.key, "device", "cpu")) == "cpu" and not is_transformed()
    if on_host and 0 not in places.shape:
        first, last = int(xp.min(places)), int(xp.max(places))
        if first < 0:
            raise ValueError(f"cache_seqlens must be at least 0; got {first}")
        if last >= capacity:
            raise ValueError(
                f"the cache holds {capacity} tokens of a sequence, and the new ones end at"
                f" {last + 1}: make k_cache and v_cache larger"
            )
    items = index_range(xp, 0, key.shape[0], cache.key)[:, None]
    if table is not None:
        where = table[items, places // size], places % size
    else:
        where = items if cache.items is None else cache.items[:, None], places
    cache.key[where], cache.value[where] = key, value


def _read(cache: Cache, pool: Array, batch: int) -> Array:
    """Return the keys or values of the sequences, (B, S, G, D), or the pool of their pages."""
    if cache.table is not None:
        return pool
    if cache.items is not None:
        pool = library_of(pool).xp.take(pool, cache.items, axis=0)
    elif pool.shape[0] != batch:
        pool = pool[:batch, ...]
    return pool[:, : cache.lengths, ...] if isinstance(cache.lengths, int) else pool


def _rotated(x: Array, rotation: Rotation, lengths: Any, *, moves: bool) -> Array:
    """Return x, (B, L, H, D), rotated by its positions; by the first one if it does not move."""
    if rotation.tables is None:
        return x
    xp = library_of(x).xp
    first = lengths if rotation.lengths is None else rotation.lengths
    places = _places(first, x.shape[1] if moves else 1, x)
    half = rotation.tables[0].shape[-1]
    flat, wide = xp.reshape(places, (-1,)), xp.float64 if x.dtype == xp.float64 else xp.float32
    cos, sin = (
        cast(xp, xp.reshape(xp.take(table, flat, axis=0), (*places.shape, 1, half)), wide)
        for table in rotation.tables
    )
    axis, shape = (-1, (half, 2)) if rotation.interleaved else (-2, (2, half))
    pairs = xp.reshape(cast(xp, x[..., : 2 * half], wide), (*x.shape[:-1], *shape))
    one, other = (pairs[..., n] if axis == -1 else pairs[..., n, :] for n in (0, 1))
    turned = xp.stack((one * cos - other * sin, one * sin + other * cos), axis=axis)
    turned = cast(xp, xp.reshape(turned, (*x.shape[:-1], 2 * half)), x.dtype)
    return xp.concat((turned, x[..., 2 * half :]), axis=-1) if 2 * half < x.shape[-1] else turned
