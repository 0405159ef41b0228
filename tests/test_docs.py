"""The pages: what is generated is up to date, and what is shown is what is there."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyattn.plugin import FEATURES

ROOT = Path(__file__).resolve().parents[1]
DOCS, PLUGIN = ROOT / "docs", ROOT / "examples" / "plugin"
WRITING = (DOCS / "writing-a-backend.md").read_text(encoding="utf-8")


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="CuPy, whose kernels it lists, is not here")
def test_the_capability_table_is_what_the_kernels_declare():
    """Mend by: python docs/capabilities.py."""
    capabilities = script("capabilities")
    assert capabilities.PAGE.read_text(encoding="utf-8") == capabilities.page()
    assert all(f"`{feature}`" in capabilities.page() for feature in FEATURES)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_file_that_a_page_points_to_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


# ---- writing a backend ----


def shown():
    """The files of the example that the page shows, by their names."""
    blocks = re.findall(
        r"^```\w+\n# (\S+\.\w+)\n(.*?)^```", WRITING, flags=re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


def test_the_page_shows_the_example_as_it_is():
    assert len(shown()) == 4
    for name, text in shown().items():
        assert (PLUGIN / name).read_text(encoding="utf-8") == text, name


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """Install the example, and return a function that runs Python where it is."""
    folder = tmp_path_factory.mktemp("plugin")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run((*pip, "--target", folder, PLUGIN), check=True, timeout=120)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path_factory.mktemp("elsewhere"),
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return run


@pytest.mark.slow
def test_the_example_passes_the_suite(plugin):
    pytest_quietly = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = plugin(*pytest_quietly, PLUGIN / "tests" / "test_conformance.py", "-k", "not tiled")
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d{3,} passed", done.stdout), done.stdout


def test_the_example_is_a_backend_like_any_other(plugin):
    done = plugin(
        "-m", "polyattn", "explain", "--shape", "2,8,16,64", "--causal", "--backend", "einsum"
    )
    assert re.search(r"einsum +einsum +CHOSEN", done.stdout), done.stdout + done.stderr
    done = plugin(
        "-m", "polyattn", "explain", "--shape", "2,8,16,64", "--softcap", "2", "--backend", "einsum"
    )
    assert re.search(r"einsum +dense +CHOSEN", done.stdout)
    long = ("--shape", "1,1,1,64", "--key-shape", "1,1,5000,64")
    done = plugin("-m", "polyattn", "explain", *long, "--backend", "einsum")
    assert "5,000 keys are too many" in done.stdout


FIRST = re.search(
    r"```python\nimport numpy as np\n\nfrom polyattn.plugin.*?```", WRITING, re.DOTALL
)[0]


@pytest.mark.slow
def test_the_first_version_on_the_page_fails_as_the_page_says(tmp_path):
    shutil.copytree(PLUGIN / "polyattn_einsum", tmp_path / "polyattn_einsum")
    first = FIRST.removeprefix("```python\n").removesuffix("```")
    (tmp_path / "polyattn_einsum" / "backend.py").write_text(first, encoding="utf-8")
    info = tmp_path / "polyattn_einsum-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polyattn-einsum\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[polyattn.backends]\neinsum = polyattn_einsum:SPEC\n")
    done = subprocess.run(
        [sys.executable, "-m", "polyattn", "check", "einsum", "--kernel", "einsum"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    shown = re.search(r"check einsum --kernel einsum\n(.*?)```", WRITING, re.DOTALL)[1]
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) > 3
    for line in lines:
        assert line in done.stdout.splitlines()
