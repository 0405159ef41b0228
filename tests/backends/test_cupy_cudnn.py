"""What CuPy's kernel tells cuDNN, when it runs and what it copies, on the host in cuDNN's place."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import cudnn as frontend
import numpy as np
import pytest
from cudnn_host import HANDLES, TYPES, Handle, HostGraph, forget, put_in_place
from cupy_checks import agree, gradients_agree
from cupy_host import Device

from polyattn import attention, explain, masks
from polyattn._core.call.problem import examine
from polyattn.plugin import Cotangents, Operands, Residuals, visible_keys
from polyattn_cupy import graphs, loading, plans, problem_graphs
from polyattn_cupy.cudnn_kernel import CupyCudnn

RNG = np.random.default_rng(0)
FACTS = {"library": "numpy", "device": "cpu", "dtype": "float16"}


@pytest.fixture
def library(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return the frontend it sees."""
    yield put_in_place(monkeypatch)
    forget()


def randn(*shape, dtype="float16"):
    return RNG.standard_normal(shape).astype(dtype)


def draw(length, keys):
    return [randn(2, 4, length, 16), randn(2, 2, keys, 16), randn(2, 2, keys, 24)]


def reasons(*arrays, **options):
    (candidate,) = explain(*arrays, backend="host", kernel="cudnn", **options).candidates
    return " ".join(candidate.reasons)


# ---- what cuDNN is told ------------------------------------------------------------------------

SHAPES = (2, 8, 100, 64), (2, 2, 300, 64), (2, 2, 300, 64)
SQUARE = (2, 8, 100, 64), (2, 2, 100, 64), (2, 2, 100, 64)
TALL = (2, 8, 100, 64), (2, 2, 30, 64), (2, 2, 30, 64)
ROW = (2, 8, 1, 64), (2, 2, 300, 64), (2, 2, 300, 64)
FIRST, LAST = frontend.diagonal_alignment.TOP_LEFT, frontend.diagonal_alignment.BOTTOM_RIGHT
BANDS = {
    "none": (SHAPES, {}, None),
    "causal": (SHAPES, {"is_causal": True}, (LAST, None, 0)),
    "causal, square": (SQUARE, {"is_causal": True}, (FIRST, None, 0)),
    "from the first": (SHAPES, {"is_causal": True, "query_offset": 0}, (FIRST, None, 0)),
    "from the first, tall": (TALL, {"is_causal": True, "query_offset": 0}, (FIRST, None, 0)),
    "causal, a row": (ROW, {"is_causal": True}, None),
    "left": (SHAPES, {"window": (5, None)}, (LAST, 6, None)),
    "right": (SHAPES, {"window": (None, 3)}, (LAST, None, 3)),
    "both": (SQUARE, {"window": (5, 3)}, (FIRST, 6, 3)),
    "both, causal": (SHAPES, {"window": (0, 3), "is_causal": True}, (LAST, 1, 0)),
    "wider than the keys": (SQUARE, {"window": (500, 100)}, None),
    "bias of a tall one": (TALL, {"is_causal": True}, None),
    "bias of a tall window": (TALL, {"window": (5, 3), "query_offset": 0}, None),
    "bias beside a band": (SHAPES, {"is_causal": True, "bias": (100, 300)}, None),
    "bias, square": (SQUARE, {"is_causal": True, "bias": (100, 100)}, (FIRST, None, 0)),
}


def problem_of(shapes, *, gradients=False, **options):
    """Return the problem of a call of such shapes, or of its gradients."""
    call = explain(*shapes, **FACTS, **options).call
    if gradients:
        rows = call.query.shape[:-1]
        output = call.query._replace(shape=(*rows, call.value.shape[-1]))
        logsumexp = call.query._replace(shape=rows, dtype="float32")
        residuals = Residuals(output=output, logsumexp=logsumexp)
        call = call._replace(residuals=residuals, cotangents=Cotangents(output=output))
    return examine(call)


def told(shapes, *, gradients=False, **options):
    problem = problem_of(shapes, gradients=gradients, **options)
    (node,) = graphs.describe(problem_graphs.graph_of(problem)).nodes
    return node


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.usefixtures("library")
def test_the_band(name, gradients):
    shapes, options, expected = BANDS[name]
    node = told(shapes, gradients=gradients, **options)
    names = "diagonal_alignment", "diagonal_band_left_bound", "diagonal_band_right_bound"
    assert tuple(node.params.get(name) for name in names) == (expected or (None, None, None))
    assert ("bias" in node.inputs) == ("bias" in name)


@pytest.mark.usefixtures("library")
def test_the_other_options():
    plain = told(SHAPES)
    assert plain.params == {"attn_scale": 0.125, "generate_stats": False}
    assert set(plain.inputs) == {"q", "k", "v"}
    assert told(SHAPES, scale=0.3).params["attn_scale"] == 0.3
    assert told(SHAPES, logsumexp=True).params["generate_stats"] is True
    assert callable(told(SHAPES, softcap=2.0).params["score_mod"])


@pytest.mark.usefixtures("library")
def test_the_arrays_of_the_graph():
    """The logsumexp is an input like the others: nothing computes it again."""
    node = told(SHAPES, gradients=True)
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


@pytest.mark.usefixtures("library")
def test_the_bias():
    for gradients in (False, True):
        node = told(SHAPES, mask=(2, 1, 1, 300), gradients=gradients)
        bias = node.inputs["bias"]
        assert (list(bias.dim), list(bias.stride)) == ([2, 1, 1, 300], [304, 304, 304, 1])
        assert TYPES[bias.data_type] == "float32"
    bias = told(SHAPES, mask=(2, 1, 1, 300), bias=(1, 8, 1, 300)).inputs["bias"]
    assert (list(bias.dim), list(bias.stride)) == ([2, 8, 1, 300], [2432, 304, 304, 1])


@pytest.mark.parametrize(
    ("keys", "options", "given"),
    [
        (192, {"mask": (100, 192)}, True),
        (192, {"mask": (192,)}, True),
        (300, {"is_causal": True, "query_offset": 3}, True),
        (256, {"mask": (100, 256)}, False),
        (192, {}, False),
        (192, {"is_causal": True}, False),
    ],
)
@pytest.mark.usefixtures("library")
def test_lengths_are_given_where_a_bias_leaves_a_tile_of_keys_unfilled(keys, options, given):
    """Without them cuDNN 9.19 makes NaN of low rows (pytorch#196678)."""
    shapes = SHAPES[0], (2, 2, keys, 64), (2, 2, keys, 64)
    node = told(shapes, gradients=True, **options)
    assert node.params.get("use_padding_mask", False) == given
    for name, uid in (("seq_len_q", graphs.QUERY_LENGTHS), ("seq_len_kv", graphs.KEY_LENGTHS)):
        assert (name in node.inputs) == given
        if given:
            tensor = node.inputs[name]
            assert (tensor.uid, list(tensor.dim)) == (uid, [2, 1, 1, 1])
            assert TYPES[tensor.data_type] == "int32"


TREE = np.array([-1, *range(99)])
EXPRESSIONS = {
    (2, 1, 1, 300): masks.padding(np.array([3, 9])),
    (1, 1, 1, 300): masks.prefix(4),
    (2, 1, 100, 300): masks.padding(np.array([3, 9]), np.array([9, 3])),
    (1, 1, 100, 300): masks.positions(np.arange(100), np.arange(300)) | masks.tree(TREE),
    (1, 8, 1, 300): masks.dense(np.ones((1, 8, 1, 300), bool)) & masks.prefix(3),
    (2, 8, 100, 300): masks.dense(np.ones((2, 8, 1, 1), bool)) | masks.dilated(2),
}


@pytest.mark.parametrize("shape", EXPRESSIONS)
@pytest.mark.usefixtures("library")
def test_the_shape_of_a_mask_expression_is_known_before_the_call(shape):
    problem = problem_of(SHAPES, mask=EXPRESSIONS[shape])
    x = Operands(*(np.zeros(shape) for shape in SHAPES), EXPRESSIONS[shape])
    assert visible_keys(problem, x, np, banded=False).shape == shape
    assert problem_graphs.bias_shape(problem) == shape


DIFFERENT = [
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": 0},
    {"window": (3, None)},
    {"window": (4, None)},
    {"window": (None, 4)},
    {"scale": 0.5},
    {"softcap": 3.0},
    {"softcap": 4.0},
    {"logsumexp": True},
    {"mask": (100, 300)},
    {"mask": (300,)},
    {"key_lengths": (2,)},
    {"bias": (100, 300)},
    {"bias": (1, 8, 100, 300)},
    {"key": (2, 4, 300, 64), "value": (2, 4, 300, 64)},
    {"value": (2, 2, 300, 32)},
]


@pytest.mark.usefixtures("library")
def test_no_two_problems_share_a_plan():
    calls, gradients = set(), set()
    for options in DIFFERENT:
        query, key, value = SHAPES
        shapes = query, options.get("key", key), options.get("value", value)
        rest = {name: x for name, x in options.items() if name not in ("key", "value")}
        calls.add(problem_graphs.graph_of(problem_of(shapes, **rest)))
        if not rest.keys() & {"softcap", "logsumexp", "bias"}:
            problem = problem_of(shapes, gradients=True, **rest)
            gradients.add(problem_graphs.graph_of(problem))
    # A bias of the same shape as a mask does not differ from it.
    assert (len(calls), len(gradients)) == (len(DIFFERENT) - 1, len(DIFFERENT) - 5)
    assert not calls & gradients


@pytest.mark.usefixtures("library")
def test_the_plan_that_was_asked_about_is_the_one_that_runs():
    arrays = randn(2, 4, 1, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 16)
    agree("cudnn", *arrays)
    agree("cudnn", *arrays, mask=RNG.random((2, 1, 1, 9)) > 0.3)
    agree("cudnn", *(x.astype("bfloat16") for x in arrays))
    agree("cudnn", *arrays)
    (engine,) = plans._local.engines.values()
    assert len(engine.plans) == 3
    assert all(plan.graph.done[-1] == "build_plans" for plan in engine.plans.values())


# ---- where and when it runs --------------------------------------------------------------------


def run(shape=(1, 1, 4, 8)):
    x = randn(*shape)
    return attention(x, x, x, backend="host", kernel="cudnn")


@pytest.mark.usefixtures("library")
def test_plans_not_used_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    for length in (1, 2, 1, 3, 4, 1):
        run((1, 1, length, 8))
    (engine,) = plans._local.engines.values()
    assert [graph.query.shape[2] for graph in engine.plans] == [4, 1]


def test_a_handle_follows_the_stream(library):
    for stream in (7, 7, 9, 9, 7):
        library.stream = stream
        run()
    (handle,) = HANDLES
    assert handle.log == [7, 7, 9, 9, 7]
    assert handle.switches == 3


@pytest.mark.usefixtures("library")
def test_a_handle_for_each_thread_and_device():
    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with Device(1):
        run()
        run()
    run()
    assert [(handle.device, len(handle.log)) for handle in HANDLES] == [(0, 2), (0, 1), (1, 2)]
    assert HANDLES[1].thread != HANDLES[0].thread
    assert [handle.destroyed for handle in HANDLES] == [False, True, False]


@pytest.mark.usefixtures("library")
def test_threads_may_make_the_first_calls():
    x = randn(1, 2, 6, 8)
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(
                lambda length: attention(
                    x[:, :, :length], x, x, backend="host", kernel="cudnn", is_causal=True
                ),
                [1, 2, 3, 4] * 8,
            )
        )
    for length, result in zip([1, 2, 3, 4] * 8, results, strict=True):
        np.testing.assert_array_equal(result, results[length - 1])
    assert len({handle.thread for handle in HANDLES}) == len(HANDLES)


def test_it_goes_past_execute_where_it_can(library):
    seen = []
    lowered = types.SimpleNamespace(_execute_plan_at_index=lambda *args: seen.append(args))
    whole = {
        "_lowered_graph": lowered,
        "_plan_index": 1,
        "plans": [None, types.SimpleNamespace(cpp_index=5)],
        "selected_engine": None,
    }
    plan = object.__new__(plans._CudnnPlan)
    plan.graph = types.SimpleNamespace(**whole)
    handle = Handle()
    plan._direct()({1: 2}, 3, handle)
    assert seen == [({1: 2}, 3, 5, handle.backend_handle, None, None, None)]
    for lost in ("_lowered_graph", "plans"):
        plan.graph = types.SimpleNamespace(**{k: x for k, x in whole.items() if k != lost})
        assert plan._direct() is None
    plan.graph = types.SimpleNamespace(**{**whole, "selected_engine": object()})
    assert plan._direct() is None


PARTS = {
    "plain": (9, 40, {}),
    "a mask for all": (9, 40, {"mask": RNG.random((2, 4, 9, 40)) > 0.3, "is_causal": True}),
    "a mask of an item": (9, 40, {"mask": RNG.random((2, 1, 9, 40)) > 0.3}),
    "a mask of heads": (9, 40, {"mask": np.arange(4)[None, :, None, None] > 0}),
}


@pytest.mark.parametrize("most", [1, 9 * 40 * 4, 10**6])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.usefixtures("library")
def test_parts_of_gradients_are_computed_one_after_the_other(name, most, monkeypatch):
    monkeypatch.setattr(problem_graphs, "MOST_SCORES", most)
    for function in (problem_graphs.parts_of, problem_graphs.graph_of):
        function.cache_clear()
    length, keys, options = PARTS[name]
    gradients_agree("cudnn", *draw(length, keys), **options)
    assert len(HANDLES[0].log) == 2 * {1: 4, 1440: 2}.get(most, 1)
    assert len(plans._engine().plans) == 1
    for function in (problem_graphs.parts_of, problem_graphs.graph_of):
        function.cache_clear()


# ---- memory ------------------------------------------------------------------------------------


def addresses(monkeypatch):
    seen = []
    genuine = plans.run
    monkeypatch.setattr(
        plans, "run", lambda graph, pointers: seen.append(pointers) or genuine(graph, pointers)
    )
    return seen


TAKEN_AS_THEY_ARE = {
    "contiguous": lambda x: x,
    "length before heads": lambda x: x.swapaxes(1, 2),
    "some rows": lambda x: x[:, :, ::3],
    "part of a vector": lambda x: x[..., 8:24],
    "one row": lambda x: x[:, :, 3:4],
    "one head": lambda x: x[:, 1:2],
}
COPIED = {
    "off by a number": lambda x: x[..., 1:25],
    "backwards": lambda x: x[..., ::-1],
    "every second": lambda x: x[..., ::2],
    "rows backwards": lambda x: x[:, :, ::-1],
    "one for all rows": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    "rows of an odd pitch": lambda x: x.reshape(2, 4, -1)[..., :1000].reshape(2, 4, 40, 25)[
        ..., :16
    ],
}


@pytest.mark.parametrize("view", TAKEN_AS_THEY_ARE)
@pytest.mark.usefixtures("library")
def test_what_cudnn_reads_is_not_copied(view, monkeypatch):
    seen = addresses(monkeypatch)
    q, k, v = (TAKEN_AS_THEY_ARE[view](randn(2, 4, 40, 32)) for _ in range(3))
    agree("cudnn", q, k, v)
    given = [x.__array_interface__["data"][0] for x in (q, k, v)]
    assert [seen[0][uid] for uid in (graphs.QUERY, graphs.KEY, graphs.VALUE)] == given


@pytest.mark.parametrize("view", COPIED)
@pytest.mark.usefixtures("library")
def test_what_cudnn_would_misread_is_copied(view, monkeypatch):
    seen = addresses(monkeypatch)
    q, k, v = (COPIED[view](randn(2, 4, 40, 32)) for _ in range(3))
    agree("cudnn", q, k, v)
    given = {x.__array_interface__["data"][0] for x in (q, k, v)}
    assert given.isdisjoint(seen[0].values())


# ---- what it cannot use -------------------------------------------------------------------------


def test_what_cudnn_refuses_is_a_reason(monkeypatch, library):
    asked = []
    genuine = graphs.build
    monkeypatch.setattr(
        graphs, "build", lambda graph, **where: asked.append(graph) or genuine(graph, **where)
    )
    monkeypatch.setattr(HostGraph, "refusal", "no such thing\nwith details")
    for _ in range(2):
        assert "cuDNN says: no such thing" in reasons(*SHAPES, **FACTS)
    assert len(asked) == 1
    assert "details" not in reasons(*SHAPES, **FACTS)


def test_devices_that_it_is_not_for(monkeypatch, library):
    monkeypatch.setattr(Device, "compute_capability", "75")
    assert "needs compute capability 8.0; this device has 7.5" in reasons(*SHAPES, **FACTS)
    forget()
    monkeypatch.setattr(Device, "compute_capability", "100")
    assert "pytorch#193893" in reasons(*SHAPES, **FACTS)
    assert not reasons(*(SHAPES[0],) * 3, **FACTS)
    monkeypatch.setattr(library, "backend_version", lambda: 92600)
    assert not reasons(*SHAPES, **FACTS)


def test_libraries_that_are_too_old(monkeypatch, library):
    assert not reasons(*SHAPES, **FACTS)
    for attribute, value, reason in (
        ("__version__", "1.27.0", "nvidia-cudnn-frontend 1.27.0 is older than 1.28"),
        ("backend_version", lambda: 91002, "cuDNN 9.10.2 is older than 9.15.0"),
        ("backend_version", _not_found, "cuDNN is not found: Unable to find symbol"),
    ):
        forget()
        with monkeypatch.context() as context:
            context.setattr(library, attribute, value)
            assert reason in reasons(*SHAPES, **FACTS)
    forget()
    monkeypatch.setattr(loading, "library", _not_installed)
    assert "pip install" in reasons(*SHAPES, **FACTS)
    assert loading.versions() == {}


def _not_found():
    raise RuntimeError("Unable to find symbol cudnnGetVersion")


def _not_installed():
    raise ImportError("No module named 'cudnn'")


def test_it_tells_the_versions(library):
    assert "cudnn 9.19.0, cudnn-frontend 1.28.0" in str(explain(*SHAPES, backend="host", **FACTS))


def test_cudnn_is_asked_about_the_gradients(library, monkeypatch):
    assert not CupyCudnn().reasons_against(problem_of(SHAPES, gradients=True))
    (engine,) = plans._local.engines.values()
    (graph,) = engine.plans
    assert graph.output_gradient is not None
    monkeypatch.setattr(library.pygraph, "refusal", "no such gradient")
    assert CupyCudnn().reasons_against(problem_of(SQUARE, gradients=True)) == [
        "cuDNN says: no such gradient"
    ]
