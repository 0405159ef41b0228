"""The command line: plain text, JSON on request, and exit codes that a script can use."""

import json
import subprocess
import sys
import types

import pytest

import polyattn
from polyattn.cli import main
from polyattn.dispatch import listing


def test_backends(capsys):
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == ["backend", "library", "devices", "kernels"]
    assert [line.split()[0] for line in lines[1:]] == [
        "cupy",
        "dask",
        "jax",
        "numpy",
        "onnx",
        "onnxruntime",
        "torch",
        "array-api",
    ]
    assert out.isascii()


def test_backends_as_json(capsys):
    assert main(["backends", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch"]["devices"][0] == "cpu"
    assert rows["array-api"]["kernels"] == ["tiled", "dense"]


def test_a_version_is_known_where_the_package_is_not_named_as_its_module(monkeypatch):
    module = types.ModuleType("acme")
    module.__version__ = "14.2"
    monkeypatch.setitem(sys.modules, "acme", module)
    assert listing._versions(("acme", "nowhere", "numpy"))["acme"] == "14.2"
    assert "nowhere" not in listing._versions(("nowhere",))


def test_backends_says_what_is_missing_and_how_to_install_it(capsys, monkeypatch):
    genuine = polyattn.dispatch.registry.is_installed
    monkeypatch.setattr(polyattn.dispatch.registry, "_plugins", {})
    monkeypatch.setattr(
        polyattn.dispatch.registry, "is_installed", lambda name: name != "torch" and genuine(name)
    )
    assert main(["backends"]) == 0
    assert 'torch is not installed: pip install "polyattn[torch]"' in capsys.readouterr().out


EVERYTHING = """
--shape 2,8,128,64 --key-shape 2,2,256,64 --value-shape 2,2,256,32 --dtype bfloat16
--library torch --causal --window 31,0 --query-offset 5 --scale 0.1 --softcap 30
--mask-shape 128,256 --bias-shape 8,1,1 --sinks --logsumexp --backend torch --json
"""


def test_explain_takes_every_option(capsys):
    assert main(["explain", *EVERYTHING.split()]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert decision["chosen"] == {"backend": "torch", "kernel": "dense"}
    assert decision["selected_by"] == "backend='torch'"
    assert decision["dtype"] == "bfloat16"
    assert decision["needs"] == sorted(
        [
            "bias",
            "causal",
            "grouped_heads",
            "logsumexp",
            "mask",
            "query_offset",
            "scale",
            "sinks",
            "softcap",
            "value_size",
            "window",
        ]
    )
    sdpa = decision["candidates"][0]
    assert sdpa["kernel"] == "sdpa"
    assert "sinks, softcap" in sdpa["reasons"][0]


def test_explain_counts_the_sinks_in_either_layout(capsys):
    arguments = ["explain", "--shape", "2,128,8,64", "--layout", "...LHD", "--sinks", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["needs"] == ["sinks"]


def test_explain_prints_what_the_function_prints(capsys):
    assert main(["explain", "--shape", "2,8,128,64", "--window", "31,none"]) == 0
    shape = (2, 8, 128, 64)
    expected = str(polyattn.explain(shape, shape, shape, window=(31, None)))
    assert capsys.readouterr().out.strip() == expected


def test_explain_where_nothing_can(capsys):
    assert main(["explain", "--shape", "2,64", "--backend", "torch:cuda:9"]) == 1
    assert "no device 'cuda:9'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["explain", "--shape", "2,64", "--backend", "nunpy"], 1, "did you mean 'numpy'?"),
        (["explain", "--shape", "2,64", "--key-shape", "2,32"], 2, "64 and 32"),
        (["explain", "--shape", "2,64", "--dtype", "int8"], 2, "has dtype int8"),
        (["explain", "--shape", "2,64", "--window", "3"], 2, "(left, right)"),
    ],
)
def test_what_is_wrong_goes_to_standard_error(arguments, code, message, capsys):
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain"], "--shape"),
        (["explain", "--shape", "2,x"], "a shape is written 2,8,128,64; got '2,x'"),
        (["explain", "--shape", "2,-4"], "a shape is written"),
        (
            ["explain", "--shape", "2,4", "--window", "a,b"],
            "a window is written 255,0 or none,0; got 'a,b'",
        ),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_and_version(capsys):
    assert main([]) == 2
    assert "backends" in capsys.readouterr().out
    for arguments in (
        ["--help"],
        ["explain", "--help"],
        ["backends", "--help"],
        ["bench", "--help"],
        ["demo", "--help"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert f"usage: {' '.join(['polyattn', *arguments[:-1]])}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"polyattn {polyattn.__version__}\n"


def test_the_environment_variable_reaches_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("POLYATTN_BACKEND", "torch")
    assert main(["explain", "--shape", "2,64"]) == 0
    assert "selected by POLYATTN_BACKEND=torch" in capsys.readouterr().out


def test_a_full_disk_is_said_in_a_line():
    command = f"{sys.executable} -m polyattn explain --shape 2,64 > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("polyattn: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m polyattn explain --shape 2,64 | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
