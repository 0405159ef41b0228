"""What `polyattn check` writes: JSON, and a script of a failing case."""

import importlib
import json
import re
import sys

import numpy as np
import pytest
from optional import torch

from polyattn import attention
from polyattn._dispatch import registry
from polyattn._kernels.dense_kernel import Dense
from polyattn.cli import main
from polyattn.conformance import CASES, KernelVariant, Target
from polyattn.conformance.functions import repro
from polyattn.conformance.report import report, run

MINE = """
import numpy as np
from polyattn import attention

def deaf(query, key, value, softcap=None, scale=None):
    return attention(query, key, value, scale=scale)

def raising(query, key, value, scale=None):
    if scale is not None:
        raise RuntimeError("<it has \\x1b no scale>")
    return attention(query, key, value)

def right(query, key, value, is_causal=False):
    return attention(query, key, value, is_causal=is_causal)

def wide(query, key, value):
    return attention(query, key, value).astype("float64")

def blank(query, key, value):
    return attention(query, key, value) * np.nan

def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False,
):
    return attention(
        q, k, v, layout="...LHD", is_causal=causal, query_offset=0 if causal else None,
        scale=softmax_scale, softcap=softcap or None,
    )
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of functions in the current folder."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    importlib.invalidate_caches()
    yield importlib.import_module("mine")
    sys.modules.pop("mine")


def script_of(function, names, target="numpy"):
    target = Target("array-api", target)
    return repro.script(repro.Subject(function, f"mine:{function.__name__}", target), names)


def runs(text):
    """Run a script, and return the type and text of its error, or ""."""
    try:
        exec(text, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Deaf(Dense):
    """Computes without softcap."""

    name = "deaf"

    def __call__(self, problem, operands, backend):
        return super().__call__(problem._replace(softcap=None), operands, backend)


@pytest.fixture
def deaf(monkeypatch):
    """Return the report of NumPy's backend with a kernel that ignores softcap."""
    backend, kernel = registry.usable("numpy")[0], Deaf()
    monkeypatch.setattr(backend, "kernels", (kernel, *backend.kernels))
    target = Target("numpy")
    section = report.Section(target, (KernelVariant(kernel),))
    steps = [
        run.CheckStep(section, KernelVariant(kernel), CASES[name])
        for name in ("plain", "softcap", "bias x softcap")
    ]
    return run.run(steps)


def test_a_failure_of_a_kernel_is_a_script(deaf):
    text = repro.of_report(deaf)
    assert "polyattn.attention(query, key, value, softcap=softcap, backend=backend" in text
    assert "kernel = 'deaf'" in text
    assert np.prod([int(n) for n in re.findall(r"key = .*reshape\((.*)\)", text)[0].split(",")]) < 4
    assert runs(text).endswith("numbers are wrong")


def test_a_script_is_of_the_simplest_case_and_repeats_the_failure(mine):
    text = script_of(mine.deaf, ["bias x softcap", "plain", "softcap", "softcap, float64"])
    assert text.startswith('"""mine.deaf differs: softcap is ignored.')
    assert "output = mine.deaf(query, key, value, softcap=softcap)\n" in text
    assert "reshape(1, 1, 2, 1)" in text
    assert "'float64').reshape(1, 1, 1, 1)" in text  # the exact result, of one number
    assert runs(text) == "AssertionError: 1 of 1 numbers are wrong"
    mine.deaf = attention  # which hears
    assert runs(text) == ""


def test_a_script_shows_an_exception(mine):
    text = script_of(mine.raising, ["plain", "scale"])
    assert text.startswith('"""mine.raising raises RuntimeError.')
    assert runs(text) == "RuntimeError: <it has \x1b no scale>"


def test_a_script_has_the_calls_and_the_layout_of_a_dialect(mine):
    text = script_of(mine.flash_attn_func, ["plain", "causal, L > S", "L < S", "7 x 513, causal"])
    assert "causal = True" in text
    shape = re.search(r"query = .*reshape\((.*)\)", text).group(1).split(", ")
    assert len(shape) == 4
    assert shape[2] == "1"  # (B, L, H, D)
    assert runs(text).endswith("numbers are wrong")


def test_a_script_uses_the_library_of_the_function():
    assert torch.ones(1)

    def mean(query, key, value):
        return torch.zeros_like(query) + value.mean(-2, keepdim=True)

    text = script_of(mean, ["plain"], "torch")
    assert "import torch\n" in text
    assert "query = torch.asarray(np.array([" in text


def test_there_is_no_script_without_a_wrong_number(mine):
    assert script_of(mine.right, ["plain", "causal"]) is None

    def by_mask(query, key, value, mask):  # a function has no literal
        return attention(query, key, value)

    assert script_of(by_mask, ["mask function"]) is None


def test_the_command_writes_a_script(mine, tmp_path, capsys):
    script = tmp_path / "a_script.py"

    def check(name, case):
        code = main(["check", "--callable", f"mine:{name}", "--case", case, "--repro", str(script)])
        return code, *capsys.readouterr()

    code, said, _ = check("deaf", "softcap 50")
    assert code == 1
    assert all(x in said for x in ("1 case differs", "softcap is ignored (1)"))
    assert "the case 'softcap 50' of polyattn" in script.read_text("utf-8")
    script.unlink()
    assert check("right", "plain")[::2] == (0, "")
    code, _, error = check("wide", "plain")
    assert (code, error.startswith("polyattn check: no failure is one call")) == (1, True)
    assert not script.exists()


def test_json_has_null_for_an_infinite_error(mine, capsys):
    assert main(["check", "--callable", "mine:blank", "--case", "plain", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert rows[0]["cases"]["plain"]["deviation"]["units"] is None
