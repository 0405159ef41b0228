"""The gradients of cuDNN's kernel without a GPU: what it asks for, computed on the host."""

from dataclasses import replace

import cudnn as frontend
import numpy as np
import pytest
from test_cupy_cudnn_host import HANDLES, TYPES, eights, forget, put_in_place
from test_cupy_host import of_gradients

from polyattn import (
    Gradients,
    Partial,
    attention_backward,
    attention_partial,
    attention_vjp,
    merge,
)
from polyattn._core.call.describe import describe
from polyattn._core.call.problem import examine
from polyattn._dispatch import registry
from polyattn._dispatch.errors import UnsupportedError
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks.gradients import check_backward
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.plugin import Cotangents, Residuals
from polyattn_cupy import graphs, plans, problem_graphs
from polyattn_cupy.cudnn import Cudnn

RNG = np.random.default_rng(0)
FIRST, LAST = frontend.diagonal_alignment.TOP_LEFT, frontend.diagonal_alignment.BOTTOM_RIGHT


@pytest.fixture
def library(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return the frontend it sees."""
    yield put_in_place(monkeypatch)
    forget()


def randn(*shape, dtype="float16"):
    return RNG.standard_normal(shape).astype(dtype)


def draw(length, keys, groups=2, dtype="float16", size=16, value_size=24):
    shapes = (2, 4, length, size), (2, groups, keys, size), (2, groups, keys, value_size)
    return [randn(*shape, dtype=dtype) for shape in shapes]


def wide(x):
    return x.astype("float64") if getattr(x, "dtype", None) in ("float16", "bfloat16") else x


def agree(*arrays, logsumexp=False, **options):
    """Compare the gradients with those of the formula in float64, and return them."""
    formula = attention_partial(*map(wide, arrays), **options)
    rows = formula.output.shape
    along = randn(*rows, dtype=arrays[0].dtype)
    of_rows = randn(*rows[:-1], dtype="float32") if logsumexp else None
    partial = Partial(formula.output.astype(along.dtype), formula.logsumexp.astype("float32"))
    mine = attention_backward(
        *arrays, partial, along, logsumexp_gradient=of_rows, into=Gradients(), backend="host",
        kernel="cudnn", **options,
    )  # fmt: skip
    expected = attention_backward(
        *map(wide, arrays), formula, wide(along), kernel="dense", **options,
        logsumexp_gradient=None if of_rows is None else of_rows.astype("float64"),
    )  # fmt: skip
    eps = 2.0**-10 if arrays[0].dtype == "float16" else 2.0**-7
    for name, one, other in zip(Gradients._fields, mine, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is None:
            continue
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == np.float32, name
        assert one.shape == other.shape, name
        # The gradient of the scale is a sum over all scores, of which most cancel out.
        terms = wide(arrays[0]) * mine.query if name == "scale" else None
        size = np.abs(other).max() if terms is None else np.abs(terms).sum()
        np.testing.assert_allclose(one, other, rtol=0, atol=4 * eps * max(1, size), err_msg=name)
    return mine


# ---- it computes what it says ------------------------------------------------------------------


# One program serves both dtypes.
RUNS = [
    (name, ("float16", "bfloat16")[n % 2]) for n, name in enumerate(of_gradients(Cudnn.features))
]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
@pytest.mark.usefixtures("library")
def test_it_keeps_to_the_conformance_cases(name, dtype):
    case = BACKWARD_CASES[name]
    case = replace(case, dtype=dtype, D=eights(case.D), E=eights(case.E))
    target, variant = Target("host", "numpy"), KernelVariant(registry.loaded("host").kernels[0])
    found = check_backward(target, variant, case)
    refused = 0 in (*case.score_shape, case.D, case.value_size) or "softcap" in case.features
    assert found or refused or dict(case.options)["scale"] <= 0


BIAS = RNG.standard_normal((4, 9, 40)).astype("float32")
MASK = RNG.random((2, 1, 9, 40)) > 0.4
MASK[1, 0, 3] = False
OPTIONS = {
    "plain": (9, 40, {}),
    "scale": (9, 40, {"scale": 0.7}),
    "causal": (9, 40, {"is_causal": True}),
    "causal, square": (9, 9, {"is_causal": True}),
    "causal, from the first": (9, 40, {"is_causal": True, "query_offset": 0}),
    "causal, from the first, tall": (40, 9, {"is_causal": True, "query_offset": 0}),
    "causal, more queries": (40, 9, {"is_causal": True}),
    "causal, elsewhere": (9, 40, {"is_causal": True, "query_offset": 3}),
    "rows before the keys": (9, 40, {"is_causal": True, "query_offset": -4}),
    "an offset for each item": (9, 40, {"is_causal": True, "query_offset": np.array([3, -4])}),
    "window": (9, 40, {"window": (6, 3)}),
    "window, square": (40, 40, {"window": (6, 0)}),
    "window, more queries": (40, 9, {"window": (3, 2)}),
    "one query": (1, 40, {"is_causal": True}),
    "one key": (9, 1, {}),
    "128 keys": (9, 128, {"bias": RNG.standard_normal((9, 128)).astype("float32")}),
    "mask of keys": (9, 40, {"mask": RNG.random((2, 1, 1, 40)) > 0.3}),
    "mask of rows": (9, 40, {"mask": MASK}),
    "mask and causal": (9, 40, {"mask": MASK, "is_causal": True}),
    "mask function": (9, 40, {"mask": lambda b, h, i, j: (i + j + h) % 3 != 0}),
    "bias": (9, 40, {"bias": BIAS}),
    "bias of 16 bits": (9, 40, {"bias": BIAS.astype("float16")}),
    "bias of 64 bits": (9, 40, {"bias": BIAS.astype("float64")}),
    "bias of an item": (9, 40, {"bias": RNG.standard_normal((2, 1, 9, 40))}),
    "bias of all": (9, 40, {"bias": RNG.standard_normal((2, 4, 9, 40)), "is_causal": True}),
    "bias of rows": (9, 40, {"bias": RNG.standard_normal((9, 1))}),
    "bias of keys": (9, 40, {"bias": RNG.standard_normal(40)}),
    "bias of heads": (9, 40, {"bias": RNG.standard_normal((4, 1, 1))}),
    "bias of nothing": (9, 40, {"bias": np.array(0.5, "float32")}),
    "bias that hides": (9, 40, {"bias": np.where(RNG.random((9, 40)) > 0.6, -np.inf, BIAS)}),
    "bias and mask": (9, 40, {"bias": BIAS, "mask": MASK}),
    "bias and window": (9, 40, {"bias": BIAS, "window": (8, 2)}),
}


RUNS = [(name, "float16", 2) for name in OPTIONS]
RUNS += [
    (name, "bfloat16", groups) for name in ("plain", "causal", "bias and mask") for groups in (4, 1)
]


@pytest.mark.parametrize(("name", "dtype", "groups"), RUNS)
@pytest.mark.usefixtures("library")
def test_gradients_are_those_of_the_formula(name, dtype, groups):
    length, keys, options = OPTIONS[name]
    agree(*draw(length, keys, groups, dtype), **options)
    assert len(HANDLES) == 1


@pytest.mark.parametrize("name", ["plain", "causal", "mask of rows", "bias", "bias and mask"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("library")
def test_the_gradient_of_the_logsumexp(name, dtype):
    length, keys, options = OPTIONS[name]
    agree(*draw(length, keys, dtype=dtype), logsumexp=True, **options)


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e5])
@pytest.mark.usefixtures("library")
def test_a_gradient_of_the_logsumexp_of_any_size(size):
    """All weights are equal, and query and key small enough for a result within float16."""
    q, k, v = draw(3, 8)
    q, k, v = (np.full_like(x, 2.0**-9) for x in (q, k, v))
    partial = attention_partial(q, k, v, backend="host", kernel="cudnn")
    gradient = np.full(partial.logsumexp.shape, np.float32(size / 3))
    mine = attention_backward(
        *(q, k, v, partial, np.zeros_like(partial.output)), logsumexp_gradient=gradient,
        into=Gradients(), backend="host", kernel="cudnn",
    )  # fmt: skip
    expected = size / 3 * 0.25 * 2.0**-9
    np.testing.assert_allclose(mine.query, expected, rtol=2e-3, atol=2.0**-24)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((9, 16), (13, 16), (13, 8)),
        ((2, 1, 4, 9, 16), (1, 3, 2, 13, 16), (3, 2, 13, 8)),
        ((4, 9, 16), (5, 2, 13, 16), (2, 13, 8)),
        ((2, 3, 4, 9, 16), (4, 13, 16), (1, 1, 4, 13, 8)),
    ],
)
@pytest.mark.usefixtures("library")
def test_gradients_have_the_shapes_of_their_arguments(query, key, value):
    arrays = [randn(*shape) for shape in (query, key, value)]
    mine = agree(*arrays, bias=RNG.standard_normal((9, 13)), is_causal=True, logsumexp=True)
    assert [x.shape for x in mine[:3]] == [query, key, value]


@pytest.mark.usefixtures("library")
def test_heads_after_length():
    q, k, v = (x.swapaxes(1, 2) for x in draw(9, 13))
    mine = agree(q, k, v, layout="...LHD", is_causal=True, bias=RNG.standard_normal((4, 9, 13)))
    assert [x.shape for x in mine[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.usefixtures("library")
def test_shares_of_the_keys_add_up():
    """Each part of the keys is given with the logsumexp of all."""
    q, k, v = draw(9, 40)
    halves = [(k[:, :, :17], v[:, :, :17]), (k[:, :, 17:], v[:, :, 17:])]
    whole = merge(*(attention_partial(q, *half, backend="host") for half in halves))
    along = randn(*whole.output.shape)
    one, other = (
        attention_backward(q, *half, whole, along, into=Gradients(), backend="host", kernel="cudnn")
        for half in halves
    )
    _, pullback = attention_vjp(*map(wide, (q, k, v)))
    expected = pullback(wide(along))
    np.testing.assert_allclose(one.query + other.query, expected.query, atol=4e-3)
    for name in ("key", "value"):
        both = np.concatenate([getattr(one, name), getattr(other, name)], axis=-2)
        np.testing.assert_allclose(both, getattr(expected, name), atol=4e-3)


@pytest.mark.usefixtures("library")
def test_a_row_without_keys_has_gradients_of_0():
    q, k, v = draw(9, 40)
    mine = agree(q, k, v, mask=MASK, bias=BIAS, logsumexp=True)
    assert not mine.query[1, :, 3].any()
    hidden = np.zeros((9, 40), bool)
    mine = agree(q, k, v, mask=hidden, logsumexp=True)
    assert not any(np.any(x) for x in (mine.query, mine.key, mine.value, mine.scale))


@pytest.mark.parametrize("most", [1, 9 * 40 * 2, 9 * 40 * 4, 9 * 40 * 8, 10**6])
@pytest.mark.parametrize("name", ["plain", "bias of all", "bias of an item", "bias of heads"])
@pytest.mark.usefixtures("library")
def test_parts_are_computed_one_after_the_other(name, most, monkeypatch):
    monkeypatch.setattr(problem_graphs, "MOST_SCORES", most)
    for function in (problem_graphs.parts_of, problem_graphs.gradient_graph_of):
        function.cache_clear()
    length, keys, options = OPTIONS[name]
    agree(*draw(length, keys), logsumexp=True, **options)
    runs = {1: 4, 720: 4, 1440: 2, 2880: 1}.get(most, 1)
    assert len(HANDLES[0].log) == 2 * runs
    assert len(plans._engine().plans) == 1
    for function in (problem_graphs.parts_of, problem_graphs.gradient_graph_of):
        function.cache_clear()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.swapaxes(1, 2),
        lambda x: x[..., 1:17],
        lambda x: x[..., ::-1],
        lambda x: np.broadcast_to(x[:, :1], x.shape),
    ],
)
@pytest.mark.usefixtures("library")
def test_arrays_that_cudnn_would_misread_are_copied(view):
    q, k, v, output, along = (view(randn(2, 4, 4, 24)) for _ in range(5))
    logsumexp = RNG.standard_normal((2, *q.shape[1:3], 3)).astype("float32")[..., 1]
    arguments = (q, k, v, Partial(output, logsumexp), along)
    got = attention_backward(*arguments, backend="host", kernel="cudnn")
    expected = attention_backward(*arguments, backend="numpy")
    for one, other in zip(got[:3], expected[:3], strict=True):
        size = max(1, np.abs(other).max())
        np.testing.assert_allclose(one / size, other / size, atol=6e-3)


# ---- what cuDNN is told ------------------------------------------------------------------------

SHAPES = (2, 8, 100, 64), (2, 2, 300, 64), (2, 2, 300, 64)
SQUARE = (2, 8, 100, 64), (2, 2, 100, 64), (2, 2, 100, 64)
TALL = (2, 8, 100, 64), (2, 2, 30, 64), (2, 2, 30, 64)


def problem_of(shapes, **options):
    """The problem of a backward pass of arrays that nobody fills."""
    arrays = {n: np.empty(x, "float32") for n, x in options.items() if n == "bias"}
    arrays |= {n: np.empty(x, bool) for n, x in options.items() if n == "mask"}
    query, key, value = (np.empty(shape, "float16") for shape in shapes)
    call, _ = describe(query, key, value, **options | arrays)
    output = call.query._replace(shape=(*query.shape[:-1], value.shape[-1]))
    logsumexp = call.query._replace(shape=query.shape[:-1], dtype="float32")
    residuals = Residuals(output=output, logsumexp=logsumexp)
    return examine(call._replace(residuals=residuals, cotangents=Cotangents(output=output)))


def told(problem):
    (node,) = graphs.describe(problem_graphs.gradient_graph_of(problem)).nodes
    return node


@pytest.mark.usefixtures("library")
def test_the_arrays_of_the_graph():
    """The logsumexp is an input like the others: nothing computes it again."""
    node = told(problem_of(SHAPES))
    assert node.params == {"attn_scale": 0.125, "use_deterministic_algorithm": True}
    facts = {
        name: (tensor.uid, tuple(tensor.dim), tuple(tensor.stride), TYPES[tensor.data_type])
        for name, tensor in node.inputs.items()
    }
    assert facts == {
        "q": (graphs.QUERY, SHAPES[0], (51200, 6400, 64, 1), "float16"),
        "k": (graphs.KEY, SHAPES[1], (38400, 19200, 64, 1), "float16"),
        "v": (graphs.VALUE, SHAPES[2], (38400, 19200, 64, 1), "float16"),
        "o": (graphs.OUTPUT, SHAPES[0], (51200, 6400, 64, 1), "float16"),
        "dO": (graphs.OUTPUT_GRADIENT, SHAPES[0], (51200, 6400, 64, 1), "float16"),
        "stats": (graphs.LOGSUMEXP, (2, 8, 100, 1), (800, 100, 1, 1), "float32"),
    }
    results = {
        name: (tensor.uid, tuple(tensor.dim), TYPES[tensor.data_type])
        for name, tensor in node.outputs.items()
    }
    assert results == {
        "dQ": (graphs.QUERY_GRADIENT, SHAPES[0], "float16"),
        "dK": (graphs.KEY_GRADIENT, SHAPES[1], "float16"),
        "dV": (graphs.VALUE_GRADIENT, SHAPES[2], "float16"),
    }


BANDS = {
    "none": (SHAPES, {}, None),
    "causal": (SHAPES, {"is_causal": True}, (LAST, None, 0)),
    "causal, square": (SQUARE, {"is_causal": True}, (FIRST, None, 0)),
    "from the first, tall": (TALL, {"is_causal": True, "query_offset": 0}, (FIRST, None, 0)),
    "window": (SHAPES, {"window": (5, 3)}, (LAST, 6, 3)),
    "bias of a tall one": (TALL, {"is_causal": True}, None),
    "bias of a tall window": (TALL, {"window": (5, 3), "query_offset": 0}, None),
    "bias beside a band": (SHAPES, {"is_causal": True, "bias": (100, 300)}, None),
    "bias, square": (SQUARE, {"is_causal": True, "bias": (100, 100)}, (FIRST, None, 0)),
}


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.usefixtures("library")
def test_the_band(name):
    shapes, options, expected = BANDS[name]
    node = told(problem_of(shapes, **options))
    names = "diagonal_alignment", "diagonal_band_left_bound", "diagonal_band_right_bound"
    assert tuple(node.params.get(name) for name in names) == (expected or (None, None, None))
    assert ("bias" in node.inputs) == ("bias" in name)


@pytest.mark.usefixtures("library")
def test_the_bias():
    node = told(problem_of(SHAPES, mask=(2, 1, 1, 300)))
    bias = node.inputs["bias"]
    assert (list(bias.dim), list(bias.stride)) == ([2, 1, 1, 300], [304, 304, 304, 1])
    assert "dBias" not in node.outputs, "a mask has no gradient"
    node = told(problem_of(SHAPES, mask=(2, 1, 1, 300), bias=(8, 1, 300)))
    for tensor in (node.inputs["bias"], node.outputs["dBias"]):
        assert list(tensor.dim) == [2, 8, 100, 300]
        assert list(tensor.stride) == [243200, 30400, 304, 1]
        assert tensor.data_type == frontend.data_type.FLOAT


@pytest.mark.parametrize(
    ("keys", "options", "given"),
    [
        (192, {"bias": (100, 192)}, True),
        (192, {"mask": (192,)}, True),
        (300, {"is_causal": True, "query_offset": 3}, True),
        (256, {"bias": (100, 256)}, False),
        (192, {}, False),
        (192, {"is_causal": True}, False),
    ],
)
@pytest.mark.usefixtures("library")
def test_lengths_are_given_where_a_bias_leaves_a_tile_of_keys_unfilled(keys, options, given):
    """Without them cuDNN 9.19 makes NaN of low rows (pytorch#196678)."""
    shapes = SHAPES[0], (2, 2, keys, 64), (2, 2, keys, 64)
    node = told(problem_of(shapes, **options))
    assert node.params.get("use_padding_mask", False) == given
    for name, uid in (("seq_len_q", graphs.QUERY_LENGTHS), ("seq_len_kv", graphs.KEY_LENGTHS)):
        assert (name in node.inputs) == given
        if given:
            tensor = node.inputs[name]
            assert (tensor.uid, list(tensor.dim)) == (uid, [2, 1, 1, 1])
            assert tensor.data_type == frontend.data_type.INT32


DIFFERENT = [
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": 0},
    {"window": (3, None)},
    {"scale": 0.5},
    {"mask": (100, 300)},
    {"bias": (100, 300)},
    {"bias": (8, 100, 300)},
    {"key": (2, 4, 300, 64), "value": (2, 4, 300, 64)},
    {"value": (2, 2, 300, 32)},
]


@pytest.mark.usefixtures("library")
def test_no_two_problems_share_a_plan():
    found = set()
    for options in DIFFERENT:
        query, key, value = SHAPES
        shapes = query, options.get("key", key), options.get("value", value)
        rest = {name: x for name, x in options.items() if name not in ("key", "value")}
        problem = problem_of(shapes, **rest)
        found.add(problem_graphs.gradient_graph_of(problem))
        assert problem_graphs.graph_of(problem) not in found
    assert len(found) == len(DIFFERENT)


# ---- what it refuses ---------------------------------------------------------------------------

FEW = (1, 4, 16), (1, 6, 16), (1, 6, 16)
REFUSED = {
    "it supports float16 and bfloat16 only": (FEW, {}),
    "must be a multiple of 8; got (12, 12)": (((1, 4, 12), (1, 6, 12), (1, 6, 12)), {}),
    "sizes up to 256; got (264, 264)": (((1, 4, 264), (1, 6, 264), (1, 6, 264)), {}),
    "sizes up to 256; got (16, 264)": (((1, 4, 16), (1, 6, 16), (1, 6, 264)), {}),
    "no gradients of one query with one key": (((1, 1, 16), (1, 1, 16), (1, 1, 16)), {}),
    "no gradients of capped scores": (FEW, {"softcap": 2.0}),
    "empty": (((1, 4, 16), (1, 0, 16), (1, 0, 16)), {}),
    "does not compute dropout": (FEW, {"dropout": (0.5, 1)}),
    "does not compute sinks": (FEW, {"sinks": np.zeros(1, "float16")}),
    "a scale above 0; got -1.0": (FEW, {"scale": -1.0}),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.usefixtures("library")
def test_refusals(reason):
    shapes, options = REFUSED[reason]
    dtype = "float32" if "only" in reason else "float16"
    query, key, value = (np.zeros(shape, dtype) for shape in shapes)
    output, logsumexp = attention_partial(query, key, value)
    with pytest.raises(UnsupportedError) as raised:
        attention_backward(
            query, key, value, (output, logsumexp), output, backend="host", kernel="cudnn",
            **options,
        )  # fmt: skip
    assert reason in str(raised.value)


@pytest.mark.usefixtures("library")
def test_what_it_refuses_the_tiles_compute():
    arrays = [randn(1, 2, 5, 12) for _ in range(3)]
    output, pullback = attention_vjp(*arrays, backend="host", softcap=2.0)
    assert pullback(output).query.shape == (1, 2, 5, 12)
    assert not HANDLES


def test_cudnn_is_asked_about_the_gradients(library, monkeypatch):
    assert not Cudnn().reasons_against(problem_of(SHAPES))
    (engine,) = plans._local.engines.values()
    assert [type(graph) for graph in engine.plans] == [graphs.GradientGraph]
    monkeypatch.setattr(library.pygraph, "refusal", "no such gradient")
    assert Cudnn().reasons_against(problem_of(SQUARE)) == ["cuDNN says: no such gradient"]
