"""Gradients of JAX's kernels: forward and reverse mode, of any order, by tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import close, draw

from polyattn import attention, attention_jvp, attention_partial, attention_vjp, masks, scores
from polyattn._kernels.tiled import Tiled
from polyattn_jax import tile
from polyattn_jax.xla import Xla


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def in_jax(arrays):
    return jax.tree.map(jnp.asarray, arrays)


def in_tiles(most=48):
    kernel = Xla()
    kernel.tile = most
    return kernel


def quickly(function):
    """Compile a function whose speed does not matter."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


# Blocks of 5 rows, and tiles of 7 keys, of which the last repeats one.
QUERY, KEY, VALUE, ALONG, DIRECT = draw(
    (2, 4, 10, 2), (2, 2, 13, 2), (2, 2, 13, 3), (2, 4, 10, 3), (2, 4, 10), dtype="float64"
)


def test_gradients_in_tiles_are_those_of_the_formula():
    bias, sinks, slopes = draw((1, 4, 10, 13), (4,), (4,), dtype="float64", seed=1)

    def options(lengths, bias, sinks, slopes):
        return {
            **{"mask": masks.padding(lengths), "score_mod": scores.alibi(slopes)},
            **{"bias": bias, "sinks": sinks, "softcap": 1.5},
            **{"is_causal": True, "window": (6, None), "query_offset": -1},
        }

    def loss(query, key, value, *more):
        given = options(jnp.asarray([13, 4]), *more)
        output, logsumexp = attention_partial(query, key, value, kernel=in_tiles(), **given)
        seen = jnp.where(logsumexp == -jnp.inf, 0, logsumexp)
        return jnp.vdot(ALONG, output) + jnp.vdot(DIRECT, seen)

    x = QUERY, KEY, VALUE, bias, sinks, slopes
    _, pullback = attention_vjp(*x[:3], **options(np.array([13, 4]), *x[3:]))
    of = pullback(ALONG, DIRECT)
    expected = of.query, of.key, of.value, of.bias, of.sinks, of.score_mod.slopes
    close(quickly(jax.grad(loss, range(6)))(*in_jax(x)), expected, 1000)


@pytest.mark.slow
def test_second_derivatives_and_maps_in_tiles_are_those_of_the_formula():
    q, k, v, slopes = in_jax(draw((1, 3, 2), (1, 4, 2), (1, 4, 2), (2,), dtype="float64"))

    def results(kernel):
        def loss(q, slope):
            # Some tiles are left out.
            mask = masks.segments(jnp.arange(3) // 2, jnp.arange(4) // 2) | masks.prefix(1)
            options = {"is_causal": True, "score_mod": lambda s, b, h, i, j: s * slope * j}
            return jnp.sum(jnp.sin(attention(q, k, v, kernel=kernel, mask=mask, **options)))

        of_many = jax.grad(lambda slopes: jnp.sum(jax.vmap(loss, (None, 0))(q, slopes)))
        return jax.jacfwd(jax.grad(loss))(q, slopes[0]), of_many(slopes)

    close(*quickly(lambda: (results("dense"), results(in_tiles(6))))(), 1000)


def test_a_function_has_no_slope_where_a_key_is_hidden():
    mask, k = jnp.arange(13) != 4, jnp.asarray(KEY).at[..., 4, :].set(jnp.nan)
    options = {"mask": mask, "score_mod": lambda s, b, h, i, j: jnp.sqrt(abs(s)), "kernel": "xla"}

    def gradients(*x):
        _, pullback = attention_vjp(*x, **options)
        slopes = jax.grad(lambda *x: jnp.sum(attention(*x, **options) * ALONG), (0, 1, 2))
        return slopes(*x), pullback(jnp.asarray(ALONG))[:3]

    for found in quickly(gradients)(QUERY, k, VALUE):
        assert all(jnp.isfinite(x).all() for x in found)
        assert not found[1][..., 4, :].any()


def test_the_tangent_of_a_value_reaches_the_rows_that_see_it():
    of_key, of_value, mask = KEY.copy(), VALUE.copy(), np.arange(13) != 4
    of_key[..., 4, :] = of_value[..., 6, :] = np.nan  # the key is hidden
    given = (QUERY, KEY, VALUE), (QUERY, of_key, of_value), mask
    expected, found = (
        attention_jvp(primals, tangents, mask=mask, is_causal=True, kernel=kernel)[1]
        for (primals, tangents, mask), kernel in ((given, None), (in_jax(given), in_tiles()))
    )
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_tiles_of_a_window_follow_an_offset_in_an_array_up_to_the_last_key():
    (key,) = draw((2, 2, 40, 2), dtype="float64")  # two tiles of 8 keys for each 5 rows
    attend = jax.jit(
        lambda *x: attention(*x[:3], window=(9, 2), query_offset=x[3], kernel=in_tiles())
    )
    for offset in (-12, 0, 17, 30, 38):
        expected = attention(QUERY, key, key, window=(9, 2), query_offset=offset)
        found = attend(*in_jax((QUERY, key, key)), offset)
        np.testing.assert_allclose(found, expected, atol=1e-12, err_msg=str(offset))


def test_what_tiled_takes_xla_takes_too():
    """The core's kernel, unrolled by XLA, has memory for all tiles: it must not be chosen."""
    assert Tiled.features <= Xla.features


@pytest.mark.parametrize("rows", [1, 12])
def test_a_distance_is_summed_for_some_rows_at_a_time(monkeypatch, rows):
    """Of all rows at once each step of the sum would read and write memory, and not the cache."""
    query, key = draw((2, 4, rows, 6), (2, 4, 9, 6), dtype="float64")
    options = {"similarity": scores.distance(), "scale": scores.by_norm()}
    monkeypatch.setattr(tile, "BLOCK", 2 * 4 * 9 * 5)

    def call(q, k):
        return attention(q, k, k, backend="jax", kernel="dense", **options)

    program = str(jax.make_jaxpr(call)(query, key))
    assert ("scan" in program) == (rows > 1)
    assert ("[3,2,4,4,9]" in program) == (rows == 12)  # three blocks
    if rows > 1:
        found, expected = quickly(call)(query, key), attention(query, key, key, **options)
        np.testing.assert_allclose(found, expected, atol=1e-5)
