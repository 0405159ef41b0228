"""Rules that a reader of the code relies on: one class for a name, tests in their places."""

import re
import runpy
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "polyattn", ROOT / "backends"

#: Class names that more than one module has, with the reason. A name that is unique has no row.
SHARED = {
    "Fused": "a kernel, and the one in the text of the contract",
    "RMSNorm": "a layer of arrays, and the layer of torch whose name is FlashAttention's",
    "RelativeBias": "a score rule, and the public layer that has its table",
}

#: The folder of tests of each room whose modules have tests of their names.
ROOMS = {
    "_base": "base",
    "_core/call": "call",
    "_core/expressions": "expressions",
    "_core/tiles": "tiles",
    "_kernels": "kernels",
    "_dispatch": "dispatch",
    "_api": "api",
}

ATTENTION = "tests/api/test_attention.py"
CASES = "polyattn/conformance/test_backend.py"
CLI = "tests/test_cli.py"
EXTENSIONS = "tests/dispatch/test_extensions.py"
REGISTRY = "tests/dispatch/test_registry.py"
SELECT = "tests/dispatch/test_select.py"

#: The tests of a module that has none of its name: a file, or the suite that all kernels run.
OWNED_BY = {
    "_base/arguments": ATTENTION,
    "_base/arrays": REGISTRY,
    "_base/autocast": "tests/backends/test_torch_autocast.py",
    "_base/extras": CLI,
    "_base/quantized": "tests/conformance/test_quantized.py",
    "_base/refused": "tests/api/test_other_arrays.py",
    "_base/same_bits": "tests/dispatch/test_same_bits.py",
    "_base/scatter": "tests/call/test_pages.py",
    "_base/slices": "tests/expressions/test_parts.py",
    "_base/settings": "tests/dispatch/test_request.py",
    "_base/span": CASES,
    "_base/streams": CLI,
    "_base/text_table": CLI,
    "_base/tracing": "tests/backends/test_torch_compiled.py",
    "_core/call/checks": ATTENTION,
    "_core/call/describe": ATTENTION,
    "_core/call/facts": "tests/call/test_options.py",
    "_core/call/features": "tests/call/test_options.py",
    "_core/call/gradients": "tests/api/test_gradients.py",
    "_core/call/key": "tests/api/test_run.py",
    "_core/call/layout": CASES,
    "_core/call/operands": "tests/call/test_options.py",
    "_core/call/parts": "tests/expressions/test_parts.py",
    "_core/call/problem": ATTENTION,
    "_core/expressions/coverage": "tests/expressions/test_masks.py",
    "_core/expressions/distances": CASES,
    "_core/expressions/indices": "tests/expressions/test_masks.py",
    "_core/expressions/mask_arrays": "tests/expressions/test_masks.py",
    "_core/expressions/tree": "tests/expressions/test_patterns.py",
    "_core/expressions/replacements": "tests/expressions/test_derivatives.py",
    "_core/tiles/axes": CASES,
    "_core/tiles/band": CASES,
    "_core/tiles/compiled": "tests/expressions/test_masks.py",
    "_core/tiles/coverage": "tests/expressions/test_masks.py",
    "_core/tiles/indices": CASES,
    "_core/tiles/named": CASES,
    "_core/tiles/online_softmax": CASES,
    "_kernels/backward": CASES,
    "_kernels/dense": CASES,
    "_kernels/dense_kernel": CASES,
    "_kernels/jvp": CASES,
    "_kernels/recomputed": CASES,
    "_kernels/sums": CASES,
    "_kernels/visible": CASES,
    "_kernels/top_keys": "tests/api/test_top_keys.py",
    "_kernels/weights": "tests/api/test_weights.py",
    "_dispatch/contract": REGISTRY,
    "_dispatch/entries": EXTENSIONS,
    "_dispatch/errors": SELECT,
    "_dispatch/listing": CLI,
    "_dispatch/placement": "tests/dispatch/test_transfer.py",
    "_dispatch/products": "tests/native/test_product.py",
    "_dispatch/standard": "tests/api/test_other_arrays.py",
    "_api/explain": "tests/dispatch/test_explanation.py",
    "_api/pieces": "tests/nn/test_quantized_cache.py",
}


def test_a_class_name_is_unique():
    places = defaultdict(list)  # the modules of each class name, without its leading underscore
    for file in sorted(file for package in PACKAGES for file in package.rglob("*.py")):
        for name in re.findall(r"^ *class _*(\w+)[(:]", file.read_text(encoding="utf-8"), re.M):
            places[name].append(file.relative_to(ROOT).as_posix())
    shared = {name: at for name, at in places.items() if len(at) > 1}
    assert {name: at for name, at in shared.items() if name not in SHARED} == {}
    assert [name for name in SHARED if name not in shared] == [], "these are unique: no row"


@pytest.mark.parametrize("room", ROOMS)
def test_a_module_has_a_test_of_its_name_or_an_owner(room):
    folder, rows = ROOT / "tests" / ROOMS[room], {row for row in OWNED_BY if row.startswith(room)}
    names = {file.stem for file in (ROOT / "polyattn" / room).glob("*.py")} - {"__init__"}
    without = {f"{room}/{name}" for name in names if not (folder / f"test_{name}.py").exists()}
    assert rows == without, f"OWNED_BY has a row for each module without a test in {folder}"
    assert all((ROOT / OWNED_BY[row]).is_file() for row in rows)


def test_the_processes_of_a_run_have_the_kernel_that_its_caller_has(monkeypatch):
    """A run sets the variable of the compiled kernel before it starts the others."""
    monkeypatch.setenv("POLYATTN_NATIVE", "0")
    has_origin = bool(getattr(find_spec("polyattn_native"), "origin", None))
    for wish, is_built in (("", has_origin), ("0", False)):
        monkeypatch.setenv("TEST_NATIVE", wish)
        assert runpy.run_path(ROOT / "tests" / "compiled_kernel.py")["IS_BUILT"] == is_built
