"""The command line: plain text, JSON on request, and exit codes that a script can use."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import polyattn
from polyattn import BackendError
from polyattn._base.streams import complain, show
from polyattn._dispatch import listing
from polyattn.cli import main


@pytest.fixture(autouse=True)
def _in_an_empty_folder_without_the_variable_of_the_tests(monkeypatch, tmp_path):
    monkeypatch.delenv("POLYATTN_TEST_WITHOUT", raising=False)
    monkeypatch.chdir(tmp_path)


def test_backends(capsys):
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    head, *rows = [row.split() for row in out.partition("\n\n")[0].splitlines()]
    assert head == ["backend", "library", "devices", "kernels"]
    names = "cupy dask jax mlx numpy onnx onnxruntime torch array-api"
    # A distribution whose kernels are left out has a row, "kernels native".
    assert [row[0] for row in rows if row[0] != "kernels"] == names.split()
    assert out.isascii()


@pytest.mark.needs("torch")
def test_backends_as_json(capsys):
    assert main(["backends", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch"]["devices"][0] == "cpu"
    assert rows["array-api"]["kernels"] == ["tiled", "dense", "gathered"]


def test_backends_names_a_misspelt_variable(capsys, monkeypatch):
    monkeypatch.setenv("POLYATTN_BACKENDS", "numpy")
    assert main(["backends"]) == 0
    said = "nothing reads the variable POLYATTN_BACKENDS; did you mean 'POLYATTN_BACKEND'?"
    assert said in capsys.readouterr().err


def test_the_variable_of_the_compiled_kernel_is_known_without_it(monkeypatch):
    monkeypatch.setenv("POLYATTN_NATIVE", "0")
    monkeypatch.setattr(listing.extensions, "names", tuple)
    assert listing.unknown_variables() == []


EVERYTHING = """
--shape 2,8,128,64 --key-shape 2,2,256,64 --value-shape 2,2,256,32 --dtype bfloat16
--library torch --causal --window 31,0 --query-offset 5 --scale 0.1 --softcap 30
--mask-shape 128,256 --bias-shape 1,8,1,1 --sinks --dropout 0.1 --logsumexp --backend torch --json
"""


@pytest.mark.needs("torch")
def test_explain_takes_every_option(capsys):
    assert main(["explain", *EVERYTHING.split()]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert decision["chosen"] == {"backend": "torch", "kernel": "dense"}
    assert decision["selected_by"] == "backend='torch'"
    assert decision["dtype"] == "bfloat16"
    needs = "bias causal dropout grouped_heads logsumexp mask query_offset scale sinks softcap"
    assert decision["needs"] == [*needs.split(), "value_size", "window"]
    (sdpa,) = (one for one in decision["candidates"] if one["kernel"] == "sdpa")
    assert "sinks, softcap" in sdpa["reasons"][0]


def test_explain_prints_what_the_function_prints(capsys):
    assert main(["explain", "--shape", "2,8,128,64", "--window", "31,none", "--gradients"]) == 0
    shape = (2, 8, 128, 64)
    expected = str(polyattn.explain(shape, shape, shape, window=(31, None), gradients=True))
    assert capsys.readouterr().out.strip() == expected


@pytest.mark.needs("torch")
def test_explain_where_nothing_can(capsys):
    assert main(["explain", "--shape", "2,64", "--backend", "torch:cuda:9"]) == 1
    assert "no device 'cuda:9'" in capsys.readouterr().out


def exit_code(arguments):
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("explain --shape 2,64 --backend nunpy", "did you mean 'numpy'?"),
        ("explain --shape 2,64 --dtype int8", "got 'int8'"),
        ("explain --shape 2,64 --window 3", "(left, right)"),
        ("explain --shape 2,64 --gradients --logsumexp", "gradients=True are two calls"),
        ("explain", "--shape"),
        ("explain --shape 2,x", "a shape is written 2,8,128,64; got '2,x'"),
        ("explain --shape 2,4 --window a,b", "a window is written 255,0 or none,0; got 'a,b'"),
        ("frobnicate", "frobnicate"),
        ("check mine:attend", "for a function write --callable module:function"),
    ],
)
def test_what_is_wrong_goes_to_standard_error(arguments, message, capsys):
    assert exit_code(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.needs("dask")
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_check_shows_no_warning_about_cases_of_infinity():
    assert main(["check", "dask", "--kernel", "dense", "--case", "inf under causal"]) == 0


def test_help_and_version(capsys):
    assert main([]) == 2
    assert "backends" in capsys.readouterr().out
    for arguments in (["--help"], ["explain", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert f"usage: {' '.join(['polyattn', *arguments[:-1]])}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"polyattn {polyattn.__version__}\n"


# ---- what holds of every command ----

EXPLAIN = ["explain", "--shape", "2,8,64"]
QUICK = ["check", "numpy", "--kernel", "dense", "--quick"]
COMMANDS = {
    "backends": ("list_backends", ["backends"]),
    "explain": ("explain", EXPLAIN),
    "check": ("conformance.report.run.steps", QUICK),
    "bench": ("bench.command._supporting", ["bench", "--backends", "numpy"]),
}
ENDINGS = dict.fromkeys([x("it is wrong") for x in (ValueError, ImportError, BackendError)], 2)
ENDINGS[KeyboardInterrupt()] = 130


@pytest.mark.parametrize("command", COMMANDS)
def test_exit_codes_are_those_of_every_command(command, monkeypatch, capsys):
    name, arguments = COMMANDS[command]
    assert exit_code([*arguments, "--frobnicate"]) == 2
    said = capsys.readouterr().err
    assert f"usage: polyattn {command}" in said
    assert "--frobnicate" in said
    for error, code in ENDINGS.items():

        def stop(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr(f"polyattn.{name}", stop)
        assert main(arguments) == code
        assert capsys.readouterr().err == f"polyattn {command}: {str(error) or 'interrupted'}\n"


# ---- standard streams, a full disk, Ctrl-C ----

RUNS = {
    "backends": ["backends"],
    "explain": EXPLAIN,
    "bench": ["bench", "--backends=numpy", "--lengths=16", "--seconds=0.1"],
    "export": ["export", "model.onnx", "--shape=2,8,64"],
    "--help": ["--help"],
}
#: At this import of `MOMENT`, a module, the user presses Ctrl-C.
STARTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("MOMENT"):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from polyattn.__main__ import main
sys.exit(main())
"""


def started(command, before="exec", **variables):
    """Run a command by a shell that opens and closes streams first."""
    words = shlex.join([sys.executable, "-P", "-c", STARTED, *RUNS[command]])
    return subprocess.run(
        ["bash", "-c", f"{before} {words}"], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONUNBUFFERED": ""} | variables,
    )  # fmt: skip


def test_closed_streams_are_no_fault(tmp_path):
    onnx = pytest.importorskip("onnx")
    assert started("export", "exec 0<&- 1>&- 2>&-; exec").returncode == 0
    onnx.checker.check_model(str(tmp_path / "model.onnx"))  # no output went into the file


@pytest.mark.parametrize("command", ["backends", "explain", "export", "--help"])
def test_streams_that_are_closed_or_full_in_every_command(command, monkeypatch, capsys):
    if command == "export":
        pytest.importorskip("onnx")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_code(RUNS[command]) == 1
    said = capsys.readouterr().err
    assert said == f"polyattn {command}: No space left on device\n"
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert exit_code(RUNS[command]) == 0


def test_without_tqdm_a_command_shows_no_bar(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(RUNS["bench"]) == 0
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_early_is_no_error():
    assert started("explain", "exec > >(true); exec").stderr == ""


def test_a_file_that_fits_on_no_disk_is_named(capsys):
    resource = pytest.importorskip("resource")
    pytest.importorskip("onnx")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        code = main(RUNS["export"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    said = capsys.readouterr().err
    assert re.fullmatch("polyattn export: .*model.onnx: File too large.*\n", said)


def test_ctrl_c_shows_no_traceback_and_leaves_what_was_there(tmp_path):
    model = tmp_path / "model.onnx"
    model.write_bytes(b"an older one")
    for command, moment in (("explain", "polyattn.cli"), ("export", "spox")):
        done = started(command, MOMENT=moment)
        assert done.returncode == 130
        assert re.fullmatch(rf"(polyattn {command}: interrupted.*\n)?", done.stderr)
    assert model.read_bytes() == b"an older one"
    assert [*tmp_path.iterdir()] == [model]


def test_no_text_of_others_reaches_the_terminal_as_a_command(capsys):
    show("one\x1b[31m\r\u202etwo\nÄ")
    complain("\x9b31m")
    assert capsys.readouterr() == ("one?[31m??two\nÄ\n", "?31m\n")


TABLES = {
    "backends": polyattn.list_backends,
    "explain": partial(polyattn.explain, *[(2, 8, 64)] * 3, window=(3, 1), backend="torch,jax"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_terminal(name, monkeypatch):
    shown = TABLES[name]()
    whole = str(shown)
    longest = max(map(len, whole.splitlines()))
    assert longest > 80
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        fitted = str(shown)
        assert max(map(len, fitted.splitlines())) <= width
        assert sorted("".join(fitted.split())) == sorted("".join(whole.split()))  # nothing is lost
        assert (fitted == whole) == (longest <= width)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = str(shown)
    monkeypatch.setenv("COLUMNS", "20")
    assert str(shown) == narrow  # not narrower: a word would not fit a column
