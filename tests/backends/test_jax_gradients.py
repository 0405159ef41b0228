"""Gradients of JAX's kernels: forward and reverse mode, of any order, by tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyattn import attention, attention_jvp, attention_partial, attention_vjp, masks, scores
from polyattn._kernels.tiled import Tiled
from polyattn_jax import tile
from polyattn_jax.xla import Xla

RNG = np.random.default_rng(0)
ARRAYS = ("query", "key", "value", "bias", "sinks")


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(*shape):
    return RNG.standard_normal(shape)


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
QUERY, KEY, VALUE = draw(2, 4, 10, 2), draw(2, 2, 13, 2), draw(2, 2, 13, 3)
ALONG, DIRECT = draw(2, 4, 10, 3), draw(2, 4, 10)


def by_scores(x):
    return {
        **{"mask": masks.padding(like(x, [13, 4])), "score_mod": scores.alibi(x["slopes"])},
        **{"bias": x["bias"], "sinks": x["sinks"], "softcap": 1.5},
        **{"is_causal": True, "window": (6, None), "query_offset": -1},
    }


def by_similarity(x):
    return {
        **{"similarity": scores.additive(x["weight"]), "scale": 0.4, "bias": x["bias"]},
        **{"is_causal": True, "query_offset": like(x, [0, 5])},
    }


CALLS = {
    "scores": (by_scores, {"slopes": draw(4), "bias": draw(1, 4, 10, 13), "sinks": draw(4)}),
    "similarity": (by_similarity, {"weight": draw(2), "bias": draw(10, 1), "key": KEY[0]}),
}


def like(x, numbers):
    """Return an array of the library of the operands."""
    return (np if isinstance(x["query"], np.ndarray) else jnp).asarray(numbers)


def of_operands(x):
    return x["query"], x["key"], x["value"]


def by_name(gradients):
    """Return the gradients of the arrays that `CALLS` names."""
    found = {name: x for name, x in gradients._asdict().items() if name in ARRAYS and x is not None}
    if gradients.score_mod is not None:
        found["slopes"] = gradients.score_mod.slopes
    if gradients.similarity is not None:
        found["weight"] = gradients.similarity.weight
    return found


@pytest.mark.parametrize("name", ["scores", pytest.param("similarity", marks=pytest.mark.slow)])
def test_gradients_in_tiles_are_those_of_the_formula(name):
    options, more = CALLS[name]
    x = {"query": QUERY, "key": KEY, "value": VALUE} | more

    def loss(x):
        output, logsumexp = attention_partial(*of_operands(x), kernel=in_tiles(), **options(x))
        seen = jnp.where(logsumexp == -jnp.inf, 0, logsumexp)
        return jnp.vdot(ALONG, output) + jnp.vdot(DIRECT, seen)

    _, pullback = attention_vjp(*of_operands(x), **options(x))
    expected = by_name(pullback(ALONG, DIRECT))
    for operand, gradient in quickly(jax.grad(loss))(in_jax(x)).items():
        np.testing.assert_allclose(gradient, expected[operand], atol=1e-12, err_msg=operand)


@pytest.mark.slow
def test_the_kernel_has_the_derivatives_itself():
    options, more = CALLS["similarity"]
    x = {"query": QUERY, "key": KEY, "value": VALUE} | more
    tangents = {"query": QUERY[::-1], "value": VALUE[::-1], "bias": x["bias"]}
    moved = {"primals": of_operands(x), "tangents": tangents}

    def derivatives(x, along, moved, kernel=None):
        given = options(x) | {"softcap": 1.5, "kernel": kernel}
        _, pullback = attention_vjp(*of_operands(x), **given)
        _, tangent = attention_jvp(**moved, **given)
        gradients = pullback(along)
        numbers = {"softcap": gradients.softcap, "scale": gradients.scale}
        return by_name(gradients) | numbers | {"tangent": tangent}

    run = quickly(lambda *given: derivatives(*given, kernel=in_tiles()))
    found, expected = run(*in_jax((x, ALONG, moved))), derivatives(x, ALONG, moved)
    assert found.keys() == expected.keys()
    for operand, gradient in expected.items():
        np.testing.assert_allclose(found[operand], gradient, atol=1e-12, err_msg=operand)


@pytest.mark.slow
def test_all_transforms_compose():
    shapes = (1, 3, 2), (1, 4, 2), (1, 4, 2), (3, 4), (2,)
    q, k, v, bias, slope = in_jax([draw(*shape) for shape in shapes])

    def results(kernel):
        def loss(q, bias, slope=0.1):
            def mod(s, b, h, i, j):
                return s * slope * j

            # Some tiles are left out.
            mask = masks.segments(jnp.arange(3) // 2, jnp.arange(4) // 2) | masks.prefix(1)
            options = {"bias": bias, "is_causal": True, "score_mod": mod, "mask": mask}
            return jnp.sum(jnp.sin(attention(q, k, v, kernel=kernel, **options)))

        def of_many(slope):
            return jnp.sum(jax.vmap(lambda slope: loss(q, bias, slope))(slope) ** 2)

        return {
            "hessian": jax.jacfwd(jax.grad(loss, (0, 1)))(q, bias),
            "grad of vmap": jax.grad(of_many)(slope),
        }

    expected, found = quickly(lambda: (results("dense"), results(in_tiles(6))))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found, expected)


@pytest.mark.parametrize("kernel", ["xla", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_function_has_no_slope_where_a_key_is_hidden(kernel):
    mask, k = jnp.arange(13) != 4, jnp.asarray(KEY).at[..., 4, :].set(jnp.nan)
    options = {"mask": mask, "score_mod": lambda s, b, h, i, j: jnp.sqrt(abs(s)), "kernel": kernel}

    def gradients(*x):
        _, pullback = attention_vjp(*x, **options)
        slopes = jax.grad(lambda *x: jnp.sum(attention(*x, **options) * ALONG), (0, 1, 2))
        return slopes(*x), pullback(jnp.asarray(ALONG))[:3]

    for found in quickly(gradients)(QUERY, k, VALUE):
        assert all(jnp.isfinite(x).all() for x in found)
        assert not found[1][..., 4, :].any()


@pytest.mark.slow
def test_a_row_that_sees_no_key_adds_nothing_to_the_gradient_of_the_scale():
    options = {"mask": masks.dense(np.arange(10)[:, None] != 2)}
    expected = attention_vjp(QUERY, KEY, VALUE, **options)[1](ALONG).scale
    spoilt = jnp.asarray(QUERY).at[..., 2, :].set(jnp.nan)
    _, pullback = attention_vjp(spoilt, *in_jax((KEY, VALUE)), kernel=in_tiles(), **options)
    np.testing.assert_allclose(pullback(jnp.asarray(ALONG)).scale, expected)


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
    key = draw(2, 2, 40, 2)  # two tiles of 8 keys for each 5 rows
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


def test_a_distance_of_longer_vectors_is_no_longer_program():
    """XLA is slow to compile, and to run, an expression of all entries."""

    def size_of(length):
        x = jax.ShapeDtypeStruct((1, 16, length), "float32")

        def loss(q, k):
            return jnp.sum(attention(q, k, k, similarity=scores.distance(1), kernel="xla"))

        return len(str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, x)))

    assert size_of(64) < 1.1 * size_of(8)


@pytest.mark.parametrize("rows", [1, 12, 13])
def test_a_distance_is_summed_for_some_rows_at_a_time(monkeypatch, rows):
    """Of all rows at once each step of the sum would read and write memory, and not the cache."""
    query, key = draw(2, 4, rows, 6), draw(2, 4, 9, 6)
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
