"""What holds for all tests: which are collected, their order, how JAX compiles, idle threads."""

import gc
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest

# In a run of the suite from another folder, tests/ is not on the path.
pytest_plugins = ["optional"] if find_spec("optional") else []

# The package is tested without the compiled kernel; `make test` then runs the kernel's tests, and
# some of the package's with it.
# A device of torch is registered once in a process, and importlib would import its module again.
collect_ignore_glob = ["tests/far_device.py"]
if os.environ.setdefault("POLYATTN_NATIVE", "0") == "0":
    collect_ignore_glob += ["backends/polyattn_native/*", "tests/native/*"]
if sys.platform != "linux":  # There are no wheels of CuPy elsewhere.
    collect_ignore_glob += ["backends/polyattn_cupy/*", "tests/backends/*cu[bdp]*", "tests/gpu/*"]

# A thread that waits must not spin: each process of a run has as many threads as there are cores.
# OpenMP and OpenBLAS read this when torch and NumPy are imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
# Tests with tensors take a tenth less time with one thread of torch. Tests of the compiled kernel
# need more threads, and tests of the NumPy kernel need more threads of BLAS.
if os.environ["POLYATTN_NATIVE"] == "0":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(os.cpu_count()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Code that runs once need not be fast. All of this is read when JAX is imported.
XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
#: A third of the time of the emitters that took their place; jaxlib 0.11 has no others.
OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false"
CACHED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
FIRST_CALL = "test_first_call_from_eight_threads"


def pytest_configure(config):
    """Let XLA compile quickly, and all processes share what it compiled, now and next time."""
    os.environ.setdefault("XLA_FLAGS", XLA + OLD_EMITTERS * has_old_emitters())
    cache = getattr(config, "cache", None)
    if cache is not None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ |= CACHED | {"JAX_COMPILATION_CACHE_DIR": str(cache.mkdir("jax"))}


def has_old_emitters():
    """Return whether XLA can compile by them: a flag that it does not know ends the process."""
    try:
        return tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
    except PackageNotFoundError:
        return False


def pytest_collectstart():
    """Leave the modules and tests that are collected to no garbage collector: they stay."""
    gc.disable()


def pytest_collection_finish():
    """Let the garbage collector look seldom, and never at the modules and tests."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Put what the suites do with one case side by side; mark what covers the slow tests."""
    if os.environ["POLYATTN_NATIVE"] != "0":
        items[:] = [item for item in items if not item.get_closest_marker("without_native")]
    places = {}

    def place(item):
        # A process computes the exact result of a case once; that takes longer than its kernels.
        case = parameters_of(item).get("case")
        return places.setdefault(str(case), len(places) + 1) if is_of_suite(case) else 0

    items.sort(key=place)
    for test, many in MANY.items():
        thin_out([item for item in items if place(item) and item.originalname == test], place, many)
    for item in items:
        if shows_what_another_does(item):
            item.add_marker("slow")
    covered = set()
    for item in items:
        marks = list(item.iter_markers("slow"))
        if not marks or any("covered_by" in mark.kwargs for mark in marks):
            continue
        # One run of each test, and of each kernel in the suites. The libraries are what counts
        # in a first call.
        kernel = None if FIRST_CALL in item.nodeid else parameters_of(item).get("variant")
        test = item.nodeid.partition("[")[0], str(kernel)
        if test not in covered:
            covered.add(test)
            item.add_marker("covering")


#: So many cases of a test are those of a kernel that tries all.
MANY = {"test_case": 500, "test_backward": 100}
#: The name of the kernel that has code of its own for each dtype.
COMPILED = "native"


def thin_out(items, place, many):
    """Leave a case to one of the kernels that try all, and to one dtype, but for what is new.

    New is a feature, a dtype or a topic to a kernel, and a feature in a dtype to all of them, or
    to a kernel that has code of its own for each dtype.
    """
    suites, met_by_all = {}, set()
    for item in items:
        given = parameters_of(item)
        suites.setdefault((item.cls, given["variant"]), {})[item] = given["case"]
    whole = {key: suite for key, suite in suites.items() if len(suite) > many}
    for turn, ((_, variant), suite) in enumerate(whole.items()):
        names, seen = {case.name for case in suite.values()}, set()
        met = set() if variant.kernel.name == COMPILED else met_by_all
        for item, case in suite.items():
            has_twin = case.name.removesuffix(f", {case.dtype}") in names - {case.name}
            is_of_others = (place(item) + turn) % len(whole) > 0
            features = case.features or {"plain"}
            shown, pairs = {case.topic, case.dtype, *features}, {(case.dtype, x) for x in features}
            takes = case.features <= variant.kernel.features
            if (has_twin or is_of_others) and shown <= seen and (not takes or pairs <= met):
                item.add_marker("slow")
            seen |= shown
            met |= pairs if takes else set()


def shows_what_another_does(item):
    """Return whether a promise of a kernel costs more than it shows beside the others."""
    name, given = getattr(item, "originalname", None), parameters_of(item)
    if name == "test_sizes" and given["variant"]:
        kernel, small_tiles = given["variant"]
        return kernel.name != COMPILED and (small_tiles or given["dtype"] != "float32")
    return name == FIRST_CALL  # an interpreter that imports a library, for each kernel


def is_of_suite(case):
    """Return whether a parameter is a case of the conformance suite."""
    return hasattr(case, "score_shape")


def parameters_of(item):
    """Return the parameters that a test runs with, by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}
