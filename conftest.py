"""The setup of all tests: which are collected, their order, how JAX compiles, memory, threads."""

import gc
import os
import re
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest

# In a run of the suite from another folder, tests/ is not on the path.
pytest_plugins = ["optional", "compiled_kernel"] if find_spec("optional") else []

# A device of torch is registered once in a process, and importlib would import its module again.
# Programs of others are imported where their modules are there.
collect_ignore_glob = ["tests/far_device.py", "tests/clients/[!t]*.py"]
if sys.platform != "linux":  # There are no wheels of CuPy elsewhere.
    collect_ignore_glob += ["backends/polyattn_cupy/*", "tests/backends/*cu[bdp]*", "tests/gpu/*"]

# In the background of a shell SIGINT is ignored, as it then is in each program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A thread that waits must not spin: each process of a run has as many threads as there are cores.
# OpenMP and OpenBLAS read this when torch and NumPy are imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
# Tests with tensors take a tenth less time with one thread of torch. Tests of the NumPy kernel need
# more threads of BLAS.
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


def pytest_runtest_teardown(item, nextitem):
    """Free the programs that a file has compiled: nothing else does, and they are gigabytes."""
    if nextitem is None or nextitem.path == item.path:
        return
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Put what the suites do with one case side by side; mark what is slow, and what covers it."""
    places = {}

    def place(item):
        # A process computes the exact result of a case once; that takes longer than its kernels.
        case = parameters_of(item).get("case")
        return places.setdefault(str(case), len(places) + 1) if is_of_suite(case) else 0

    items.sort(key=place)
    deal(items)
    for item in items:
        if SLOW.match(item.name):
            item.add_marker("slow")
    covered = set()
    for item in items:
        marks = list(item.iter_markers("slow"))
        if not marks or any("covered_by" in mark.kwargs for mark in marks):
            continue
        # One run of each test, and of each kernel in the suites. The libraries are what counts
        # in a first call.
        kernel = None if item.name.startswith(FIRST_CALL) else parameters_of(item).get("variant")
        test = item.nodeid.partition("[")[0], str(kernel)
        if test not in covered:
            covered.add(test)
            item.add_marker("covering")


FIRST_CALL = "test_first_call_from_eight_threads"
#: Tests of the suites that take long, and show little beside the others.
SLOW = re.compile(rf"{FIRST_CALL}|test_sizes\[.*(small tiles|float64)")
#: The kernels that take every case, and the last digits of the numbers of those that each gets: see
#: `deal`. NumPy's tiles are dear where they are small.
TURNS = {
    "numpy tiled": "012",
    "numpy tiled, small tiles": "3",
    "array-api dense": "456",
    "array-api tiled, small tiles": "789",
    "numpy native": "45",
}
#: The kernel that has code of its own for each dtype.
COMPILED = "numpy native"


def deal(items):
    """Leave each kernel of the suites the essential cases; deal the others among some kernels.

    They are dealt by their numbers in `CASES`. What a kernel does not get is slow, and so is a copy
    of a case in another dtype, but for the compiled kernel.
    """
    suites = {}
    for item in items:
        given = parameters_of(item)
        is_test = getattr(item, "originalname", "") in ("test_case", "test_backward")
        if is_test and is_of_suite(given.get("case")):
            key = item.cls, item.originalname, str(given["variant"])
            suites.setdefault(key, []).append(item)
    # Few cases that cover all others stay as they are.
    whole = {key: suite for key, suite in suites.items() if len(suite) >= 100}
    if whole:
        from polyattn.conformance import CASES, ESSENTIAL

        numbers = {name: number for number, name in enumerate(CASES)}
    for (cls, _, variant), suite in whole.items():
        kernel = f"{cls.backend} {variant}"
        for item in suite:
            case = parameters_of(item)["case"]
            is_its_turn = str(numbers.get(case.name, 0))[-1] in TURNS.get(kernel, "")
            is_copy = case.name.endswith(f", {case.dtype}") and kernel != COMPILED
            if case.name not in ESSENTIAL and (is_copy or not is_its_turn):
                item.add_marker("slow")


def is_of_suite(case):
    """Return whether a parameter is a case of the conformance suite."""
    return hasattr(case, "score_shape")


def parameters_of(item):
    """Return the parameters that a test runs with, by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}
