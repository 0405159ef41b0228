"""What imports what: rooms import only the rooms below them, and no framework comes in unasked."""

import ast
import importlib
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import polyattn

ROOT = Path(polyattn.__file__).resolve().parent
BACKENDS = ROOT.parent / "backends"
FRAMEWORKS = {"torch", "jax", "cupy", "dask", "tensorflow", "mlx", "autograd", "ndonnx", "onnx"}
#: What `polyattn.conformance` needs beside NumPy: the extra "testing", less what is no import.
TESTING = {"array_api_extra", "ml_dtypes", "mpmath", "numpy", "pytest"}

#: Each room, and the rooms below it that it imports. `__init__` is the package's names.
ROOMS = {
    "_base": set(),
    "_core.expressions": {"_base"},
    "_core.call": {"_base", "_core.expressions"},
    "_core.tiles": {"_base", "_core.expressions", "_core.call"},
    "masks": {"_base", "_core.expressions", "_core.tiles"},
    "scores": {"_base", "_core.expressions"},
    "plugin": {"_base", "_core.expressions", "_core.call", "_core.tiles"},
    "_kernels": {"_base", "_core.expressions", "_core.call", "_core.tiles", "plugin"},
    "plugin.dense": {"_kernels"},
    "_dispatch": {"_base", "_core.expressions", "_core.call", "plugin", "_kernels"},
    "_api": {"_base", "_core.expressions", "_core.call", "plugin", "_kernels", "_dispatch"},
    "__init__": {"_base", "_core.call", "masks", "scores", "_dispatch", "_api"},
    "plot": {"_base", "_core.expressions", "_core.call", "_core.tiles", "_dispatch", "_api"},
    "run": set(),
    "dialects": {"_base", "_core.expressions", "masks", "scores", "_api", "run"},
    "nn": {"_base", "_core.expressions", "scores", "_dispatch", "_api"},
    "parallel": {"_base", "_core.expressions", "_core.call", "_core.tiles", "_api"},
    "integrations": {"_base", "_core.call", "plugin", "_api", "dialects", "nn"},
    "bench": {"_base", "_core.call", "plugin", "_dispatch", "_api", "__init__"},
    "conformance": {"_base", "_core.expressions", "_core.call", "_core.tiles", "masks", "scores",
        "plugin", "_dispatch", "__init__", "dialects"},
    "export": {"_base", "_dispatch", "__init__", "nn"},
    "cli": {"_base", "_dispatch", "__init__", "run", "bench", "conformance", "export"},
    "__main__": {"run", "cli"},
}  # fmt: skip
#: What any plugin imports.
CONTRACT = {"polyattn.plugin", "polyattn.plugin.dense"}
#: Modules from elsewhere that a room may import beside the standard library.
OUTSIDE = {
    "_base.arrays": {"array_api_compat"},
    "bench": {"numpy", "threadpoolctl"},
    "conformance": TESTING,
    "dialects.flax": {"jax"},  # imported for a key of jax.random
    "dialects.flash_attn.layers": {"torch"},
    "dialects.flash_attn.losses": {"torch"},
    "dialects.flash_attn.modules": {"torch"},
    "dialects.flash_attn.ops.layer_norm": {"torch"},
    "dialects.flash_attn.ops.activations": {"torch"},
    "dialects.xformers.ops": {"torch"},
    "export": {"numpy"},
    "_core.expressions.intervals": {"numpy"},  # imported when intervals are asked for
    "_base.host": {"numpy"},  # imported when a sequence, or an array of NumPy, is placed
    "integrations.diffusers": {"diffusers", "torch"},
    "integrations": {"jax", "mlx", "ndonnx", "numpy", "spox", "torch", "transformers"},
    "_base.slices": {"jax"},  # for a slice whose start JAX traces
    "_base.progress": {"tqdm"},
    "_base.streams": {"tqdm"},
    "_base.tracing": {"torch"},  # imported while torch.compile traces a call
    "parallel": {"cupy", "jax", "mpi4py", "torch"},  # each in a module of its own
    "nn": {"numpy"},  # whose bit generator draws the first parameters of a layer
}


@cache
def nodes_of(file):
    """Return the imports, attributes, functions and classes in a file."""
    kinds = ast.Import, ast.ImportFrom, ast.Attribute, ast.FunctionDef, ast.ClassDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imports_of(file):
    """Yield the module, and the name if there is one, of each import in a file."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def room_of(module, name="", rooms=ROOMS):
    """Return the room of what is imported: the longest path that the table has."""
    parts = f"{module}.{name}".split(".")[1:]
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((path for path in paths if path in rooms), "__init__")


def module_of(file):
    """Return the name of a module of the core, by its file."""
    return ".".join(("polyattn", *file.relative_to(ROOT).with_suffix("").parts))


FILES = {room: [] for room in ROOMS}
for _file in sorted(ROOT.rglob("*.py")):
    FILES[room_of(module_of(_file))].append(_file)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_the_rooms_of_its_row(room):
    """All of them, and no other; and what is let in from outside."""
    below = set()
    for file in FILES[room]:
        outside = OUTSIDE.get(room_of(module_of(file), rooms=OUTSIDE), set())
        for module, name in imports_of(file):
            root = module.partition(".")[0]
            if root == "polyattn":
                assert room_of(module, name) in ROOMS[room] | {room}, f"{file}: {module} {name}"
                below.add(room_of(module, name))
            else:
                assert root in sys.stdlib_module_names | outside, f"{file}: {module}"
    assert below - {room} == ROOMS[room]


def test_no_room_is_above_a_room_that_imports_it():
    order = list(ROOMS)
    for room, below in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in below), room


def modules():
    """Return the modules that each module of the core imports."""
    names = {module_of(file) for file in files()}
    graph = {}
    for file in files():
        imported = {full for m, n in imports_of(file) for full in (f"{m}.{n}", m)}
        graph[module_of(file)] = imported & names
    return graph


def files():
    return [file for file in ROOT.rglob("*.py") if file.name != "__init__.py"]


def test_there_is_no_circle():
    graph = modules()
    while graph:
        leaves = {module for module, below in graph.items() if not below & graph.keys()}
        assert leaves, f"these import one another: {sorted(graph)}"
        graph = {module: below for module, below in graph.items() if module not in leaves}


def test_our_plugins_import_the_contract_and_what_it_imports_and_read_no_private_name():
    contract = set(importlib.import_module("polyattn.plugin").__all__)
    core = "\n".join(x.read_text(encoding="utf-8") for x in (ROOT / "_core" / "tiles").glob("*.py"))
    for file in BACKENDS.rglob("*.py"):
        for module, name in imports_of(file):
            if module.partition(".")[0] == "polyattn":
                assert room_of(module, name) in ROOMS["plugin"] | {"plugin"}, f"{file}: {module}"
                assert module in CONTRACT or name not in contract, f"{file}: {module} {name}"
        attributes = {node.attr for node in nodes_of(file) if isinstance(node, ast.Attribute)}
        own = {node.name for node in nodes_of(file) if isinstance(node, ast.FunctionDef)}
        private = {name for name in attributes - own if name[0] == "_" != name[1]}
        read = {name for name in private if f"self.{name} =" in core}
        assert not read, f"{file}: {read}"


def test_other_distributions_import_the_contract_alone():
    examples = ROOT.parent / "examples" / "plugin" / "polyattn_einsum"
    files = [*examples.glob("*.py"), *(BACKENDS / "polyattn_native").rglob("*.py")]
    for file in [*files, ROOT.parent / "tests" / "broken_plugin.py"]:
        ours = {module for module, _ in imports_of(file) if module.startswith("polyattn.")}
        assert ours <= CONTRACT, file


def test_the_contract_is_short():
    contract = importlib.import_module("polyattn.plugin").__all__
    assert len(set(contract)) == len(contract) <= 45


def test_the_words_of_the_glossary_are_names_in_the_code():
    page = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## What do the words mean?")[2].partition("\n## ")[0]
    words = re.findall(r"^\| `(\w+)` \| ", section, re.M)
    names = {node.name for x in files() for node in nodes_of(x) if isinstance(node, ast.ClassDef)}
    assert 10 < len(words) <= 20
    assert not set(words) - names


def loaded_after(run_python, code, names):
    listing = f"import sys; print(*sorted(m for m in {sorted(names)!r} if m in sys.modules))"
    return run_python(f"{code}\n{listing}").split()


def test_no_framework_is_imported_and_nothing_of_the_conformance_suite(run_python):
    code = """
import numpy as np, polyattn
import polyattn.cli, polyattn.bench.measure, polyattn.plugin, polyattn_numpy, polyattn_torch
import polyattn._dispatch.registry as r; r.names()
polyattn.explain((2, 3, 4), (2, 3, 4), (2, 3, 4))
x = np.ones((2, 3, 4)); polyattn.attention(x, x, x)
with polyattn.use_backend('numpy'): polyattn.attention(x, x, x)
"""
    names = [*FRAMEWORKS, *(TESTING - {"numpy"}), "polyattn.conformance"]
    if hasattr(np, "cumulative_sum"):  # otherwise array_api_compat imports all of NumPy
        names += ["numpy.f2py", "numpy.testing"]
    assert loaded_after(run_python, code, names) == []


@pytest.mark.needs("torch")
def test_calls_on_tensors_do_not_import_the_compiler(run_python):
    code = "import polyattn, torch; x = torch.ones(1, 2, 3, 4, requires_grad=True)\n"
    code += "with torch.no_grad(): polyattn.attention(x, x, x)\n"
    code += "polyattn.attention(x, x, x, window=(1, 0)).sum().backward()"
    assert loaded_after(run_python, code, ["torch._dynamo", "sympy"]) == []


UNUSED = """
import polyattn, sys
loaded = [name for name in sys.modules if name.startswith(("numpy", "polyattn."))]
assert not loaded and not hasattr(polyattn, "__wrapped__"), loaded
"""
USES = """
polyattn.attention
from polyattn import attention
from polyattn import *
assert {'attention', 'nn'} < set(dir(polyattn)) and polyattn.__all__
import pickle; pickle.loads(pickle.dumps(polyattn.Partial))
import pydoc; assert 'attention(' in pydoc.render_doc(polyattn)
with Pool(15) as pool: assert all(pool.map(lambda n: getattr(polyattn, n), names * 3))
"""
EACH = f"""
from concurrent.futures import ThreadPoolExecutor as Pool
names = 'attention', 'masks', 'nn', 'explain', 'plot'
for use in {USES.strip().splitlines()!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "polyattn"]:
        del sys.modules[name]
    import polyattn
    assert 'attention' not in vars(polyattn)
    exec(use, vars() | {{"polyattn": polyattn}})
    assert callable(vars(polyattn)['attention']), use
"""


def test_importing_the_package_loads_nothing_until_a_name_is_used(run_python):
    run_python(UNUSED + EACH)


def test_type_checkers_know_the_modules():
    stub = (ROOT / "__init__.pyi").read_text(encoding="utf-8")
    named = re.findall(r"^from polyattn import (\w+) as \1$", stub, re.M)
    assert {*named, "masks", "scores"} == set(polyattn._MODULES)


def test_the_version_and_masks_load_nothing_else(run_python):
    code = f"{UNUSED}assert polyattn.__version__ is polyattn.__version__; polyattn.masks.causal()"
    assert loaded_after(run_python, code, ["polyattn._api", "polyattn._dispatch"]) == []


def test_the_parts_of_the_package_are_there_when_they_are_asked_for(run_python):
    parts = "p.nn.Linear, p.parallel.shard, p.dialects, p.export.onnx, p.plot.mask"
    run_python("import polyattn; polyattn.masks.causal()._repr_html_()")
    run_python(f"import polyattn as p; {parts}")
    with pytest.raises(AttributeError, match="no attribute 'layers'"):
        polyattn.layers  # noqa: B018


def test_a_function_hides_no_module():
    for package in [path.parent for path in ROOT.rglob("__init__.py")]:
        module = sys.modules.get(".".join(("polyattn", *package.relative_to(ROOT).parts)))
        for file in package.glob("*.py") if module else ():
            public = getattr(module, file.stem, None)
            assert file.stem == "__init__" or not callable(public), f"{public} hides {file}"


def test_dir_of_a_public_module_has_its_public_names():
    public = [module_of(x) for x in ROOT.rglob("*.py") if "\n__all__ = " in x.read_text("utf-8")]
    assert len(public) > 20
    for name in public:
        module = importlib.import_module(name.removesuffix(".__init__"))
        assert dir(module) == sorted(module.__all__), name
    shown = set(dir(polyattn))
    assert shown > {*polyattn.__all__}
    assert all(hasattr(polyattn, name) for name in shown)
    assert [name for name in shown if name.startswith("_")] == ["__version__"]
