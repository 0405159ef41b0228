"""What imports what: rooms import only the rooms below them, and no framework comes in unasked."""

import ast
import importlib
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import polyattn

ROOT = Path(polyattn.__file__).resolve().parent
BACKENDS = ROOT.parent / "backends"
FRAMEWORKS = {
    "torch", "jax", "cupy", "dask", "tensorflow", "mlx", "autograd", "ndonnx", "onnx", "matplotlib",
}  # fmt: skip
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
    "dialects.flash_attn": {"torch"},  # by modules with classes of torch
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
    """All of them, which are above it in the table, no other, and what is let in from outside."""
    below, earlier = set(), [*ROOMS][: [*ROOMS].index(room)]
    for file in FILES[room]:
        outside = OUTSIDE.get(room_of(module_of(file), rooms=OUTSIDE), set())
        for module, name in imports_of(file):
            root = module.partition(".")[0]
            if root == "polyattn":
                assert room_of(module, name) in ROOMS[room] | {room}, f"{file}: {module} {name}"
                below.add(room_of(module, name))
            else:
                assert root in sys.stdlib_module_names | outside, f"{file}: {module}"
    assert below - {room} == ROOMS[room] <= {*earlier}


def test_there_is_no_circle():
    modules = {module_of(x): x for x in ROOT.rglob("*.py") if x.name != "__init__.py"}
    imported = {
        module: {full for m, n in imports_of(x) for full in (f"{m}.{n}", m)} & modules.keys()
        for module, x in modules.items()
    }
    TopologicalSorter(imported).prepare()


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


def none_of(names):
    """Return code that fails if one of the modules is loaded."""
    return f"assert not (found := {set(names)!r} & sys.modules.keys()), found"


#: Below NumPy 2.1 array_api_compat imports all of it.
REST = ["numpy.f2py", "numpy.testing"] if hasattr(np, "cumulative_sum") else []
USED = f"""
import sys, polyattn
assert not [name for name in sys.modules if name.startswith(("numpy", "polyattn."))]
assert not hasattr(polyattn, "__wrapped__")
assert polyattn.__version__ is polyattn.__version__
mask = polyattn.masks.causal()
{none_of(["polyattn._api", "polyattn._dispatch"])}
mask._repr_html_()
import numpy as np
import polyattn.cli, polyattn.bench.measure, polyattn.plugin, polyattn_numpy, polyattn_torch
import polyattn._dispatch.registry as r; r.names()
polyattn.explain((2, 3, 4), (2, 3, 4), (2, 3, 4))
x = np.ones((2, 3, 4)); polyattn.attention(x, x, x)
with polyattn.use_backend('numpy'): polyattn.attention(x, x, x)
{none_of([*FRAMEWORKS, *(TESTING - {"numpy"}), *REST, "polyattn.conformance"])}
p = polyattn
p.nn.Linear, p.parallel.shard, p.dialects, p.export.onnx, p.plot.mask
"""


def test_each_use_loads_what_it_needs_and_no_framework(run_python):
    run_python(USED)
    with pytest.raises(AttributeError, match="no attribute 'layers'"):
        polyattn.layers  # noqa: B018


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_calls_on_tensors_do_not_import_the_compiler(run_python):
    code = "import polyattn, sys, torch; x = torch.ones(1, 2, 3, 4, requires_grad=True)\n"
    code += "with torch.no_grad(): polyattn.attention(x, x, x)\n"
    code += "polyattn.attention(x, x, x, window=(1, 0)).sum().backward()"
    run_python(f"{code}\n{none_of(['torch._dynamo', 'sympy'])}")


USES = """
from polyattn import *
assert {'attention', 'nn'} < set(dir(polyattn)) and polyattn.__all__
import pickle; pickle.loads(pickle.dumps(polyattn.Partial))
import pydoc; assert 'attention(' in pydoc.render_doc(polyattn)
with Pool(15) as pool: assert all(pool.map(lambda n: getattr(polyattn, n), names * 3))
"""
EACH = f"""
import sys
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


def test_a_name_of_the_package_is_loaded_by_any_use_of_it(run_python):
    run_python(EACH)


def test_type_checkers_know_the_modules():
    stub = (ROOT / "__init__.pyi").read_text(encoding="utf-8")
    named = re.findall(r"^from polyattn import (\w+) as \1$", stub, re.M)
    assert {*named, "masks", "scores"} == set(polyattn._MODULES)


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
