"""Strategies on processes of torch and MPI and on devices of JAX, and what ends them."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import on_jax
import pytest
from optional import jax

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "on_ranks.py"
MORE = (
    "differences", "digits", "gradients:bias x softcap", "gradients:plain, bfloat16",
    "gradients:L > S", "gradients:alibi value, float64", "value:mask function x score_mod",
    "value:window x offset array", "gradients:dropout x causal and sinks",
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


@pytest.mark.slow
@pytest.mark.needs("torch")
@pytest.mark.parametrize("size", [2, 4])
def test_processes_of_torch(size):
    ended = processes(size, PROGRAM, "torch", *MORE, "death")
    for rank, (printed, errors, status) in enumerate(ended):
        assert status == 0, errors[-3000:]
        done = [f"rank {rank} of {size}: {check}" for check in MORE]
        assert printed.splitlines()[: len(MORE)] == done
        assert rank == size - 1 or "stopped: " in printed


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
    ("size", "checks"),
    [
        (2, ["differences", "digits"]),
        pytest.param(4, MORE, marks=pytest.mark.slow(covered_by="torch")),
    ],
)
def test_processes_of_mpi(size, checks):
    done = mpi(size, PROGRAM, "mpi", *checks)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = {f"rank {rank} of {size}: {check}" for rank in range(size) for check in checks}
    assert all(done.stdout.count(line) == 1 for line in printed)  # lines of ranks may run together


# ---- JAX ----

FEW = ("ring-contiguous", "heads_need_no_collectives")
#: Each strategy and layout, and a case for each feature.
REST = (
    "ring-zigzag", "gather-zigzag", "heads-contiguous", "decode-zigzag", "mesh_of_two_axes",
    "options_of_another_axis", "numbers_from_the_host", "no_keys",
    "value:packed documents:ring:zigzag", "value:window x offset array:ring:contiguous",
    "value:composed masks, offset below 0:gather:zigzag", "value:plain, bfloat16:decode:zigzag",
    "value:mask function x score_mod:heads:zigzag", "value:rank 2:gather:contiguous",
    "gradients:dropout x causal and sinks:ring:zigzag", "gradients:bias x softcap:ring:contiguous",
    "gradients:sinks x grouped heads:heads:contiguous", "gradients:L > S:gather:zigzag",
    "gradients:dropout:decode:contiguous", "gradients:score_mod:ring:zigzag",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("size", "checks"), [(4, FEW), (4, REST)])
def test_devices_of_jax(size, checks):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={size}"
    done = subprocess.run(
        [sys.executable, HERE / "on_jax.py", *checks],
        env=environment(XLA_FLAGS=flags),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(checks)


@pytest.mark.parametrize(
    ("check", "strategy"),
    [
        (on_jax.check_options_of_another_axis, "gather"),
        (on_jax.check_options_of_another_axis, "decode"),
        (on_jax.check_functions_of_traced_arrays, "ring"),
    ],
)
def test_one_device_of_jax(check, strategy):
    with jax.enable_x64(True):
        check([strategy])
