"""What pages show runs: their Python in order and to the letter, and the commands of polyattn."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import arrays
import draw
import pages
import pytest
from optional import is_absent, torch

from polyattn.cli import main

ROOT = Path(__file__).resolve().parents[2]
# Folders with an underscore hold what a build of the site makes.
DOCS = [p for p in ROOT.glob("docs/**/*.md") if "/_" not in p.relative_to(ROOT).as_posix()]
PAGES = sorted([ROOT / "README.md", *DOCS, *ROOT.glob("examples/*/README.md")])
NAMES = {page.relative_to(ROOT).as_posix(): page for page in PAGES}
WITH_CODE = {name for name, page in NAMES.items() if any(pages.blocks(page))}
COMMANDS = {name: lines for name, page in NAMES.items() if (lines := pages.commands(page))}

PYTHON = re.compile(
    r"^[ >\t]*(?:`{3,}|~{3,})[ {]*(?:code-block\}? *)?(?:python|py|pycon|ipython|doctest)",
    flags=re.MULTILINE | re.IGNORECASE,
)
# Pages that take seconds and that another test runs; it looks at what they print too.
ELSEWHERE = {
    "README.md": "test_how_to.py",
    "docs/nn.md": "test_pages.py",
    "docs/how-to/generate.md": "test_how_to.py",
    "docs/how-to/gradients.md": "test_how_to.py",
    "docs/how-to/troubleshooting.md": "test_how_to.py",
}
# What these print differs from run to run.
NOT_SHOWN = ("milliseconds(compute",)
#: Pages whose code, or whose commands, take long.
LONG = {
    f"docs/{n}.md"
    for n in ("how-to/check-kernels", "how-to/export", "how-to/long-arrays", "performance")
}
# Commands that run elsewhere or not at all, each with the reason.
EXAMPLE = "needs the example of a plugin, with which tests/docs/test_site.py runs it"
FLASH = "polyattn.dialects.flash_attn:flash_attn_func"
SDPA = "torch.nn.functional:scaled_dot_product_attention"
LEFT_OUT = {
    "polyattn explain --shape 2,8,128,64 --backend einsum": EXAMPLE,
    "polyattn check einsum --kernel einsum": EXAMPLE,
    "polyattn check --callable mine:attend --quick": "tests/docs/test_site.py",
    f"polyattn check --callable {FLASH} --quick": "tests/conformance/test_functions.py",
    # whose code is 1, for rows that differ: tests/conformance/test_same_bits.py
    f"polyattn check --callable {SDPA} --same-bits": "it takes 20 seconds",
    "polyattn check --callable mine:attend --library torch:cuda": "needs a GPU",
    "polyattn check acme --kernel fused": "there is no such backend",
    "polyattn check --write-cases cases": "tests/conformance/test_written.py",
}


def slow_if_long(names):
    return [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in names]


@pytest.mark.parametrize("name", slow_if_long(sorted(WITH_CODE - ELSEWHERE.keys())))
def test_a_page_runs_and_prints_what_it_shows(name):
    for block, printed in pages.surprises(NAMES[name]):
        assert block.shown is None, f"{block.code}\nprints\n{printed}"
        assert any(part in block.code for part in NOT_SHOWN), block.code


def test_no_python_of_a_page_is_left_out():
    for name, page in NAMES.items():
        text = page.read_text(encoding="utf-8")
        assert len(PYTHON.findall(text)) == len(list(pages.blocks(page))), name
    for name, test in ELSEWHERE.items():
        assert name in WITH_CODE
        assert "pages.surprises(" in Path(__file__).with_name(test).read_text("utf-8"), name


@pytest.mark.parametrize("name", slow_if_long(COMMANDS))
def test_the_commands_of_a_page_are_done_one_after_another(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if torch:  # another module may have made the device of far_device.py
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for line in COMMANDS[name]:
        if line.startswith("polyattn run "):  # ends this process: tests/test_run.py
            continue
        if line not in LEFT_OUT and not ("--library torch" in line and is_absent("torch")):
            assert main(shlex.split(line)[1:]) == 0, f"{line}: {capsys.readouterr().err}"


def test_everything_that_is_set_apart_is_on_a_page():
    code = "".join(block.code for page in PAGES for block in pages.blocks(page))
    assert all(part in code for part in NOT_SHOWN)
    assert {*WITH_CODE, *COMMANDS} >= LONG
    assert set(LEFT_OUT) <= {line for lines in COMMANDS.values() for line in lines}


@pytest.mark.slow
def test_a_script_draws_the_pictures_of_the_worked_examples(drawn_by, tmp_path):
    assert drawn_by(draw, tmp_path, 4000) == set(draw.PICTURES)
    learn = ROOT / "docs" / "learn"
    shown = {
        (name, page.name)
        for page in learn.glob("*.md")
        for name in re.findall(r"\]\(\.\./images/(.*?)\)", page.read_text("utf-8"))
    }
    assert shown == {(name, page) for name, (page, _) in draw.PICTURES.items()}
    assert all((learn.parent / "images" / name).exists() for name in draw.PICTURES)


# ---- the page of layers ----

LAYERS = ROOT / "docs" / "nn.md"


@pytest.mark.slow
def test_the_page_of_layers_prints_what_it_shows_and_its_model_trains():
    assert pages.surprises(LAYERS) == []
    names = pages.run(LAYERS)[-1].names
    jax = names["jax"]
    after, _ = names["loss"](names["model"], jax.numpy.asarray([[3, 1, 4, 1, 5]]))
    assert after < names["before"]
    maps = ("query_proj", "key_proj", "value_proj", "output_proj")  # of a layer of Equinox
    layer = SimpleNamespace(num_heads=4, **dict.fromkeys(maps, lambda x: 2 * x))
    (x,) = arrays.draw((6, 32), to=jax.numpy.asarray)
    expected = 2 * jax.nn.dot_product_attention(*[2 * x.reshape(6, 4, 8)] * 3, is_causal=True)
    arrays.close(names["attend"](layer, x, x, x, is_causal=True), expected.reshape(6, 32))
