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

CASES = "polyattn/conformance/test_backend.py"
ATTENTION = "tests/api/test_attention.py"
MASKS = "tests/expressions/test_masks.py"

#: The modules without tests of their name, by what tests them: a file, or the suite of all kernels.
OWNED_BY = {
    CASES: "_base/span _core/call/layout _core/expressions/distances _core/tiles/axes"
    " _core/tiles/band _core/tiles/indices _core/tiles/named _core/tiles/online_softmax"
    " _kernels/backward _kernels/dense _kernels/dense_kernel _kernels/jvp _kernels/recomputed"
    " _kernels/sums _kernels/visible",
    ATTENTION: "_api/names _base/arguments _core/call/checks _core/call/describe"
    " _core/call/problem",
    MASKS: "_core/expressions/coverage _core/expressions/indices _core/expressions/mask_arrays"
    " _core/tiles/compiled _core/tiles/coverage",
    "tests/api/test_gradients.py": "_core/call/gradients",
    "tests/api/test_other_arrays.py": "_base/refused _dispatch/standard",
    "tests/api/test_run.py": "_core/call/key",
    "tests/api/test_top_keys.py": "_kernels/top_keys",
    "tests/api/test_weights.py": "_kernels/weights",
    "tests/backends/test_torch_autocast.py": "_base/autocast",
    "tests/backends/test_torch_compiled.py": "_base/tracing",
    "tests/call/test_options.py": "_core/call/facts _core/call/features _core/call/operands",
    "tests/call/test_pages.py": "_base/scatter",
    "tests/conformance/test_quantized.py": "_base/quantized",
    "tests/dispatch/test_explanation.py": "_api/explain",
    "tests/dispatch/test_extensions.py": "_dispatch/entries",
    "tests/dispatch/test_registry.py": "_base/arrays _dispatch/contract",
    "tests/dispatch/test_request.py": "_base/settings",
    "tests/dispatch/test_same_bits.py": "_base/same_bits",
    "tests/dispatch/test_select.py": "_dispatch/errors",
    "tests/dispatch/test_transfer.py": "_dispatch/placement",
    "tests/expressions/test_derivatives.py": "_core/expressions/replacements",
    "tests/expressions/test_parts.py": "_base/slices _core/call/parts",
    "tests/expressions/test_patterns.py": "_core/expressions/tree",
    "tests/native/test_product.py": "_dispatch/products",
    "tests/nn/test_quantized_cache.py": "_api/pieces",
    "tests/test_cli.py": "_base/extras _base/streams _base/text_table _dispatch/listing",
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
    folder, owned = ROOT / "tests" / ROOMS[room], " ".join(OWNED_BY.values()).split()
    names = {file.stem for file in (ROOT / "polyattn" / room).glob("*.py")} - {"__init__"}
    without = {f"{room}/{name}" for name in names if not (folder / f"test_{name}.py").exists()}
    rows = [module for module in owned if module.startswith(room)]
    assert sorted(rows) == sorted(without), f"OWNED_BY has what has no test in {folder}"
    assert all((ROOT / owner).is_file() for owner in OWNED_BY)


def test_the_processes_of_a_run_have_the_kernel_that_its_caller_has(monkeypatch):
    """A run sets the variable of the compiled kernel before it starts the others."""
    monkeypatch.setenv("POLYATTN_NATIVE", "0")
    has_origin = bool(getattr(find_spec("polyattn_native"), "origin", None))
    for wish, is_built in (("", has_origin), ("0", False)):
        monkeypatch.setenv("TEST_NATIVE", wish)
        assert runpy.run_path(ROOT / "tests" / "compiled_kernel.py")["IS_BUILT"] == is_built
