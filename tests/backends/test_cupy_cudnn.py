"""What CuPy's kernel tells cuDNN, when it runs and what it copies, with the host as cuDNN."""

import threading
import types

import cudnn as frontend
import numpy as np
import pytest
from cudnn_host import HANDLES, TYPES, Handle, HostGraph, forget, put_in_place
from cupy_checks import agree, gradients_agree
from cupy_host import Device

from polyattn import attention, attention_partial, explain, masks
from polyattn._core.call.problem import examine
from polyattn.plugin import Cotangents, Operands, Residuals, visible_keys
from polyattn_cupy import graphs, loading, plans, problem_graphs

RNG = np.random.default_rng(0)
FACTS = {"library": "numpy", "device": "cpu", "dtype": "float16"}


@pytest.fixture
def library(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return the frontend that it uses."""
    yield put_in_place(monkeypatch)
    forget()


def randn(*shape, dtype="float16"):
    return RNG.standard_normal(shape).astype(dtype)


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


def told(shapes, **options):
    """Return the node of the frontend's graph."""
    (node,) = graphs.describe(problem_graphs.graph_of(problem_of(shapes, **options))).nodes
    return node


def facts(tensor):
    return tensor.uid, tuple(tensor.dim), tuple(tensor.stride), TYPES[tensor.data_type]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.usefixtures("library")
def test_the_band(name, gradients):
    shapes, options, expected = BANDS[name]
    node = told(shapes, gradients=gradients, **options)
    names = "diagonal_alignment", "diagonal_band_left_bound", "diagonal_band_right_bound"
    assert tuple(node.params.get(name) for name in names) == (expected or (None, None, None))
    assert ("bias" in node.inputs) == ("bias" in name)


KEYS = {
    "lengths": (SHAPES, {"key_lengths": (2,)}, True),
    "a number": (SHAPES, {"mask": masks.prefix(9)}, True),
    "decode": (ROW, {"key_lengths": (2,), "is_causal": True}, True),
    "decode, a number": (ROW, {"key_lengths": 9, "is_causal": True}, True),
    "causal": (SHAPES, {"key_lengths": (2,), "is_causal": True}, False),
    "decode, a window": (ROW, {"key_lengths": (2,), "window": (7, 0)}, False),
    "decode, other positions": (ROW, {"mask": masks.prefix(9), "is_causal": True,
                                      "query_offset": 3}, False),
    "beside a bias": (SHAPES, {"key_lengths": (2,), "bias": (100, 300)}, False),
    "lengths of rows": (SHAPES, {"mask": masks.padding(9, 5)}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.usefixtures("library")
def test_numbers_of_keys_are_told_in_place_of_a_bias(name):
    shapes, options, is_told = KEYS[name]
    node = told(shapes, **options)
    assert (node.params.get("use_padding_mask", False), "bias" in node.inputs) == (
        is_told, not is_told,
    )  # fmt: skip
    assert not node.params.get("diagonal_alignment")
    if is_told:
        assert facts(node.inputs["seq_len_kv"])[:2] == (graphs.KEY_LENGTHS, (2, 1, 1, 1))
        assert told(shapes, gradients=True, **options).inputs.keys() >= {"bias"}


@pytest.mark.parametrize("lengths", [9, np.array([3, 0]), np.array([[-1], [400]])], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.usefixtures("library")
def test_items_see_the_keys_that_they_have(rows, lengths):
    batch = (2, 1) if np.ndim(lengths) == 2 else (2,)
    x, y = randn(*batch, 4, rows, 8), randn(*batch, 2, 17, 8)
    mask = masks.prefix(lengths)
    found, expected = (
        attention_partial(x, y, y, mask=mask, **where)
        for where in ({"backend": "host", "kernel": "cudnn"}, {"kernel": "dense"})
    )
    np.testing.assert_allclose(found.output, expected.output, atol=2e-3)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, atol=2e-3)


@pytest.mark.usefixtures("library")
def test_the_other_options():
    plain = told(SHAPES)
    assert plain.params == {"attn_scale": 0.125, "generate_stats": False}
    assert set(plain.inputs) == {"q", "k", "v"}
    assert told(SHAPES, scale=0.3).params["attn_scale"] == 0.3
    assert told(SHAPES, logsumexp=True).params["generate_stats"] is True
    assert callable(told(SHAPES, softcap=2.0).params["score_mod"])


@pytest.mark.usefixtures("library")
def test_gradients_start_from_the_logsumexp_that_is_given():
    node = told(SHAPES, gradients=True)
    assert node.params == {"attn_scale": 0.125, "use_deterministic_algorithm": True}
    assert {name: facts(tensor) for name, tensor in node.inputs.items()} == {
        "q": (graphs.QUERY, SHAPES[0], (51200, 6400, 64, 1), "float16"),
        "k": (graphs.KEY, SHAPES[1], (38400, 19200, 64, 1), "float16"),
        "v": (graphs.VALUE, SHAPES[2], (38400, 19200, 64, 1), "float16"),
        "o": (graphs.OUTPUT, SHAPES[0], (51200, 6400, 64, 1), "float16"),
        "dO": (graphs.OUTPUT_GRADIENT, SHAPES[0], (51200, 6400, 64, 1), "float16"),
        "stats": (graphs.LOGSUMEXP, (2, 8, 100, 1), (800, 100, 1, 1), "float32"),
    }
    results = {name: facts(tensor)[:2] for name, tensor in node.outputs.items()}
    assert results == {
        "dQ": (graphs.QUERY_GRADIENT, SHAPES[0]),
        "dK": (graphs.KEY_GRADIENT, SHAPES[1]),
        "dV": (graphs.VALUE_GRADIENT, SHAPES[2]),
    }


@pytest.mark.parametrize(
    ("keys", "options", "given"),
    [
        (192, {"mask": (100, 192)}, True),
        (300, {"is_causal": True, "query_offset": 3}, True),
        (256, {"mask": (100, 256)}, False),
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
        tensor = node.inputs.get(name)
        expected = (uid, (2, 1, 1, 1), (1, 1, 1, 1), "int32") if given else None
        assert (tensor and facts(tensor)) == expected


EXPRESSIONS = {
    (2, 1, 1, 300): masks.padding(np.array([3, 9])),
    (1, 1, 1, 300): masks.prefix(4),
    (1, 1, 100, 300): masks.positions(np.arange(100), np.arange(300))
    | masks.tree(np.array([-1, *range(99)])),
    (2, 8, 100, 300): masks.dense(np.ones((2, 8, 1, 1), bool)) | masks.dilated(2),
}


@pytest.mark.parametrize("shape", EXPRESSIONS)
@pytest.mark.usefixtures("library")
def test_the_shape_of_a_mask_expression_is_known_before_the_call(shape):
    problem = problem_of(SHAPES, mask=EXPRESSIONS[shape])
    x = Operands(*(np.zeros(shape) for shape in SHAPES), EXPRESSIONS[shape])
    assert visible_keys(problem, x, np, banded=False).shape == shape
    assert problem_graphs.bias_shape(problem) == shape
    # Gradients have a bias of all rows.
    problem = problem_of(SHAPES, gradients=True, mask=EXPRESSIONS[shape])
    assert problem_graphs.bias_shape(problem) == (*shape[:2], 100, 300)


# ---- where and when it runs --------------------------------------------------------------------


def run(length=4):
    x = randn(1, 1, length, 8)
    return attention(x, x, x, backend="host", kernel="cudnn")


@pytest.mark.usefixtures("library")
def test_the_plan_unused_for_longest_is_dropped(monkeypatch):
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    for length in (1, 2, 1, 3, 4, 1):
        run(length)
    assert [graph.query.shape[2] for graph in plans.device_handle().plans] == [4, 1]


def test_a_handle_follows_the_stream(library):
    for stream in (7, 7, 9, 9, 7):
        library.stream = stream
        run()
    (handle,) = HANDLES
    assert handle.log == [7, 7, 9, 9, 7]


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


@pytest.mark.parametrize("lost", ["", "_lowered_graph", "plans", "selected_engine"])
def test_the_way_past_execute_needs_all_that_it_reads(lost):
    seen = []
    parts = {
        "_lowered_graph": types.SimpleNamespace(_execute_plan_at_index=lambda *x: seen.append(x)),
        "_plan_index": 1,
        "plans": [None, types.SimpleNamespace(cpp_index=5)],
        "selected_engine": None,
    }
    if lost:
        parts |= {lost: object() if lost == "selected_engine" else None}
    plan = object.__new__(plans._CudnnPlan)
    plan.graph, handle = types.SimpleNamespace(**parts), Handle()
    direct = plan._direct()
    assert (direct is None) == bool(lost)
    if direct is not None:
        direct({1: 2}, 3, handle)
        assert seen == [({1: 2}, 3, 5, handle.backend_handle, None, None, None)]


PARTS = {
    "plain": {},
    "a mask for all": {"mask": RNG.random((2, 4, 9, 40)) > 0.3, "is_causal": True},
    "a mask of heads": {"mask": np.arange(4)[None, :, None, None] > 0},
}


@pytest.mark.parametrize(("most", "count"), [(1, 4), (9 * 40 * 4, 2), (10**6, 1)])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.usefixtures("library")
def test_gradients_of_many_scores_are_computed_part_by_part(name, most, count, monkeypatch):
    monkeypatch.setattr(problem_graphs, "MOST_SCORES", most)
    arrays = randn(2, 4, 9, 16), randn(2, 2, 40, 16), randn(2, 2, 40, 24)
    cached = problem_graphs.parts_of, problem_graphs.graph_of
    for function in cached:
        function.cache_clear()
    gradients_agree("cudnn", *arrays, **PARTS[name])
    assert len(HANDLES[0].log) == 2 * count
    assert len(plans.device_handle().plans) == 1
    for function in cached:
        function.cache_clear()


# ---- memory ------------------------------------------------------------------------------------

READ_IN_PLACE = {
    "contiguous": lambda x: x,
    "length before heads": lambda x: x.swapaxes(1, 2),
    "some rows": lambda x: x[:, :, ::3],
    "part of a vector": lambda x: x[..., 8:24],
    "one row": lambda x: x[:, :, 3:4],
    "one head": lambda x: x[:, 1:2],
}
COPIED = {
    "not aligned": lambda x: x[..., 1:25],
    "every second number": lambda x: x[..., ::2],
    "rows backwards": lambda x: x[:, :, ::-1],
    "one row for all": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    "rows of an odd stride": lambda x: x.reshape(2, 4, -1)[..., :1000].reshape(2, 4, 40, 25)[
        ..., :16
    ],
}


@pytest.mark.parametrize("view", [*READ_IN_PLACE, *COPIED])
@pytest.mark.usefixtures("library")
def test_memory_that_cudnn_would_misread_is_copied(view, monkeypatch):
    seen, genuine = [], plans.run

    def watched(graph, pointers):
        seen.append(pointers)
        genuine(graph, pointers)

    monkeypatch.setattr(plans, "run", watched)
    q, k, v = ((READ_IN_PLACE | COPIED)[view](randn(2, 4, 40, 32)) for _ in range(3))
    agree("cudnn", q, k, v)
    given = [x.__array_interface__["data"][0] for x in (q, k, v)]
    read = [seen[0][uid] for uid in (graphs.QUERY, graphs.KEY, graphs.VALUE)]
    assert [one == other for one, other in zip(read, given, strict=True)] == [
        view not in COPIED
    ] * 3


# ---- what it cannot use -------------------------------------------------------------------------


def test_cudnn_is_asked_once_about_a_call_and_its_refusal_is_a_reason(monkeypatch, library):
    asked, genuine = [], graphs.build

    def watched(graph, **where):
        asked.append(graph)
        return genuine(graph, **where)

    monkeypatch.setattr(graphs, "build", watched)
    monkeypatch.setattr(HostGraph, "refusal", "no such thing\nwith details")
    for _ in range(2):
        assert reasons(*SHAPES, **FACTS) == "cuDNN says: no such thing"
    assert len(asked) == 1


def test_unsupported_devices(monkeypatch, library):
    monkeypatch.setattr(Device, "compute_capability", "75")
    assert "needs compute capability 8.0; this device has 7.5" in reasons(*SHAPES, **FACTS)
    forget()
    monkeypatch.setattr(Device, "compute_capability", "100")
    assert "pytorch#193893" in reasons(*SHAPES, **FACTS)
    assert not reasons(*(SHAPES[0],) * 3, **FACTS)
    monkeypatch.setattr(library, "backend_version", lambda: 92600)
    assert not reasons(*SHAPES, **FACTS)


def not_found():
    raise RuntimeError("Unable to find symbol cudnnGetVersion")


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("__version__", "1.28.0", ""),
        ("__version__", "1.27.0", "nvidia-cudnn-frontend 1.27.0 is older than 1.28"),
        ("backend_version", lambda: 91002, "cuDNN 9.10.2 is older than 9.15.0"),
        ("backend_version", not_found, "cuDNN is not found: Unable to find symbol"),
    ],
)
def test_libraries_that_are_too_old(attribute, value, reason, monkeypatch, library):
    monkeypatch.setattr(library, attribute, value)
    assert reason in reasons(*SHAPES, **FACTS)
    assert bool(reason) == bool(reasons(*SHAPES, **FACTS))


def test_an_absent_library_and_the_versions_that_explain_shows(monkeypatch, library):
    assert "cudnn 9.19.0, cudnn-frontend 1.28.0" in str(explain(*SHAPES, backend="host", **FACTS))
    forget()

    def not_installed():
        raise ImportError("No module named 'cudnn'")

    monkeypatch.setattr(loading, "library", not_installed)
    assert "pip install" in reasons(*SHAPES, **FACTS)
