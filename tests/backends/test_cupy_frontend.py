"""NVIDIA's frontend checks every graph by its own rules.

It needs a cuDNN for that, so a library is compiled that has cuDNN's version and says yes to all.
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "problem_graphs.band_of = lambda problem: graphs.CudnnBand(True, None, 0)",
            "gradients .*does not support max_s_q > max_s_kv",
        ),
        (
            "packed = graphs._rows; "
            "graphs._rows = lambda output: packed(output)._replace(strides=(9999, 1, 9, 1))",
            "gradients .*Stats .* must be a packed BHSD tensor",
        ),
    ],
    ids=["a band", "a logsumexp that is not packed"],
)
def test_a_graph_against_its_rules_is_refused(change, said, folder):
    done = ask(folder, "from polyattn_cupy import graphs, problem_graphs", change)
    assert done.returncode == 1, done.stderr
    assert re.search(f"OTHERWISE .*{said}", done.stdout), done.stdout
