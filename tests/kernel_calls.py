"""Random calls of the compiled kernel in C++, whose source is in a folder.

The unit of one instruction set is compiled without optimization, in 2 s, and linked with the rest
as it is in the repository, compiled once.
"""

import atexit
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
NATIVE = "backends/polyattn_native"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-fno-rtti", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
UNIT = ["-O0", "-Wno-psabi", "-DPOLYATTN_UNIT=sse2", "-DPOLYATTN_BYTES=16"]
#: The other instruction sets of the interface, which stand for the one that is compiled.
OTHERS = [f"-Wl,--defsym,_ZN{name}4unitE=_ZN4sse24unitE" for name in ("4avx2", "6avx512")]
CALLS = 3000
#: As many as find most planted mistakes: `make test` has these.
FEW = 100
lock = Lock()


def is_possible():
    """Return whether the compiler, the linker and the processor are those that are needed."""
    return (
        sys.platform == "linux" and platform.machine() == "x86_64" and bool(shutil.which(COMPILER))
    )


def compile_to(target, *arguments):
    """Compile, or raise with what the compiler says."""
    command = [COMPILER, *FLAGS, *map(str, arguments), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


@cache
def objects_of_repository():
    """Compile all but the unit, and return the objects, each once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="polyattn-native-"))
    atexit.register(shutil.rmtree, folder)
    objects = []
    for source in ("fuzz/fuzz", "src/pool", "src/interface"):
        objects.append(folder / f"{source.replace('/', '_')}.o")
        compile_to(objects[-1], "-O2", "-c", ROOT / NATIVE / f"{source}.cpp")
    return objects


def wrong_call(folder, hint, most=CALLS):
    """Return what is wrong with a random call of the source in a folder, or None.

    The hint is such an answer: its call is tried before the others.
    """
    program = folder / "fuzz"
    with lock:
        objects = objects_of_repository()
    compile_to(program, *UNIT, folder / NATIVE / "src" / "unit.cpp", *objects, *OTHERS, "-pthread")
    for seed, calls in [(seed, 1) for seed in re.findall(r"seed (\d+)", hint)] + [(0, most)]:
        command = [program, str(seed), str(calls), "sse2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if -done.returncode in (signal.SIGSEGV, signal.SIGBUS):  # an address outside of the arrays
            return f"{signal.Signals(-done.returncode).name} at seed {seed} or after"
        if done.returncode < 0 and not done.stdout:
            raise RuntimeError(f"the random calls ended by the signal {-done.returncode}")
        if done.returncode:
            return (done.stdout or f"status {done.returncode}").splitlines()[0]
    return None
