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
from optional import array_api_strict, torch

import polyattn
from polyattn import attention, attention_partial, explain, masks, scores
from polyattn._base.arrays import library_of
from polyattn._dispatch import contract, registry
from polyattn._dispatch.placement import find_placement
from polyattn.plugin import Backend, BackendSpec, Kernel
from polyattn.plugin.dense import Dense

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


#: A feature, and the options of calls that ask for it.
FEATURES = {
    "causal": [{"is_causal": True}],
    "window": [{"window": (1, 0)}],
    "softcap": [{"softcap": 2.0}],
    "scale": [{"scale": 2.0}, {"scale": scores.long_sequence()}],
    "mask_mod": [
        {"mask": lambda b, h, i, j: i > j},
        {"mask": masks.rule(lambda b, h, i, j: i > j) | masks.causal()},
    ],
    "mask_expression": [{"mask": masks.prefix(3) | masks.causal()}],
    "score_mod": [{"score_mod": lambda s, *_: s}],
    "score_expression": [{"score_mod": scores.alibi(4)}],
    "similarity": [{"similarity": scores.cosine()}],
    "score_norm": [{"scale": scores.by_norm()}],
    "normalizer": [{"normalizer": scores.sigmoid()}],
    "mask": [{"mask": (5, 5)}],
    "bias": [{"bias": (5, 5)}],
    "sinks": [{"sinks": (4,)}],
    "logsumexp": [{"logsumexp": True}],
    "dropout": [{"dropout": (0.5, 1)}],
    "query_offset": [{"is_causal": True, "query_offset": 2}],
    "query_offset_array": [{"is_causal": True, "query_offset": (2,)}],
    "grouped_heads": [{"key": (2, 2, 5, 8)}],
    "value_size": [{"value": (2, 4, 5, 7)}],
    "batch_broadcast": [{"value": (1, 4, 5, 8)}, {"key": (1, 4, 5, 8), "value": (2, 4, 5, 8)}],
}


@pytest.mark.usefixtures("acme")
def test_a_kernel_never_gets_a_feature_that_it_does_not_declare():
    # Functions of their own ask for two, and keys in pages become whole for such a kernel.
    assert FEATURES.keys() == polyattn.plugin.FEATURES.keys() - {"backward", "jvp", "block_table"}
    on_acme = {"library": "array_api_strict", "device": str(NEAR), "kernel": "plain"}
    for feature, calls in FEATURES.items():
        for options in calls:
            shapes = {"query": X.shape, "key": X.shape, **options}
            shapes.setdefault("value", shapes["key"])
            explanation = explain(**shapes, **on_acme)
            assert feature in explanation.problem.features
            assert explanation.chosen is None
            assert feature in explanation.candidates[0].reasons[0]
    one_way = type("OneWay", (Dense,), {"differentiates": {}})
    with pytest.raises(polyattn.UnsupportedError, match="does not compute jvp"):
        polyattn.attention_jvp((X,) * 3, (X,) * 3, kernel=one_way())


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
    output, logsumexp = attention_partial(x, x, x, backend=f"acme:{NEAR}", kernel="dense")
    assert output.device == logsumexp.device == FAR
    attention(x, x, x, backend=f"acme:{NEAR}")
    problem, operands = acme.ran[-1]
    assert operands.query.device == NEAR
    assert problem.converted


def test_arrays_of_other_libraries_move_to_its_first_device(acme):
    for x in (X, torch.from_numpy(X)):
        assert type(attention(x, x, x, backend="acme")) is type(x)
        assert acme.ran[-1][1].query.device == NEAR


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


def test_a_device_by_name_by_kind_or_by_number(monkeypatch):
    monkeypatch.setattr(registry, "devices_of", lambda name: ("cpu", "cuda:0", "cuda:1"))
    wanted = {"cuda:1": "cuda:1", "cuda": "cuda:0", "1": "cuda:1", "cpu": "cpu", "mps": None}
    assert {name: registry.device_of("torch", name) for name in wanted} == wanted


@pytest.mark.needs("torch")
def test_a_kind_of_device_leaves_arrays_on_their_device_of_that_kind(monkeypatch):
    registry.load("torch")
    monkeypatch.setattr(registry, "devices_of", lambda name: ("cpu", "cuda:0", "cuda:1"))
    explanation = explain(X.shape, X.shape, X.shape, library="torch", device="cuda:1")
    for name, device, moved in (
        ("torch:cuda", "cuda:1", 0),
        ("torch:cuda:0", "cuda:0", 3),
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

UNREADABLE = "the entry points of {} cannot be read: install another release of it, or uninstall it"


def reasons():
    """Return why each backend is not available, after a call that must still succeed."""
    attention(X, X, X)
    return {info.name: info.reason for info in polyattn.list_backends()}


@pytest.mark.parametrize(
    "line",
    ["acme", "acme = pkg:", "acme = pkg:SPEC; one"],
)
def test_a_malformed_line_is_listed_and_affects_no_other_distribution(install, line):
    install("polyattn-acme", ["other = pkg:SPEC", "# ours", "", line])
    install("polyattn-good", ["# ours", "", "good = good:SPEC [extra]"])
    install("elsewhere", ["malformed"], group="console_scripts")
    listed = reasons()
    assert listed["polyattn-acme"] == UNREADABLE.format("polyattn-acme")
    assert listed["good"] == "no_such_library is not installed: pip install good"
    assert listed["numpy"] is None
    with pytest.raises(polyattn.UnknownBackendError, match="did you mean 'good'"):
        attention(X, X, X, backend="goood")


def test_an_entry_that_names_a_module_only_is_listed_with_its_line(install):
    install("polyattn-acme", ["acme = pkg"])
    assert reasons()["acme"] == "the line 'acme = pkg' must be of the form name = module:object"


@pytest.mark.parametrize("metadata", [None, "Version: 1.0"])
def test_a_distribution_without_a_name_is_listed_by_its_folder(install, tmp_path, metadata):
    install("polyattn-acme", ["acme"], metadata)
    name = f"an unnamed distribution in {tmp_path}"
    assert reasons()[name] == UNREADABLE.format(name)


def test_a_taken_name_is_listed_with_its_distribution(install):
    install("one", ["good = good:SPEC"])
    install("two", ["good = good:SPEC", "array-api = good:SPEC"])
    listed = reasons()
    first, second = ("one", "two") if "good (two)" in listed else ("two", "one")
    assert f"'good' is taken already, by {first}" in listed[f"good ({second})"]
    assert "'array-api' is taken already, by polyattn" in listed["array-api (two)"]
    assert listed["array-api"] is None


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
