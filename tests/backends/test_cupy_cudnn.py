"""cuDNN's kernel without a GPU: NVIDIA's frontend describes the graph, and the host computes it."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cudnn as frontend
import ml_dtypes
import numpy as np
import pytest
from test_cupy_cudnn_host import HANDLES, Handle, HostGraph, eights, forget, put_in_place
from test_cupy_host import Device, cases

from polyattn import attention, attention_partial, explain
from polyattn._dispatch import registry
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn_cupy import graphs, loading, plans, problem_graphs
from polyattn_cupy.cudnn import Cudnn
from polyattn_cupy.graphs import Band, Tensor

RNG = np.random.default_rng(0)


@pytest.fixture
def library(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return the frontend it sees."""
    yield put_in_place(monkeypatch)
    forget()


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_what_it_declares_is_needed_by_some_case():
    promises.check_declarations(
        Target("host", "numpy"), KernelVariant(registry.loaded("host").kernels[0]), CASES
    )


def randn(*shape, dtype="float16"):
    return RNG.standard_normal(shape).astype(dtype)


def chosen(*arrays, **options):
    return explain(*arrays, backend="host", kernel="cudnn", **options).chosen is not None


def reasons(*arrays, **options):
    (candidate,) = explain(*arrays, backend="host", kernel="cudnn", **options).candidates
    return " ".join(candidate.reasons)


def agree(*arrays, **options):
    """Hold output and logsumexp against the formula, and return them."""
    mine = attention_partial(*arrays, backend="host", kernel="cudnn", **options)
    formula = attention_partial(*arrays, kernel="dense", **options)
    eps = float(ml_dtypes.finfo(arrays[0].dtype).eps)
    for one, other, unit in zip(mine, formula, (eps, 1e-6), strict=True):
        one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
        np.testing.assert_allclose(one, other, rtol=4 * unit, atol=4 * unit)
    return mine


# ---- it computes what it says ------------------------------------------------------------------


# One program serves both dtypes: of bfloat16 there are the essential cases only.
RUNS = [
    pytest.param(*case.values, dtype, marks=case.marks)
    for dtype, step in {"float16": 24, "bfloat16": 10**6}.items()
    for case in cases(Cudnn.features, step, ("float32",))
]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
@pytest.mark.usefixtures("library")
def test_it_keeps_to_the_conformance_cases(name, dtype):
    case = CASES[name]
    case = replace(case, dtype=dtype, D=eights(case.D), E=eights(case.E))
    target, variant = Target("host", "numpy"), KernelVariant(registry.loaded("host").kernels[0])
    outcome = checks.check_case(target, variant, case)
    ran = any(handle.log for handle in HANDLES)
    assert ran == (outcome.output is not None)
    refused = 0 in (*case.score_shape, case.D, case.value_size) or case.features >= {"softcap"}
    assert ran or refused or dict(case.options)["scale"] <= 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("library")
def test_no_score_is_so_low_that_a_masked_key_is_seen(dtype):
    q, k, v = randn(1, 1, 3, 8), randn(1, 1, 40, 8), randn(1, 1, 40, 8)
    q[...], k[...] = 1, 0
    k[..., :20, 0] = -60_000
    mask = np.arange(40) < 20  # the low ones take part, the high ones do not
    output, logsumexp = agree(*(x.astype(dtype) for x in (q, k, v)), mask=mask, scale=8.0)
    assert (logsumexp < -400_000).all()
    assert np.isfinite(output.astype("float32")).all()


@pytest.mark.usefixtures("library")
def test_a_bias_that_only_almost_hides():
    bias = np.where(RNG.random((3, 40)) > 0.5, np.finfo("float32").min, 0)
    agree(randn(1, 1, 3, 8), randn(1, 1, 40, 8), randn(1, 1, 40, 8), bias=bias.astype("float32"))


@pytest.mark.usefixtures("library")
def test_rows_that_see_nothing():
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 8)
    mask = RNG.random((2, 1, 5, 9)) > 0.3
    mask[1, 0, 3] = False
    bias = np.zeros((4, 5, 9), "float32")
    bias[2, 1] = -np.inf
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
        output, logsumexp = agree(q, k, v, **options)
        dead = np.zeros((2, 4, 5), bool)
        dead[1, :, 3], dead[:, 2, 1] = "mask" in options, "bias" in options
        np.testing.assert_array_equal(logsumexp == -np.inf, dead)
        assert (output[dead] == 0).all()
    agree(q, k, v, is_causal=True, query_offset=-3)
    agree(q, k, v, mask=mask, is_causal=True, query_offset=-2)


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
    "causal, from the first": (SHAPES, {"is_causal": True, "query_offset": 0}, (FIRST, None, 0)),
    "causal, from the first, tall": (
        TALL,
        {"is_causal": True, "query_offset": 0},
        (FIRST, None, 0),
    ),
    "causal, a row": (ROW, {"is_causal": True}, None),
    "left": (SHAPES, {"window": (5, None)}, (LAST, 6, None)),
    "right": (SHAPES, {"window": (None, 3)}, (LAST, None, 3)),
    "both": (SQUARE, {"window": (5, 3)}, (FIRST, 6, 3)),
    "both, causal": (SHAPES, {"window": (0, 3), "is_causal": True}, (LAST, 1, 0)),
    "wider than the keys": (SQUARE, {"window": (500, 100)}, None),
}


def problem_of(shapes, **options):
    return explain(*shapes, library="numpy", device="cpu", dtype="float16", **options).problem


def told(problem):
    (node,) = graphs.describe(problem_graphs.graph_of(problem)).nodes
    return node


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.usefixtures("library")
def test_the_band(name):
    shapes, options, expected = BANDS[name]
    params = told(problem_of(shapes, **options)).params
    if expected is None:
        assert not {key for key in params if key.startswith("diagonal")}
    else:
        alignment, left, right = expected
        assert params["diagonal_alignment"] == alignment
        assert params.get("diagonal_band_left_bound") == left
        assert params.get("diagonal_band_right_bound") == right


@pytest.mark.usefixtures("library")
def test_the_other_options():
    plain = told(problem_of(SHAPES))
    assert plain.params == {"attn_scale": 0.125, "generate_stats": False}
    assert set(plain.inputs) == {"q", "k", "v"}
    assert told(problem_of(SHAPES, scale=0.3)).params["attn_scale"] == 0.3
    assert told(problem_of(SHAPES, logsumexp=True)).params["generate_stats"] is True
    assert callable(told(problem_of(SHAPES, softcap=2.0)).params["score_mod"])
    bias = told(problem_of(SHAPES, mask=(2, 1, 1, 300))).inputs["bias"]
    assert (list(bias.dim), list(bias.stride)) == ([2, 1, 1, 300], [304, 304, 304, 1])
    assert bias.data_type == frontend.data_type.FLOAT


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
    {"key": (2, 4, 300, 64), "value": (2, 4, 300, 64)},
    {"value": (2, 2, 300, 32)},
]


@pytest.mark.usefixtures("library")
def test_no_two_problems_share_a_plan():
    graphs = set()
    for options in DIFFERENT:
        query, key, value = SHAPES
        shapes = query, options.get("key", key), options.get("value", value)
        rest = {name: x for name, x in options.items() if name not in ("key", "value")}
        graphs.add(problem_graphs.graph_of(problem_of(shapes, **rest)))
    assert len(graphs) == len(DIFFERENT)


@pytest.mark.usefixtures("library")
def test_the_plan_that_was_asked_about_is_the_one_that_runs():
    arrays = randn(2, 4, 1, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 16)
    mask = RNG.random((2, 1, 1, 9)) > 0.3
    agree(*arrays)
    agree(*arrays, mask=mask)
    agree(*(x.astype("bfloat16") for x in arrays))
    agree(*arrays)
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
    plan = object.__new__(plans._Plan)
    plan.graph = types.SimpleNamespace(**whole)
    handle = Handle()
    plan._direct()({1: 2}, 3, handle)
    assert seen == [({1: 2}, 3, 5, handle.backend_handle, None, None, None)]
    for lost in ("_lowered_graph", "plans"):
        plan.graph = types.SimpleNamespace(**{k: x for k, x in whole.items() if k != lost})
        assert plan._direct() is None
    plan.graph = types.SimpleNamespace(**{**whole, "selected_engine": object()})
    assert plan._direct() is None


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
    agree(q, k, v)
    given = [x.__array_interface__["data"][0] for x in (q, k, v)]
    assert [seen[0][uid] for uid in (graphs.QUERY, graphs.KEY, graphs.VALUE)] == given


@pytest.mark.parametrize("view", COPIED)
@pytest.mark.usefixtures("library")
def test_what_cudnn_would_misread_is_copied(view, monkeypatch):
    seen = addresses(monkeypatch)
    q, k, v = (COPIED[view](randn(2, 4, 40, 32)) for _ in range(3))
    agree(q, k, v)
    given = {x.__array_interface__["data"][0] for x in (q, k, v)}
    assert given.isdisjoint(seen[0].values())


# ---- what it refuses ---------------------------------------------------------------------------

REFUSED = {
    "it supports float16 and bfloat16 only": {"dtype": "float32"},
    "must be a multiple of 8; got (12, 12)": {"shapes": ((1, 4, 12), (1, 4, 12), (1, 4, 12))},
    "must be a multiple of 8; got (16, 12)": {"shapes": ((1, 4, 16), (1, 4, 16), (1, 4, 12))},
    "empty": {"shapes": ((1, 4, 16), (1, 0, 16), (1, 0, 16))},
    "a scale above 0; got -1.0": {"scale": -1.0},
    "a scale above 0; got 0.0": {"scale": 0.0},
    "it caps scores only": {"softcap": 2.0, "is_causal": True},
    "caps scores only": {"softcap": 2.0, "mask": (100, 300)},
    "a bias of 67,174,400 elements, above 67,108,864": {
        "shapes": ((8192, 16), (8200, 16), (8200, 16)),
        "is_causal": True,
        "query_offset": 3,
    },
    "sinks": {"sinks": (8,)},
    "dropout": {"dropout": (0.5, 1)},
    "score_mod": {"score_mod": lambda s, *_: s},
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.usefixtures("library")
def test_refusals(reason):
    options = {"dtype": "float16", "library": "numpy", "device": "cpu", **REFUSED[reason]}
    shapes = options.pop("shapes", SHAPES)
    assert reason in reasons(*shapes, **options)


def test_what_cudnn_refuses_is_a_reason(monkeypatch, library):
    asked = []
    genuine = graphs.build
    monkeypatch.setattr(
        graphs, "build", lambda graph, **where: asked.append(graph) or genuine(graph, **where)
    )
    monkeypatch.setattr(HostGraph, "refusal", "no such thing\nwith details")
    facts = {"library": "numpy", "device": "cpu", "dtype": "float16"}
    for _ in range(2):
        assert "cuDNN says: no such thing" in reasons(*SHAPES, **facts)
    assert len(asked) == 1
    assert "details" not in reasons(*SHAPES, **facts)


def test_devices_that_it_is_not_for(monkeypatch, library):
    facts = {"library": "numpy", "device": "cpu", "dtype": "float16"}
    monkeypatch.setattr(Device, "compute_capability", "75")
    assert "needs compute capability 8.0; this device has 7.5" in reasons(*SHAPES, **facts)
    forget()
    monkeypatch.setattr(Device, "compute_capability", "100")
    assert "pytorch#193893" in reasons(*SHAPES, **facts)
    assert not reasons(*(SHAPES[0],) * 3, **facts)
    monkeypatch.setattr(library, "backend_version", lambda: 92600)
    assert not reasons(*SHAPES, **facts)


def test_libraries_that_are_too_old(monkeypatch, library):
    facts = {"library": "numpy", "device": "cpu", "dtype": "float16"}
    assert not reasons(*SHAPES, **facts)
    for attribute, value, reason in (
        ("__version__", "1.27.0", "nvidia-cudnn-frontend 1.27.0 is older than 1.28"),
        ("backend_version", lambda: 91002, "cuDNN 9.10.2 is older than 9.15.0"),
        ("backend_version", _not_found, "cuDNN is not found: Unable to find symbol"),
    ):
        forget()
        with monkeypatch.context() as context:
            context.setattr(library, attribute, value)
            assert reason in reasons(*SHAPES, **facts)
    forget()
    monkeypatch.setattr(loading, "library", _not_installed)
    assert "pip install" in reasons(*SHAPES, **facts)
    assert loading.versions() == {}


def _not_found():
    raise RuntimeError("Unable to find symbol cudnnGetVersion")


def _not_installed():
    raise ImportError("No module named 'cudnn'")


def test_it_tells_the_versions(library):
    facts = {"library": "numpy", "device": "cpu", "dtype": "float16"}
    assert "cudnn 9.19.0, cudnn-frontend 1.28.0" in str(explain(*SHAPES, backend="host", **facts))


@pytest.mark.usefixtures("library")
def test_bands_of_a_graph():
    assert problem_graphs.band_of(problem_of(SHAPES, window=(2, 1))) == Band(True, 2, 1)
    assert problem_graphs.graph_of(problem_of(SHAPES)).query == Tensor(
        (2, 8, 100, 64), (51200, 6400, 64, 1), "float16"
    )
