"""Wrong caches and pages: keys of variable length, and tables of pages."""

import numpy as np
from array_api_compat import array_namespace

from pool.steps import ended, finished, gathered, prepared, scores, serve, weights


def with_lengths(says, change):
    """Return attention over a cache whose lengths are changed: `change(lengths, capacity)`."""

    def attend(query, key, value, *, key_lengths=None, block_table=None, is_causal=False):
        if block_table is not None:
            key, value = (gathered(x, block_table) for x in (key, value))
        if key_lengths is not None:
            lengths = np.resize(np.asarray(key_lengths), key.shape[:1])
            key_lengths = change(lengths, key.shape[-2])
        return serve(query, key, value, key_lengths=key_lengths, is_causal=is_causal)

    attend.__doc__ = says
    return attend


lengths_ignored = with_lengths(
    "The lengths are ignored: unused slots are seen.",
    lambda lengths, capacity: 0 * lengths + capacity,
)
newest_key_missing = with_lengths(
    "The newest key of each item is left out.", lambda lengths, capacity: np.maximum(lengths - 1, 0)
)
newest_key_twice = with_lengths(
    "One key after the end of each item is seen.",
    lambda lengths, capacity: np.minimum(lengths + 1, capacity),
)
length_of_first_item = with_lengths(
    "All items have the length of the first.", lambda lengths, capacity: 0 * lengths + lengths[:1]
)
last_page_whole = with_lengths(
    "All slots of the last page are seen.",
    lambda lengths, capacity: np.minimum(-(-lengths // 4) * 4, capacity),
)
last_page_missing = with_lengths(
    "The keys after the last whole page are left out.", lambda lengths, capacity: lengths // 4 * 4
)
no_item_is_empty = with_lengths(
    "An item without keys sees slot 0.", lambda lengths, capacity: np.maximum(lengths, 1)
)


def empty_item_of_nan(query, key, value, *, key_lengths=None, is_causal=False):
    """The output of an item without keys is NaN: 0 / 0."""
    output = serve(query, key, value, key_lengths=key_lengths, is_causal=is_causal)
    if key_lengths is None:
        return output
    empty = (np.resize(np.asarray(key_lengths), key.shape[:1]) == 0)[:, None, None, None]
    return np.where(empty, output.dtype.type(np.nan), output)


def unused_slots_times_0(query, key, value, *, key_lengths=None, block_table=None):
    """Slots that no item uses have a weight of 0, but 0 · NaN is NaN."""
    if block_table is not None:
        key, value = (gathered(x, block_table) for x in (key, value))
    q, k, v = prepared(query, key, value)
    s = scores(q, k)
    shown = ended(s, key_lengths) & np.ones(s.shape, bool)
    return (weights(s, shown) @ v).astype(query.dtype)


def rows_from_the_first_key(query, key, value, *, key_lengths=None, is_causal=False):
    """New causal rows count from the first key, not from the end of their item."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = ended(s, key_lengths, is_causal, newest=None if key_lengths is None else s.shape[-2])
    return finished(s, shown, arrays, query)


def rows_from_the_capacity(query, key, value, *, key_lengths=None, is_causal=False, window=None):
    """New rows and windows count from the end of the cache, not from the end of their item."""
    arrays = prepared(query, key, value)
    s = scores(*arrays[:2])
    shown = ended(s, key_lengths, is_causal, window, None if key_lengths is None else s.shape[-1])
    return finished(s, shown, arrays, query)


def table_ignored(query, key, value, *, key_lengths=None, block_table=None, is_causal=False):
    """The pages of the items are taken to be in order."""
    if block_table is not None:
        block_table = np.arange(block_table.size).reshape(block_table.shape) % key.shape[0]
    return serve(query, key, value, key_lengths=key_lengths, block_table=block_table,
                 is_causal=is_causal)  # fmt: skip


def pages_of_the_next_item(query, key, value, *, key_lengths=None, block_table=None):
    """The last page of an item is that of the next item."""
    if block_table is not None:
        block_table = np.array(block_table)
        ends = np.resize(np.maximum(np.asarray(key_lengths) - 1, 0), len(block_table))
        rows, last = np.arange(len(block_table)), ends // key.shape[-2]
        block_table[rows, last] = np.roll(block_table, -1, 0)[rows, last]
    return serve(query, key, value, key_lengths=key_lengths, block_table=block_table)


def pages_sorted(query, key, value, *, key_lengths=None, block_table=None):
    """The pages of an item are read in the order of their numbers."""
    table = None if block_table is None else np.sort(block_table, axis=-1)
    return serve(query, key, value, key_lengths=key_lengths, block_table=table)


def page_once(query, key, value, *, key_lengths=None, block_table=None):
    """A page that an item has twice is replaced by page 0 the second time."""
    if block_table is not None:
        table = np.array(block_table)
        first = np.array([[p not in row[:n] for n, p in enumerate(row)] for row in table.tolist()])
        block_table = np.where(first, table, 0)
    return serve(query, key, value, key_lengths=key_lengths, block_table=block_table)


def keys_of_another_item(query, key, value, *, is_causal=False):
    """From 64 keys on, the last 16 of an item are those of the item before."""
    if key.ndim > 3 and key.shape[-2] >= 64 and key.shape[0] > 1:
        xp = array_namespace(key)
        key, value = (
            xp.concat([x[..., :-16, :], xp.roll(x, 1, axis=0)[..., -16:, :]], axis=-2)
            for x in (key, value)
        )
    return serve(query, key, value, is_causal=is_causal)
