"""Masks and scores as values, and dropout, in JAX: tiles, gradients, memory, compiled code."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import draw

from polyattn import attention, explain, masks, scores
from polyattn_jax.loop_layout import block_sizes
from polyattn_jax.xla import Xla, compiled

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(5)
B, H, G, L, S, D = 2, 4, 2, 37, 41, 8


QUERY, KEY, VALUE = draw((B, H, L, D), (B, G, S, D), (B, G, S, D))
QUERY_IDS, KEY_IDS = np.sort(RNG.integers(0, 5, (B, L))), np.sort(RNG.integers(0, 5, (B, S)))
SLOPES = np.arange(1.0, H + 1, dtype=np.float32)


def small_tiles(number=150):
    kernel = copy.copy(Xla())
    kernel.tile = number
    return kernel


# ---- vmap ---------------------------------------------------------------------------------------


def test_vmap_over_ids_leaves_tiles_out():
    def call(q, k, v, query_ids, key_ids):
        mask = masks.causal() & masks.segments(query_ids, key_ids)
        return attention(q, k, v, mask=mask, kernel=small_tiles())

    arrays = [jnp.asarray(x) for x in (QUERY, KEY, VALUE, QUERY_IDS, KEY_IDS)]
    one = str(jax.make_jaxpr(call)(*(x[0] for x in arrays)))
    mapped = str(jax.make_jaxpr(jax.vmap(call))(*arrays))
    assert mapped.count("cond[") == one.count("cond[") > 0


def test_a_position_that_hides_every_tile_of_a_mask_leaves_rows_of_0():
    query, key = jnp.ones((2, 2, 3, 8)), jnp.ones((2, 1, 4, 8))
    options = {"is_causal": True, "query_offset": -3, "mask": masks.prefix(np.array([1, 2]))}

    def total(*arrays):
        return attention(*arrays, **options).sum()

    assert "xla" in str(explain(query, key, key, **options).chosen)
    value, gradients = jax.value_and_grad(total, (0, 1, 2))(query, key, key)
    assert not any(jnp.any(x) for x in (value, *gradients))


# ---- tiles that are gone over ------------------------------------------------------------------

IDS = jnp.asarray(np.repeat(np.arange(8), 32))
SPARSE = {
    "static, at an offset": (masks.window(20, 0) | masks.prefix(16), 32),
    "compiled": (masks.compile(masks.dense(IDS[:, None] == IDS), 256, tile=16), 0),
    "segments and causal": (masks.causal() & masks.segments(IDS), 0),
    "padding": (masks.padding(jnp.asarray(40), jnp.asarray(70)), 0),
    "dense": (masks.dense(IDS[:, None] == IDS) | masks.prefix(0), 0),
}


@pytest.mark.parametrize("name", SPARSE)
def test_the_tiles_that_are_computed_are_those_that_hold_something(name):
    mask, offset = SPARSE[name]
    options = {"mask": mask} | ({"query_offset": jnp.asarray(offset)} if offset else {})
    kernel, visited, shape = small_tiles(256), [], (1, 256, 4)

    def noted(score, b, h, i, j):
        first = i.ravel()[0], j.ravel()[0]
        jax.debug.callback(lambda i, j: visited.append((int(i), int(j))), *first)
        return score

    def call(x):
        return attention(x, x, x, kernel=kernel, score_mod=noted, **options)

    jax.block_until_ready(jax.jit(call)(jnp.zeros(shape)))
    jax.effects_barrier()
    problem = explain(shape, shape, shape, mask=mask, library="jax").problem
    rows, columns = block_sizes(problem, kernel.tile)
    assert 256 % rows == 256 % columns == 0
    index = jnp.arange(256)
    seen = np.asarray(mask(0, 0, index[:, None] + offset, index))
    seen = seen.reshape(256 // rows, rows, 256 // columns, columns).any((1, 3))
    wanted = [(int(r) * rows, int(c) * columns) for r, c in np.argwhere(seen)]
    assert sorted(visited) == wanted
    assert len(wanted) < 16 * 16 / 2


def test_a_gradient_keeps_what_is_of_tile_size():
    """No tile keeps a copy of a bias or mask that is as large as the scores."""

    def loss(x, bias, array):
        mask = masks.dense(array) | masks.prefix(1)
        return jnp.sum(attention(x, x, x, bias=bias, mask=mask, kernel=small_tiles(2**16)))

    shapes = ((1, 2048, 64), "float32"), ((2048, 2048), "float32"), ((2048, 2048), "bool")
    given = (jax.ShapeDtypeStruct(*one) for one in shapes)
    made = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile().memory_analysis()
    assert made.temp_size_in_bytes < 2 * 4 * 2048**2


# ---- compiled once -----------------------------------------------------------------------------


def test_what_arrays_and_seeds_hold_compiles_nothing_anew_but_what_is_static_does():
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
    for step in (2, 3, 3):
        found = attention(q, k, v, mask=masks.dilated(step))
        expected = attention(QUERY, KEY, VALUE, mask=masks.dilated(step))
        np.testing.assert_allclose(found, expected, atol=5e-6)
    assert compiled._cache_size() == 4


# ---- numbers of 64 bits ------------------------------------------------------------------------


def test_a_seed_of_another_library_keeps_its_64_bits():
    seed = np.uint64(2**63 + 5)
    ours = attention(QUERY, KEY, VALUE, dropout=(0.3, seed), backend="jax")
    expected = attention(QUERY, KEY, VALUE, dropout=(0.3, int(seed)))
    np.testing.assert_allclose(ours, expected, atol=5e-6)


def test_ids_that_jax_cannot_hold_are_refused_and_large_ones_told_apart():
    x, value = np.ones((1, 4, 8), np.float32), np.arange(4, dtype=np.float32)[None, :, None]

    def call(top):
        mask = masks.segments(np.array([top, top + 1, top, top + 1]))
        return attention(x, x, value, mask=mask, backend="jax")

    np.testing.assert_allclose(call(2**31 - 2)[0, :, 0], [1, 2, 1, 2])
    with pytest.raises(ValueError, match="32 bits"):
        call(2**33)
