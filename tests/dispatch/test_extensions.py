"""Kernels of other distributions, which join the lists of backends."""

import re
import sys

import pytest
from arrays import draw
from optional import torch

import polyattn
from polyattn import attention, attention_backward, explain
from polyattn._api.run import planned_call
from polyattn._core.call.describe import describe
from polyattn._dispatch import entries, extensions, registry
from polyattn.plugin import CONTRACT_VERSION

(X,) = draw((2, 4, 5, 8))
VERSION = f"this polyattn has version {CONTRACT_VERSION} of the plugin contract"
SPEC = """
from polyattn.plugin import CONTRACT_VERSION, KernelSpec
SPEC = KernelSpec(
    "fast", {"numpy": "fast_kernels:Fast"}, (), "pip install fast", CONTRACT_VERSION
)
"""
KERNELS = """
import numpy as np
from polyattn.plugin import Gradients, Kernel

class Fast(Kernel):
    name = "fast"
    features = frozenset({"causal", "logsumexp"})
    differentiates = {"backward": frozenset({"causal"})}

    def reasons_against(self, problem):
        return ["it takes one batch axis"] if len(problem.batch) != 1 else []

    def only_on_request(self, problem):
        return "it is wrong where it masks" if problem.is_causal else None

    def remark(self, problem):
        return "it is all sevens"

    def __call__(self, problem, operands, backend):
        return 0 * operands.query + 7, 0 * operands.query[..., 0]

    def backward(self, problem, operands, residuals, cotangents, backend):
        query, key, value = (0 * x + 7 for x in operands[:3])
        return Gradients(query=query, key=key, value=value)

class Second(Fast):
    name = "second"

class Third(Fast):
    name = "third"

class Small(Fast):
    name = "small"

class Exits(Fast):
    def __init__(self):
        raise SystemExit(3)
"""


@pytest.fixture
def give(install, tmp_path, monkeypatch):
    """Return a function that installs kernels by the text of their spec, and allows them."""
    (tmp_path / "fast_kernels.py").write_text(KERNELS)

    def give(spec=SPEC, lines=None, distribution="speedy", allowed=True):
        (tmp_path / f"{distribution}.py").write_text(spec)
        lines = lines or [f"fast = {distribution}:SPEC"]
        for name in [line.partition(" =")[0].upper() for line in lines if allowed]:
            if name != "BACKEND":
                monkeypatch.setenv(f"POLYATTN_{name}", "1")
        install(distribution, lines, "Name: {}\nVersion: 1.0", entries.KERNELS)

    give.folder = tmp_path
    return give


FAST = {"numpy": "fast_kernels:Fast"}


def spec(kernels, name="fast", requires=(), version=CONTRACT_VERSION, **more):
    """Return the text of a module with this spec."""
    return (
        "from polyattn.plugin import KernelSpec\n"
        f"SPEC = KernelSpec({name!r}, {kernels!r}, {requires!r}, 'pip install fast', {version!r},"
        f" **{more!r})"
    )


def names(backend="numpy"):
    """Return the names of the kernels of a backend, in order."""
    assert registry.load(backend) is None
    return [kernel.name for kernel in registry.kernels_of(registry.loaded(backend))]


def reasons():
    """Return why each row of the list is not available, after a call that must succeed."""
    attention(X, X, X)
    return {info.name: info.reason for info in polyattn.list_backends()}


def test_a_kernel_joins_a_backend_and_runs_first(give):
    give()
    assert "numpy" in registry.names()
    assert "fast_kernels" not in sys.modules  # before its backend is loaded
    assert names() == ["fast", "small", "tiled", "dense", "gathered"]
    assert (attention(X, X, X) == 7).all()
    partial = polyattn.attention_partial(X, X, X)
    assert (attention_backward(X, X, X, partial, X).query == 7).all()
    explanation = explain(X, X, X)
    assert (explanation.chosen.kernel, explanation.chosen.origin) == ("fast", "speedy")
    assert [c.origin for c in explanation.candidates[1:]] == [None] * 3
    assert re.search(r"numpy +fast \(speedy\) +CHOSEN +it is all sevens", str(explanation))
    assert explanation.as_dict()["candidates"][0]["origin"] == "speedy"
    (info,) = (info for info in polyattn.list_backends() if info.name == "numpy")
    assert (info.kernels[0], info.origins) == ("fast", {"fast": "speedy"})
    assert "fast (speedy), small, tiled, dense, gathered" in str(polyattn.list_backends())


def test_those_of_two_distributions_stand_in_the_order_of_their_names_or_where_they_say(give):
    give(spec({"numpy": "fast_kernels:Second"}, name="a"), ["a = one:SPEC"], "one")
    give(spec(FAST, name="b", before={"numpy": "dense"}), ["b = two:SPEC"], "two")
    give(spec({"numpy": "fast_kernels:Third"}, name="c"), ["c = three:SPEC"], "three")
    assert names() == ["second", "third", "small", "tiled", "fast", "dense", "gathered"]


# ---- what is broken, missing or left out -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "its plugin cannot be imported: ModuleNotFoundError"),
        (spec({}, version="3"), "TypeError: contract_version must be a number, such as 5; got '3'"),
        ("from polyattn.plugin import Colour", f"; {VERSION}"),
        (spec({}, colour="red"), f"'colour'; {VERSION}"),
        (spec([]), "TypeError: kernels must map backends, by name; got []"),
        (spec({}, before={"numpy": "small"}), "before names 'numpy', for which there are no"),
    ],
)
def test_a_spec_that_is_broken_affects_nothing_else(give, text, reason):
    give(text)
    assert reason in reasons()["kernels fast"]
    assert names() == ["small", "tiled", "dense", "gathered"]
    with pytest.raises(polyattn.UnsupportedError, match=re.escape(reason)):
        attention(X, X, X, kernel="fast")
    assert reason not in str(explain(X, X, X))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (spec({"numpy": "no_such_module:Fast"}), "cannot be loaded: ModuleNotFoundError"),
        (spec({"numpy": "fast_kernels:Exits"}), "its kernels cannot be loaded: SystemExit: 3"),
        (spec({"numpy": "builtins:dict"}), "its kernels must be instances of Kernel; one is {}"),
        (spec({"numpy": "fast_kernels:Small"}), "the backend has a kernel 'small' already"),
        (spec({"numpy": ("fast_kernels:Fast",) * 2}), "the backend has a kernel 'fast' already"),
        (spec(FAST, requires=("no_such", "numpy")), "no_such is not installed: pip install fast"),
        (spec(FAST, before={"numpy": "smal"}), "before='smal' is not a place in numpy: name one"),
    ],
)
def test_kernels_that_cannot_join_affect_nothing_else(give, text, reason, monkeypatch):
    give(text)
    monkeypatch.setattr(registry, "_warned", set())
    with pytest.warns(RuntimeWarning, match=f"kernels fast for numpy .*{re.escape(reason)}"):
        assert reason in reasons()["kernels fast for numpy"]
    assert names() == ["small", "tiled", "dense", "gathered"]
    unsupported, unavailable = polyattn.UnsupportedError, polyattn.BackendUnavailableError
    for backend, error in ((None, unsupported), ("numpy", unavailable)):
        with pytest.raises(error, match=re.escape(reason)):
            attention(X, X, X, kernel="fast", backend=backend)
    first, second = explain(X, X, X).candidates[:2]
    assert (first.kernel, first.status) == ("fast", "unavailable")
    assert (second.kernel, second.status) == ("small", "chosen")
    assert "fast" not in str(explain(X, X, X, kernel="small"))
    tensor = torch.from_numpy(X)
    assert "fast" not in str(explain(tensor, tensor, tensor))


@pytest.mark.needs("torch")
def test_a_place_among_the_array_api_kernels_is_before_all_of_them(give):
    give(spec({"torch": "fast_kernels:Fast"}, before={"torch": "dense"}))
    assert names("torch") == ["paged", "sdpa", "flex", "tiled", "dense", "gathered"]
    ((_, _, reason),) = extensions.absent("torch", "fast")
    assert reason == "before='dense' is not a place in torch: name one of paged, sdpa, flex, tiled"


@pytest.mark.needs("torch")
def test_what_one_backend_cannot_have_another_can(give):
    give(spec({"nunpy": "x:Y", "numpy": "fast_kernels:Fast", "torch": "x:Y"}))
    assert names() == ["fast", "small", "tiled", "dense", "gathered"]
    listed = {info.name: info.reason for info in polyattn.list_backends()}
    unknown = "no plugin provides the backend 'nunpy'; did you mean 'numpy'?"
    assert listed["kernels fast for nunpy"] == unknown
    assert "cannot be loaded" in listed["kernels fast for torch"]
    assert (listed["numpy"], listed["torch"]) == (None, None)


def test_an_interrupt_while_kernels_are_imported_is_raised(give):
    give(spec({"numpy": "interrupted:Fast"}))
    (give.folder / "interrupted.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        attention(X, X, X)


def test_the_environment_leaves_kernels_out(give, monkeypatch):
    give("raise RuntimeError('imported')")
    monkeypatch.setenv("POLYATTN_FAST", "0")
    assert reasons()["kernels fast"] == "POLYATTN_FAST=0 leaves it out"
    with pytest.raises(polyattn.UnsupportedError, match="POLYATTN_FAST=0 leaves it out"):
        attention(X, X, X, kernel="fast")


def test_a_wrong_value_in_the_environment_is_refused_until_it_is_corrected(give, monkeypatch):
    give()
    monkeypatch.setenv("POLYATTN_FAST", "no")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"POLYATTN_FAST must be 0, .* or 1, .*; it is 'no'"):
            attention(X, X, X)
    monkeypatch.setenv("POLYATTN_FAST", "1")
    assert (attention(X, X, X) == 7).all()


def test_a_name_whose_variable_means_something_else_is_refused(give, monkeypatch):
    give(spec(FAST, name="backend"), ["backend = speedy:SPEC"])
    monkeypatch.setenv("POLYATTN_BACKEND", "numpy")
    assert reasons()["kernels backend"].endswith("means something else: rename it")


# ---- what runs unnamed -------------------------------------------------------------------------


def test_what_others_install_runs_once_it_is_named(give):
    give(allowed=False)
    usual = attention(X, X, X, kernel="small")
    assert (attention(X, X, X) == usual).all()
    *_, last = explain(X, X, X).candidates
    assert (last.kernel, last.origin, last.status) == ("fast", "speedy", "not allowed")
    assert "it runs if the call names it, or with POLYATTN_FAST=1" in str(explain(X, X, X))
    for kernel in ("fast", "fast,auto", ["gathered", "fast"]):
        assert (attention(X, X, X, kernel=kernel) == 7).all()
    assert (attention(X, X, X, kernel="auto,fast") == usual).all()
    assert explain(X, X, X, kernel="fast,auto", is_causal=True).chosen.kernel == "fast"
    assert explain(X, X, X, kernel="fast,auto", dropout=(0.1, 1)).chosen.kernel == "dense"
    (row,) = (info for info in polyattn.list_backends() if info.name == "numpy")
    assert row.waiting == (
        "fast: it is not polyattn's: it runs if the call names it, or with POLYATTN_FAST=1",
    )
    assert row.waiting[0] in " ".join(str(polyattn.list_backends()).split())


def test_what_is_not_allowed_differentiates_nothing(give):
    jvp = KERNELS.replace(
        'name = "second"',
        'name = "second"\n    differentiates = {"jvp": frozenset({"causal"})}\n    jvp = None',
    )
    give(spec({"numpy": "fast_kernels:Second"}), allowed=False)
    (give.folder / "fast_kernels.py").write_text(jvp)
    plan = planned_call(*describe(X, X, X), None, None).plan
    assert "second" in names()
    assert plan.with_feature("jvp").kernel.name == "dense"


def test_what_is_broken_and_not_allowed_is_no_news_of_a_call(give):
    give(spec({"numpy": "no_such_module:Fast"}), allowed=False)
    attention(X, X, X)  # a warning would be an error
    *_, last = explain(X, X, X).candidates
    assert (last.kernel, last.status) == ("fast", "not allowed")
    assert "cannot be loaded: ModuleNotFoundError" in last.text


def test_polyattn_native_is_ours(give, install):
    """And no other distribution takes the name of its kernels."""
    (give.folder / "ours.py").write_text(SPEC)
    install("aaa", ["fast = no_such:SPEC"], "Name: aaa", entries.KERNELS)
    install("polyattn_native", ["fast = ours:SPEC"], "Name: polyattn-native", entries.KERNELS)
    assert (attention(X, X, X) == 7).all()
    assert ("kernels fast (aaa)", "its name 'fast' is taken already, by polyattn-native") in [
        (title, reason.partition(":")[0]) for title, reason in extensions.failures()
    ]


def test_a_plugin_that_is_named_and_broken_is_told(install):
    install("broken", ["broken = no_such_module:SPEC"], "Name: broken", entries.KERNELS)
    with pytest.warns(RuntimeWarning, match="the kernels broken for numpy cannot be used"):
        attention(X, X, X, kernel="broken,auto")
    assert "no_such_module" in str(explain(X, X, X, kernel="broken,auto"))


def test_what_a_kernel_cannot_do_and_where_another_is_better_are_shown_both(give):
    give()
    rank_5 = X[None]
    refused = explain(rank_5, rank_5, rank_5, is_causal=True).candidates[0]
    assert refused.reasons == ("it takes one batch axis",)
    assert refused.on_request == "it is wrong where it masks"
    assert refused.text == "it takes one batch axis; only on request: it is wrong where it masks"
    named = explain(X, X, X, is_causal=True, kernel="fast").chosen
    assert named.text == "only on request: it is wrong where it masks; it is all sevens"
    undeclared = explain(X, X, X, is_causal=True, softcap=2.0).candidates[0]
    assert (undeclared.status, undeclared.on_request) == ("refused", None)
    assert undeclared.reasons == ("it does not compute softcap",)
    assert explain(X, X, X, is_causal=True).candidates[0].status == "on request"
    assert (attention(X, X, X, is_causal=True, kernel="fast") == 7).all()


@pytest.mark.slow
def test_a_compiled_call_has_what_it_names(give):
    give(spec({"torch": "fast_kernels:Fast"}), allowed=False)
    call = torch.compile(lambda x: attention(x, x, x, kernel=["paged", "fast"]), backend="eager")
    assert (call(torch.from_numpy(X)) == 7).all()
