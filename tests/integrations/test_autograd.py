"""HIPS autograd with polyattn: the textbook's gradients, on NumPy's kernels and in the layers."""

from typing import ClassVar

import numpy as np
import pytest
from autograd import grad, jacobian, value_and_grad
from autograd.core import make_vjp
from autograd.test_util import check_grads
from optional import anp, torch

import polyattn
from polyattn import attention, attention_partial, masks, nn, scores
from polyattn._base.arrays import library_of
from polyattn._dispatch import registry
from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance import Target, deviation
from polyattn.conformance.cases.gradient_cases import GRADIENT_CASES, POISONED_GRADIENT_CASES
from polyattn.conformance.checks.autodiff import differentiable
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.integrations import autograd_functions as functions

RANDOM = np.random.default_rng(3)
QUERY, KEY, VALUE = (
    RANDOM.standard_normal(shape) for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3))
)
BIAS, SINKS = RANDOM.standard_normal((4, 1, 7)), RANDOM.standard_normal(4)
TABLE = RANDOM.standard_normal((8, 4))
NUMPY = Target("numpy")


def total(x):
    """Some function of an output that is not symmetric in its entries."""
    return anp.sum(anp.sin(x) * x)


def relative(table):
    return scores.relative_bias(table, bidirectional=False)


# ---- gradients ---------------------------------------------------------------------------------


def covering():
    """Return cases that have all features: the conformance suite tries each on the kernels."""
    seen, cases = {"float64", "float16", "bfloat16"}, []
    for case in [*POISONED_GRADIENT_CASES.values(), *GRADIENT_CASES.values()]:
        if case.dtype == "float32" and not case.features <= seen:
            cases.append(case)
            seen |= case.features
    return cases


@pytest.mark.parametrize("case", covering(), ids=lambda case: case.name)
def test_gradients_are_as_accurate_as_the_textbooks(case):
    arrays, options = NUMPY.arguments(case)
    inputs = differentiable(arrays, options)
    others = {name: x for name, x in options.items() if name not in inputs}
    back, _ = make_vjp(lambda boxes: attention(**dict(boxes.items()), **others), inputs)
    gradients = back(cotangent(case))
    for name, yard in gradient_yardsticks(case).items():
        off = deviation(gradients[name], yard, f"{case}: gradient of {name}")
        assert off.fault is None, off.fault


OPTIONS = {
    "causal, window, offset": {"is_causal": True, "window": (2, None), "query_offset": 1},
    "mask": {"mask": masks.prefix(3) | masks.window(1, 1)},
    "softcap, scale": {"softcap": 1.5, "scale": 0.7},
    "dropout": {"dropout": (0.3, 5)},
    "cosine": {"similarity": scores.cosine(), "scale": 3.0},
    "sigmoid": {"normalizer": scores.sigmoid()},
    "by norm": {"scale": scores.by_norm()},
    "function": {"score_mod": lambda s, b, h, i, j: s - 0.1 * s * s * (i - j)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_both_modes_and_both_orders_agree_with_differences(name):
    def output(query, key, value):
        return attention(query, key, value, **OPTIONS[name])

    check_grads(output, (0, 1, 2), modes=["rev", "fwd"], order=1)(QUERY, KEY, VALUE)
    check_grads(output, (0, 1), modes=["rev", "fwd"], order=2)(QUERY[:1, :2], KEY[:1], VALUE[:1])


@pytest.mark.parametrize("kernel", ["tiled", "dense"])
def test_pools_of_pages_are_differentiated(kernel):
    call = {"block_table": np.array([[0, 2], [2, -1]]), "key_lengths": np.array([5, 2])}

    def output(query, key, value):
        return attention(query, key, value, is_causal=True, kernel=kernel, **call)

    pools = [RANDOM.standard_normal((3, 2, 4, size)) for size in (8, 3)]
    check_grads(output, (0, 1, 2), modes=["rev", "fwd"], order=1)(QUERY, *pools)


@pytest.mark.parametrize("layout", ["...HLD", "...LHD"])
def test_boxes_and_arrays_mix(layout):
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    if layout == "...LHD":
        arrays = {name: x.swapaxes(1, 2).copy() for name, x in arrays.items()}
    arrays |= {"bias": BIAS, "sinks": SINKS, "table": TABLE}

    def output(function, given):
        given = dict(given)
        return function(
            score_mod=relative(given.pop("table")),
            is_causal=True,
            layout=layout,
            **given,
        )

    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    of_torch = output(attention, tensors)
    (of_torch.sin() * of_torch).sum().backward()
    for names in (("query",), ("key", "bias"), ("value", "sinks"), ("table",), tuple(arrays)):

        def loss(boxes, names=names):
            return total(output(attention, arrays | {name: boxes[name] for name in names}))

        found, gradients = value_and_grad(loss)({name: arrays[name] for name in names})
        assert found == total(output(attention, arrays))
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, tensors[name].grad, atol=1e-12)


# torch imports what it deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_second_derivative_is_that_of_torch():
    def inner(query):
        return total(attention(query, KEY, VALUE, is_causal=True, sinks=SINKS))

    found = grad(lambda query: anp.sum(grad(inner)(query) ** 2))(QUERY)
    query = torch.tensor(QUERY, requires_grad=True)
    key, value, sinks = map(torch.tensor, (KEY, VALUE, SINKS))
    output = attention(query, key, value, is_causal=True, sinks=sinks)
    (first,) = torch.autograd.grad((output.sin() * output).sum(), query, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), query)
    np.testing.assert_allclose(found, second, atol=1e-11)


def test_a_recorded_call_runs_on_the_kernel_that_was_asked_for():
    ran = []

    class Counting(Dense):
        def __call__(self, problem, operands, backend):
            ran.append("forward")
            return super().__call__(problem, operands, backend)

        def backward(self, *given):
            ran.append("backward")
            return super().backward(*given)

    kernel = Counting()
    jacobian(lambda query: attention(query, KEY, VALUE, kernel=kernel)[0, 0, 0])(QUERY)
    assert ran == ["forward", "backward", "backward", "backward"]


def test_a_kernel_without_gradients_runs_forward_and_another_one_backward():
    class Forward(Dense):
        features = Dense.features - {"logsumexp"}
        differentiates: ClassVar = {}

        def __call__(self, *given):
            return super().__call__(*given)[0] + 1, None

    def loss(query, more, **options):
        return total(attention(query, KEY, VALUE, **options) + more)

    value, gradient = value_and_grad(loss)(QUERY, 0, kernel=Forward())
    assert value == pytest.approx(loss(QUERY, 1))
    np.testing.assert_allclose(gradient, grad(loss)(QUERY, 1), atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "array-api"])
def test_a_named_backend_computes_the_gradients_too(backend):
    def loss(query, bias, **options):
        return total(attention(query, KEY, VALUE, bias=bias, **options))

    found = grad(loss, (0, 1))(QUERY, BIAS, backend=backend)
    for one, other in zip(found, grad(loss, (0, 1))(QUERY, BIAS), strict=True):
        assert type(one) is np.ndarray
        np.testing.assert_allclose(one, other, atol=1e-12)
    assert type(attention(QUERY, KEY, VALUE, backend=backend)) is np.ndarray


def test_partials_weights_and_pullbacks_are_differentiated():
    def whole(query, key):
        return attention(query, key, VALUE)

    def halves(query, key):
        left = attention_partial(query, key[:, :, :3], VALUE[:, :, :3])
        right = attention_partial(QUERY, KEY[:, :, 3:], VALUE[:, :, 3:])
        return polyattn.merge(left, right).output

    check_grads(halves, (0, 1), modes=["rev", "fwd"], order=1)(QUERY, KEY)
    check_grads(lambda q: attention_partial(q, KEY, VALUE).logsumexp, modes=["rev", "fwd"])(QUERY)
    check_grads(lambda q: polyattn.attention_weights(q, KEY), modes=["rev"], order=1)(QUERY)

    def by_pullback(query):
        output, pullback = polyattn.attention_vjp(query, KEY, VALUE)
        return total(output) + total(pullback(np.ones(output.shape)).query)

    def by_autograd(query):
        summed = grad(lambda query: anp.sum(whole(query, KEY)))
        return total(whole(query, KEY)) + total(summed(query))

    np.testing.assert_allclose(grad(by_pullback)(QUERY), grad(by_autograd)(QUERY), atol=1e-11)
    check_grads(
        lambda q: polyattn.attention_jvp((q, KEY, VALUE), (QUERY, None, None))[1],
        modes=["rev"], order=1,
    )(QUERY)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_have_the_dtype_of_their_arrays(dtype):
    arrays = tuple(x.astype(dtype) for x in (QUERY, KEY, VALUE, BIAS))
    gradients = grad(lambda q, k, v, b: total(attention(q, k, v, bias=b)), (0, 1, 2, 3))(*arrays)
    assert {str(gradient.dtype) for gradient in gradients} == {dtype}


# ---- functions in score_mod --------------------------------------------------------------------

SLOPES = RANDOM.standard_normal(4)


def steeper(slopes):
    return lambda s, b, h, i, j: s * slopes[h] + 0.1 * (i - j)


def test_a_function_may_read_what_is_differentiated_beside_the_query():
    def by_function(query, slopes):
        return total(attention(query, KEY, VALUE, score_mod=steeper(slopes)))

    def by_query(query, slopes):
        scaled = query * slopes[:, None, None]
        return total(attention(scaled, KEY, VALUE, score_mod=steeper(np.ones(4))))

    found, expected = (grad(f, (0, 1))(QUERY, SLOPES) for f in (by_function, by_query))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_function_that_alone_reads_a_box_is_refused():
    def loss(slopes):
        return total(attention(QUERY, KEY, VALUE, score_mod=steeper(slopes)))

    with pytest.raises(TypeError, match=r"score_mod reads an array that is differentiated.*bias="):
        grad(loss)(SLOPES)


def test_a_score_that_is_constant_has_a_derivative_of_zero():
    def loss(query):
        return total(attention(query, KEY, VALUE, score_mod=lambda s, b, h, i, j: 0.1 * (i - j)))

    assert not grad(loss)(QUERY).any()


# ---- boxes look like arrays of NumPy -----------------------------------------------------------


def test_boxes_are_described_as_numpys_arrays():
    plain = str(polyattn.explain(QUERY, KEY, VALUE))

    def loss(query):
        assert (library_of(query).name, library_of(query).xp) == ("numpy", functions)
        assert str(polyattn.explain(query, KEY, VALUE)) == plain
        assert repr(scores.alibi(query[0, :, 0, 0])).startswith("scores.alibi(<(4,) float64")
        with pytest.raises(TypeError, match="query is an array of numpy and key one of torch"):
            attention(query, torch.tensor(KEY), VALUE)
        return anp.sum(query)

    grad(loss)(QUERY)


# ---- layers ------------------------------------------------------------------------------------

IDS = RANDOM.integers(0, 11, size=(2, 6))
MODELS = {
    "gelu": {"positions": 8, "key_heads": 2, "rotary": nn.Rotary(6), "tied": True},
    "silu": {
        **{"norm": nn.RMSNorm, "activation": "silu", "gated": True, "fused": True},
        "rotary": nn.Rotary(4, pairing="neighbours"),
    },
    "gelu_tanh": {"activation": "gelu_tanh", "positions": nn.Sinusoidal(24)},
    "relu": {"activation": "relu", "positions": 8, "pre_norm": False},
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in MODELS), ("silu", "float32")]
)
def test_models_have_torchs_loss_and_gradients(name, dtype):
    def model_of(like):
        return nn.Transformer.init(11, 24, 4, 2, like=like, is_causal=True, seed=7, **MODELS[name])

    first = model_of(torch.zeros(1, dtype=getattr(torch, dtype)))
    tensors = {n: p.requires_grad_() for n, p in first.parameters().items()}
    logits = first.with_parameters(tensors)(torch.tensor(IDS), is_causal=True)
    expected = (logits.sin() * logits).sum()
    expected.backward()
    model = model_of(np.zeros(1, dtype))

    def loss(parameters):
        return total(model.with_parameters(parameters)(IDS, is_causal=True))

    found, gradients = value_and_grad(loss)(model.parameters())
    atol = 1e-11 if dtype == "float64" else 1e-5
    assert found == pytest.approx(expected.item(), rel=atol)
    for n, gradient in gradients.items():
        assert gradient.dtype == dtype
        of_torch = tensors[n].grad.numpy()
        np.testing.assert_allclose(gradient, of_torch, atol=atol * (1 + np.abs(of_torch).max()))


def test_layers_differentiate_twice_and_by_both_modes():
    x = RANDOM.standard_normal((1, 3, 8))
    for norm, options in (
        (nn.LayerNorm, {}),
        (nn.RMSNorm, {"gated": True, "rotary": nn.Rotary(4)}),
    ):
        block = nn.EncoderBlock.init(8, 2, norm=norm, like=x, **options)

        def output(x, parameters, block=block):
            return block.with_parameters(parameters)(x, is_causal=True)

        check_grads(output, (0, 1), modes=["rev", "fwd"], order=2)(x, block.parameters())


def test_a_cache_takes_boxes():
    x = RANDOM.standard_normal((2, 5, 8))
    layer = nn.MultiHeadAttention.init(8, 2, like=x)

    def by_steps(parameters):
        recorded, outputs = layer.with_parameters(parameters), []
        cache = layer.cache(2, like=x, batch=(2,))  # enlarged by the third step
        for part in (x[:, :1], x[:, 1:2], x[:, 2:]):
            output, cache = recorded(part, cache=cache, is_causal=True)
            outputs.append(output)
        return total(anp.concatenate(outputs, axis=1))

    def at_once(parameters):
        return total(layer.with_parameters(parameters)(x, is_causal=True))

    found, expected = grad(by_steps)(layer.parameters()), grad(at_once)(layer.parameters())
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], atol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_large_plain_arrays_meet_recorded_parameters(kind):
    x = RANDOM.standard_normal((600, 96)).astype("float32")
    layers = {"linear": nn.Linear.init(96, 2, like=x), "norm": nn.RMSNorm.init(96, like=x)}
    layer = layers[kind]

    def loss(parameters, x):
        return total(layer.with_parameters(parameters)(x))

    found = grad(loss)(layer.parameters(), x)
    first, second = (grad(loss)(layer.parameters(), half) for half in (x[:300], x[300:]))
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, first[name] + second[name], rtol=1e-3, atol=1e-2)


# ---- functions of boxes ------------------------------------------------------------------------

X, Y = RANDOM.standard_normal((2, 3, 4)), RANDOM.standard_normal((3, 1))
CALLS = {
    "broadcast_to": lambda x, y: functions.broadcast_to(y, (2, 3, 4)) * x,
    "where": lambda x, y: functions.where(x > 0, y, x) + functions.where(x < 0, 0.0, y),
    "sum": lambda x, y: functions.sum(x, axis=(0, -1)) * functions.sum(y),
    "mean": lambda x, y: functions.mean(x, axis=-1, keepdims=True) * functions.mean(y, axis=0),
    "max": lambda x, y: functions.max(x, axis=-1) * functions.min(x * y, axis=0)[:, 0],
    "maximum": lambda x, y: functions.maximum(x, y) * functions.minimum(y, x),
    "clip": lambda x, y: functions.clip(x * y, -0.5, 0.5),
    "tanh": lambda x, y: functions.tanh(x) * functions.erfc(y),
    "take": lambda x, y: functions.take(x, np.asarray([2, 0, -1]), axis=-2) * y,
    "concat": lambda x, y: functions.concat((x[0], y), axis=1) * 2,
    "stack": lambda x, y: functions.stack((x[0] * y, x[1]), axis=-1) ** 2,
    "shapes": lambda x, y: functions.matrix_transpose(functions.permute_dims(x, (2, 0, 1))) * y[0],
    "matmul": lambda x, y: (
        functions.matmul(functions.matrix_transpose(x), y)
        * functions.matmul(functions.matmul(x[0], x[1].T), y)[0]
    ),
    "vectors": lambda x, y: functions.matmul(functions.matmul(x, x[0, 0]), y[:, 0]),
    "stacks": lambda x, y: functions.matmul(functions.matrix_transpose(x), x * y),
    "astype": lambda x, y: functions.astype(x, x.dtype) * functions.asarray(y),
    "cumulative_sum": lambda x, y: functions.cumulative_sum(x, axis=1) * y,
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_of_the_standard_have_derivatives_and_keep_float32(name):
    modes = ["rev"] if name == "cumulative_sum" else ["rev", "fwd"]  # as in autograd
    check_grads(CALLS[name], (0, 1), modes=modes, order=2)(X, Y)
    gradients = grad(lambda x, y: total(CALLS[name](x, y)), (0, 1))(
        X.astype("float32"), Y.astype("float32")
    )
    assert {str(gradient.dtype) for gradient in gradients} == {"float32"}


def test_a_maximum_is_not_a_number_where_an_argument_is_not():
    one, other = np.asarray([np.nan, 1.0, 2.0]), np.asarray([3.0, 2.0, np.nan])
    np.testing.assert_array_equal(functions.maximum(one, other), [np.nan, 2, np.nan])
    np.testing.assert_array_equal(functions.minimum(one, other), [np.nan, 1, np.nan])


def test_all_other_names_are_numpys():
    assert functions.float32 is np.float32
    assert functions.isdtype(np.dtype("int8"), "integral")
    with pytest.raises(AttributeError):
        functions.no_such_function  # noqa: B018


def test_a_backend_without_a_kernel_that_has_a_derivative(monkeypatch):
    class Forward(Dense):
        differentiates: ClassVar = {"jvp": Dense.differentiates["jvp"]}

    monkeypatch.setattr(registry, "kernels_of", lambda backend: (Forward(),))
    with pytest.raises(polyattn.UnsupportedError, match=r"does not compute backward .* has dense"):
        grad(lambda x: anp.sum(attention(x, KEY, VALUE, kernel=Forward())))(QUERY)


@pytest.mark.parametrize("name", ["query", "sinks"])
def test_integers_become_floats_where_a_derivative_is_recorded(monkeypatch, name):
    monkeypatch.setattr(Dense, "reads_quantized", lambda self, problem: True)
    tokens = RANDOM.standard_normal((2, 7, 4))
    cache = nn.QuantizedCache.init(2, 4, 8, like=tokens, window=1, block=2).append(tokens, tokens)
    key, value = (
        np.concatenate(pair, axis=1)
        for pair in zip(
            next(cache._float_pieces())[1:3], (cache.recent.keys, cache.recent.values), strict=True
        )
    )
    query, sinks = RANDOM.standard_normal((4, 2, 4)), RANDOM.standard_normal(4)
    argument = ("query", "sinks").index(name)

    def over(function):
        return grad(lambda *x: total(function(x[0], sinks=x[1])), argument)(query, sinks)

    found = over(lambda query, **options: cache.attention(query, kernel="dense", **options))
    expected = over(lambda query, **options: attention(query, key, value, **options))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
