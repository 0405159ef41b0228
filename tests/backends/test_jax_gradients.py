"""Gradients of JAX's kernels: forward and reverse mode, of any order, by tiles."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyattn import attention, attention_backward, attention_partial, masks, scores
from polyattn_jax.backend import JaxBackend
from polyattn_jax.xla import Xla

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(*shape):
    return RNG.standard_normal(shape)


def in_jax(arrays):
    return jax.tree.map(jnp.asarray, arrays)


def in_tiles(most=48):
    kernel = copy.copy(Xla())
    kernel.tile = most
    return kernel


# Two blocks of rows, of 6 and 5, and tiles of 7 keys, of which the last repeats one.
QUERY, KEY, VALUE = draw(2, 4, 11, 3), draw(2, 2, 13, 3), draw(2, 2, 13, 5)


def by_position(x):
    return {
        **{"is_causal": True, "window": (6, None), "query_offset": -1, "softcap": 1.5},
        **{"bias": x["bias"], "sinks": x["sinks"]},
    }


def by_expressions(x):
    lengths = jnp.asarray([13, 4])
    return {
        **{"mask": masks.padding(lengths), "score_mod": scores.alibi(x["slopes"])},
        **{"dropout": (0.3, 5), "bias": x["bias"]},
    }


def by_functions(x):
    def mod(s, b, h, i, j):
        return jnp.where(j == 2, -jnp.inf, s - x["slopes"][h] * abs(i - j) * jnp.mean(x["value"]))

    return {"score_mod": mod, "mask": lambda b, h, i, j: (i + j + b) % 3 != 0}


def by_similarity(x):
    offset = jnp.asarray([0, 5])
    return {
        **{"similarity": scores.additive(x["weight"]), "scale": 0.4, "bias": x["bias"]},
        **{"is_causal": True, "query_offset": offset},
    }


CALLS = {
    "position": (by_position, {"bias": draw(4, 11, 13), "sinks": draw(4)}),
    "expressions": (by_expressions, {"slopes": draw(4), "bias": draw(2, 1, 1, 13)}),
    "functions": (by_functions, {"slopes": draw(4)}),
    "similarity": (by_similarity, {"weight": draw(3), "bias": draw(11, 1), "key": KEY[0]}),
}


def of_operands(x):
    return x["query"], x["key"], x["value"]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_in_tiles_are_those_of_the_formula(name):
    options, more = CALLS[name]
    x = in_jax({"query": QUERY, "key": KEY, "value": VALUE} | more)
    along, direct = in_jax((draw(2, 4, 11, 5), draw(2, 4, 11)))

    def loss(x, kernel):
        output, logsumexp = attention_partial(*of_operands(x), kernel=kernel, **options(x))
        seen = jnp.where(logsumexp == -jnp.inf, 0, logsumexp)
        return jnp.vdot(along, output) + jnp.vdot(direct, seen)

    def explicit(x):
        arrays, given = of_operands(x), options(x)
        partial = attention_partial(*arrays, kernel=in_tiles(), **given)
        return attention_backward(
            *arrays, partial, along, logsumexp_gradient=direct, kernel=in_tiles(), **given
        )

    expected = jax.jit(jax.grad(lambda x: loss(x, "dense")))(x)
    found = jax.jit(jax.grad(lambda x: loss(x, in_tiles())))(x)
    for operand, gradient in expected.items():
        np.testing.assert_allclose(found[operand], gradient, atol=1e-12, err_msg=operand)
    if name == "functions":  # no one gives it the arrays that they use
        return
    ours = jax.jit(lambda x: explicit(x)._replace(score_mod=None, similarity=None))(x)._asdict()
    for operand in expected.keys() & ours.keys():
        np.testing.assert_allclose(ours[operand], expected[operand], atol=1e-12, err_msg=operand)


def test_all_transforms_compose():
    shapes = (1, 4, 2), (1, 5, 2), (1, 5, 2), (4, 5), (3,)
    q, k, v, bias, slope = in_jax([draw(*shape) for shape in shapes])

    def results(kernel):
        def call(q, k, v, bias=bias, slope=0.1):
            def mod(s, b, h, i, j):
                return s * slope * j

            return attention(q, k, v, bias=bias, is_causal=True, score_mod=mod, kernel=kernel)

        def loss(q, bias, slope=0.1):
            return jnp.sum(jnp.sin(call(q, k, v, bias, slope)))

        def of_many(slope):
            return jnp.sum(jax.vmap(lambda slope: loss(q, bias, slope))(slope) ** 2)

        return {
            "jvp": jax.jvp(lambda k, v: call(q, k, v), (k, v), (jnp.cos(k), jnp.sin(v))),
            "hessian": jax.jacfwd(jax.jacrev(loss))(q, bias),
            "of the bias only": jax.grad(loss, 1)(q, bias),
            "vmap of grad": jax.vmap(lambda slope: jax.grad(loss, (0, 2))(q, bias, slope))(slope),
            "grad of vmap": jax.grad(of_many)(slope),
        }

    expected, found = jax.jit(lambda: (results("dense"), results(in_tiles(6))))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found, expected)


def hiding(j):
    return (j == 3) | (j == 4)


HIDDEN = {
    "by an array, softcap": {
        **{"mask": ~hiding(np.arange(13)) & (np.arange(11)[:, None] != 2), "softcap": 1.5},
    },
    "by functions": {
        "score_mod": lambda s, b, h, i, j: jnp.where(j == 3, -jnp.inf, s),
        "mask": lambda b, h, i, j: (j != 4) & (i != 2),
    },
    "by a mask value, another similarity": {
        "mask": masks.rule(lambda b, h, i, j: ~hiding(j) & (i != 2)),
        **{"similarity": scores.distance(2), "is_causal": True},
    },
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_changes_no_gradient(name):
    options = {
        key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in HIDDEN[name].items()
    }

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, kernel=in_tiles(), **options)))

    slopes = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = slopes(QUERY, KEY, VALUE)
    for spoilt in (np.nan, np.inf, -np.inf):
        q, k, v = QUERY.copy(), KEY.copy(), VALUE.copy()
        q[..., 2, :] = spoilt  # a row that sees nothing
        k[..., 3:5, :] = v[..., 3:5, :] = spoilt
        for ours, theirs in zip(slopes(q, k, v), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_memory_is_for_a_few_tiles():
    def loss(q, k, v, bias):
        return jnp.sum(attention(q, k, v, bias=bias, kernel=in_tiles(2**14)))

    shapes = [(1, 1, 1024, 8)] * 3 + [(1024, 1024)]
    arrays = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024**2 * 4


def test_the_backend_differentiates_functions():
    x, gradient = jnp.asarray(draw(3)), jnp.asarray(draw(3))
    found = JaxBackend().pullback(jnp.sin, x, gradient)
    np.testing.assert_allclose(found, jnp.cos(x) * gradient)
