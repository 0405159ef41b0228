"""Masks by given positions and trees of drafts, in the calls that they are for."""

import numpy as np
import pytest
from arrays import tiles_of, visited_tiles
from optional import jax, jnp

from polyattn import attention, masks

RNG = np.random.default_rng(8)
H, D = 2, 4


def draw(*lengths):
    return [RNG.normal(size=(H, n, D)) for n in lengths]


@pytest.fixture(params=["dense", "tiled"])
def call(request):
    """Attention on NumPy, by all scores at once and by small tiles."""
    kernel = "dense" if request.param == "dense" else tiles_of(8)
    return lambda *arrays, **options: attention(
        *arrays, **options, kernel=kernel, backend="array-api"
    )


@pytest.mark.parametrize("written", [3, 13])
def test_a_circular_cache_shows_what_a_long_one_shows(call, written):
    capacity, near = 8, 5
    query, key, value = draw(1, written, written)
    slots = np.full(capacity, -1)
    ring = [np.full((H, capacity, D), np.nan) for _ in range(2)]
    for token in range(written):
        slots[token % capacity] = token
        for cache, new in zip(ring, (key, value), strict=True):
            cache[:, token % capacity] = new[:, token]
    seen = masks.causal() & (masks.window(near, 0) | masks.prefix(0))
    found = call(query, *ring, mask=masks.positions(np.array([written - 1]), slots, seen))
    expected = attention(query, key, value, window=(near, 0), is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_packed_chunks_of_prompts_begin_at_a_position_each(call):
    rows, keys = [3, 1, 4], [5, 6, 4]  # the last rows of each prompt are new
    query, key, value = draw(sum(rows), sum(keys), sum(keys))
    ids, key_ids = (np.repeat(np.arange(3), n) for n in (rows, keys))
    places = np.concatenate([np.arange(s - n, s) for n, s in zip(rows, keys, strict=True)])
    key_places = np.concatenate([np.arange(s) for s in keys])
    near = masks.causal() & masks.window(3, None)
    mask = masks.segments(ids, key_ids) & masks.positions(places, key_places, near)
    found = call(query, key, value, mask=mask)
    for n in range(3):
        own = query[:, ids == n], key[:, key_ids == n], value[:, key_ids == n]
        expected = attention(*own, mask=near)
        np.testing.assert_allclose(found[:, ids == n], expected, atol=1e-14)


def test_the_order_of_keys_does_not_matter(call):
    length, order = 12, RNG.permutation(12)
    query, key, value = draw(length, length, length)
    mask = masks.positions(order, order[::-1], masks.window(3, 1))
    shuffled = [x[:, places] for x, places in ((query, order), (key, order[::-1]))]
    found = call(*shuffled, value[:, order[::-1]], mask=mask)
    expected = attention(query, key, value, window=(3, 1))[:, order]
    np.testing.assert_allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("far", [2**29, 2**30 + 5, 2**62])
def test_far_positions_are_compared_without_overflow(call, far):
    x = draw(3)[0]
    rows, keys = np.array([0, far, 2**63 - 1]), np.array([far, -far, 3])
    seen = np.array([[0, 0, 0], [1, 0, 1], [1, 0, 1]], bool)
    found = call(x, x, x, mask=masks.positions(rows, keys))
    np.testing.assert_allclose(found, attention(x, x, x, mask=seen))
    wide = masks.positions(rows[:2], keys, masks.window(2**63, 2**63))
    expected = attention(x[:, :2], x, x, mask=keys >= 0)
    np.testing.assert_allclose(call(x[:, :2], x, x, mask=wide), expected)


def test_far_positions_with_narrow_indices():
    times = np.array([0, 10, 20]) + 1_700_000_000_000
    b, h, i, j = np.ogrid[:1, :1, :3, :3]
    seen = masks.positions(times, times, masks.window(10, 0))(
        b, h, i.astype("int32"), j.astype("int32")
    )
    np.testing.assert_array_equal(seen[0, 0], np.tri(3, dtype=bool) & ~np.tri(3, k=-2, dtype=bool))
    at = b, h, i[:, :, :1].astype("int8"), j[..., :2].astype("int8")
    ids = np.array([1, 257], np.int32)  # equal in 8 bits
    np.testing.assert_array_equal(masks.segments(ids[:1], ids)(*at)[0, 0], [[True, False]])
    assert masks.padding(np.array([256], np.int32))(*at).all()


#: Masks of rows at the largest number and the one before, and of keys at 0 and at these two.
AT_THE_END = [
    (masks.window(0, None), [[0, 0, 1], [0, 1, 1]]),
    (masks.window(2, 0), [[0, 1, 1], [0, 1, 0]]),
    (masks.dilated(2), [[0, 0, 1], [1, 1, 0]]),
    (masks.dilated(2**63), [[0, 0, 1], [0, 1, 0]]),
    (~masks.prefix(2), [[0, 1, 1], [0, 1, 1]]),
    (masks.global_tokens(0), [[1, 0, 0], [1, 0, 0]]),
]


def test_the_largest_number_of_a_dtype_is_a_position(call):
    (x,) = draw(3)
    places = np.array([0, 2**63 - 2, 2**63 - 1])
    for mask, seen in AT_THE_END:
        found = call(x[:, :2], x, x, mask=masks.positions(places[:0:-1], places, mask))
        np.testing.assert_allclose(found, attention(x[:, :2], x, x, mask=np.array(seen, bool)))


def test_the_largest_number_of_32_bits_is_a_position_in_a_program():
    @jax.jit
    def shown(places, *at):
        found = [masks.positions(places[:0:-1], places, mask)(*at) for mask, _ in AT_THE_END]
        return [jnp.broadcast_to(one, (1, 1, 2, 3))[0, 0] for one in found]

    narrow = np.array([0, 2**31 - 2, 2**31 - 1], np.int32)
    found = shown(narrow, *np.ogrid[:1, :1, :2, :3])
    np.testing.assert_array_equal(found, [seen for _, seen in AT_THE_END])


def test_positions_that_no_library_holds_are_refused():
    far = np.array([0, 2**63], np.uint64)
    for arrays in ((far, [0, 1]), ([0, 1], far)):
        with pytest.raises(ValueError, match="_positions holds 9223372036854775808, which int64"):
            masks.positions(*arrays)
    masks.positions(far // 2, np.zeros(0, np.uint64))


def test_tiles_are_skipped_by_the_least_and_greatest_position(monkeypatch):
    tiles = visited_tiles(monkeypatch)

    def visited(query, mask):
        tiles.clear()
        attention(query, x, x, mask=mask, kernel=tiles_of(256), backend="array-api")
        return [(rows.start // 16, keys.start // 16, masked) for rows, keys, masked in tiles]

    x = RNG.normal(size=(1, 64, 4))
    half = np.concatenate([np.arange(32, 64), np.arange(32)])  # the later half first
    mask = masks.positions(half, np.where(half < 16, -1, half))
    # Keys at positions 32, 48, 0 (absent) and 16, by rows at 32, 48, 0 and 16.
    expected = [(0, 0, True), (0, 3, False), (1, 0, False), (1, 1, True), (1, 3, False)]
    assert visited(x, mask) == [*expected, (3, 3, True)]
    past = [(0, 0, False), (0, 1, False), (0, 2, False)]
    assert visited(x[:, :16], masks.tree(np.arange(-1, 15))) == [*past, (0, 3, True)]


# ---- trees -------------------------------------------------------------------------------------

#: 0 and 1 begin; 2 and 3 follow 0, 4 follows 1, 5 follows 3.
PARENTS = np.array([-1, -1, 0, 0, 1, 3])
PATHS = [[0], [1], [0, 2], [0, 3], [1, 4], [0, 3, 5]]
ANCESTORS = np.array([[n in path for n in range(6)] for path in PATHS])


def test_a_tree_is_a_mask_of_its_ancestors(call):
    query, key, value = draw(6, 10, 10)
    array = np.concatenate([np.ones((6, 4), bool), ANCESTORS], axis=1)
    expected = attention(query, key, value, mask=array)
    # What is beyond itself in the array is hidden.
    later = ANCESTORS | np.triu(np.ones((6, 6), bool), 1)
    for mask in (masks.tree(PARENTS), masks.tree(later)):
        np.testing.assert_allclose(call(query, key, value, mask=mask), expected, atol=1e-14)


def test_what_follows_the_drafts_is_hidden(call):
    query, key, value = draw(6, 10, 10)
    found = call(query, key, value, mask=masks.tree(PARENTS), query_offset=2)
    expected = attention(query, key[:, :8], value[:, :8], mask=masks.tree(PARENTS))
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_each_item_has_its_own_tree_and_offset(call):
    query, key, value = RNG.normal(size=(3, 2, H, 3, D))
    parents, offset = np.array([[-1, 0, 0], [-1, -1, 1]]), np.array([0, -1])
    found = call(query, key, value, mask=masks.tree(parents), query_offset=offset)
    for n in range(2):
        own = [x[n] for x in (query, key, value)]
        expected = attention(*own, mask=masks.tree(parents[n]), query_offset=int(offset[n]))
        np.testing.assert_allclose(found[n], expected, atol=1e-14)


def test_a_traced_parent_that_is_no_earlier_draft_is_none():
    x = draw(3)[0]
    call = jax.jit(lambda parents: attention(*[jnp.asarray(x)] * 3, mask=masks.tree(parents)))
    found = call(jnp.asarray([2, 1, 0]))
    np.testing.assert_allclose(found, attention(x, x, x, mask=masks.tree([-1, -1, 0])), atol=1e-6)
