"""Selection of the first kernel that supports the call, of named backends or our own."""

import logging

import numpy as np
import pytest
from arrays import draw
from optional import array_api_strict, da, jnp, torch

import polyattn
from polyattn import attention, explain, scores
from polyattn._dispatch import cache, registry

(X,) = draw((2, 4, 5, 8))


def chosen(x=X, **options):
    candidate = explain(x, x, x, **options).chosen
    return candidate.backend, candidate.kernel


def test_the_arrays_decide_by_default():
    assert chosen() == ("numpy", "small")
    for make, expected in {
        torch.asarray: ("torch", "sdpa"),
        jnp.asarray: ("jax", "xla"),
        da.from_array: ("dask", "chunked"),
        array_api_strict.asarray: ("array-api", "dense"),
    }.items():
        assert chosen(make(X)) == expected


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"backend": ["torch:cuda", "torch"]}, ("torch", "sdpa")),
        ({"backend": " torch:cuda , auto "}, ("numpy", "small")),
        ({"backend": "torch,numpy", "kernel": "tiled"}, ("torch", "tiled")),
        # a list of kernels is tried on each backend in turn
        ({"backend": "array-api,numpy", "kernel": "small,tiled"}, ("array-api", "tiled")),
        ({"backend": "array-api,numpy", "kernel": "small"}, ("numpy", "small")),
    ],
    ids=str,
)
def test_the_first_backend_that_supports_the_call_runs(options, expected):
    assert chosen(**options) == expected
    assert explain(X, X, X, backend="numpy,torch").candidates[-1].status == "next"


@pytest.mark.parametrize(
    ("kernel", "options", "expected"),
    [
        ("dense,auto", {}, "dense"),
        ("small, auto", {"dropout": (0.1, 1)}, "dense"),
        ("small,tiled", {"dropout": (0.1, 1)}, "tiled"),  # which runs here on request only
        (["auto", "tiled"], {}, "small"),
        (("small,dense", "auto"), {"dropout": (0.1, 1)}, "dense"),
    ],
)
def test_the_first_kernel_of_a_list_that_can_run_runs(kernel, options, expected):
    explanation = explain(X, X, X, kernel=kernel, **options)
    assert explanation.chosen.kernel == expected
    names = [candidate.kernel for candidate in explanation.candidates]
    assert len(set(names)) == len(names)
    result = attention(X, X, X, kernel=kernel, **options)
    np.testing.assert_array_equal(result, attention(X, X, X, kernel=expected, **options))


def test_the_choice_of_kernels_is_shown():
    explanation = explain(X, X, X, kernel="small,tiled", softcap=2.0, backend="numpy")
    assert explanation.source == "backend='numpy', kernel='small,tiled'"
    assert explain(X, X, X, kernel="auto").source == "the arrays' own library"
    given = {"backend": "numpy", "kernel": "small,tiled", "normalizer": scores.sparsemax()}
    with pytest.raises(polyattn.UnsupportedError, match="'small,tiled' cannot take") as error:
        attention(X, X, X, **given)
    names = [candidate.kernel for candidate in error.value.explanation.candidates]
    assert names == ["small", "tiled"]


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        ("tiled,,auto", ValueError, "a name is missing in kernel='tiled,,auto'"),
        ([], ValueError, r"a name is missing in kernel=\[\]"),
        ("tield,auto", ValueError, "has a kernel 'tield'; did you mean 'tiled'"),
        (
            "auto,sdpa",
            ValueError,
            "kernel='auto,sdpa': .* has a kernel 'sdpa'.* here are auto, .*small",
        ),
        (["tiled", 3], TypeError, "a kernel is named by a string"),
    ],
)
def test_a_wrong_list_of_kernels_is_refused(kernel, error, message):
    for function in (attention, explain):
        with pytest.raises(error, match=message):
            function(X, X, X, kernel=kernel)


def test_names_of_kernels_are_not_checked_where_a_backend_is_absent(plugins):
    plugins(acme=_spec())
    assert explain(X, X, X, backend="acme,numpy", kernel="fused,dense").chosen.kernel == "dense"


@pytest.mark.needs("torch")
def test_an_error_while_running_is_not_retried_elsewhere(monkeypatch):
    registry.load("torch")
    kernel = registry.loaded("torch").kernels[1]
    monkeypatch.setattr(type(kernel), "__call__", lambda *_: 1 / 0)
    tensor = torch.from_numpy(X)
    with pytest.raises(ZeroDivisionError):
        attention(tensor, tensor, tensor, backend="torch,numpy")


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


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (_spec(requires=("no_such", "nor_this")), "no_such, nor_this are not installed: pip "),
        (_spec(), "it cannot be loaded: ModuleNotFoundError"),
        (_spec(contract_version=CONTRACT - 1), f"{CONTRACT - 1}, and {VERSION}: upgrade acme"),
        (_spec(contract_version=CONTRACT + 1), f"{CONTRACT + 1}, and {VERSION}: upgrade polyattn"),
        (_spec(name="emca"), "named 'emca'"),
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


def test_an_interrupt_while_a_plugin_is_imported_is_raised(plugins):
    plugins(acme=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        attention(X, X, X)


def test_other_plugins_cannot_replace_ours(plugins):
    others = {"numpy": _spec("numpy"), "array-api": _spec("array-api")}
    plugins(**others, other=_spec("other", namespaces=("numpy",)))
    assert registry.ARRAY_API not in registry.names()
    assert registry.serving("numpy") == ("numpy",)
    registry.load("numpy")
    assert type(registry.loaded("numpy")).__module__ == "polyattn_numpy.backend"


def lines_of(log):
    """Return the lines that polyattn logged, without the arrays that all calls of a test share."""
    records = [record for record in log.records if record.name == "polyattn"]
    assert {record.levelname for record in records} <= {"DEBUG"}
    shared = "new plan: query (2, 4, 5, 8), key (2, 4, 5, 8), value (2, 4, 5, 8), float32, "
    return [record.getMessage().removeprefix(shared) for record in records]


def test_the_logger_has_a_line_for_each_new_plan(caplog):
    cache.forget()
    with caplog.at_level(logging.DEBUG, "polyattn"):
        for _ in range(2):
            attention(X, X, X)
            attention(X, X, X, dropout=(0.1, 1))
        attention(X, X, X, normalizer=scores.sparsemax(), backend="array-api")
        explain(X, X, X, sinks=X[0, :, 0, 0])
        polyattn.attention_vjp(X, X, X)[1](X)
    assert lines_of(caplog) == [
        "numpy on cpu, needs nothing beyond the plain formula: numpy small",
        "numpy on cpu, needs dropout: numpy dense, after small: it does not compute dropout; tiled:"
        " the problem is small: dense has less overhead",
        "numpy on cpu, needs normalizer: array-api dense, after tiled: it does not compute"
        " normalizer",
        "numpy on cpu, needs logsumexp: numpy small",
        "numpy on cpu, needs backward: numpy dense, after small: it does not compute backward;"
        " tiled: the problem is small: dense has less overhead",
    ]
