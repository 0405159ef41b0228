"""The pages: what is generated is up to date, and what is shown is what is there."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import array_types
import capabilities
import design
import links
import numpy as np
import peers
import pytest

from polyattn import UnsupportedError, attention, attention_vjp
from polyattn.conformance import ESSENTIAL
from polyattn.conformance.functions.report import summarise, summary

ROOT = Path(__file__).resolve().parents[2]
DOCS, PLUGIN = ROOT / "docs", ROOT / "examples" / "plugin"
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if "/_" not in p.relative_to(ROOT).as_posix()]
WRITING = (DOCS / "writing-a-backend.md").read_text(encoding="utf-8")
CHECKING = (DOCS / "how-to" / "check-kernels.md").read_text(encoding="utf-8")


GENERATED = {
    "capabilities": lambda: capabilities.page(array_types.written()),
    "design": design.page,
    "masks": lambda: importlib.import_module("masks").page(),
    "peers": peers.page,
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_page_that_a_script_makes_is_up_to_date(name):
    """Mend by: python docs/NAME.py."""
    if name == "capabilities" and sys.platform != "linux":
        pytest.skip("CuPy, whose kernels it lists, is not here")
    page = importlib.import_module(name).PAGE
    assert page.read_text(encoding="utf-8") == GENERATED[name]()


def test_the_table_of_capabilities_has_each_backend():
    ours = {e.name for e in entry_points(group="polyattn.backends") if e.dist.name == "polyattn"}
    assert {spec.name for spec in capabilities.SPECS} == ours


@pytest.mark.parametrize("name", array_types.KINDS)
def test_what_happens_with_a_type_of_array_is_on_the_page(name):
    """Mend by: python docs/capabilities.py."""
    kind = array_types.KINDS[name]
    found = array_types.outcome(kind)
    if found is None:
        pytest.skip(f"there is no array of {kind.module} here")
    assert array_types.written()[name] == found


def test_every_place_that_a_page_points_to_is_there():
    for page in (ROOT / "README.md", *PAGES):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            name, _, title = target.partition("#")
            if not target.startswith("http"):
                file = page.parent / name if name else page
                assert file.exists(), f"{page}: {target}"
                titles = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M) if title else [""]
                letters = [re.sub(r"[\W_]", "", x.lower()) for x in (title, *titles)]
                assert letters[0] in letters[1:], f"{page}: {target}"


WRONG = {
    '<a href="gone.html">x</a>': "gone.html does not lead to a file",
    '<a href="other.html#gone">x</a>': "other.html#gone has no such anchor",
    '<a href="#gone">x</a>': "#gone has no such anchor",
    '<a href="http:/x">x</a>': "http:/x is not an address",
    '<script src="https://example.org/x.js"></script>': "is loaded from another site",
    '<img src="gone.png">': "gone.png does not lead to a file",
}


def test_links_that_are_wrong_are_found(tmp_path):
    right = '<h1 id="a">x</h1><a href="page.html#a">x</a> <a href="https://example.org">x</a>'
    (tmp_path / "page.html").write_text(right + "".join(WRONG))
    (tmp_path / "site.css").write_text("a {background: url(x.png)} @import 'https://x.org/x.css';")
    (tmp_path / "other.html").write_text(right)
    found, words = [*links.problems(tmp_path)], ["https://x.org/x.css is loaded", *WRONG.values()]
    assert len(found) == len(words)
    assert all(any(one in line for line in found) for one in words)


# ---- where things are ----

RECIPES = (DOCS / "recipes.md").read_text(encoding="utf-8")
PARTS = {  # of the page, by the folders that their files are in
    tuple(re.findall(r"`([\w/]+)`", files[1])): part
    for part in re.split(r"^##+ ", RECIPES, flags=re.M)
    if (files := re.search(r"^Files are in ([^.]*)", part, re.M))
}


def test_every_name_on_the_page_is_in_its_file():
    for folders, part in PARTS.items():
        for path, names in re.findall(r"`([\w/]+\.(?:py|h|cpp|cu))(?::\s+([^`]+))?`", part):
            places = [ROOT / folder / path for folder in (*folders, "polyattn", "backends")]
            text = next(one for one in places if one.exists()).read_text(encoding="utf-8")
            for name in re.findall(r"\w+", names):
                assert re.search(rf"\b{name}\b", text), f"{path}: {name}"


# ---- what was measured of others ----

#: Rows of the README that are measured, with the columns of the data, and its words.
MEASURED = {
    "row with no visible key": "empty rows",
    "causal when `L != S`": "causal, L ≠ S",
    "NaN in a hidden key or value": "NaN hidden",
}
PEERS = "torch.sdpa", "torch.flex", "jax.nn", "keras.torch"
SAID = {"mean": "mean of the values", "top left": "top left", "leaks": "reaches the output"}


def test_the_readme_says_of_others_what_was_measured():
    """The first column is ours, which the suite tests."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, area in MEASURED.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*)$", text, re.MULTILINE)
        for peer, cell in zip(PEERS, row.split(" | ")[1:], strict=False):  # no xFormers
            counts = peers.data()[peer]["found"].get(area)
            if counts:  # FlexAttention has no argument for causal
                most = max(SAID, key=lambda word: counts.get(word, 0))
                assert cell == (SAID[most] if most in counts else "0"), (name, peer)


# ---- writing a backend ----


def shown():
    """The files of the example that the page shows, by their names."""
    blocks = re.findall(
        r"^```\w+\n# (\S+\.\w+)\n(.*?)^```", WRITING, flags=re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


SHORT = "polyattn-short/"  # the kernel for another backend, of which the page is the source


def test_the_page_shows_the_example_as_it_is():
    files = {name: text for name, text in shown().items() if not name.startswith(SHORT)}
    assert len(files) == 4
    for name, text in files.items():
        assert (PLUGIN / name).read_text(encoding="utf-8") == text, name


def install(folder, name, group, points):
    """Write to a folder what pip notes of a distribution with these entry points."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))


def run(folder, *arguments, **variables):
    """Run Python where the distributions of a folder are installed."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_the_function_of_the_page_is_told_what_the_page_shows():
    code, shown = re.search(
        r"```python\n(import numpy as np\n\n\ndef attend.*?)```.*?mine:attend --quick\n(.*?)```",
        CHECKING,
        re.DOTALL,
    ).groups()
    made = {}
    exec(code, made)
    rows = summarise(made["attend"], ESSENTIAL.values(), np.array, np.asarray)
    found = {row.name: summary(row)[::2] for row in rows}
    cells = re.findall(r"^  (\w+) +(\d of \d) +\S+ *(.*)$", shown, re.MULTILINE)
    assert [name for name, *_ in cells] == ["causal", "lengths"]
    assert all(found[name] == (agree, remark) for name, agree, remark in cells)


@pytest.mark.slow
def test_the_example_is_a_backend_like_any_other(tmp_path):
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    assert run(tmp_path, *pip, "--target", tmp_path, PLUGIN).returncode == 0

    def explain(*options):
        return run(tmp_path, "-m", "polyattn", "explain", "--backend", "einsum", *options).stdout

    assert re.search(r"einsum +einsum +CHOSEN", explain("--shape", "2,8,128,64"))
    assert re.search(r"einsum +dense +CHOSEN", explain("--shape", "2,8,16,64", "--softcap", "2"))
    long = ("--shape", "1,1,1,64", "--key-shape", "1,1,5000,64")
    assert re.search(r"einsum +einsum +on request .*5,000 keys are too many", explain(*long))
    shown = re.search(r"```text\n(  einsum .*?)```", WRITING, re.DOTALL)[1]
    assert shown.strip() in explain(*long, "--kernel", "einsum")


@pytest.fixture
def with_short(tmp_path):
    """Install the kernel for another backend, and return a function that runs polyattn there."""
    files = {n.removeprefix(SHORT): text for n, text in shown().items() if n.startswith(SHORT)}
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    ((group, points),) = project["entry-points"].items()
    install(tmp_path, project["name"], group, points)

    def polyattn(*commands, **variables):
        code = f"from polyattn.cli import main; raise SystemExit(max(map(main, {commands})))"
        return run(tmp_path, "-c", code, **{"POLYATTN_SHORT": "1", **variables})

    return polyattn


@pytest.mark.slow
def test_the_kernel_for_another_backend_passes_the_suite_and_may_be_forbidden(with_short):
    done = with_short(("check", "numpy", "--kernel", "short"))
    assert done.returncode == 0, done.stdout + done.stderr
    step = ("explain", "--shape", "1,8,1,64", "--key-shape", "1,8,500,64")
    out = with_short(step, ("explain", "--shape", "1,8,100,64")).stdout
    assert re.search(r"numpy +short \(polyattn-short\) +CHOSEN", out)
    assert re.search(r"numpy +short .* on request +it holds all scores of a head, and 10,000", out)
    assert "short" not in with_short(step, POLYATTN_SHORT="0").stdout
    chosen = with_short(step, POLYATTN_SHORT="").stdout
    assert re.search(r"small +CHOSEN(.|\n)*short .* not allowed", chosen)


def block(beginning):
    """Return the Python of the page that begins like this."""
    return re.search(rf"```python\n({re.escape(beginning)}.*?)```", WRITING, re.DOTALL)[1]


def check(folder, backend, *arguments):
    """Check the example with another module for its backend."""
    shutil.copytree(PLUGIN / "polyattn_einsum", folder / "polyattn_einsum")
    (folder / "polyattn_einsum" / "backend.py").write_text(backend, encoding="utf-8")
    install(folder, "polyattn_einsum", "polyattn.backends", {"einsum": "polyattn_einsum:SPEC"})
    return run(folder, "-m", "polyattn", "check", "einsum", *arguments)


@pytest.mark.slow
def test_the_first_version_on_the_page_fails_as_the_page_says(tmp_path):
    done = check(
        tmp_path, block("import numpy as np\n\nfrom polyattn.plugin"), "--kernel", "einsum"
    )
    shown = re.search(r"check einsum --kernel einsum\n(.*?)```", WRITING, re.DOTALL)[1]
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) > 3
    for line in lines:
        pattern = re.escape(line).replace(re.escape("..."), r"\d+ of \d+")
        assert any(re.fullmatch(pattern, one) for one in done.stdout.splitlines()), line


TRAINED = "from polyattn.plugin import Gradients\n"


@pytest.mark.slow
def test_the_gradients_of_the_page_pass_the_suite(tmp_path):
    final = (PLUGIN / "polyattn_einsum" / "backend.py").read_text(encoding="utf-8")
    backend = final + block(TRAINED) + "\nEinsumBackend.kernels = (Trained(),)\n"
    done = check(tmp_path, backend)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^  backward +[\d.]+ ", done.stdout, re.MULTILINE), done.stdout


def test_the_kernels_of_the_page_differentiate_what_it_says():
    made = {}
    final = (PLUGIN / "polyattn_einsum" / "backend.py").read_text(encoding="utf-8")
    exec(final + block(TRAINED) + block("from polyattn.plugin.dense import Dense"), made)
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4))
    _, vjp = attention_vjp(x, x, x, is_causal=True, kernel=made["Trained"]())
    (said,) = re.findall(r"the gradient is refused: `(it .*?)`", WRITING)
    with pytest.raises(UnsupportedError, match=said):
        vjp(x)
    rounded, vjp = attention_vjp(x, x, x, softcap=2.0, kernel=made["Rounded"]())
    key = x.astype("float16").astype("float64")
    np.testing.assert_allclose(rounded, attention(x, key, x, softcap=2.0), rtol=1e-12)
    with pytest.raises(UnsupportedError, match="does not compute backward"):
        vjp(x)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="the commands are of a shell")
def test_the_commands_of_the_page_install_the_wheel_where_the_clone_is_not(tmp_path):
    page = (DOCS / "start.md").read_text(encoding="utf-8")
    build, install = re.findall(r"^\$ (pip wheel .*|pip install \"\$.*)$", page, flags=re.MULTILINE)
    command = shlex.join([sys.executable, "-m", "pip"])
    # Without a network: the environment has what builds it, and no dependency is installed.
    settings = {"NO_INDEX": "1", "NO_DEPS": "1", "NO_BUILD_ISOLATION": "0", "TARGET": "site"}
    environment = os.environ | {f"PIP_{name}": value for name, value in settings.items()}

    def run(line):
        given = {"cwd": tmp_path, "env": environment, "timeout": 120, "text": True}
        script = f'pip() {{ {command} "$@"; }}; {line}'
        done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, **given)
        return done.stdout + done.stderr

    run(build.replace(" . ", f" {shlex.quote(str(ROOT))} "))
    assert "does not provide" not in run(install)  # the extra of its name
    assert (tmp_path / "site" / "polyattn" / "__init__.py").exists()
