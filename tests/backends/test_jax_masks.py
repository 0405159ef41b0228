"""Masks and scores as values, and dropout, in JAX: tiles, gradients, memory, compiled code."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyattn import attention, attention_partial, explain, masks, scores
from polyattn_jax.loop_layout import block_sizes
from polyattn_jax.xla import Xla, compiled

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(5)
B, H, G, L, S, D = 2, 4, 2, 37, 41, 8


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


QUERY, KEY, VALUE = draw(B, H, L, D), draw(B, G, S, D), draw(B, G, S, D)
LENGTHS, OFFSETS = np.array([9, 26]), np.array([0, 7])
QUERY_IDS, KEY_IDS = np.sort(RNG.integers(0, 5, (B, L))), np.sort(RNG.integers(0, 5, (B, S)))
SLOPES, TABLE, WEIGHT = abs(draw(H)), draw(32, H), draw(D)


def checkered(b, h, i, j):
    return (i // 8 + j // 8) % 2 == b % 2


def doubled(score, b, h, i, j):
    return score + score


#: Options by a function of the arrays that they carry.
OPTIONS = {
    "segments": lambda to: {"mask": masks.causal() & masks.segments(to(QUERY_IDS), to(KEY_IDS))},
    "rule": lambda to: {"mask": masks.rule(checkered) & masks.padding(to(LENGTHS))},
    "chained": lambda to: {
        "score_mod": scores.temperature(2.0) >> scores.relative_bias(to(TABLE)) >> doubled
    },
    "slopes": lambda to: {"score_mod": scores.alibi(to(SLOPES)), "query_offset": 3},
    "additive": lambda to: {"similarity": scores.additive(to(WEIGHT)), "softcap": 2.0},
    "dropout": lambda to: {"dropout": (0.4, 2**40 + 3), "mask": masks.causal() | masks.prefix(5)},
}  # fmt: skip
#: Those with a function of the caller's, which is not compiled but inside of jax.jit.
CALLED = ("rule", "chained")


def small_tiles(number=150):
    kernel = copy.copy(Xla())
    kernel.tile = number
    return kernel


def expected_of(name):
    return attention_partial(QUERY, KEY, VALUE, kernel="dense", **OPTIONS[name](np.asarray))


def check(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


# ---- what is computed --------------------------------------------------------------------------


def test_values_go_along_to_a_named_backend():
    for name in ("segments", "slopes", "additive", "dropout"):
        options = OPTIONS[name](np.asarray)
        ours = attention_partial(QUERY, KEY, VALUE, backend="jax", kernel="xla", **options)
        check(ours, expected_of(name))


def test_a_call_with_a_function_in_a_value_is_not_compiled_by_itself():
    q, k, v = map(jnp.asarray, (QUERY, KEY, VALUE))
    for name, make in OPTIONS.items():
        kernel = explain(q, k, v, **make(jnp.asarray)).chosen.kernel
        assert kernel == ("dense" if name in CALLED else "xla")


# ---- gradients and vmap ------------------------------------------------------------------------


def test_forward_and_second_derivatives_pass_tiles_that_are_left_out():
    q, k, v = map(jnp.asarray, (QUERY, KEY, VALUE))
    direction = jnp.asarray(draw(*QUERY.shape))
    mask = masks.segments(jnp.asarray(QUERY_IDS), jnp.asarray(KEY_IDS)) | masks.prefix(2)

    def all_of(kernel):
        def call(q):
            return attention(q, k, v, mask=mask, kernel=kernel)

        def slope(q):
            return jax.grad(lambda q: jnp.sum(jnp.sin(call(q))))(q)

        jvp = jax.jvp(call, (q,), (direction,))[1]
        return jvp, jax.grad(lambda q: jnp.vdot(slope(q), direction))(q)

    for ours, theirs in zip(all_of(small_tiles(400)), all_of("dense"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def under_vmap(kernel):
    def call(q, k, v, query_ids, key_ids):
        mask = masks.causal() & masks.segments(query_ids, key_ids)
        return attention(q, k, v, mask=mask, kernel=kernel)

    return call, [jnp.asarray(x) for x in (QUERY, KEY, VALUE, QUERY_IDS, KEY_IDS)]


def test_vmap_over_ids():
    call, arrays = under_vmap(small_tiles())
    expected = expected_of("segments").output
    np.testing.assert_allclose(jax.vmap(call)(*arrays), expected, atol=5e-6)

    def loss(function, *arrays):
        return jnp.sum(jnp.sin(function(*arrays)))

    mapped = jax.grad(lambda q: loss(jax.vmap(call), q, *arrays[1:]))(arrays[0])
    whole = jax.grad(lambda q: loss(under_vmap("dense")[0], q, *arrays[1:]))(arrays[0])
    np.testing.assert_allclose(mapped, whole, atol=2e-5)


def test_a_position_that_hides_every_tile_of_a_mask_leaves_rows_of_0():
    query, key = jnp.ones((2, 2, 3, 8)), jnp.ones((2, 1, 4, 8))
    options = {"is_causal": True, "query_offset": -3, "mask": masks.prefix(np.array([1, 2]))}

    def total(*arrays):
        return attention(*arrays, **options).sum()

    assert "xla" in str(explain(query, key, key, **options).chosen)
    value, gradients = jax.value_and_grad(total, (0, 1, 2))(query, key, key)
    assert not any(jnp.any(x) for x in (value, *gradients))


def test_under_vmap_a_tile_is_left_out_still():
    call, arrays = under_vmap(small_tiles())
    one = str(jax.make_jaxpr(call)(*(x[0] for x in arrays)))
    mapped = str(jax.make_jaxpr(jax.vmap(call))(*arrays))
    assert mapped.count("cond[") == one.count("cond[") > 0


# ---- tiles that are gone over ------------------------------------------------------------------


def tiles_of(mask, kernel, length=256, **options):
    """Return the tiles that are computed, those that hold a key that is seen, and their size."""
    x = jnp.asarray(draw(1, length, 4))
    visited = []

    def noted(score, b, h, i, j):
        jax.debug.callback(
            lambda i, j: visited.append((int(i), int(j))), i.ravel()[0], j.ravel()[0]
        )
        return score

    options = {"mask": mask, "score_mod": noted, **options}
    jax.block_until_ready(jax.jit(lambda x: attention(x, x, x, kernel=kernel, **options))(x))
    jax.effects_barrier()
    shape = (1, length, 4)
    problem = explain(shape, shape, shape, mask=mask, library="jax").problem
    rows, columns = block_sizes(problem, kernel.tile)
    assert length % rows == length % columns == 0
    offset = options.get("query_offset", 0)
    index = np.arange(length)
    seen = np.asarray(mask(0, 0, jnp.asarray(index[:, None]) + offset, jnp.asarray(index)))
    seen = seen.reshape(length // rows, rows, length // columns, columns).any((1, 3))
    wanted = [(int(r) * rows, int(c) * columns) for r, c in np.argwhere(seen)]
    return sorted(visited), wanted


IDS = jnp.asarray(np.repeat(np.arange(8), 32))
SPARSE = {
    "static": masks.window(20, 0) | masks.prefix(16),
    "global tokens": masks.window(4, 4) | masks.global_tokens(100),
    "compiled": masks.compile(masks.dense(IDS[:, None] == IDS), 256, tile=16),
    "segments": masks.segments(IDS),
    "segments and causal": masks.causal() & masks.segments(IDS),
    "padding": masks.padding(jnp.asarray(40), jnp.asarray(70)),
    "dense": masks.dense(IDS[:, None] == IDS) | masks.prefix(0),
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_the_tiles_that_are_computed_are_those_that_hold_something(name):
    visited, wanted = tiles_of(SPARSE[name], small_tiles(256))
    assert visited == wanted
    assert len(wanted) < 16 * 16 / 2


def test_an_offset_in_an_array_leaves_tiles_out_too():
    mask = masks.window(20, 0) | masks.prefix(16)
    visited, wanted = tiles_of(mask, small_tiles(256), query_offset=jnp.asarray(32))
    assert visited == wanted


def test_lists_without_gaps_need_no_condition():
    def conditions(mask):
        x = jnp.zeros((1, 64, 4))
        text = str(
            jax.make_jaxpr(lambda x: attention(x, x, x, mask=mask, kernel=small_tiles(256)))(x)
        )
        return text.count("cond[")

    window, segments = masks.window(64, 64) | masks.prefix(1), masks.segments(jnp.zeros(64, int))
    assert conditions(window) < conditions(segments)


def test_a_gradient_keeps_what_is_of_tile_size():
    """Of a bias or mask as large as the scores no whole is kept for each tile."""
    kernel = small_tiles(2**16)

    def slope(x, bias, array):
        def loss(x, bias):
            mask = masks.dense(array) | masks.prefix(1)
            return jnp.sum(attention(x, x, x, bias=bias, mask=mask, kernel=kernel))

        return jax.grad(loss, (0, 1))(x, bias)

    x = jax.ShapeDtypeStruct((1, 2048, 64), "float32")
    bias = jax.ShapeDtypeStruct((2048, 2048), "float32")
    array = jax.ShapeDtypeStruct((2048, 2048), "bool")
    temporary = jax.jit(slope).lower(x, bias, array).compile().memory_analysis()
    assert temporary.temp_size_in_bytes < 2 * 2048**2 * 4


@pytest.mark.parametrize(
    "similarity", [scores.distance(), scores.additive(jnp.ones(64))], ids=["distance", "additive"]
)
def test_a_similarity_by_entries_takes_memory_for_a_tile_too(similarity):
    x = jax.ShapeDtypeStruct((1, 2048, 64), "float32")

    def slope(x):
        return jax.grad(lambda x: jnp.sum(attention(x, x, x, similarity=similarity)))(x)

    temporary = jax.jit(slope).lower(x).compile().memory_analysis()
    assert temporary.temp_size_in_bytes < 16 * 2048**2


# ---- compiled once -----------------------------------------------------------------------------


def test_what_arrays_and_seeds_hold_compiles_nothing_anew():
    q, k, v = map(jnp.asarray, (QUERY, KEY, VALUE))
    compiled._clear_cache()
    outputs = []
    for number, seed in enumerate((1, 2**63, jnp.asarray(7), jnp.asarray(8))):
        ids = jnp.asarray((QUERY_IDS * number) % 3), jnp.asarray((KEY_IDS * number) % 3)
        mod = scores.alibi(jnp.asarray(SLOPES) * (number + 1))
        options = {"mask": masks.segments(*ids), "score_mod": mod, "dropout": (0.5, seed)}
        outputs.append(attention(q, k, v, **options))
    assert compiled._cache_size() == 2  # of a number, and of an array
    assert len({float(jnp.sum(output)) for output in outputs}) == 4


def test_what_is_static_in_a_value_is_compiled_for():
    q, k, v = map(jnp.asarray, (QUERY, KEY, VALUE))
    compiled._clear_cache()
    for step in (2, 3, 3):
        ours = attention(q, k, v, mask=masks.dilated(step))
        expected = attention(QUERY, KEY, VALUE, mask=masks.dilated(step))
        np.testing.assert_allclose(ours, expected, atol=5e-6)
    assert compiled._cache_size() == 2


# ---- dropout -----------------------------------------------------------------------------------


def kept_by(q, k, v, seed, kernel):
    weights = attention(q, k, v, dropout=(0.3, seed), kernel=kernel)
    return np.asarray(weights) != 0


def test_a_seed_may_be_traced_and_mapped_over():
    eye = np.broadcast_to(np.eye(S, dtype=np.float32), (B, G, S, S))
    arrays = tuple(map(jnp.asarray, (QUERY, KEY, eye)))
    seeds = jnp.asarray([3, 4], jnp.uint32)

    def call(seed):
        return attention(*arrays, dropout=(0.3, seed), kernel=small_tiles())

    for number, ours in zip((3, 4), jax.jit(jax.vmap(call))(seeds), strict=True):
        expected = kept_by(QUERY, KEY, eye, number, "dense")
        np.testing.assert_array_equal(np.asarray(ours) != 0, expected)


@pytest.mark.parametrize("seed", [np.int64(2**40 + 7), np.uint64(2**63 + 5)])
def test_a_seed_of_another_library_keeps_its_64_bits(seed):
    ours = attention(QUERY, KEY, VALUE, dropout=(0.3, seed), backend="jax")
    expected = attention(QUERY, KEY, VALUE, dropout=(0.3, int(seed)))
    np.testing.assert_allclose(ours, expected, atol=5e-6)


def test_ids_that_jax_cannot_hold_are_refused_and_large_ones_told_apart():
    x = np.ones((1, 4, 8), np.float32)
    value = np.arange(4, dtype=np.float32)[None, :, None]
    for top, error in ((2**31 - 2, None), (2**33, ValueError)):
        mask = masks.segments(np.array([top, top + 1, top, top + 1]))
        if error is None:
            output = attention(x, x, value, mask=mask, backend="jax")
            np.testing.assert_allclose(output[0, :, 0], [1, 2, 1, 2])
        else:
            with pytest.raises(error, match="32 bits"):
                attention(x, x, value, mask=mask, backend="jax")
