"""`polyattn run`: programs that import flash_attn or xformers run unedited, as Python runs them."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from polyattn import cli
from polyattn.run import stand_ins
from polyattn.run.command import main

STARTED = "import sys; from polyattn.__main__ import main; sys.exit(main())"
SAID = "polyattn run: polyattn stands in for flash_attn 2.8.3 and xformers 0.0.35\n"
#: Of what would be imported, without the time of an import.
PROBE = """
import importlib.util
print("stand-in" if "dialects" in importlib.util.find_spec("flash_attn").origin else "real")
"""
PROBED = "stand-in\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv(stand_ins.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])


def python(*arguments, **changes):
    command, environment = [sys.executable, *arguments], os.environ | changes
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def polyattn_run(*arguments, **changes):
    return python("-c", STARTED, "run", *arguments, **changes)


def write(text, name="program.py"):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    return name


FACTS = "import sys; print(__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.path)"
#: The arguments, the program, and the exit code.
PROGRAMS = {
    "script": (["program.py", "--epochs", "1", "-m", "--help"], f"{FACTS}; sys.exit(7)", 7),
    "script elsewhere": (["folder/program.py", "--as", "x"], FACTS, 0),
    "module": (["-m", "program", "--check", "--", "y"], FACTS, 0),
    "exception": (["program.py"], "def f():\n    return 1 / 0\n\nf()\n", 1),
    "module not there": (["-m", "nothing"], "", 1),
    "signal": (["program.py"], "import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_python_runs_it(name):
    arguments, text, code = PROGRAMS[name]
    for file in ("program.py", "folder/program.py"):
        write(text, file)
    expected, found = python(*arguments), polyattn_run(*arguments)
    assert found.stdout == expected.stdout
    assert found.stderr == SAID + expected.stderr
    assert found.returncode == expected.returncode == code


def test_code_of_the_command_line_and_of_the_standard_input():
    text = "import sys; print(__name__, sys.argv, sys.path)"
    assert polyattn_run("-c", text, "-m").stdout == python("-c", text, "-m").stdout
    command = [sys.executable, "-c", STARTED, "run", "-", "y"]
    found = subprocess.run(command, input=text + PROBE, capture_output=True, text=True, check=True)
    expected = subprocess.run(
        [sys.executable, "-", "y"], input=text, capture_output=True, text=True, check=True
    )
    assert found.stdout == expected.stdout + PROBED


def test_a_start_and_a_probe_import_nothing():
    found = polyattn_run(
        write(
            "import importlib.metadata, importlib.util, sys\n"
            "assert importlib.util.find_spec('flash_attn').origin.endswith('__init__.py')\n"
            "assert importlib.util.find_spec('flash_attn_interface') is None\n"
            "print(importlib.metadata.version('xformers'))\n"
            "assert not {'polyattn._public', 'numpy', 'torch', 'argparse'} & set(sys.modules)\n"
        )
    )
    assert (found.stdout, found.returncode) == ("0.0.35\n", 0), found.stderr


CHILD = """
import multiprocessing
import numpy as np

def attend(x):
    from flash_attn import flash_attn_func
    return flash_attn_func(x, x, x, causal=True).shape

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(attend, [np.ones((1, 3, 2, 8))]))
"""


def test_child_processes_find_the_modules():
    found = polyattn_run(write(CHILD))
    assert (found.stdout, found.stderr) == ("[(1, 3, 2, 8)]\n", SAID)


RANK = """
import torch, torch.distributed as dist
from flash_attn import flash_attn_func
dist.init_process_group("gloo")
x = torch.full((1, 2, 1, 4), float(dist.get_rank() + 1))
total = flash_attn_func(x, x, x)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(total[0, 0, 0].tolist())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_torchrun():
    write(f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n", "torchrun")
    Path("torchrun").chmod(0o700)
    options = ["--standalone", "--nproc-per-node", "2"]
    found = polyattn_run("./torchrun", *options, write(RANK), OMP_NUM_THREADS="1")
    assert (found.stdout, found.returncode) == ("[3.0, 3.0, 3.0, 3.0]\n", 0), found.stderr
    assert found.stderr.count("stands in") == 1


def test_a_program_that_is_executable_and_a_command_that_is_none():
    for name in ("program", "bare"):
        Path(write(PROBE, name)).chmod(0o700)
    assert polyattn_run("program").stdout == PROBED
    if sys.platform != "win32":
        found = polyattn_run("./bare")
        assert found.returncode == 2
        assert "error: ./bare: Exec format error; name what runs it, such as" in found.stderr


def test_nothing_is_left_behind_and_a_folder_without_code_is_no_package(tmp_path):
    package, program = Path(stand_ins.__file__).parent, write(PROBE)
    Path("flash_attn").mkdir()
    before = sorted(package.rglob("*"))
    assert polyattn_run(program, TMPDIR=str(tmp_path)).stdout == PROBED
    assert {file.name for file in tmp_path.iterdir()} == {program, "flash_attn"}
    assert sorted(package.rglob("*")) == before
    assert python(program).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "out", "said", "code"),
    [
        ([], "real\n", "xformers 0.0.35\npolyattn run: flash_attn: installed, used as it is", 0),
        (["--as", "flash_attn"], "", "flash_attn: installed already; leave it out of --as, or", 2),
        (["--as", "flash_attn", "--replace"], "stand-in\n", "stands in for flash_attn 2.8.3\n", 0),
        (["--replace"], "stand-in\n", "stands in for flash_attn 2.8.3 and xformers 0.0.35\n", 0),
    ],
)  # fmt: skip
def test_a_package_that_is_installed_is_left_alone(arguments, out, said, code):
    write("", "flash_attn.py")
    found = polyattn_run(*arguments, write(PROBE))
    assert (found.stdout, found.returncode) == (out, code)
    assert said in found.stderr


WRONG_NAME = "POLYATTN_INSTALL takes names of flash_attn,"


def test_the_names_come_from_the_variable_and_from_the_option():
    program = write("import os; print(os.environ['POLYATTN_INSTALL'])")
    names = "flash_attn_interface:tuples"
    assert polyattn_run(program, POLYATTN_INSTALL=names).stdout == f"{names}\n"
    assert WRONG_NAME in polyattn_run(program, POLYATTN_INSTALL="torch").stderr
    found = polyattn_run("--as", "flash_attn_interface", program, POLYATTN_INSTALL=names)
    assert found.stdout == "flash_attn_interface\n"
    assert found.stderr == "polyattn run: polyattn stands in for flash_attn_interface 3.0.0\n"


def test_a_service_takes_the_variables():
    text = polyattn_run("--environment").stdout
    environment = dict(line.split("=", 1) for line in text.splitlines())
    assert [*environment] == ["POLYATTN_INSTALL", "PYTHONPATH"]
    found = python(write(PROBE), **environment)
    assert (found.stdout, found.stderr) == (PROBED, "")
    found = python(write("print('runs')"), **environment | {"POLYATTN_INSTALL": "xformers, torch"})
    assert found.stdout == "runs\n"
    assert WRONG_NAME in found.stderr


def test_a_sitecustomize_of_the_program_runs_too():
    own = Path(write("print('its own')", "first/sitecustomize.py")).resolve()
    program = write("import sitecustomize; print(sitecustomize.__file__)" + PROBE)
    given = [one for one in [os.environ.get("PYTHONPATH")] if one]
    found = polyattn_run(program, PYTHONPATH=os.pathsep.join([str(own.parent), *given]))
    # In the Python of the command too, whose output comes first.
    assert found.stdout == f"its own\nits own\n{own}\n{PROBED}", found.stderr


def test_one_within_another_and_a_command_of_this_environment():
    name = Path(sys.executable).name
    write("", "flash_attn.py")
    found = polyattn_run("--replace", name, "-c", STARTED, "run", write(PROBE), PATH="")
    assert (found.stdout, found.stderr) == (PROBED, SAID * 2)


def test_another_python_runs_as_without_it(tmp_path):
    venv.create(tmp_path / "other", symlinks=True)
    other = next((tmp_path / "other").glob("[bS]*/python*"))
    found = polyattn_run(str(other), "-c", "import sys; print(sys.path)")
    folder = str(Path(stand_ins.__file__).parent)
    assert (found.returncode, folder in found.stdout) == (0, False), found.stderr
    assert found.stderr == SAID


WRONG = {
    "no program": ([], "name a program, or the files of --check, such as train.py"),
    "no such file": (["nothing.py"], "nothing.py: no such file in this folder, and no such comm"),
    "no name": (["", "x"], "name a program"),
    "unknown name": (["--as", "flash_atn", "x.py"], "flash_attn_interface:tuples; got 'flash_atn'"),
    "no module": (["--replace", "-m"], "name a program"),
    "no files": (["--check"], "name a program, or the files of --check"),
    "no code": (["-c"], "name a program"),
    "option of Python": (["-u", "x.py"], "-u; options of Python follow its name, as in polyattn"),
    "no names": (["--as"], "argument --as: expected one argument"),
    "unknown option": (["--repl", "x.py"], "unrecognized arguments: --repl"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_ends_with_2(name, capsys):
    arguments, message = WRONG[name]
    for entry, words in ((main, arguments), (cli.main, ["run", *arguments])):
        with pytest.raises(SystemExit, match="2"):
            entry(words)
        assert message in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed")
def test_a_folder_that_was_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SystemExit, match="2"):
        main(["nothing.py"])
    assert "no such file in this folder" in capsys.readouterr().err
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["--environment"]) == 0


CHECKED = """\
import flash_attn, os.path
import flash_attn.bert_padding as padding
from flash_attn import flash_attn_func as f, flash_attn_nothing
from flash_attn.no.such import name, other
try:
    from flash_attn_interface import flash_attn_func as f3
except ImportError:
    f3 = None

def g(q, k, v, **more):
    flash_attn.flash_attn_interface.flash_attn_varlen_func(q, k, v, 1, 2, max_seqlen_q=3)
    flash_attn.flash_attn_interface.flash_attn_unpadded_func(q)
    f(q, k)
    f(*q, causl=True)
    f(q, k, v, causal=True, **more)
    f(q, **more)
    padding.pad_input(q, k, 1, 2).no_attribute_of_ours, padding.IndexFirstAxis.apply.__doc__.strip
    from flash_attn.ops.triton import rotary
    return rotary.apply_rotary(q, k, v, 0, None, None, False, False, False, 1), os.path.join(q)

import rotary_emb
"""
FAULTS = """\
model.py:3: flash_attn.flash_attn_nothing: module 'flash_attn' has no attribute 'flash_attn_nothing'
model.py:4: flash_attn.no.such.name: module 'flash_attn' has no attribute 'no'
model.py:4: flash_attn.no.such.other: module 'flash_attn' has no attribute 'no'
model.py:6: flash_attn_interface.flash_attn_func: No module named 'flash_attn_interface'; it comes by name, --as flash_attn_interface
model.py:12: flash_attn.flash_attn_interface.flash_attn_unpadded_func: module 'flash_attn.flash_attn_interface' has no attribute 'flash_attn_unpadded_func'
model.py:13: flash_attn.flash_attn_func(): missing a required argument: 'v'
model.py:14: flash_attn.flash_attn_func(): got an unexpected keyword argument 'causl'
model.py:19: flash_attn.ops.triton.rotary.apply_rotary(): too many positional arguments
model.py:21: rotary_emb: rotary_emb is made of kernels for GPUs, which polyattn does not stand in for: call flash_attn.layers.rotary.apply_rotary_emb
"""  # noqa: E501 -- lines of output


def test_check_lists_what_would_fail(capsys):
    file = write(CHECKED, "model.py")
    assert main(["--as", "flash_attn", "--check", file]) == 1
    assert capsys.readouterr().out == FAULTS
    assert main(["--check", write(CHILD, "good.py"), write("", "empty.py")]) == 0
    assert capsys.readouterr().out == (
        "good.py: all names of flash_attn, xformers resolve: 1\n"
        "empty.py: all names of flash_attn, xformers resolve: 0\n"
    )
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


def test_check_of_a_file_that_is_no_python(capsys):
    write("def f(:", "broken.py")
    for file in ("broken.py", "nothing.py"):
        assert main(["--check", file]) == 2
        assert f"polyattn run: {file} cannot be read: " in capsys.readouterr().err
