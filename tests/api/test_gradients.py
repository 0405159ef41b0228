"""Gradients and directional derivatives without automatic differentiation."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from arrays import close, draw

import polyattn
from polyattn import (
    Gradients,
    Partial,
    attention,
    attention_backward,
    attention_jvp,
    attention_partial,
    attention_vjp,
    merge,
    parallel,
    scores,
)
from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks.gradients import compare
from polyattn.conformance.checks.target import Target
from polyattn.conformance.reference.gradients import cotangent

SHAPES = ((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 5))
QUERY, KEY, VALUE, ALONG = draw(*SHAPES, (2, 4, 9, 5), dtype="float64")


def test_a_gradient_has_the_rank_of_its_array():
    given = draw((9, 8), (13, 8), (3, 1, 13, 5))
    output, pullback = attention_vjp(*given)
    assert [x.shape for x in pullback(output)[:3]] == [x.shape for x in given]


def test_the_shares_of_parts_of_the_keys_add_up():
    query, key, value, along = draw(*SHAPES, ALONG.shape, dtype="float16")
    options = {"is_causal": True, "softcap": 2.0}
    parts = [(slice(0, 5), 4), (slice(5, 13), -1)]

    def of(part, offset):
        return {"key": key[..., part, :], "value": value[..., part, :], "query_offset": offset}

    whole = merge(*(attention_partial(query, **of(*p), **options) for p in parts))
    found, of_keys = Gradients(), []
    for part in parts:
        found = attention_backward(
            query, partial=whole, output_gradient=along, into=Gradients(query=found.query),
            **of(*part), **options,
        )  # fmt: skip
        assert found.query.dtype == "float32"
        of_keys.append(found[1:3])
    sums = found.query, *(np.concatenate(some, axis=-2) for some in zip(*of_keys, strict=True))
    expected = attention_vjp(query, key, value, **options)[1](along)
    assert expected.query.dtype == "float16"
    close(tuple(x.astype("float16") for x in sums), expected[:3], 10)


def test_a_named_backend():
    primals, tangents = (QUERY, KEY, VALUE), draw(*SHAPES, dtype="float64", seed=1)
    options = {"is_causal": True, "score_mod": scores.alibi(np.linspace(0.1, 1, 4))}
    here = attention_vjp(*primals, **options)[1](ALONG)
    there = attention_vjp(*primals, **options, backend="torch")[1](ALONG)
    assert isinstance(there.query, np.ndarray)
    close(there.query, here.query, 400)
    close(there.score_mod.slopes, here.score_mod.slopes, 4000)
    assert there.bias is there.softcap is there.similarity is None
    here, there = (attention_jvp(primals, tangents, backend=one)[1] for one in (None, "torch"))
    assert isinstance(there, np.ndarray)
    close(there, here, 400)


def test_what_cannot_be_differentiated_is_refused():
    output, pullback = attention_vjp(QUERY, KEY, VALUE, score_mod=lambda s, b, h, i, j: s * s)
    with pytest.raises(polyattn.UnsupportedError, match=r"scores\.function\(f, derivative=g\)"):
        pullback(output)
    with pytest.raises(TypeError, match=r"output_gradient must be an array .* got None"):
        pullback(None)


def backward(**change):
    partial = attention_partial(QUERY, KEY, VALUE)
    given = {"partial": partial, "output_gradient": partial.output} | change
    return attention_backward(QUERY, KEY, VALUE, **given)


def jvp(tangents):
    return attention_jvp((QUERY, KEY, VALUE), tangents)


@pytest.mark.parametrize(
    ("call", "given", "error", "message"),
    [
        (backward, {"partial": None}, TypeError, "partial must be the Partial"),
        (backward, {"into": 0}, TypeError, "into must be Gradients; got a int"),
        (
            backward,
            {"into": Gradients(key=ALONG[0, 0, 0])},
            ValueError,
            r"into\.key .*; got \(5,\)",
        ),
        (backward, {"output_gradient": np.zeros(3)}, ValueError, "must have the shape"),
        (backward, {"output_gradient": ALONG.astype("f4")}, TypeError, "float64 as the query"),
        (backward, {"partial": Partial(ALONG, ALONG[..., 0, 0])}, ValueError, "must be that of"),
        (backward, {"partial": Partial(ALONG, None)}, ValueError, "needs the logsumexp"),
        (jvp, {"tangents": (None,) * 2}, TypeError, "must be those of .* got 2 of them"),
        (jvp, {"tangents": (ALONG[0], None, None)}, ValueError, "tangent of query must have its"),
        (jvp, {"tangents": {"bias": ALONG}}, ValueError, "a tangent of bias, and no bias in"),
        (jvp, {"tangents": {"scale": 1.0}}, TypeError, "those of query, .* got one of 'scale'"),
    ],
)
def test_what_does_not_fit_is_refused(call, given, error, message):
    with pytest.raises(error, match=message):
        call(**given)


def test_float32_partials_of_16_bits_keep_their_digits():
    query, key, value = draw((2, 4, 8), (2, 64, 8), (2, 64, 5), dtype="float16")
    parts = [slice(n, n + 8) for n in range(0, 64, 8)]

    def joined(**options):
        return merge(*(attention_partial(query, key[:, p], value[:, p], **options) for p in parts))

    exact = attention(*(x.astype("float64") for x in (query, key, value)))
    whole = joined(dtype="float32")
    assert whole.output.dtype == "float32"
    assert np.max(np.abs(whole.output - exact)) < 1e-6
    assert np.max(np.abs(joined().output - exact)) > 1e-4
    with pytest.raises(ValueError, match="dtype must be float16 or float32 for this query"):
        joined(dtype="float64")


ALIKE = replace(BACKWARD_CASES["keys of mean 64, bfloat16"], L=20, S=30)


def of_vjp(query, key, value, along, **options):
    output, pullback = attention_vjp(query, key, value, **options)
    assert output.dtype == query.dtype
    return pullback(along)[:3]


def of_torch(query, key, value, along, **options):
    tensors = [x.requires_grad_() for x in (query, key, value)]
    attention(*tensors, **options).backward(along)
    return [x.grad for x in tensors]


def of_ranks(query, key, value, along):
    def of_rank(ranks):
        own = [np.array_split(x, 2, axis=-2)[ranks.rank] for x in (query, key, value, along)]
        _, pullback = parallel.attention_vjp(*own[:3], over=ranks, strategy="gather")
        return pullback(own[3])[:3]

    ranks = parallel.run_threads(2, of_rank)
    return [np.concatenate(parts, -2) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("library", "way"),
    [("numpy", of_vjp), ("torch", partial(of_torch, kernel="tiled")), ("numpy", of_ranks)],
)
def test_the_output_is_not_rounded_before_its_gradient(library, way):
    target = Target("array-api", library)
    given = *ALIKE.arguments()[0], cotangent(ALIKE)
    found = map(target.back, way(*map(target.to, given)))
    compare(ALIKE, dict(zip(("query", "key", "value"), found, strict=True)))


class Narrow(Dense):
    """Computes calls of 16 bits only."""

    def reasons_against(self, problem):
        return [] if problem.dtype == "float16" else [f"it does not compute {problem.dtype}"]


class Rounding(Dense):
    """Does not promise gradients that are rounded once."""

    promises = Dense.promises - {"rounds_once"}


@pytest.mark.parametrize("kind", [Narrow, Rounding])
def test_a_kernel_gets_the_dtype_of_sums_only_if_it_takes_it(kind):
    seen = set()

    class Seen(kind):
        def __call__(self, problem, operands, backend):
            seen.add(problem.dtype)
            return super().__call__(problem, operands, backend)

    of_vjp(*[np.ones((2, 3, 4), "float16")] * 4, kernel=Seen())
    assert seen == {"float16"}


@pytest.mark.parametrize("kernel", [None, "dense"])
@pytest.mark.parametrize("options", [{}, {"sinks": np.zeros(2, "float16")}], ids=str)
def test_derivatives_of_16_bits_are_quiet(options, kernel):
    """What float16 cannot hold becomes 0 or ±inf, as in the output."""
    x = 30 * draw((3, 2, 6, 8), dtype="float16")[0]
    with np.errstate(all="raise"):
        output, pullback = attention_vjp(*x, kernel=kernel, **options)
        gradients = pullback(np.full_like(output, 6e4))
        _, tangent = attention_jvp(tuple(x), tuple(10 * x), kernel=kernel, **options)
    assert np.isinf(gradients.value).any()
    assert (gradients.query == 0).any()
    assert np.isfinite(tangent).all()


def test_gradients_print_their_shapes_and_are_a_tuple():
    x = np.ones((2, 3, 4), np.float32)
    gradients = attention_vjp(x, x, x, score_mod=scores.alibi(np.ones(2)))[1](x)
    shown = "Gradients(query: (2, 3, 4) float32, key: (2, 3, 4) float32, value: (2, 3, 4) float32"
    assert repr(gradients).startswith(f"{shown}, score_mod: scores.alibi(<(2,) float64>)")
    assert list(gradients) == [getattr(gradients, name) for name in Gradients._fields]


def test_no_tangent_is_a_tangent_of_0():
    output, tangent = attention_jvp((QUERY, KEY, VALUE), (None, None, None))
    assert np.array_equal(output, attention(QUERY, KEY, VALUE))
    assert not tangent.any()
