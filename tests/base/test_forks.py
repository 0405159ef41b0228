"""The child of a fork: every lock is free there, and a call that was under way ends."""

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

ROOT = Path(__file__).resolve().parents[2]
#: What holds a lock, or threads that wait for one.
MAKERS = (
    "Lock|RLock|allocate_lock|Condition|Semaphore|BoundedSemaphore|Event|Barrier|Queue|LifoQueue"
    "|PriorityQueue|SimpleQueue|ThreadPoolExecutor"
)
#: Where one is made, and why the child of a fork does not wait for it.
MADE = {
    ("polyattn/_base/forks.py", "RLock"): "it is made anew",
    ("polyattn/parallel/thread_ranks.py", "SimpleQueue"): "the child has no other rank",
    ("polyattn/conformance/checks/promises.py", "Barrier"): "a process of its own makes it",
    ("backends/polyattn_numpy/thread_pool.py", "SimpleQueue"): "it is made anew, and calls end",
}
QUIET = "-W", "ignore::DeprecationWarning"  # of forks beside threads, in Python 3.12
START = """
import os, signal, sys, threading, time
import numpy as np
import polyattn
def in_child(action):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(100)
    try:
        os._exit(action() or 0)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)
"""


def test_every_lock_is_made_by_one_function():
    made = {
        (file.relative_to(ROOT).as_posix(), name)
        for folder in ("polyattn", "backends")
        for file in (ROOT / folder).rglob("*.py")
        for name in re.findall(rf"\b({MAKERS})\(", file.read_text(encoding="utf-8"))
    }
    assert made == set(MADE)


@pytest.fixture
def print_in_forks(run_python):
    """Return a function that runs code with `in_child` in a new interpreter, for what it prints."""
    return lambda code: run_python(START + code, *QUIET).split()


def test_locks_that_another_thread_holds_are_free_and_those_of_the_forking_thread_its_own(
    print_in_forks,
):
    *of_own, count, status = print_in_forks("""
from polyattn._base import forks
from polyattn._dispatch import registry, request
x = np.ones((1, 1, 8))
cache = polyattn.nn.PagedCache.init(1, 8, 4, items=1, page=2, like=x)
cache = cache.append(x[None], x[None])
with registry._lock, request._context._lock:
    print(in_child(lambda: registry._lock.release() or request._context._lock.release()))
print(in_child(lambda: polyattn.attention(x, x, x) is None))
forks.PATIENCE = 0.1
locks = list(forks._locks)
assert {registry._lock, request._context._lock} <= set(locks)
held = threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    time.sleep(60)

threading.Thread(target=hold, daemon=True).start()
held.wait()

def check():
    assert all(lock.acquire(False) for lock in locks)
    polyattn.attention(x[:, :, :4], x[:, :, :4], x, backend="numpy")

print(len(locks), in_child(check))
""")
    assert [*of_own, status] == ["0"] * 3
    assert int(count) >= 5


def test_a_fork_waits_while_a_backend_is_loaded(print_in_forks, tmp_path):
    (tmp_path / "slowly.py").write_text("import time\ntime.sleep(1)\n")
    assert print_in_forks(f"""
sys.path.insert(0, {str(tmp_path)!r})
from polyattn._dispatch import registry
registry.unusable = lambda spec, distribution: __import__("slowly") and None
threading.Thread(target=registry.load, args=("numpy",)).start()
while "slowly" not in sys.modules:
    time.sleep(0.01)
print(in_child(lambda: registry.load("numpy")))
""") == ["0"]


@pytest.mark.parametrize(
    ("threads", "kernel"), [(2, "tiled"), pytest.param(2, "native", marks=pytest.mark.native)]
)
def test_a_fork_amid_a_call_ends_it_or_lets_it_end(threads, kernel, print_in_forks):
    assert print_in_forks(f"""
rng = np.random.default_rng(0)
x = rng.standard_normal((1, 8, 2000, 64), np.float32)
short = x[:, :, :300]
attend = polyattn.attention
few = attend(short, short, short)
children = []

def fork(number, frame):
    child = os.fork()
    if child:
        children.append(child)
        return
    signal.alarm(100)
    assert (few == attend(short, short, short)).all()

signal.signal(signal.SIGUSR1, fork)
parent = os.getpid()
os.environ["POLYATTN_NUM_THREADS"] = "{threads}"
whole = attend(x, x, x, kernel="{kernel}")
begun = time.perf_counter()
attend(x, x, x, kernel="{kernel}")
half = (time.perf_counter() - begun) / 2
threading.Timer(half, os.kill, (parent, signal.SIGUSR1)).start()
status = 0
while not children and not status:
    try:
        # In the child BLAS has threads of its own, and may round otherwise.
        right = np.allclose(attend(x, x, x, kernel="{kernel}"), whole, atol=1e-5)
    except RuntimeError as error:
        right = "the process was forked amid this call" in str(error) and {threads} > 1
    status = 1 if not right else 2 if os.getpid() != parent else 0
if os.getpid() != parent:
    os._exit(status - 2)
print(status, *[os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in children])
""") == ["0", "0"]
