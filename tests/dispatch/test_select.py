"""Which kernel runs: by argument, context and environment, and how arrays move there and back."""

import contextlib
import contextvars
import gc
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from optional import array_api_strict, da, jax, jnp, torch

import polyattn
from polyattn import (
    attention,
    attention_jvp,
    attention_partial,
    attention_vjp,
    explain,
    masks,
    scores,
    use_backend,
    use_threads,
)
from polyattn._base.arrays import library_of
from polyattn._base.threads import thread_count
from polyattn._core.call.describe import describe
from polyattn._core.call.problem import examine
from polyattn._dispatch import cache, registry, request, select
from polyattn._kernels.dense_kernel import Dense

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 5, 8), dtype=np.float32)
SHAPE = X.shape


def chosen(*arrays, **options):
    arrays = arrays or (X, X, X)
    candidate = explain(*arrays, **options).chosen
    return candidate.backend, candidate.kernel


# ---- what a kernel declares ----


class Half(Dense):
    """Computes a softcap, and differentiates it in forward mode only."""

    name = "half"
    features = frozenset({"causal", "logsumexp", "softcap"})
    differentiates: ClassVar = {"backward": frozenset({"causal"}), "jvp": features}

    def backward(self, problem, *given):
        return super().backward(problem._replace(softcap=None), *given)


def test_a_kernel_differentiates_what_it_declares_and_no_more():
    output, pullback = attention_vjp(X, X, X, is_causal=True, kernel=Half())
    wanted = attention_vjp(X, X, X, is_causal=True)[1](X).query
    np.testing.assert_allclose(pullback(X).query, wanted, atol=1e-5)
    assert attention_jvp((X, X, X), (X, X, X), softcap=2.0, kernel=Half())[0].shape == output.shape
    _, pullback = attention_vjp(X, X, X, softcap=2.0, kernel=Half())
    with pytest.raises(polyattn.UnsupportedError, match="computes softcap, and has no gradient of"):
        pullback(X)
    with pytest.raises(polyattn.UnsupportedError, match="it does not compute bias"):
        attention_vjp(X, X, X, bias=X[..., :5], kernel=Half())


@pytest.mark.needs("torch")
def test_autograd_differentiates_by_operations_what_a_kernel_does_not():
    x, y = (torch.tensor(X, dtype=torch.float64, requires_grad=True) for _ in range(2))
    attention(x, x, x, softcap=2.0, kernel=Half()).sum().backward()
    attention(y, y, y, softcap=2.0).sum().backward()
    np.testing.assert_allclose(x.grad, y.grad, atol=1e-12)


@pytest.mark.needs("torch")
def test_autograd_runs_the_backward_pass_of_a_kernel_that_has_no_other():
    class Opaque(Dense):
        name = "opaque"
        differentiates: ClassVar = {"backward": Dense.differentiates["backward"]}

        def __call__(self, *given):
            with torch.no_grad():
                return super().__call__(*given)

    found = []
    for kernel in (Opaque(), None):
        x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
        attention(x, x, x, softcap=2.0, kernel=kernel).sum().backward()
        found.append(x.grad)
    np.testing.assert_allclose(*found, atol=1e-12)


# ---- the three channels ----


@pytest.mark.without_native
def test_the_arrays_decide_by_default():
    assert chosen() == ("numpy", "small")
    for make, expected in {
        torch.asarray: ("torch", "sdpa"),
        jnp.asarray: ("jax", "xla"),
        da.from_array: ("dask", "chunked"),
        array_api_strict.asarray: ("array-api", "dense"),
    }.items():
        assert chosen(*[make(X)] * 3) == expected


def test_the_channels_select_alike(monkeypatch):
    for names in ("torch", "torch:cpu", "torch,numpy", "numpy,torch", "array-api"):
        by_argument = explain(X, X, X, backend=names)
        with monkeypatch.context() as patch:
            with use_backend(*names.split(",")):
                by_context = explain(X, X, X)
            patch.setenv("POLYATTN_BACKEND", names)
            by_environment = explain(X, X, X)
        assert by_argument.candidates == by_context.candidates == by_environment.candidates
        assert "use_backend" in by_context.source
        assert "POLYATTN_BACKEND" in by_environment.source


@pytest.mark.needs("torch")
def test_argument_over_context_over_environment(monkeypatch):
    monkeypatch.setenv("POLYATTN_BACKEND", "torch")
    assert chosen()[0] == "torch"
    with use_backend("array-api"):
        assert chosen()[0] == "array-api"
        with use_backend("torch"):
            assert chosen()[0] == "torch"
        assert chosen()[0] == "array-api"
        assert chosen(backend="numpy")[0] == "numpy"
        assert chosen(backend="auto")[0] == "numpy"
    assert chosen()[0] == "torch"


def test_the_environment_is_read_at_call_time_and_refused_when_wrong(monkeypatch):
    attention(X, X, X)
    monkeypatch.setenv("POLYATTN_BACKEND", "nunpy")
    with pytest.raises(polyattn.UnknownBackendError, match=r"'numpy'.*POLYATTN_BACKEND=nunpy"):
        attention(X, X, X)
    monkeypatch.setenv("POLYATTN_BACKEND", "numpy,")
    with pytest.raises(ValueError, match="missing in POLYATTN_BACKEND='numpy,'"):
        attention(X, X, X)
    monkeypatch.setenv("POLYATTN_BACKEND", "")
    assert chosen()[0] == "numpy"


def test_a_context_refuses_a_wrong_name_at_once():
    with pytest.raises(polyattn.UnknownBackendError), use_backend("nunpy"):
        pass
    with pytest.raises(ValueError, match="name is missing in use_backend"), use_backend():
        pass


@pytest.mark.parametrize(
    ("kind", "named"),
    [("cuda", "jax:cuda or onnxruntime:cuda or torch:cuda"), ("mps", "torch:mps")],
)
def test_a_kind_of_device_is_refused_with_its_backends(kind, named):
    with pytest.raises(polyattn.UnknownBackendError, match=f"a kind of device, as in {named}"):
        attention(X, X, X, backend=kind)


def test_an_interrupt_while_a_plugin_is_imported_is_raised(plugins):
    plugins(acme=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        attention(X, X, X)


def test_a_context_ends_with_an_error_too():
    with pytest.raises(RuntimeError, match="mine"), use_backend("torch"):
        raise RuntimeError("mine")
    assert chosen()[0] == "numpy"


@contextlib.contextmanager
def block(number):
    with use_backend(f"torch:cuda:{number}"), use_threads(number):
        yield


def in_generator(number):
    with block(number):
        yield


def held():
    return request.request(None).names, thread_count()


@pytest.fixture
def blocked_thread():
    """Another thread, whose block is open: the contexts of all threads are read."""
    entered, done = threading.Event(), threading.Event()

    def hold():
        with use_backend("numpy"):
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("blocked_thread")
def test_a_block_of_a_generator_may_end_after_the_block_around_it():
    outside, suspended = held(), in_generator(2)
    with block(3):
        around = held()
        next(suspended)
        inside = held()
    assert held() == inside != around
    suspended.close()
    assert held() == outside


@pytest.mark.usefixtures("blocked_thread")
def test_a_block_of_a_generator_may_end_in_another_context():
    outside, suspended = held(), in_generator(2)
    context = contextvars.copy_context()
    context.run(next, suspended)
    assert held() == outside != context.run(held)
    suspended.close()
    assert held() == context.run(held) == outside


# ---- lists ----


@pytest.mark.without_native
@pytest.mark.needs("torch")
def test_the_first_backend_that_supports_the_call_runs():
    assert chosen(backend="torch:cuda,numpy") == ("numpy", "small")
    assert chosen(backend=["torch:cuda", "torch"]) == ("torch", "sdpa")
    assert chosen(backend="torch,numpy", kernel="tiled") == ("torch", "tiled")
    assert chosen(backend=" torch:cuda , numpy ") == ("numpy", "small")


@pytest.mark.without_native
@pytest.mark.needs("torch")
def test_the_requested_kernel_is_part_of_the_decision():
    assert [chosen(kernel=k)[1] for k in ("dense", "tiled", None)] == ["dense", "tiled", "small"]
    assert [c.status for c in explain(X, X, X, backend="numpy,torch").candidates][-1] == "next"


def test_no_backend_outside_the_list_runs():
    with pytest.raises(polyattn.UnsupportedError, match="no device 'cuda' here"):
        attention(X, X, X, backend="torch:cuda")


@pytest.mark.without_native
def test_auto_in_a_list_stands_for_the_automatic_choice():
    assert chosen(backend="torch:cuda,auto") == ("numpy", "small")
    strict = array_api_strict.asarray(X)
    assert chosen(strict, strict, strict, backend="torch:cuda,auto") == ("array-api", "dense")


def test_auto_moves_no_array():
    with pytest.raises(TypeError, match="array of numpy"):
        attention(X, torch.from_numpy(X), X, backend="auto")


@pytest.mark.without_native
@pytest.mark.needs("torch")
def test_an_error_while_running_is_not_retried_elsewhere(monkeypatch):
    registry.load("torch")
    kernel = registry.loaded("torch").kernels[1]
    monkeypatch.setattr(type(kernel), "__call__", lambda *_: 1 / 0)
    tensor = torch.from_numpy(X)
    with pytest.raises(ZeroDivisionError):
        attention(tensor, tensor, tensor, backend="torch,numpy")


# ---- plugins that are missing or broken ----


CONTRACT = polyattn.plugin.CONTRACT_VERSION
VERSION = f"this polyattn has version {CONTRACT} of the plugin contract"


def _spec(name="acme", **changes):
    facts = {
        "name": name,
        "namespaces": ("array_api_strict",),
        "implementation": "no_such_module:Backend",
        "requires": (),
        "install": "pip install acme",
        "contract_version": CONTRACT,
    }
    return polyattn.plugin.BackendSpec(**{**facts, **changes})


@pytest.mark.without_native
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            _spec(requires=("no_such_library",)),
            "no_such_library is not installed: pip install acme",
        ),
        (_spec(), "it cannot be loaded: ModuleNotFoundError"),
        (
            _spec(contract_version=CONTRACT - 1),
            f"for version {CONTRACT - 1}, and {VERSION}: upgrade acme",
        ),
        (
            _spec(contract_version=CONTRACT + 1),
            f"for version {CONTRACT + 1}, and {VERSION}: upgrade polyattn",
        ),
        (_spec(name="emca"), "named 'emca'"),
        (ImportError("broken"), "its plugin cannot be imported: ImportError: broken"),
        (SystemExit(3), "its plugin cannot be imported: SystemExit: 3"),
        (object(), "is not a BackendSpec"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_says_why(plugins, spec, reason):
    plugins(acme=spec)
    with pytest.raises(polyattn.BackendUnavailableError) as caught:
        attention(X, X, X, backend="acme")
    assert reason in str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert chosen(backend="acme,numpy") == ("numpy", "small")
    row = next(info for info in polyattn.list_backends() if info.name == "acme")
    assert not row.available
    assert reason in row.reason


@pytest.mark.parametrize(
    ("changes", "reason"), [({}, "cannot be loaded"), ({"contract_version": 1}, VERSION)]
)
def test_the_core_serves_the_library_of_a_broken_plugin(plugins, monkeypatch, changes, reason):
    monkeypatch.setenv("POLYATTN_ACME", "1")
    plugins(acme=_spec(**changes))
    strict = array_api_strict.asarray(X)
    explanation = explain(strict, strict, strict)
    assert explanation.chosen.backend == "array-api"
    assert reason in str(explanation)


def test_other_plugins_cannot_replace_ours(plugins):
    others = {"numpy": _spec("numpy"), "array-api": _spec("array-api")}
    plugins(**others, other=_spec("other", namespaces=("numpy",)))
    assert registry.ARRAY_API not in registry.names()
    assert registry.serving("numpy") == ("numpy",)
    registry.load("numpy")
    assert type(registry.loaded("numpy")).__module__ == "polyattn_numpy.backend"


# ---- there and back ----


def reference(**options):
    return attention(X, X, X, backend="array-api", **options)


@pytest.mark.parametrize(
    ("make", "library"),
    [
        (lambda x: x, "numpy"),
        (torch.from_numpy, "torch"),
        (jnp.asarray, "jax"),
        (array_api_strict.asarray, "array_api_strict"),
    ],
)
def test_the_result_comes_back_to_the_callers_library(make, library):
    x = make(X)
    for backend in ("numpy", "torch"):
        output, logsumexp = attention_partial(x, x, x, is_causal=True, backend=backend)
        assert type(output) is type(logsumexp) is type(x)
        assert polyattn._base.arrays.library_of(output).name == library
        np.testing.assert_allclose(np.asarray(output), reference(is_causal=True), atol=1e-6)


def test_all_operands_are_moved():
    rng = np.random.default_rng(1)
    options = {
        "mask": rng.random((5, 5)) > 0.3,
        "bias": rng.standard_normal((2, 1, 5, 5), dtype=np.float32),
        "sinks": rng.standard_normal(4, dtype=np.float32),
        "query_offset": np.array([1, 3]),
        "window": (2, 1),
    }
    expected = reference(**options)
    strict = {
        name: array_api_strict.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    x = array_api_strict.asarray(X)
    for backend in ("numpy", "torch"):
        output = attention(x, x, x, backend=backend, **strict)
        np.testing.assert_allclose(np.asarray(output), expected, atol=1e-6)


def test_callbacks_get_arrays_of_the_callers_library():
    table = RNG.standard_normal((5, 5)).astype(np.float32)
    seen = set()

    def score_mod(score, b, h, i, j):
        seen.add(type(score))
        return score + table[i, j]

    def mask(b, h, i, j):
        seen.add(type(i))
        return (i + j) % 3 != 0

    for given in (mask, masks.rule(mask) | masks.prefix(1)):
        options = {"score_mod": score_mod, "mask": given}
        output = attention(X, X, X, backend="torch", **options)
        np.testing.assert_allclose(output, reference(**options), atol=1e-6)
    assert seen == {np.ndarray}


COUNTED = [
    {"is_causal": True, "dropout": (0.5, 1)},
    {"window": (10, 0), "key_lengths": 2**30},
    {"window": (10, 0), "query_offset": (1,)},
    {"mask": masks.global_tokens(2**30 + 2)},
    {"mask": lambda b, h, i, j: j > i},
    {"score_mod": scores.alibi([0.5])},
]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "array_api_strict"])
@pytest.mark.parametrize("options", COUNTED, ids=lambda options: str([*options]))
def test_a_kernel_that_counts_in_32_bits_gets_no_longer_sequence(library, options):
    pytest.importorskip(library)
    shapes = (1, 1, 2, 4), *[(1, 1, 2**30 + 1, 4)] * 2
    explanation = explain(*shapes, library=library, **options)
    assert explanation.chosen is None
    assert "it counts to 2**30, and S or L is 1,073,741,825" in str(explanation)
    assert explain(*shapes, library=library).chosen is not None


def test_keys_beyond_what_a_kernel_counts_are_refused_by_name():
    query, key = np.zeros((1, 2, 1), "float32"), np.zeros((1, 1, 1), "float32")
    far = np.broadcast_to(key, (1, 2**31 + 9, 1))  # without memory
    with pytest.raises(polyattn.UnsupportedError, match="for mask_expression it counts to 2"):
        attention(query, far, far, window=(10, 0), key_lengths=2**31)
    one = torch.zeros(1, 1, 1).expand(1, 2**31 + 9, 1)
    with pytest.raises(polyattn.UnsupportedError, match="for mask_expression, window it counts"):
        attention(torch.zeros(1, 2, 1), one, one, window=(10, 0), key_lengths=2**31)


def test_arrays_of_several_libraries_move_to_a_named_backend():
    tensor, strict = torch.from_numpy(X), array_api_strict.asarray(X)
    output = attention(X, tensor, strict, backend="torch")
    assert isinstance(output, np.ndarray)
    np.testing.assert_allclose(output, reference(), atol=1e-6)
    assert isinstance(attention(tensor, X, strict, backend="torch"), torch.Tensor)


def test_conjugate_and_negative_views_of_torch_are_converted():
    tensor = torch.complex(torch.from_numpy(X), torch.from_numpy(X)).conj().imag
    assert tensor.is_neg()
    output = attention(tensor, tensor, tensor, backend="numpy")
    torch.testing.assert_close(output, -torch.from_numpy(reference()), rtol=0, atol=1e-6)


def test_bfloat16_is_converted():
    x = X.astype(ml_dtypes.bfloat16)
    output = attention(x, x, x, backend="torch")
    assert output.dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(X).bfloat16()
    assert attention(tensor, tensor, tensor, backend="numpy").dtype == torch.bfloat16
    x = jnp.asarray(x)
    assert attention(x, x, x, backend="numpy").dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "view",
    [
        X[:, :, ::-1],
        X[..., ::-1],
        np.broadcast_to(X[:1], X.shape),
        X.astype(">f4"),
        np.asfortranarray(X),
        np.zeros(X.shape, [("a", "f4"), ("b", "i2")])["a"],
    ],
)
def test_views_of_every_kind_are_converted(view):
    read_only = view.view()
    read_only.flags.writeable = False
    for x in (view, read_only):
        expected = attention(x, x, x)
        np.testing.assert_allclose(attention(x, x, x, backend="torch"), expected, atol=1e-6)


TENSOR = torch.from_numpy(X)


def under(transform):
    """Return what calls attention inside a transformation of tensors."""
    return lambda: transform(lambda x: attention(x, x, x, backend="numpy"))(TENSOR)


STAYING = {
    "a graph of gradients": (
        lambda: attention(*[TENSOR.clone().requires_grad_()] * 3, backend="numpy"),
        r"requires grad.*query.detach\(\)",
    ),
    "a traced array": (
        lambda: jax.jit(lambda x: attention(x, x, x, backend="numpy"))(X),
        "traced, transformed, lazy",
    ),
    "a lazy array": (
        lambda: attention(*[da.from_array(X)] * 3, backend="torch"),
        "traced, transformed, lazy",
    ),
    "a tensor without values": (
        lambda: attention(*[TENSOR.to("meta")] * 3, backend="torch:cpu"),
        "device meta",
    ),
    "a tensor under vmap": (under(torch.func.vmap), "transformed"),
    "a tensor under jvp": (
        under(lambda f: lambda x: torch.func.jvp(f, (x,), (x,))),
        "transformed",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", STAYING)
def test_what_would_be_lost_does_not_leave_its_library(name):
    call, message = STAYING[name]
    with pytest.raises(polyattn.UnsupportedError, match=message):
        call()


def test_a_graph_of_gradients_stays_where_its_library_computes():
    tensor = TENSOR.clone().requires_grad_()
    for backend in ("torch:cpu", "array-api"):
        assert attention(tensor, tensor, tensor, backend=backend).requires_grad


def test_a_dtype_that_is_lost_on_the_way_is_refused(monkeypatch):
    genuine = type(registry.loaded("numpy")).place

    def place(self, array, device):
        placed = genuine(self, array, device)
        return placed.astype(np.float32) if placed.dtype == np.float64 else placed

    monkeypatch.setattr(type(registry.loaded("numpy")), "place", place)
    x = torch.ones((2, 3, 4), dtype=torch.float64)
    with pytest.raises(polyattn.UnsupportedError, match="numpy makes float32 of float64"):
        attention(x, x, x, backend="numpy")
    assert attention(*[x.float()] * 3, bias=x[0, :, :3], backend="numpy").dtype == torch.float32


def test_a_gradient_in_the_closure_of_a_function_is_not_lost():
    tensor = torch.from_numpy(X)
    slope = torch.ones(4, requires_grad=True)
    rule = {"score_mod": lambda s, b, h, i, j: s * slope[h]}
    assert attention(tensor, tensor, tensor, **rule).requires_grad
    with pytest.raises(polyattn.UnsupportedError, match="the result of the function requires grad"):
        attention(tensor, tensor, tensor, backend="numpy", **rule)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    tensor = torch.from_numpy(X).bfloat16()
    with pytest.raises(ImportError, match="pip install ml_dtypes"):
        attention(tensor, tensor, tensor, backend="numpy")


def test_the_result_comes_back_to_the_callers_device():
    elsewhere = array_api_strict.Device("device1")
    x = array_api_strict.asarray(X, device=elsewhere)
    for backend in ("numpy", "torch"):
        output, logsumexp = attention_partial(x, x, x, backend=backend)
        assert output.device == logsumexp.device == elsewhere


def test_array_api_moves_no_array():
    with pytest.raises(polyattn.UnsupportedError, match="does not move them"):
        attention(X, X, X, backend="array-api:cuda")
    with pytest.raises(polyattn.UnsupportedError, match="does not move them; they are on numpy"):
        attention(X, torch.from_numpy(X), X, backend="array-api")


# ---- explain ----


@pytest.mark.without_native
def test_explain_from_shapes_agrees_with_arrays():
    tensor = torch.from_numpy(X)
    options = {"is_causal": True, "softcap": 3.0}
    assert (
        explain(SHAPE, SHAPE, SHAPE, library="torch", **options).candidates
        == explain(tensor, tensor, tensor, **options).candidates
    )
    options = {"mask": (5, 5), "bias": (1, 4, 5, 5), "sinks": (4,), "query_offset": (2,)}
    explanation = explain(SHAPE, SHAPE, SHAPE, **options, is_causal=True, dtype="bfloat16")
    assert explanation.problem.features == {"mask", "bias", "sinks", "query_offset_array", "causal"}
    assert explanation.chosen.kernel == "dense"


def test_explain_checks_what_attention_checks():
    with pytest.raises(ValueError, match="8 and 6"):
        explain(SHAPE, (2, 4, 5, 6), SHAPE)


def test_explain_assumes_the_default_device_of_the_library():
    assert explain(SHAPE, SHAPE, SHAPE, library="torch").problem.device == "cpu"
    with pytest.raises(ValueError, match="'numpy' is not usable on 'cuda'"):
        explain(SHAPE, SHAPE, SHAPE, device="cuda")


def test_explain_refuses_a_library_that_has_no_arrays():
    no_arrays = "its arrays do not follow"
    for library, reason in {"nunpy": "it is not installed", "operator": no_arrays}.items():
        with pytest.raises(ValueError, match=f"library '{library}' is not usable: {reason}"):
            explain(SHAPE, SHAPE, SHAPE, library=library)


@pytest.mark.parametrize("given", [{"library": np}, {"device": 0}])
def test_explain_takes_names(given):
    with pytest.raises(TypeError, match=f"{next(iter(given))} must be a string"):
        explain(SHAPE, SHAPE, SHAPE, **given)


def test_explain_refuses_malformed_shapes():
    for shape in ((2, -4), (2.0, 4), ("a", 4), (True, None)):
        with pytest.raises(ValueError, match="integers of at least 0"):
            explain(shape, shape, shape)


@pytest.mark.without_native
@pytest.mark.needs("torch")
def test_explain_moves_no_array(monkeypatch):
    registry.load("torch")
    monkeypatch.setattr(type(registry.loaded("torch")), "place", lambda *_: 1 / 0)
    assert chosen(backend="torch") == ("torch", "sdpa")


@pytest.mark.without_native
def test_an_explanation_prints_as_a_table():
    text = str(explain(SHAPE, SHAPE, SHAPE, backend="torch:cuda,numpy", window=(1, 0)))
    lines = text.splitlines()
    assert lines[0].startswith("attention: query (2, 4, 5, 8), key")
    assert lines[1].split() == ["needs:", "window"]
    assert lines[2] == "selected by backend='torch:cuda,numpy'"
    assert [line.split()[0] for line in lines[3:]] == ["torch:cuda", *["numpy"] * 3]
    assert "CHOSEN" in lines[-1]


def test_a_plan_is_remembered_by_facts_not_by_values():
    cache.forget()
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((3, 11, 13))
        attention(x, x, x, softcap=1.5)
    assert cache._plan.cache_info().misses == cache.cached_call.cache_info().misses == 1


@pytest.mark.parametrize("kernel", [None, Dense()])
def test_gradients_of_16_bits_select_once(kernel, monkeypatch):
    x = np.ones((3, 7, 11), "float16")

    def differentiate():
        output, pullback = attention_vjp(x, x, x, softcap=1.5, kernel=kernel)
        pullback(output)

    differentiate()
    monkeypatch.setattr(cache, "select", lambda *_: 1 / 0)
    differentiate()


def test_select_is_a_function_of_its_arguments(monkeypatch):
    requested, xp = request.request("torch,numpy"), library_of(X).xp

    def selected(x):
        call, _ = describe(x, x, x, is_causal=True)
        return select.select(call, examine(call), requested, None, xp)

    plan = selected(X)
    monkeypatch.setenv("POLYATTN_BACKEND", "numpy")
    with use_backend("numpy"):
        assert selected(X + 1) == plan


class Carried:
    """A mask or score function that supports weak references."""

    def __call__(self, *args):
        return args[-1] >= 0 if len(args) == 4 else args[0]


class Given(Dense):
    """A kernel of the caller's."""


@pytest.mark.parametrize(
    ("make", "options_of"),
    [
        (Carried, lambda f: {"mask": f}),
        (Carried, lambda f: {"mask": masks.compile(f, 5)}),
        (Carried, lambda f: {"score_mod": scores.function(f) >> scores.temperature(2.0)}),
        (Given, lambda kernel: {"kernel": kernel}),
        (lambda: np.ones(5, np.int64), lambda ids: {"mask": masks.segments(ids) | masks.prefix(1)}),
    ],
)
def test_the_plan_cache_keeps_no_object_of_the_caller_alive(make, options_of):
    x = np.ones((2, 4, 5, 8))
    gc.freeze()  # what is there already, which takes a second to go through
    try:
        thing = make()
        for _ in range(2):
            attention(x, x, x, **options_of(thing))
        alive = weakref.ref(thing)
        del thing
        gc.collect()
        assert alive() is None
    finally:
        gc.unfreeze()


class Changed(Dense):
    """A kernel whose results are changed."""

    name = "changed"

    def __init__(self, output=lambda x: x, logsumexp=lambda x: x, gradient=lambda x: x):
        self.changes, self.gradient = (output, logsumexp), gradient

    def _changed(self, results):
        return tuple(
            None if x is None else f(x) for f, x in zip(self.changes, results, strict=True)
        )

    def __call__(self, problem, operands, backend):
        return self._changed(super().__call__(problem, operands, backend))

    def jvp(self, *given):
        return self._changed(super().jvp(*given))

    def backward(self, *given):
        found = super().backward(*given)
        return found._replace(key=self.gradient(found.key))


WRONG = {
    "None": (lambda x: None, "it returned None"),
    "a list": (lambda x: x.tolist(), "it returned a list"),
    "another shape": (lambda x: x[..., None], r"it returned an array of numpy, \(.*, 1\) float32"),
    "another length": (lambda x: x[:1], r"it returned an array of numpy, \(1, .*\) float32"),
    "another dtype": (lambda x: x.astype("f8"), r"it returned an array of numpy, .* float64"),
    "another library": (lambda x: torch.asarray(x), r"it returned an array of torch, .* float32"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_result_that_is_not_what_a_kernel_must_return_is_refused(mistake):
    change, got = WRONG[mistake]

    def refused(what, shape):
        wanted = rf"the kernel changed must return its {what} as an array of numpy, \({shape}\)"
        return pytest.raises(TypeError, match=rf"^{wanted} float32; {got}$")

    output, gradient = Changed(output=change), Changed(gradient=change)
    for _ in range(2):  # a repeated call too
        with refused("output", "2, 4, 5, 8"):
            attention(X, X, X, kernel=output)
        with refused("output", "2, 4, 5, 8"):
            polyattn.attention_jvp((X, X, X), (X, X, X), kernel=output)
        with refused("gradient of key", "2, 4, 5, 8"):
            polyattn.attention_vjp(X, X, X, kernel=gradient)[1](X)
        if mistake != "None":
            with refused("logsumexp", "2, 4, 5"):
                attention_partial(X, X, X, kernel=Changed(logsumexp=change))


def test_a_right_result_of_a_kernel_is_taken():
    arrays, kernel = (X, X, X[..., :3]), Changed()
    expected = attention(*arrays)
    np.testing.assert_allclose(attention(*arrays, kernel=kernel), expected, atol=1e-6)
    for to in (torch.asarray, da.from_array):
        found = attention(*map(to, arrays), kernel=kernel)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    traced = jax.jit(lambda *x: attention(*x, kernel=kernel))(*arrays)
    np.testing.assert_allclose(traced, expected, atol=1e-6)


def test_a_plan_with_a_kernel_object_is_cached_while_the_object_lives(monkeypatch):
    kernel = Given()
    attention(X, X, X, kernel=kernel)
    monkeypatch.setattr(cache, "select", lambda *_: 1 / 0)
    attention(X, X, X, kernel=kernel)
    with pytest.raises(ZeroDivisionError):
        attention(X, X, X, kernel=Given())


@pytest.mark.parametrize("to", [np.asarray, torch.asarray])
def test_compiled_masks_with_other_tables_share_only_the_plan(to):
    cache.forget()
    q, k, v = (to(RNG.standard_normal((2, 64, 8), dtype=np.float32)) for _ in range(3))
    for keys in (17, 40):
        mask = masks.compile(masks.prefix(to(np.array(keys))), 64, tile=8)
        output = attention(q, k, v, mask=masks.global_tokens(0) | mask, window=(None, 16))
        expected = attention(
            *(np.asarray(x) for x in (q, k, v)), kernel="dense", backend="numpy",
            mask=lambda b, h, i, j, keys=keys: (j < keys) | (i == 0), window=(None, 16),
        )  # fmt: skip
        assert cache._plan.cache_info().misses == 2  # and that of the expected output
        np.testing.assert_allclose(np.asarray(output), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.needs("torch")
def test_each_thread_chooses_its_backend():
    def call(name):
        with use_backend(name):
            return [chosen()[0] for _ in range(50)] == [name] * 50

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, ["numpy", "torch", "array-api"] * 8))


class NotEmpty(Dense):
    takes_empty = False


def test_a_kernel_that_takes_no_empty_arrays_gets_none():
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x = np.ones(shape, np.float32)
        with pytest.raises(polyattn.UnsupportedError, match="it does not support empty arrays"):
            attention(x, x, x, kernel=NotEmpty())
    assert attention(X, X, X, kernel=NotEmpty()).shape == SHAPE


@pytest.mark.parametrize("given", ["mask", "score_mod", "rule"])
def test_an_explanation_notes_what_a_function_may_not_expect(given):
    def function(*at):
        return at[-1] <= at[-2] if given != "score_mod" else at[0]

    name = "mask" if given == "rule" else given
    options = {name: masks.rule(function) if given == "rule" else function}
    row = r"functions count rows from 0, .* row i is at the position i \+ 8 among"
    step = explain((2, 8, 1, 64), (2, 8, 9, 64), (2, 8, 9, 64), **options)
    assert "note:      functions count rows from 0" in str(step)
    assert re.search(row, step.as_dict()["notes"][0])
    assert not explain((8, 9, 64), (8, 9, 64), (8, 9, 64), **options).notes
    assert not explain((8, 1, 64), (8, 9, 64), (8, 9, 64), mask=masks.causal()).notes
    found = []

    def noted(x):
        found.append(explain(x, x, x, **options).notes)
        return x

    jax.vmap(noted)(jnp.ones((3, 2, 5, 8)))
    torch.func.vmap(noted)(torch.ones((3, 2, 5, 8)))
    notes = ("inside vmap, functions get b = 0 for every item: use batch axes instead",)
    assert found == [notes, notes]
