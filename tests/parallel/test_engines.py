"""Strategies on processes of torch and MPI and on devices of JAX, and what ends them."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "on_ranks.py"
CHECKS = ("digits", "gradients:bias x softcap", "value:composed masks, offset below 0")
MORE = (
    "gradients:plain, bfloat16", "gradients:sinks x grouped heads", "gradients:L > S",
    "gradients:alibi value, float64", "value:mask function x score_mod",
    "value:window x offset array", "value:similarity x score norm", "value:nan under mask array",
)  # fmt: skip
HAS_MPI = importlib.util.find_spec("mpi4py") and shutil.which(
    "mpiexec", path=str(Path(sys.executable).parent)
)


def environment(**more):
    # The programs import what the tests import, also where it is not installed.
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def processes(size, *arguments):
    """Run processes of torch, and return what each printed, its errors and its exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=environment(
                RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(*texts, process.returncode) for texts, process in zip(printed, started, strict=True)]


@pytest.mark.parametrize(
    ("size", "checks"), [(2, CHECKS), pytest.param(4, CHECKS + MORE, marks=pytest.mark.slow)]
)
def test_processes_of_torch(size, checks):
    for rank, (printed, errors, status) in enumerate(processes(size, PROGRAM, "torch", *checks)):
        assert status == 0, errors[-3000:]
        assert f"rank {rank} of {size}: {len(checks)} checks" in printed


def mpi(size, *arguments):
    """Run processes of MPI."""
    launcher = Path(sys.executable).parent / "mpiexec"
    return subprocess.run(
        [launcher, "-n", str(size), sys.executable, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py, and an MPI in the environment")
@pytest.mark.parametrize(
    ("size", "checks"), [(2, CHECKS), pytest.param(4, CHECKS + MORE, marks=pytest.mark.slow)]
)
def test_processes_of_mpi(size, checks):
    done = mpi(size, PROGRAM, "mpi", *checks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n"))[1:] == [
        f"rank {rank} of {size}: {len(checks)} checks" for rank in range(size)
    ]


# ---- faults ----

FAULT = """
import os, sys, datetime
import torch, torch.distributed as dist
from polyattn import parallel

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
x = torch.ones(1, 4, 8, 4, requires_grad=True)
output = parallel.attention(x, x, x, over=dist.group.WORLD, strategy="ring")
if dist.get_rank() == 1:
    {end}
output.sum().backward()
"""


@pytest.mark.parametrize(
    ("end", "status"), [("os._exit(7)", 7), ("raise ZeroDivisionError", 1)]
)
def test_a_process_that_dies_ends_the_others(end, status):
    (_, errors, first), (_, _, second) = processes(2, "-c", FAULT.format(end=end))
    assert second == status
    assert first == 1
    assert "rror" in errors
