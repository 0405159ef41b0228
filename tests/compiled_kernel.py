"""Run tests without the compiled kernel, and those that are marked as native with it.

A test with the marker `native` runs with the kernel, as do all in `tests/native`; one with the
marker `with_native` runs without it and then with it. Both are in one process, so the plugins that
are found without the kernel and those with it are kept apart here and exchanged.
`POLYATTN_NATIVE=0` leaves the kernel out, and so does a machine where it is not built.
"""

import os
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
from optional import torch

from polyattn._dispatch import cache, extensions, products, registry

FOLDERS = "tests/native/", "backends/polyattn_native/"
#: What the caller says of the kernel; the other processes of a run inherit it.
WISH = os.environ.setdefault("TEST_NATIVE", os.environ.get("POLYATTN_NATIVE", ""))
#: The folder of its sources alone is a namespace, which has no origin.
IS_BUILT = bool(getattr(find_spec("polyattn_native"), "origin", None)) and WISH != "0"
os.environ["POLYATTN_NATIVE"] = "0"
_plugins = {False: ({}, []), True: ({}, [])}


def use(is_native):
    """Let the calls that follow find the compiled kernel, or not."""
    was_native = os.environ["POLYATTN_NATIVE"] == "1"
    if is_native == was_native:
        return
    _plugins[was_native] = dict(registry._plugins), list(extensions._extensions)
    os.environ["POLYATTN_NATIVE"] = str(int(is_native))
    registry._plugins.clear()
    registry._plugins.update(_plugins[is_native][0])
    extensions._extensions[:] = _plugins[is_native][1]
    cache.forget()
    products._kernels_for.cache_clear()
    if torch:
        torch.set_num_threads(os.cpu_count() if is_native else 1)


@contextmanager
def using(is_native):
    """Let the calls inside find the compiled kernel, or not."""
    before = os.environ["POLYATTN_NATIVE"] == "1"
    use(is_native)
    try:
        yield
    finally:
        use(before)


def pytest_ignore_collect(collection_path):
    """Leave out what imports the kernel where it is not built."""
    path = f"{collection_path.as_posix()}/"
    return True if not IS_BUILT and any(folder in path for folder in FOLDERS) else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Make two tests of one that is marked, the second with the kernel."""
    if IS_BUILT and metafunc.definition.get_closest_marker("with_native"):
        both = [
            pytest.param(False, id=pytest.HIDDEN_PARAM),
            pytest.param(True, id="native", marks=pytest.mark.native),
        ]
        metafunc.fixturenames.append("is_native")
        metafunc.parametrize("is_native", both)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Mark the tests of the kernel, and put those with it last: the plugins are exchanged once."""
    for item in items:
        if item.nodeid.startswith(FOLDERS):
            item.add_marker("native")
    result = yield
    items.sort(key=is_marked)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Let the test find the kernel if it is marked."""
    if is_marked(item) and not IS_BUILT:
        pytest.skip("the compiled kernel is not built")
    use(is_native=is_marked(item))


def is_marked(item):
    """Return whether a test runs with the compiled kernel."""
    return item.get_closest_marker("native") is not None
