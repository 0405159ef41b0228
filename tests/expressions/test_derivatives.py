"""The derivatives of expressions, against torch's derivatives of the expressions."""

from functools import partial

import numpy as np
import pytest
from arrays import EVERYWHERE, NUMPY, TORCH, close
from optional import TorchBackend, torch

from polyattn import attention_jvp, attention_vjp, explain, scores
from polyattn._base.arrays import is_array, library_of
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.tiles.indices import Indices
from polyattn.plugin import BackendPrimitives
from polyattn_numpy.backend import NumpyBackend

B, H, L, S, D = 2, 6, 5, 7, 4
RNG = np.random.default_rng(7)
SCORES, GRADIENT, TANGENT = (2 * RNG.normal(size=(B, H, L, S)) for _ in range(3))
QUERY, KEY, QUERY_TANGENT, KEY_TANGENT = (RNG.normal(size=(B, H, n, D)) for n in (L, S, L, S))
SLOPES, TABLE, WEIGHT = RNG.random(H), RNG.normal(size=(8, H)), RNG.normal(size=D)
XP = library_of(TORCH.to(SCORES)).xp
CLOSE = {"rtol": 1e-12, "atol": 1e-13}
# torch itself uses it where it is first asked for a forward derivative.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def squared(score, b, h, i, j):
    return score * score


def twice(score, b, h, i, j):
    return 2 * score


def chain(to):
    first = scores.alibi(to(SLOPES)) >> scores.function(squared, twice)
    bias = scores.relative_bias(to(TABLE), bidirectional=False, max_distance=6)
    return first >> bias >> scores.softcap(3.0) >> scores.temperature(2.5)


def tile(to):
    """Return the indices of all scores of a call whose arrays `to` makes."""
    query, key = to(QUERY), to(KEY)
    problem = explain(query, key, key, backend="array-api").problem
    operands = Operands(query=query, key=key, value=key)
    return Indices(problem, library_of(query).xp, operands, Span(0, L), Span(0, S))


def arrays_of(expression):
    return [thing for _, thing in expression.carried() if is_array(thing)]


def with_arrays(expression, arrays):
    rest = iter(arrays)
    return expression.map(lambda _, thing: next(rest) if is_array(thing) else thing)


def torch_gradients(forward, inputs, gradient):
    """Return the gradients of the inputs of a function by torch, 0 for one that is not used."""
    inputs = [torch.tensor(np.asarray(x), requires_grad=True) for x in inputs]
    found = torch.autograd.grad(
        forward(*inputs), inputs, torch.tensor(gradient), materialize_grads=True
    )
    return [x.numpy() for x in found]


# ---- score modifications -----------------------------------------------------------------------


def test_a_derivative_that_is_not_finite_leaves_a_gradient_of_0():
    value = scores.function(lambda s, *at: s**0.5, lambda s, *at: 0.5 / s**0.5)
    with np.errstate(divide="ignore"):
        found, _ = value.pullback(0 * SCORES, tile(np.array), 0 * GRADIENT)
    np.testing.assert_array_equal(found, 0)


def test_a_gradient_of_0_has_a_second_derivative():
    value, at = scores.softcap(1.5), tile(TORCH.to)
    s, gradient = torch.tensor(SCORES), torch.zeros(SCORES.shape, dtype=torch.float64)
    _, found = torch.func.jvp(
        lambda g: value.pullback(s, at, g)[0], (gradient,), (torch.tensor(TANGENT),)
    )
    np.testing.assert_allclose(found, value.pullback(s, at, torch.tensor(TANGENT))[0], **CLOSE)


# ---- functions with a derivative ---------------------------------------------------------------


def test_a_library_differentiates_a_function_among_other_modifications():
    arrays, results = [torch.asarray(x) for x in (QUERY, KEY, KEY)], []
    tangents = [torch.asarray(x) for x in (QUERY_TANGENT, KEY_TANGENT, KEY_TANGENT)]
    for derivative in (None, twice):
        rule = scores.function(squared, derivative) >> scores.temperature(2.0)
        output, pullback = attention_vjp(*arrays, score_mod=rule)
        _, tangent = attention_jvp(arrays, tangents, score_mod=rule)
        results.append((*pullback(output)[:3], tangent))
    close(*results)


def test_a_function_alone_keeps_its_derivative():
    shape = (B, H, L, D)
    problem = explain(shape, shape, shape, score_mod=scores.function(squared, twice)).problem
    assert problem.features == {"score_mod", "score_expression"}
    assert str(problem.score_spec) == "scores.function(<function>, <function>)"
    plain = explain(shape, shape, shape, score_mod=scores.function(squared)).problem
    assert plain.features == {"score_mod"}
    with pytest.raises(TypeError, match="the derivative of score_mod must take"):
        explain(shape, shape, shape, score_mod=scores.function(squared, lambda score: score))


# ---- similarities ------------------------------------------------------------------------------

SIMILAR = {
    "cosine": lambda to: scores.cosine(),
    "distance": lambda to: scores.distance(),
    "distance of 1": lambda to: scores.distance(p=1),
    "additive": lambda to: scores.additive(to(WEIGHT)),
}


def pulled(library, name, query, key, gradient):
    similarity, xp = SIMILAR[name](library.to), library_of(library.to(query)).xp
    found = similarity.pullback(*map(library.to, (query, key, gradient)), BackendPrimitives(xp))
    return [library.back(x) for x in (*found[:2], *found[2])]


@pytest.mark.parametrize("name", SIMILAR)
def test_the_pullback_of_a_similarity_is_its_gradient(name):
    query, key = QUERY.copy(), KEY.copy()
    key[:, :, 1] = query[:, :, 2]
    query[:, :, 3] = 0

    def forward(q, k, *arrays):
        return with_arrays(SIMILAR[name](TORCH.to), arrays).between(q, k, BackendPrimitives(XP))

    carried = arrays_of(SIMILAR[name](np.asarray))
    expected = torch_gradients(forward, [query, key, *carried], GRADIENT)
    close(pulled(NUMPY, name, query, key, GRADIENT), expected)


@pytest.mark.parametrize("name", ["distance", "distance of 1"])
def test_gradients_of_distances_between_close_vectors_keep_their_digits(name):
    given = [(x + mean).astype("float32") for x, mean in ((QUERY, 999), (KEY, 999), (GRADIENT, 0))]
    expected = pulled(NUMPY, name, *[x.astype("float64") for x in given])
    for one, other in zip(pulled(NUMPY, name, *given), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["distance", "distance of 1"])
def test_a_row_that_is_not_finite_spoils_no_other_row(name):
    query, others = QUERY.copy(), [0, 1, 3, 4]
    query[..., 2, :] = np.nan
    found, expected = (pulled(NUMPY, name, x, KEY, GRADIENT)[0] for x in (query, QUERY))
    np.testing.assert_allclose(found[..., others, :], expected[..., others, :])


@pytest.mark.parametrize("library", EVERYWHERE, ids=str)
def test_vectors_of_no_numbers_have_gradients_of_none(library):
    xp = library_of(library.to(QUERY)).xp
    given = [library.to(x) for x in (QUERY[..., :0], KEY[..., :0], GRADIENT)]
    for similarity in (scores.cosine(), scores.distance(), scores.additive(library.to(WEIGHT[:0]))):
        *of_vectors, of_arrays = similarity.pullback(*given, BackendPrimitives(xp))
        assert [x.shape for x in of_vectors] == [(B, H, L, 0), (B, H, S, 0)]
        assert [x.shape for x in of_arrays] == [(0,)] * len(of_arrays)


class InBlocks(BackendPrimitives):
    """Primitives that take every array for eager, and blocks of two rows of this file's scores."""

    block = 2 * B * H * S

    def is_eager(self, array):
        return True


@pytest.mark.parametrize("name", SIMILAR)
def test_blocks_of_rows_give_what_all_rows_give(name):
    similarity, tangents = SIMILAR[name](np.asarray), (QUERY_TANGENT, KEY_TANGENT)

    def found(backend):
        of_query, of_key, of_arrays = similarity.pullback(QUERY, KEY, GRADIENT, backend)
        forward = similarity.between(QUERY, KEY, backend)
        moved = similarity.pushforward(QUERY, KEY, tangents, backend)
        return [forward, of_query, of_key, *of_arrays, moved]

    blocks = InBlocks(np)
    assert len(blocks.row_blocks(QUERY, KEY)) == -(-L // 2)
    close(found(blocks), found(BackendPrimitives(np)))


# ---- norms and normalizers ---------------------------------------------------------------------

SEEN = np.tril(np.ones((L, S), bool), 1)
SEEN[2] = False


@pytest.mark.parametrize("make", [lambda: BackendPrimitives(np), NumpyBackend, TorchBackend])
def test_a_sigmoid_is_exact_to_the_ends_of_the_range(make):
    backend = make()
    s = np.array([-np.inf, -200, -86, -20, -1e-3, 0, 1e-3, 3, 200, np.inf, np.nan], np.float32)
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-s.astype(np.float64)))
        found = np.asarray(backend.sigmoid(torch.tensor(s) if type(backend) is TorchBackend else s))
    np.testing.assert_allclose(found, expected, rtol=4e-7, atol=1e-38)


@pytest.mark.parametrize("normalizer", [scores.sigmoid(), scores.sparsemax()], ids=repr)
def test_a_weight_that_is_nan_has_no_other_gradient(normalizer):
    xp = library_of(SCORES).xp
    weights = normalizer.weights(SCORES, BackendPrimitives(xp))
    weights[0, 0, 0, 0] = np.nan
    assert np.isnan(normalizer.pullback(weights, GRADIENT, xp)[0, 0, 0, 0])


def of_chain(s, g, *arrays):
    found, of_arrays = with_arrays(chain(TORCH.to), arrays).pullback(s, tile(TORCH.to), g)
    return found, *of_arrays


def of_norm(s, g):
    return scores.by_norm(3.0).pullback(s, [TORCH.to(SEEN)], g, XP)


def of_normalizer(normalizer, s, g):
    return normalizer.pullback(normalizer.weights(s, BackendPrimitives(XP)), g, XP)


def of_similarity(name, query, key, g, *arrays):
    similarity = with_arrays(SIMILAR[name](TORCH.to), arrays)
    *found, of_arrays = similarity.pullback(query, key, g, BackendPrimitives(XP))
    return *found, *of_arrays


#: A pullback, and the arrays that it takes.
PULLBACKS = {
    "chain": (of_chain, SCORES, GRADIENT, *arrays_of(chain(np.asarray))),
    "norm": (of_norm, SCORES, GRADIENT),
    "sigmoid": (partial(of_normalizer, scores.sigmoid()), SCORES, GRADIENT),
    "sparsemax": (partial(of_normalizer, scores.sparsemax()), SCORES, GRADIENT),
    "cosine": (partial(of_similarity, "cosine"), QUERY, KEY, GRADIENT),
    "distance": (partial(of_similarity, "distance"), QUERY, KEY, GRADIENT),
    "additive": (partial(of_similarity, "additive"), QUERY, KEY, GRADIENT, WEIGHT),
}


@pytest.mark.parametrize("name", PULLBACKS)
def test_a_pullback_has_derivatives_itself(name):
    pullback, *arrays = PULLBACKS[name]
    inputs = [torch.asarray(x).requires_grad_() for x in arrays]
    assert torch.autograd.gradcheck(pullback, inputs, atol=1e-5, fast_mode=True)
