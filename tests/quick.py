"""Run the tests of the core on NumPy only, or those of one room and of the rooms above it.

`make quick` takes 15 s. `make quick ROOM=nn` runs the tests of `nn` and of all that
imports it, with the libraries that are installed; ROOM is a row of ROOMS in `test_imports.py`, or
a backend.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from optional import LIBRARIES
from test_imports import BACKENDS, ROOMS

TESTS = Path(__file__).resolve().parent
CORE = list(ROOMS)[: list(ROOMS).index("_api") + 1]
#: What `make quick` installs, of the libraries that a test can do without.
INSTALLED = {"array_api_strict", "safetensors"}
#: Rooms whose tests have another name.
ELSEWHERE = {
    "__init__": ["test_imports.py"],
    "__main__": ["test_cli.py"],
    "masks": ["expressions"],
    "scores": ["expressions"],
    "plugin": ["conformance/test_suite.py", "call"],
    "plugin.dense": ["kernels"],
}


def above(room):
    """Return a room, and the rooms that import it or one that does."""
    rooms = {room}
    for other, below in ROOMS.items():  # in order, from the ground up
        if below & rooms:
            rooms.add(other)
    return rooms


def tests_of(room):
    """Return the folders and files that test a room or a backend."""
    name = room.rpartition(".")[2].lstrip("_")
    names = ELSEWHERE.get(room, [name, f"test_{name}.py", f"backends/test_{name}*.py"])
    return {str(path) for pattern in names for path in TESTS.glob(pattern)}


def chosen(room):
    """Return the tests of a room and of what is above it: of the core if no room is named."""
    backends = {path.name.removeprefix("polyattn_") for path in BACKENDS.glob("polyattn_*")}
    if room in backends:
        return sorted(tests_of(room))
    by_name = {known.removeprefix("_core.").strip("_"): known for known in ROOMS}
    known = room.removeprefix("_core.").strip("_")
    if known not in {"", *by_name}:
        names = ", ".join(sorted({*by_name, *backends}))
        raise SystemExit(f"quick: no room {room!r}; the rooms are {names}")
    rooms = above(by_name[known]) if known else CORE
    return sorted(set().union(*map(tests_of, rooms)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("room", nargs="?", default="", help="a room, such as nn or torch")
    room = parser.parse_args().room
    hidden = ",".join(sorted(LIBRARIES - INSTALLED))
    alone = {"OPENBLAS_NUM_THREADS": "1", "POLYATTN_NATIVE": "0", "POLYATTN_TEST_WITHOUT": hidden}
    alone = {} if room else alone
    pytest = ("-m", "pytest", "-q", "--no-header", "-r", "fE", "--numprocesses", "auto")
    # The kernels that say most in the least time.
    check = ("-m", "polyattn", "check", "numpy", "--quick", "--kernel", "dense,small")
    for command in ((*pytest, "--dist", "worksteal", *chosen(room)), *([] if room else [check])):
        done = subprocess.run([sys.executable, *command], env=os.environ | alone, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
