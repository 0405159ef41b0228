"""Strategies on processes of torch and MPI and on devices of JAX, and what ends them."""

import os
import subprocess
import sys
from pathlib import Path

import on_jax
import pytest
from optional import jax

HERE = Path(__file__).resolve().parent
MPIEXEC = Path(sys.executable).with_name("mpiexec")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LAUNCHERS = {"torch": TORCHRUN, "mpi4py": [MPIEXEC, "-n"]}
FEW = "gradients:alibi value, float64", "value:plain, bfloat16"
MORE = (
    *FEW, "gradients:bias x softcap", "gradients:plain, bfloat16", "gradients:L > S",
    "value:mask function x score_mod", "value:window x offset array",
    "gradients:dropout x causal and sinks",
)  # fmt: skip


def run(*command, **variables):
    """Run a program until it ends well, and return what it printed."""
    # It imports what the tests import, also where that is not installed.
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    command = [str(word) for word in command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("engine", "size", "checks"),
    [
        pytest.param("torch", 4, [*MORE, "death"], marks=pytest.mark.slow),
        pytest.param(
            "mpi4py", 2, FEW,
            marks=pytest.mark.skipif(not MPIEXEC.exists(), reason="needs an MPI beside Python"),
        ),
    ],
    ids=["torch", "mpi"],
)  # fmt: skip
def test_processes(engine, size, checks):
    python = [sys.executable] if engine == "mpi4py" else []
    printed = run(*LAUNCHERS[engine], size, *python, HERE / "on_ranks.py", engine, *checks)
    lines = [f"rank {rank} of {size}: {check}" for rank in range(size) for check in checks]
    # Lines of ranks may run together.
    assert all(printed.count(line) == 1 for line in lines if not line.endswith("death"))
    assert printed.count("stopped: ") == ("death" in checks) * (size - 1)


# ---- JAX ----

FIRST = "gradients:bias x softcap:ring:contiguous", "heads_need_no_collectives"
#: Each strategy and layout, and a case for each feature.
REST = (
    "mesh_of_two_axes", "options_of_another_axis",
    *[f"value:S = 0:{strategy}:contiguous" for strategy in ("ring", "gather", "heads", "decode")],
    "value:packed documents:ring:zigzag", "value:window x offset array:ring:contiguous",
    "value:composed masks, offset below 0:gather:zigzag", "value:plain, bfloat16:decode:zigzag",
    "value:mask function x score_mod:heads:zigzag", "value:rank 2:gather:contiguous",
    "gradients:dropout x causal and sinks:ring:zigzag", "gradients:L > S:gather:zigzag",
    "gradients:sinks x grouped heads:heads:contiguous", "gradients:score_mod:ring:zigzag",
    "gradients:dropout x causal and sinks:decode:contiguous",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("checks", [FIRST, REST], ids=["first", "rest"])
def test_devices_of_jax(checks):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    printed = run(sys.executable, HERE / "on_jax.py", *checks, XLA_FLAGS=flags)
    assert len(printed.splitlines()) == len(checks)


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
