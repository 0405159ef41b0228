"""Public docstrings are numpydoc: every parameter and result is described, and in order."""

import importlib
import inspect
import pydoc
import re
from pathlib import Path

import pytest
from numpydoc.validate import validate

import polyattn

MODULES = [
    importlib.import_module(name)
    for name in (
        "polyattn",
        "polyattn.conformance",
        "polyattn.conformance.functions.check",
        "polyattn.conformance.functions.report",
        "polyattn.conformance.suite",
        "polyattn.dialects",
        "polyattn.dialects.flash_attn",
        "polyattn.dialects.flash_attn_interface",
        "polyattn.dialects.flax",
        "polyattn.dialects.keras",
        "polyattn.dialects.natten",
        "polyattn.dialects.torch",
        "polyattn.dialects.xformers",
        "polyattn.export",
        "polyattn.integrations.jax",
        "polyattn.integrations.transformers",
        "polyattn.masks",
        "polyattn.nn",
        "polyattn.nn.load",
        "polyattn.parallel",
        "polyattn.plot",
        "polyattn.plugin",
        "polyattn.plugin.dense",
        "polyattn.scores",
    )
]
# What only kernels, their authors and commands call: types and a line may say what it takes.
READ_BY_KERNELS = (
    "polyattn.conformance.Case.",
    "polyattn.conformance.KernelVariant.",
    "polyattn.conformance.Target.",
    "polyattn.conformance.functions.report.",
    "polyattn.masks.Mask.",
    "polyattn.parallel.Communicator.",
    "polyattn.plugin.",
    "polyattn.scores.Normalizer.",
    "polyattn.scores.Score.",
    "polyattn.scores.Similarity.",
)
BY_REFERENCE = "polyattn.dialects.flash_attn_interface.", "polyattn.dialects.natten."
# No extended summary, example or cross-reference is asked of what explains itself.
NOT_ASKED = {"ES01", "EX01", "GL01", "GL08", "SA01", "SA04", "PR06", "PR10", "RT02", "RT03", "SS06"}


def public(module):
    """Yield the import path of every public function and class, and of their public methods."""
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)) or name == "Array":
            continue
        yield f"{module.__name__}.{name}"
        if inspect.isclass(value):
            for method, function in vars(value).items():
                is_public = not method.startswith(("_", "test_", "pytest_"))
                if is_public and inspect.isfunction(function):
                    yield f"{module.__name__}.{name}.{method}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_docstrings(module):
    faults = {path: faults_of(path) for path in public(module)}
    assert {path: found for path, found in faults.items() if found} == {}


def faults_of(path):
    """Return what numpydoc finds wrong in a docstring, and the fields that it lacks."""
    found = validate(path)
    one_line = "\n" not in found["docstring"].strip()
    # A method that takes nothing may say in its one line what it returns.
    allowed = NOT_ASKED | ({"RT01", "YD01"} if one_line else set())
    if path.startswith(READ_BY_KERNELS):
        allowed |= {"PR01", "RT01", "YD01"}
    # The others are those of the function that is named, or in the line.
    if path.startswith(BY_REFERENCE) or path.endswith(("packed_func", "_first_axis")):
        allowed |= {"PR01", "RT01"}
    fields = []
    if "Attributes\n" in found["docstring"]:
        allowed |= {"PR01"}  # a value, whose attributes are its parameters
        fields = getattr(pydoc.locate(path), "__annotations__", {})
    missing = [field for field in fields if field not in found["docstring"]]
    return missing + [(code, text) for code, text in found["errors"] if code not in allowed]


def test_the_main_functions_show_an_example():
    for name in ("attention", "attention_partial", "explain", "merge"):
        assert ">>> " in getattr(polyattn, name).__doc__, name


def test_the_reference_has_every_public_name_and_no_other():
    folder = Path(__file__).resolve().parents[1] / "docs"
    listed, rests = [], []
    for page in sorted(folder.rglob("*.md")):
        directives = r"^(?:\.\. |```\{)(\w+)(?:::|\}) (\S+)(?:\n((?:[\w, ]+\n)+)```)?$"
        for kind, name, names in re.findall(directives, page.read_text("utf-8"), re.M):
            if kind in ("module", "currentmodule"):
                module = name
                listed += [f"{module}.{name}" for name in re.findall(r"\w+", names)]
                rests += [] if names or kind == "currentmodule" else [module]
            elif kind in ("data", "autoclass"):
                listed.append(f"{module}.{name}")
    assert sorted(set(listed)) == sorted(listed)
    names = {f"{m.__name__}.{name}": getattr(m, name) for m in MODULES for name in m.__all__}
    # An empty list of the site has the names that no other list has.
    listed += [p for p in names if p.rpartition(".")[0] in rests and p not in listed]
    assert set(listed) <= set(names)
    # What two modules have is described once.
    described = [names[path] for path in listed]
    public = {path: value for path, value in names.items() if not inspect.ismodule(value)}
    assert [p for p, value in public.items() if not any(value is d for d in described)] == []
