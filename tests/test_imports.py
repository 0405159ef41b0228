"""Importing costs little: no framework comes in that the caller has not brought."""

import ast
from pathlib import Path

import pytest

import polyattn

ROOT = Path(polyattn.__file__).resolve().parent
#: What `polyattn.conformance` needs beside NumPy: the extra "testing", less what is no import.
TESTING = {"array_api_extra", "ml_dtypes", "mpmath", "numpy", "pytest", "tqdm"}
FRAMEWORKS = {"torch", "jax", "cupy", "dask", "tensorflow", "mlx"}
LOADED = "import sys; print(*sorted(m for m in {names!r} if m in sys.modules))"


def loaded_after(run_python, code, names):
    return run_python(f"{code}\n{LOADED.format(names=sorted(names))}").split()


@pytest.mark.parametrize(
    "code",
    [
        "import polyattn",
        "import polyattn.cli",
        "import polyattn.bench.run, polyattn.bench.page, polyattn.bench.compare",
        "import polyattn.plugin, polyattn_numpy, polyattn_torch",
        "import polyattn; polyattn.explain((2, 3, 4), (2, 3, 4), (2, 3, 4))",
        "import numpy as np, polyattn; x = np.ones((2, 3, 4)); polyattn.attention(x, x, x)",
        "import numpy as np, polyattn; x = np.ones((2, 3, 4))\n"
        "with polyattn.use_backend('numpy'): polyattn.attention(x, x, x)",
    ],
)
def test_no_framework_is_imported(run_python, code):
    assert loaded_after(run_python, code, FRAMEWORKS) == []


def test_a_spec_imports_no_array_library(run_python):
    code = "import polyattn_numpy, polyattn_torch, polyattn_numpy as n; n.SPEC"
    assert loaded_after(run_python, code, FRAMEWORKS) == []
    assert (
        loaded_after(run_python, "import polyattn.dispatch.registry as r; r.names()", FRAMEWORKS)
        == []
    )


def test_a_named_backend_brings_its_library(run_python):
    code = """
import numpy as np, polyattn
x = np.ones((2, 3, 4), np.float32)
polyattn.attention(x, x, x, backend="torch")
"""
    assert loaded_after(run_python, code, FRAMEWORKS) == ["torch"]


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: file.name)
def test_the_core_imports_the_standard_library_and_one_thing_more(file):
    allowed_here = {"polyattn"} | ({"array_api_compat"} if file.name == "arrays.py" else set())
    if file.parent.name == "conformance":
        allowed_here |= TESTING
    if file.parent.name == "bench":
        allowed_here |= {"numpy", "threadpoolctl"}
    if "nn" in file.parts:
        allowed_here |= {"numpy"}  # its bit generator initialises the parameters
    if file.parent.name == "integrations":
        allowed_here |= {file.stem, "torch"}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            root = name.partition(".")[0]
            assert root in allowed_here or root in __import__("sys").stdlib_module_names, name


def imported_from_the_core(folder):
    """Return the top-level modules of the core that the files of a folder import."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "polyattn":
                found.add(node.module.partition(".")[2].partition(".")[0])
    return found


def test_a_kernel_knows_no_registry_and_no_front_door():
    known = imported_from_the_core(ROOT / "kernels")
    allowed = {"arrays", "band", "indices", "kernels", "patterns", "plugin", "problem", "tiles"}
    assert known <= allowed


@pytest.mark.parametrize("name", ["polyattn_numpy", "polyattn_torch"])
def test_a_plugin_imports_the_contract_alone(name):
    assert imported_from_the_core(ROOT.parent / "backends" / name) == {"plugin"}


def test_importing_polyattn_needs_nothing_of_the_conformance_suite(run_python):
    names = [*(TESTING - {"numpy"}), "polyattn.conformance"]
    assert loaded_after(run_python, "import polyattn, polyattn.cli", names) == []


def test_the_parts_of_the_package_are_there_when_they_are_asked_for(run_python):
    run_python("import polyattn; polyattn.nn.Linear, polyattn.dialects, polyattn.plot.mask")
    with pytest.raises(AttributeError, match="no attribute 'layers'"):
        polyattn.layers  # noqa: B018


def test_public_names():
    assert set(polyattn.__all__) >= {
        "attention",
        "attention_partial",
        "explain",
        "list_backends",
        "merge",
        "Partial",
        "use_backend",
    }
    for name in polyattn.__all__:
        assert getattr(polyattn, name).__doc__
