"""The pages: what is generated is up to date, and what is shown is what is there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import array_types
import capabilities
import links
import numpy as np
import pytest

from polyattn import UnsupportedError, attention, attention_vjp
from polyattn.conformance import CASES, ESSENTIAL
from polyattn.conformance.functions.report import summarise, summary
from polyattn.conformance.reference.tolerance import exact

ROOT = Path(__file__).resolve().parents[2]
DOCS, PLUGIN = ROOT / "docs", ROOT / "examples" / "plugin"
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if "/_" not in p.relative_to(ROOT).as_posix()]
WRITING = (DOCS / "writing-a-backend.md").read_text(encoding="utf-8")
CHECKING = (DOCS / "how-to" / "check-kernels.md").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="CuPy, whose kernels it lists, is not here")
def test_the_capability_table_is_what_the_kernels_declare():
    """Mend by: python docs/capabilities.py."""
    ours = {e.name for e in entry_points(group="polyattn.backends") if e.dist.name == "polyattn"}
    assert {spec.name for spec in capabilities.SPECS} == ours
    page = capabilities.page(array_types.written())
    assert capabilities.PAGE.read_text(encoding="utf-8") == page


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


def test_the_error_in_float64_is_as_the_semantics_say():
    case = replace(CASES["D = 80"], name="D = 80, float64", dtype="float64")
    arrays, _ = case.arguments()
    error = abs(attention(*arrays) - exact(case).output).max()
    page = (DOCS / "semantics.md").read_text(encoding="utf-8")
    bound = float(re.search(r"below (2e-15) in float64", page)[1])
    assert bound / 10 < error < bound  # the order of sums depends on the processor


WRONG = {
    '<a href="gone.html">x</a>': "gone.html does not lead to a file",
    '<a href="other.html#gone">x</a>': "other.html#gone has no such anchor",
    '<a href="#gone">x</a>': "#gone has no such anchor",
    '<a href="http:/x">x</a>': "http:/x is not an address",
    '<script src="https://example.org/x.js"></script>': "is loaded from another site",
    '<link rel="stylesheet" href="//example.org/x.css">': "is loaded from another site",
    '<img src="gone.png">': "gone.png does not lead to a file",
}


def test_a_link_that_is_wrong_is_found(tmp_path):
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    (tmp_path / "site.css").write_text("a {background: url(x.png)}")
    right = (
        '<a href="other.html#there">x</a> <a href="https://example.org">x</a> <a href="#a">x</a>'
    )
    for number, (body, reason) in enumerate(WRONG.items()):
        page = tmp_path / f"{number}.html"
        page.write_text(f'<p id="a">{right}{body}</p>')
        (found,) = links.problems(tmp_path)
        assert found.startswith(f"{page.name}: ")
        assert found.endswith(reason)
        page.unlink()
    (tmp_path / "site.css").write_text("@import 'https://example.org/x.css';")
    (found,) = links.problems(tmp_path)
    assert found == "site.css: https://example.org/x.css is loaded from another site"


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
def test_the_example_is_a_backend_like_any_other(plugin):
    done = plugin("-m", "polyattn", "explain", "--shape", "2,8,128,64", "--backend", "einsum")
    assert re.search(r"einsum +einsum +CHOSEN", done.stdout), done.stdout + done.stderr
    done = plugin(
        "-m", "polyattn", "explain", "--shape", "2,8,16,64", "--softcap", "2", "--backend", "einsum"
    )
    assert re.search(r"einsum +dense +CHOSEN", done.stdout)
    long = ("--shape", "1,1,1,64", "--key-shape", "1,1,5000,64")
    done = plugin("-m", "polyattn", "explain", *long, "--backend", "einsum")
    assert re.search(r"einsum +einsum +on request .*5,000 keys are too many", done.stdout)
    done = plugin("-m", "polyattn", "explain", *long, "--backend", "einsum", "--kernel", "einsum")
    shown = re.search(r"```text\n(  einsum .*?)```", WRITING, re.DOTALL)[1]
    assert shown.strip() in done.stdout


@pytest.fixture
def with_short(tmp_path):
    """Install the kernel for another backend, and return a function that runs polyattn there."""
    files = {n.removeprefix(SHORT): text for n, text in shown().items() if n.startswith(SHORT)}
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    info = tmp_path / "polyattn_short-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))

    def run(*commands, **variables):
        code = f"from polyattn.cli import main; raise SystemExit(max(map(main, {commands})))"
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(tmp_path),
                "OMP_NUM_THREADS": "1",
                "POLYATTN_SHORT": "1",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_the_kernel_for_another_backend_runs_where_the_page_says(with_short):
    step = ("explain", "--shape", "1,8,1,64", "--key-shape", "1,8,500,64")
    out = with_short(step, ("explain", "--shape", "1,8,100,64")).stdout
    assert re.search(r"numpy +short \(polyattn-short\) +CHOSEN", out)
    assert re.search(r"numpy +short .* on request +it holds all scores of a head, and 10,000", out)
    assert "short" not in with_short(step, POLYATTN_SHORT="0").stdout
    assert re.search(
        r"small +CHOSEN(.|\n)*short .* not allowed", with_short(step, POLYATTN_SHORT="").stdout
    )


@pytest.mark.slow
def test_the_kernel_for_another_backend_passes_the_suite(with_short):
    done = with_short(("check", "numpy", "--kernel", "short"))
    assert done.returncode == 0, done.stdout + done.stderr


def block(beginning):
    """Return the Python of the page that begins like this."""
    return re.search(rf"```python\n({re.escape(beginning)}.*?)```", WRITING, re.DOTALL)[1]


@pytest.fixture
def check(tmp_path):
    """Return a function that checks the plugin with another module for its backend."""

    def check(backend, *arguments):
        shutil.copytree(PLUGIN / "polyattn_einsum", tmp_path / "polyattn_einsum")
        (tmp_path / "polyattn_einsum" / "backend.py").write_text(backend, encoding="utf-8")
        info = tmp_path / "polyattn_einsum-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polyattn-einsum\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[polyattn.backends]\neinsum = polyattn_einsum:SPEC\n"
        )
        return subprocess.run(
            [sys.executable, "-m", "polyattn", "check", "einsum", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )

    return check


@pytest.mark.slow
def test_the_first_version_on_the_page_fails_as_the_page_says(check):
    done = check(block("import numpy as np\n\nfrom polyattn.plugin"), "--kernel", "einsum")
    shown = re.search(r"check einsum --kernel einsum\n(.*?)```", WRITING, re.DOTALL)[1]
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) > 3
    for line in lines:
        pattern = re.escape(line).replace(re.escape("..."), r"\d+ of \d+")
        assert any(re.fullmatch(pattern, one) for one in done.stdout.splitlines()), line


TRAINED = "from polyattn.plugin import Gradients\n"


@pytest.mark.slow
def test_the_gradients_of_the_page_pass_the_suite(check):
    final = (PLUGIN / "polyattn_einsum" / "backend.py").read_text(encoding="utf-8")
    done = check(final + block(TRAINED) + "\nEinsumBackend.kernels = (Trained(),)\n")
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
