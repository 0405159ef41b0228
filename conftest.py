"""What holds wherever tests are collected: which of them, in what order, and how JAX compiles."""

import os
import sys

collect_ignore_glob = []
if sys.platform != "linux":  # There are no wheels of CuPy elsewhere.
    collect_ignore_glob += ["backends/polyattn_cupy/*", "tests/backends/test_cupy*", "tests/gpu/*"]

# Code that runs once need not be fast. All of this is read when JAX is imported.
XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
CACHED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def pytest_configure(config):
    """Let XLA compile quickly, and all processes share what it compiled, now and next time."""
    os.environ.setdefault("XLA_FLAGS", XLA)
    cache = getattr(config, "cache", None)
    if cache is not None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ |= CACHED | {"JAX_COMPILATION_CACHE_DIR": str(cache.mkdir("jax"))}


def pytest_collection_modifyitems(items):
    """Put what the conformance suites do with one case side by side.

    A process computes the exact result of a case once, which takes longer than all kernels do.
    """
    places = {}

    def place(item):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "variant" not in parameters or "case" not in parameters:
            return 0
        return places.setdefault(str(parameters["case"]), len(places) + 1)

    items.sort(key=place)
