"""What is built is what is here, and runs where nothing else is."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import polyattn

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_plugin_folders_wheel_packages_and_entry_points_are_one_list():
    folders = {f.name for f in (ROOT / "backends").glob("polyattn_*")}
    folders -= {f.parent.name for f in (ROOT / "backends").glob("*/pyproject.toml")}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    declared = PROJECT["project"]["entry-points"]["polyattn.backends"]
    installed = {
        entry.name: entry.value
        for entry in importlib.metadata.entry_points(group="polyattn.backends")
        if entry.dist.name == "polyattn"
    }
    assert packages[0] == "polyattn"
    assert {Path(p).name for p in packages[1:]} == folders
    assert {Path(p).parent.name for p in packages[1:]} == {"backends"}
    assert {value.partition(":")[0] for value in declared.values()} == folders
    assert {f"polyattn_{name}" for name in declared} == folders
    assert installed == declared


def test_the_version_is_that_of_the_last_tag(tmp_path):
    """Or a fixed one where there is no git, as in an archive of the sources."""
    assert importlib.metadata.version("polyattn") == polyattn.__version__
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)

    def git(*words):
        user = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True)

    def version():
        return ProjectMetadata(str(tmp_path), PluginManager()).version

    assert version() == PROJECT["tool"]["hatch"]["version"]["fallback-version"]
    for words in (["init"], ["add", "."], ["commit", "-m", "x"], ["tag", "v1.2.0"]):
        git(*words)
    assert version() == "1.2.0"
    git("commit", "--allow-empty", "-m", "y")
    assert version() == "1.2.1.dev1"


def test_files_for_the_host_of_the_repository_say_what_is_true():
    files = [
        *ROOT.glob(".github/**/*.yml"),
        ROOT / ".pre-commit-config.yaml",
        ROOT / "CITATION.cff",
    ]
    read = {f.name: yaml.safe_load(f.read_text(encoding="utf-8")) for f in files}
    steps = read["checks.yml"]["jobs"]["checks"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    ruff, codespell, *_ = read[".pre-commit-config.yaml"]["repos"]
    assert f"ruff=={ruff['rev'][1:]}" in CONSTRAINTS
    assert f"codespell=={codespell['rev'][1:]}" in CONSTRAINTS
    assert read["CITATION.cff"]["license"] == PROJECT["project"]["license"]
    assert read["CITATION.cff"]["repository-code"] == PROJECT["project"]["urls"]["Source"]


def test_the_versions_agree():
    native = tomllib.loads((ROOT / "backends/polyattn_native/pyproject.toml").read_text("utf-8"))
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    versions = {
        "the version without git": PROJECT["tool"]["hatch"]["version"]["fallback-version"],
        "polyattn-native": native["project"]["version"],
        "the recipe for conda": recipe["context"]["version"],
    }
    extra, *_ = PROJECT["project"]["optional-dependencies"]["native"]
    bounds = {extra, *native["project"]["dependencies"]} - {"numpy>=2.0"}
    major, minor, *_ = native["project"]["version"].split(".")
    bound = f">={major}.{minor}.0.dev0,<{major}.{int(minor) + 1}"
    assert bounds == {f"polyattn{bound}", f"polyattn-native{bound}"}
    released = re.search(r"^## (\d[\w.]*), (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    last, date = released.groups() if released else (None, None)
    assert {*versions.values()} == {last or "0.1.0.dev0"}, versions
    assert citation.get("version") == last
    assert str(citation.get("date-released")) == str(date)
    if os.environ.get("GITHUB_REF_TYPE") == "tag":  # which has started this workflow
        assert os.environ["GITHUB_REF_NAME"] == f"v{last}"


def test_the_recipe_for_conda_needs_what_the_package_needs():
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text(encoding="utf-8"))
    project = PROJECT["project"]
    python = f"python{project['requires-python']}"
    needs = {
        "run": [python, *project["dependencies"]],
        "host": [python, "pip", *PROJECT["build-system"]["requires"]],
    }
    found = recipe["requirements"]
    assert needs == {name: [x.replace(" ", "") for x in found[name]] for name in found}
    assert recipe["about"]["summary"] == project["description"]


def test_the_pythons_that_are_named_are_those_that_are_tested():
    workflow = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["platforms"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert tested == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def test_the_oldest_versions_that_are_tested_are_the_lower_bounds():
    extras = PROJECT["project"]["optional-dependencies"]
    bounded = sum(extras.values(), PROJECT["project"]["dependencies"])
    bounds = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(bounded), re.MULTILINE))
    pins = dict(
        line.split("==") for line in (ROOT / "tests/oldest.txt").read_text("utf-8").splitlines()[1:]
    )
    assert {*pins} - {"jaxlib"} >= {"numpy", "array-api-compat", "threadpoolctl", "tqdm", "jax"}
    assert pins.pop("jaxlib") == pins["jax"]
    assert not [one for one in bounded if re.match(r"cupy\b(?!-)", one)]  # it has no wheels
    for name, pin in pins.items():
        assert f"{bounds[name]}.0.0.".startswith(f"{pin}."), name


def build(source, folder):
    """Build the wheel of a project."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    tops = {name.partition("/")[0] for name in names}
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert tops == {Path(p).name for p in packages} | {info}
    assert f"{info}/licenses/LICENSE" in names
    assert {f"{top}/py.typed" for top in tops - {info}} <= set(names)


@pytest.mark.slow
def test_a_plugin_is_built_and_tested_from_the_wheel_alone(wheel, tmp_path):
    """The example passes its own suite, and the wrong kernels load; no source is on the path."""
    site, plugin = tmp_path / "site", tmp_path / "plugin"
    shutil.copytree(ROOT / "examples" / "plugin", plugin)
    for one in (wheel, build(plugin, tmp_path)):
        shutil.unpack_archive(one, site, "zip")
    shutil.copy(ROOT / "tests" / "broken_plugin.py", site)
    shutil.rmtree(plugin / "polyattn_einsum")
    path = os.pathsep.join([str(site), *(p for p in sys.path if p.endswith("-packages"))])
    environment = {**os.environ, "PYTHONPATH": path, "POLYATTN_NATIVE": "0"}
    code = "import polyattn, polyattn_einsum, broken_plugin as b; b.BrokenBackend()\n"
    code += "print(polyattn.__file__, polyattn_einsum.__file__)"
    suite = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not tiled"]
    loaded, tested = (
        subprocess.run(  # -S: no .pth file adds the folder of the sources.
            [sys.executable, "-S", *command],
            cwd=plugin, env=environment, capture_output=True, text=True, timeout=300,
        )
        for command in (["-c", code], suite)
    )  # fmt: skip
    assert [Path(x).parents[1] for x in loaded.stdout.split()] == [site, site], loaded.stderr
    assert tested.returncode == 0, tested.stdout[-2000:]
    assert re.search(r"\d{3,} passed", tested.stdout), tested.stdout[-2000:]


EXAMPLE = """
import numpy as np, polyattn
x = np.random.default_rng(0).standard_normal((2, 8, 16, 64), dtype=np.float32)
np.testing.assert_array_equal(polyattn.attention(x, x, x, is_causal=True)[:, :, 0], x[:, :, 0])
print(polyattn.list_backends())
"""


@pytest.mark.slow
def test_the_wheel_runs_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    options = ["--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    install = [*pip, "install", *options, str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    command = [python, "-W", "error", "-c", EXAMPLE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed" in done.stdout
