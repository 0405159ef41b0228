"""What pages show runs: their Python in order and to the letter, and the commands of polyattn."""

import re
import shlex
from pathlib import Path

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
    "docs/nn.md": "test_nn.py",
    "docs/how-to/generate.md": "test_how_to.py",
    "docs/how-to/gradients.md": "test_how_to.py",
    "docs/how-to/troubleshooting.md": "test_how_to.py",
}
# What these print differs from run to run.
NOT_SHOWN = ("milliseconds(compute",)
# Pages whose commands take half a minute or more.
LONG = {"docs/performance.md": pytest.mark.slow}
# Commands that run elsewhere or not at all, each with the reason.
EXAMPLE = "needs the example of a plugin, with which tests/docs/test_site.py runs it"
SDPA = "torch.nn.functional:scaled_dot_product_attention"
LEFT_OUT = {
    "polyattn explain --shape 2,8,128,64 --backend einsum": EXAMPLE,
    "polyattn check einsum --kernel einsum": EXAMPLE,
    "polyattn check --callable mine:attend --quick": "tests/docs/test_site.py",
    # whose code is 1, for rows that differ: tests/conformance/test_same_bits.py
    f"polyattn check --callable {SDPA} --same-bits": "it takes 20 seconds",
    "polyattn check --callable mine:attend --library torch:cuda": "needs a GPU",
    "polyattn check acme --kernel fused": "there is no such backend",
    "polyattn check --write-cases cases": "tests/conformance/test_written.py",
}


PAGE = """# A page

![a line](line.png)

```python
from pathlib import Path
from matplotlib import pyplot

lines = pyplot.plot([0, 1])
print("drawn")
```

```text
drawn
```

```python
assert list(Path().iterdir()) == []
lines = None
```
"""


def test_a_page_is_run_block_after_block_in_an_empty_folder(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    first, second = pages.run(page)
    assert (first.block.picture, first.block.shown, first.printed) == (
        "line.png",
        "drawn\n",
        "drawn\n",
    )
    assert first.figure is first.names["lines"][0].figure
    assert second.figure is None
    assert second.names["lines"] is None
    assert second.block.shown is None
    assert pages.run(page)[0] is first


def test_an_error_on_a_page_names_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nx = 1\nx / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        pages.run(page)
    assert caught.traceback[-1].lineno == 4  # counted from 0


@pytest.mark.parametrize("name", sorted(WITH_CODE - ELSEWHERE.keys()))
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


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG.get(n, ())) for n in COMMANDS])
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
    assert set(LONG) <= set(COMMANDS)
    assert set(LEFT_OUT) <= {line for lines in COMMANDS.values() for line in lines}


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = NAMES["README.md"].read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^\$ )make (\w+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
