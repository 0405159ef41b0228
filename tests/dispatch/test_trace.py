"""What ran: `polyattn.trace` counts the calls of a whole process, and a logger names new plans."""

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from optional import da, jax, jnp, torch

import polyattn
from polyattn import attention, parallel
from polyattn._dispatch import cache
from polyattn._dispatch.trace import CallCount, open_traces
from polyattn.plugin import Kernel

X = np.random.default_rng(0).standard_normal((2, 4, 64, 8)).astype(np.float32)


def only(trace):
    """Return the calls of a trace in which all are alike."""
    (calls,) = trace.calls
    return calls


def total(trace):
    return sum(calls.count for calls in trace.calls)


@pytest.mark.without_native
def test_calls_are_counted_by_what_decides_their_kernel():
    with polyattn.trace() as trace:
        for _ in range(3):
            attention(X, X[:, :2, :50], X[:, :2, :50, :3], is_causal=True)
        attention(X[0, 0], X[0, 0], X[0, 0])
    causal, flat = trace.calls
    assert causal.function == "forward"
    assert causal[:6] == (
        "numpy", "cpu", "float32", (2, 4, 64, 8), (2, 2, 50, 8), (2, 2, 50, 3),
    )  # fmt: skip
    assert causal.needs == {"causal", "grouped_heads", "value_size"}
    assert (causal.backend, causal.kernel) == ("numpy", "tiled")
    (small,) = causal.refused
    assert (small.kernel, small.status) == ("small", "refused")
    assert small.reasons == ("it needs rows that see all keys",)
    assert (causal.traced, causal.count, causal.seconds) == (False, 3, None)
    assert (flat.query, flat.needs, flat.count) == ((64, 8), set(), 1)


@pytest.mark.without_native
def test_it_prints_as_a_table_and_is_data_for_json():
    with polyattn.trace() as trace:
        attention(X, X, X, is_causal=True)
        attention(X, X, X, normalizer=polyattn.scores.sparsemax(), backend="numpy")
    titles, first, second = str(trace).splitlines()
    assert titles.split("  ")[1:3] == ["calls", "function"]
    assert first.endswith("numpy tiled  small: it needs rows that see all keys")
    assert second.endswith("; tiled: it does not compute normalizer")
    assert repr(trace) == "<Trace: 2 calls of 2 kinds; print it for the kernels>"
    sparse = trace.calls[1]._asdict() | {"needs": sorted(trace.calls[1].needs)}
    refused = json.loads(json.dumps(sparse))["refused"]
    assert [one[1] for one in refused] == ["small", "tiled"]
    assert refused[1][2:4] == ["refused", ["it does not compute normalizer"]]


def test_a_signal_handler_may_call_while_calls_are_listed(monkeypatch):
    replace = CallCount._replace

    def amid_a_call(one, /, **fields):
        attention(X, X, X, softcap=2.0)
        return replace(one, **fields)

    with polyattn.trace() as trace:
        attention(X, X, X)
        monkeypatch.setattr(CallCount, "_replace", amid_a_call)
        assert len(trace.calls) == 1


@pytest.mark.without_native
def test_derivatives_and_weights_are_calls_too():
    with polyattn.trace() as trace:
        partial = polyattn.attention_partial(X, X, X)
        polyattn.attention_backward(X, X, X, partial, X)
        polyattn.attention_jvp((X, X, X), (X, None, None))
        polyattn.attention_weights(X, X)
    found = [(calls.function, calls.count, calls.kernel) for calls in trace.calls]
    assert found == [
        ("forward", 2, "tiled"),
        ("backward", 1, "tiled"),
        ("jvp", 1, "dense"),
        ("weights", 1, "weights"),
    ]
    assert trace.calls[-1].value is None


class Own(Kernel):
    name = "own"
    __hash__ = None

    def __call__(self, problem, operands, backend):
        return operands.query, None


class Failing(Own):
    def __call__(self, problem, operands, backend):
        raise ArithmeticError


def test_what_is_refused_or_fails_does_not_count():
    with polyattn.trace() as trace:
        with pytest.raises(ArithmeticError):
            attention(X, X, X, kernel=Failing())
        attention(X, X, X, kernel=Own())
        with pytest.raises(polyattn.UnsupportedError):
            attention(X, X, X, softcap=1.0, kernel=Failing())
        with pytest.raises(TypeError):
            attention(X, X, 1)
        polyattn.explain(X, X, X)
    assert (only(trace).kernel, only(trace).count) == ("own", 1)


def test_a_trace_counts_while_it_is_open_and_traces_may_overlap():
    attention(X, X, X)
    with polyattn.trace() as outer:
        attention(X, X, X)
        with pytest.raises(ValueError, match="softcap"), polyattn.trace() as inner:
            attention(X, X, X, softcap=attention(X, X, X).ndim - 5)
        attention(X, X, X)
    attention(X, X, X)
    assert (total(outer), total(inner)) == (3, 1)
    assert open_traces == []


def test_a_moved_call_says_where_its_kernel_ran():
    pytest.importorskip("torch")
    with polyattn.trace() as trace:
        attention(X, X, X, backend="torch:cpu")
    calls = only(trace)
    assert (calls.library, calls.backend, calls.device) == ("numpy", "torch:cpu", "cpu")


# ---- nothing is lost ---------------------------------------------------------------------------


def ranks():
    parallel.run_threads(4, lambda over: parallel.attention(X, X, X, over=over, strategy="gather"))


def chunks():
    array = da.from_array(X, chunks=(1, 2, 64, 8))
    attention(array, array, array).compute(scheduler="threads")


@pytest.mark.parametrize(
    ("program", "calls", "library"),
    [
        (ranks, {"numpy": 4}, None),
        (chunks, {"dask": 1, "numpy": 4}, "dask"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_each_call_of_a_program_in_several_threads_counts(program, calls, library):
    if library:
        pytest.importorskip(library)
    program()  # imports
    with polyattn.trace() as trace, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(program) for _ in range(12)]:
            done.result()
    found = {}
    for one in trace.calls:
        found[one.library] = found.get(one.library, 0) + one.count
    assert found == {name: 12 * number for name, number in calls.items()}
    assert {one.library for one in trace.calls if one.traced} == {"dask"} & found.keys()


def test_threads_and_tasks_lose_no_count_while_other_traces_open_and_close():
    begin, found = threading.Barrier(4), []

    def calls(number):
        begin.wait()
        for _ in range(200):
            attention(X[:number], X[:number], X[:number])
            with polyattn.trace() as own:
                attention(X, X, X)
            found.append(total(own))

    async def tasks():
        await asyncio.gather(*[asyncio.to_thread(calls, n % 2 + 1) for n in range(4)])

    with polyattn.trace() as trace:
        asyncio.run(tasks())
    assert {one.query[0]: one.count for one in trace.calls} == {1: 400, 2: 1200}
    assert len(found) == 800
    assert min(found) >= 1


# ---- programs that run later ---------------------------------------------------------------------


def test_a_program_of_torch_counts_when_it_is_traced_and_a_later_trace_compiles_nothing():
    pytest.importorskip("torch")
    graphs = []

    def kept(module, inputs):
        graphs.append(module)
        return module.forward

    program = torch.compile(
        lambda x: attention(x, x, x, is_causal=True), fullgraph=True, backend=kept
    )
    tensor = torch.from_numpy(X)
    with polyattn.trace(time=True) as trace:
        program(tensor)
        program(tensor)
    calls = only(trace)
    assert (calls.traced, calls.count, calls.seconds) == (True, 1, None)
    assert (calls.query, calls.needs) == ((2, 4, 64, 8), {"causal"})
    assert "1 traced" in str(trace)
    program(tensor)
    with polyattn.trace() as later:
        program(tensor)
        program(tensor[:, :, :50])  # compiled anew, with a length that is open
        program(tensor[:, :, :40])
    assert len(graphs) == 2
    assert only(later).query == (2, 4, None, 8)


def test_a_program_that_was_compiled_without_a_trace_is_not_compiled_again():
    pytest.importorskip("torch")
    program = torch.compile(lambda x: attention(x, x, x), fullgraph=True, backend="eager")
    tensor = torch.from_numpy(X)
    program(tensor)
    before = dict(torch._dynamo.utils.counters["stats"])
    with polyattn.trace() as trace:
        program(tensor)
    assert trace.calls == ()
    assert torch._dynamo.utils.counters["stats"] == before


@pytest.mark.filterwarnings("ignore")  # of torch: about the numbers that decide the kernel
def test_lengths_under_jit_trace_are_numbers():
    pytest.importorskip("torch")
    with polyattn.trace() as trace:
        torch.jit.trace(lambda x: attention(x, x, x), torch.from_numpy(X), check_trace=False)
    assert str(only(trace).query) == "(2, 4, 64, 8)"


def test_a_program_of_jax_counts_when_it_is_traced():
    pytest.importorskip("jax")
    program, array = jax.jit(lambda x: attention(x, x, x)), jnp.asarray(X)
    with polyattn.trace(time=True) as trace:
        program(array)
        program(array)
        attention(array, array, array)
    traced, ran = trace.calls
    assert (traced.traced, traced.count, traced.seconds) == (True, 1, None)
    assert (ran.traced, ran.count) == (False, 1)
    assert ran.seconds is not None


def test_a_call_over_constants_of_a_program_of_jax_is_timed():
    pytest.importorskip("jax")
    array = jnp.asarray(X)
    with polyattn.trace(time=True) as trace:
        jax.jit(lambda x: x + attention(array, array, array))(array)
        attention(array, array, array)
    assert only(trace).count == 2


# ---- time --------------------------------------------------------------------------------------


def test_time_waits_for_the_device_around_each_call_where_it_is_asked_for(monkeypatch):
    events = []
    backend = polyattn._dispatch.registry.usable("numpy")[0]
    run = type(backend).run

    def logged(self, *given):
        events.append("run")
        return run(self, *given)

    monkeypatch.setattr(type(backend), "run", logged)
    monkeypatch.setattr(type(backend), "synchronize", lambda _, device=None: events.append(device))
    with polyattn.trace() as untimed:
        attention(X, X, X)
        assert events == ["run"]
        with polyattn.trace(time=True) as timed:
            attention(X, X, X)
            attention(X, X, X)
    assert events == ["run", *["cpu", "run", "cpu"] * 2]
    assert (only(untimed).count, only(untimed).seconds) == (3, None)
    assert only(timed).count == 2
    assert only(timed).seconds > 0
    assert "seconds" in str(timed)
    assert "seconds" not in str(untimed)


# ---- the logger ----------------------------------------------------------------------------------


@pytest.mark.without_native
def test_the_logger_has_a_line_for_each_new_plan(caplog):
    cache.forget()
    with caplog.at_level(logging.DEBUG, "polyattn"):
        attention(X, X, X, softcap=2.0)
        attention(X, X, X, softcap=2.0)
        attention(X, X, X, normalizer=polyattn.scores.sparsemax())
        polyattn.explain(X, X, X, sinks=X[0, :, 0, 0])
    shapes = "(2, 4, 64, 8) ×3"
    assert [record.getMessage() for record in caplog.records] == [
        f"new plan: forward: {shapes}, float32, numpy on cpu, softcap: numpy tiled, after small: it"
        " does not compute softcap",
        f"new plan: forward: {shapes}, float32, numpy on cpu, normalizer: numpy dense, after small:"
        " it does not compute normalizer; tiled: it does not compute normalizer",
    ]
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_the_logger_is_silent_at_other_levels_and_in_programs(caplog):
    cache.forget()
    with caplog.at_level(logging.INFO, "polyattn"):
        attention(X, X, X)
    if torch:
        with caplog.at_level(logging.DEBUG, "polyattn"):
            program = torch.compile(lambda x: attention(x, x, x), fullgraph=True, backend="eager")
            program(torch.from_numpy(X))
    assert [record for record in caplog.records if record.name == "polyattn"] == []
