"""A plugin as a third party would write it, and plugins that are broken.

The plugin serves array-api-strict, which has three devices without any hardware.
"""

import dataclasses
import re
import sys
import types

import numpy as np
import pytest
from arrays import draw
from optional import array_api_strict

import polyattn
from polyattn import attention, explain
from polyattn._base.arrays import library_of
from polyattn._dispatch import contract, registry
from polyattn._dispatch.placement import find_placement
from polyattn.plugin import Backend, BackendSpec, Kernel

(X,) = draw((2, 4, 5, 8))
NEAR, FAR, BEYOND = (array_api_strict.Device(d) for d in ("CPU_DEVICE", "device1", "device2"))


def strict(x, device=NEAR):
    return array_api_strict.asarray(x, device=device)


class Plain(Kernel):
    """Computes the plain formula and nothing else."""

    name = "plain"

    def __call__(self, problem, operands, backend):
        backend.ran.append((problem, operands))
        dense = next(k for k in registry.kernels_of(None) if k.name == "dense")
        return dense(problem, operands, backend)


class AcmeBackend(Backend):
    """array-api-strict on its devices."""

    kernels = (Plain(),)

    def __init__(self):
        super().__init__(array_api_strict)
        self.ran = []

    def devices(self):
        return [str(NEAR), str(FAR), str(BEYOND)]

    def place(self, array, device):
        if not isinstance(array, type(strict(X))):
            array = strict(np.from_dlpack(array))
        return array.to_device({str(d): d for d in (NEAR, FAR, BEYOND)}[device])

    def fetch(self, array):
        return np.from_dlpack(array.to_device(NEAR))


SPEC = BackendSpec(
    name="acme",
    namespaces=("array_api_strict",),
    implementation="acme:AcmeBackend",
    requires=(),
    install="pip install acme",
    contract_version=5,
    devices=(str(NEAR), str(FAR)),
    dtypes=("float32",),
)


@pytest.fixture
def acme(monkeypatch, plugins):
    """Register the plugin for the length of a test, allow it, and return its backend."""
    monkeypatch.setenv("POLYATTN_ACME", "1")
    monkeypatch.setitem(sys.modules, "acme", types.SimpleNamespace(AcmeBackend=AcmeBackend))
    plugins(acme=SPEC)
    assert "acme" in registry.names()
    assert registry.load("acme") is None
    return registry.loaded("acme")


def chosen(*arrays, **options):
    candidate = explain(*arrays, **options).chosen
    return candidate.backend, candidate.kernel


def test_the_core_serves_its_library_until_it_is_allowed(acme, monkeypatch, plugins):
    monkeypatch.delenv("POLYATTN_ACME")
    plugins(acme=SPEC)
    x = strict(X)
    assert chosen(x, x, x) == ("array-api", "dense")
    *_, last = explain(x, x, x).candidates
    assert (last.backend, last.status) == ("acme", "not allowed")
    assert "it runs if the call names it, or with POLYATTN_ACME=1" in last.reasons[0]
    for backend in ("acme", "auto,acme"):
        assert chosen(x, x, x, backend=backend) == ("acme", "plain")
    assert "POLYATTN_ACME=1" in str(polyattn.list_backends())
    monkeypatch.setenv("POLYATTN_ACME", "0")
    plugins(acme=SPEC)
    with pytest.raises(polyattn.BackendUnavailableError, match="POLYATTN_ACME=0 leaves it out"):
        attention(x, x, x, backend="acme")


@pytest.mark.usefixtures("acme")
def test_an_undeclared_dtype_or_device_is_refused():
    with pytest.raises(polyattn.UnsupportedError, match="it does not take float64"):
        attention(*[strict(X.astype("f8"))] * 3, backend="acme")
    with pytest.raises(polyattn.UnsupportedError, match=r"it does not run on .*device2") as refused:
        attention(*[strict(X, BEYOND)] * 3, backend="acme")
    listed = registry.spec_of("acme").devices
    assert f"the spec of acme lists {', '.join(listed)};" in str(refused.value)
    assert f"add devices={(*listed, str(BEYOND))} there" in str(refused.value)
    # The core serves the call if the backend is not named.
    assert chosen(*[strict(X.astype("f8"))] * 3) == ("array-api", "dense")


def test_arrays_stay_on_their_device_unless_another_is_named(acme):
    x = strict(X, FAR)
    assert attention(x, x, x, backend="acme").device == FAR
    assert acme.ran[-1][0].device == str(FAR)
    assert not acme.ran[-1][0].converted
    assert attention(x, x, x, backend=f"acme:{NEAR}").device == FAR
    problem, operands = acme.ran[-1]
    assert operands.query.device == NEAR
    assert problem.converted


def test_a_backend_without_devices_places_arrays_itself(acme, monkeypatch):
    monkeypatch.setattr(AcmeBackend, "devices", lambda self: [])
    monkeypatch.setattr(AcmeBackend, "place", lambda self, array, device: strict(np.asarray(array)))
    assert isinstance(attention(X, X, X, backend="acme"), np.ndarray)
    assert acme.ran[-1][0].device == ""


@pytest.mark.parametrize(
    ("declared", "flaw"),
    [
        ({"features": "causal"}, "must declare its features as a set; got 'causal'"),
        ({"promises": {"poison_save"}}, "promise 'poison_save'; did you mean 'poison_safe'?"),
        ({"features": {"backward"}}, "must declare 'backward' in differentiates, not in features"),
        ({"differentiates": {"backward": {"casual"}}}, "'casual'; did you mean 'causal'?"),
        ({"differentiates": {"reverse": set()}}, "must map 'backward' and 'jvp' to the features"),
        ({"differentiates": {"jvp": set()}}, "declares 'jvp' in differentiates, and has no method"),
    ],
    ids=str,
)
def test_a_kernel_that_breaks_the_contract_is_refused(declared, flaw):
    broken = type("Broken", (Kernel,), {"name": "a"} | declared)
    assert flaw in contract.flaw_of((broken(),))
    nameless = type("Broken", (Kernel,), {})
    assert "its kernel Broken has no name" in contract.flaw_of((nameless(),))
    assert "must be instances of Kernel" in contract.flaw_of((nameless,))
    assert contract.flaw_of(AcmeBackend.kernels) is None


def test_a_spec_refuses_a_string_for_a_tuple():
    for field in ("namespaces", "requires", "devices", "dtypes"):
        with pytest.raises(TypeError, match=f"{field} must be a tuple of strings; got 'cpu'"):
            dataclasses.replace(SPEC, **{field: "cpu"})


@pytest.mark.parametrize("named", [("torchh",), ("importlib", "numpy")])
def test_a_backend_whose_namespaces_match_no_arrays_is_not_available(named, monkeypatch, plugins):
    monkeypatch.setitem(sys.modules, "acme", types.SimpleNamespace(AcmeBackend=AcmeBackend))
    plugins(acme=dataclasses.replace(SPEC, namespaces=named))
    (info,) = (info for info in polyattn.list_backends() if info.name == "acme")
    assert (
        f"its namespaces begin with {named[0]!r}, which is not a namespace of arrays" in info.reason
    )
    assert info.reason.endswith("did you mean 'array_api_strict'?")
    with pytest.raises(polyattn.BackendUnavailableError, match="not a namespace of arrays"):
        attention(X, X, X, backend="acme")


def test_a_backend_that_cannot_be_loaded_is_named_in_one_warning(monkeypatch, plugins):
    monkeypatch.setitem(sys.modules, "acme", types.SimpleNamespace())
    monkeypatch.setenv("POLYATTN_ACME", "1")
    monkeypatch.setattr("polyattn._dispatch.registry._warned", set())
    plugins(acme=SPEC)
    x, reason = strict(X), "it cannot be loaded: AttributeError: .*AcmeBackend"
    with pytest.warns(RuntimeWarning, match=f"^acme cannot be used: {reason}.* kernel dense runs"):
        attention(x, x, x)
    attention(*[strict(X[:1])] * 3)  # a new plan, without a second warning
    (info,) = (info for info in polyattn.list_backends() if info.name == "acme")
    for text in (info.reason, str(explain(x, x, x))):
        assert re.search(reason, text)


@pytest.mark.usefixtures("acme")
def test_a_wrapped_callback_may_return_a_bool():
    options = {"backend": "acme", "kernel": "dense"}
    assert not attention(X, X, X, mask=lambda b, h, i, j: False, **options).any()


@pytest.mark.needs("torch")
def test_a_kind_of_device_leaves_arrays_on_their_device_of_that_kind(monkeypatch):
    registry.load("torch")
    monkeypatch.setattr(registry, "devices_of", lambda name: ("cpu", "cuda:0", "cuda:1"))
    explanation = explain(X.shape, X.shape, X.shape, library="torch", device="cuda:1")
    for name, device, moved in (
        ("torch:cuda", "cuda:1", 0),
        ("torch:cuda:0", "cuda:0", 3),
        ("torch:1", "cuda:1", 0),
        ("torch:cpu", "cpu", 3),
    ):
        placement = find_placement(explanation.call, explanation.problem, name, None)
        assert placement.problem.device == device
        assert len(placement.moved) == moved


def test_two_namespaces_of_one_package_are_two_libraries():
    xps = [types.SimpleNamespace(__name__=name) for name in ("wrap.one", "wrap.two")]
    arrays = [
        type("Wrapped", (), {"__array_namespace__": lambda self, api_version=None, xp=xp: xp})()
        for xp in xps
    ]
    assert [library_of(x).name for x in arrays] == ["wrap.one", "wrap.two"]
    one, two = map(registry.array_api_backend, xps)
    assert one is not two


def test_nothing_breaks_while_another_thread_imports_torch(run_python):
    run_python("""
import sys, types
sys.modules["torch"] = types.ModuleType("torch")  # as it stands when an import has just begun
import numpy as np, polyattn
x = np.ones((2, 3, 4))
polyattn.attention(x, x, x)
""")


# ---- what is installed -------------------------------------------------------------------------


def reasons():
    """Return why each backend is not available, after a call that must still succeed."""
    attention(X, X, X)
    return {info.name: info.reason for info in polyattn.list_backends()}


def test_what_is_wrong_with_one_distribution_is_listed_and_affects_no_other(install, tmp_path):
    install("polyattn-acme", ["other = pkg:SPEC", "# ours", "", "acme"])
    install("polyattn-good", ["# ours", "", "good = good:SPEC [extra]"])
    install("elsewhere", ["malformed"], group="console_scripts")
    install("short", ["short = pkg"])
    install("nameless", ["acme = pkg:"], metadata="Version: 1.0")
    install("two", ["good = good:SPEC", "array-api = good:SPEC"])
    listed = reasons()
    nameless = f"an unnamed distribution in {tmp_path}"
    for name in ("polyattn-acme", nameless):
        why = f"the entry points of {name} cannot be read: install another release of it, or"
        assert listed[name] == f"{why} uninstall it"
    assert listed["short"] == "the line 'short = pkg' must be of the form name = module:object"
    first, second = "polyattn-good", "two"
    if "good (two)" not in listed:
        first, second = second, first
    assert f"'good' is taken already, by {first}" in listed[f"good ({second})"]
    assert "'array-api' is taken already, by polyattn" in listed["array-api (two)"]
    assert listed["good"] == "no_such_library is not installed: pip install good"
    assert listed["numpy"] is listed["array-api"] is None
    with pytest.raises(polyattn.UnknownBackendError, match="did you mean 'good'"):
        attention(X, X, X, backend="goood")


def test_a_distribution_hides_one_of_its_name_later_on_the_path(install, tmp_path, monkeypatch):
    install("acme", ["old = pkg:SPEC"])
    info = tmp_path / "above/acme-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: acme")
    (info / "entry_points.txt").write_text("[polyattn.backends]\nnew = pkg:SPEC")
    monkeypatch.syspath_prepend(tmp_path / "above")
    assert "new" in reasons()
    assert "old" not in reasons()


def test_a_backend_that_fails_to_list_its_devices_is_listed_with_the_error(acme, monkeypatch):
    monkeypatch.setattr(AcmeBackend, "devices", lambda self: 1 / 0)
    assert reasons()["acme"].endswith("ZeroDivisionError: division by zero")
