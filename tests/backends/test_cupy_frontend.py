"""NVIDIA's frontend takes every graph by its own rules, beside a cuDNN that is made up.

The stand-ins of `cudnn_host` take a graph from the frontend before it is checked. Here it
is checked, and handed to a library that has the version of cuDNN and says yes to everything.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import cudnn as frontend
import pytest

ROOT = Path(__file__).resolve().parents[2]
SAID = {
    "cudnnGetVersion": "unsigned long cudnnGetVersion(void) { return 91900; }",
    "cudnnGetCudartVersion": "unsigned long cudnnGetCudartVersion(void) { return 13000; }",
    "cudnnGetErrorString": 'const char *cudnnGetErrorString(int code) { return ""; }',
    "cudnnGetLastErrorString": "void cudnnGetLastErrorString(char *said, long n) { *said = 0; }",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a libcudnn.so.9 that has all functions that the frontend looks for."""
    folder = tmp_path_factory.mktemp("cudnn")
    (module,) = Path(frontend.__file__).parent.glob("_compiled_module*.so")
    names = {n.decode() for n in re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", module.read_bytes())}
    assert "cudnnBackendSetAttribute" in names
    rest = (f"int {name}(void) {{ return 0; }}" for name in sorted(names - SAID.keys()))
    source = folder / "cudnn.c"
    source.write_text("\n".join([*SAID.values(), *rest, ""]))
    command = ["g++", "-x", "c", "-shared", "-fPIC", "-w", "-o", folder / "libcudnn.so.9", source]
    subprocess.run(command, check=True)
    return folder


def ask(folder, *changes):
    """Return what cudnn_plans.py prints, after changes to the modules of the kernel."""
    code = [
        "import runpy, sys",
        "sys.argv[1:] = ['--frontend']",
        *changes,
        "runpy.run_path('tests/gpu/cudnn_plans.py', run_name='__main__')",
    ]
    paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.run(
        [sys.executable, "-c", "\n".join(code)], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_frontend_takes_the_graphs_of_calls_and_of_gradients(folder):
    done = ask(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("cudnn 9.19.0")
    assert sum("gradients" in line for line in lines) > 50


CHANGES = {
    "an option that it does not know": (
        "from polyattn_cupy import graphs",
        "graphs._band_options = lambda cudnn, band: {'diagonal': 0}",
        "sdpa_backward.*incompatible function arguments",
    ),
    "a band that it refuses": (
        "from polyattn_cupy import graphs, problem_graphs",
        "problem_graphs.band_of = lambda problem: graphs.CudnnBand(True, None, 0)",
        "gradients .*does not support max_s_q > max_s_kv",
    ),
    "a logsumexp that is not packed": (
        "from polyattn_cupy import graphs; packed = graphs._rows",
        "graphs._rows = lambda output: packed(output)._replace(strides=(9999, 1, 9, 1))",
        "gradients .*Stats .* must be a packed BHSD tensor",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_it_refuses_is_noticed(name, folder):
    *changes, said = CHANGES[name]
    done = ask(folder, *changes)
    assert done.returncode == 1, done.stderr
    assert re.search(f"OTHERWISE .*{said}", done.stdout), done.stdout
