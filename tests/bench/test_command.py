"""The output and files of ``polyattn bench``, and its errors for a wrong command line."""

import csv
import json
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from polyattn.bench import measure, picture, table, timing
from polyattn.bench.compare import compare
from polyattn.bench.machine import Machine
from polyattn.bench.peaks import Peak
from polyattn.bench.results import BenchResults, Timing, read
from polyattn.bench.workload import Workload
from polyattn.cli import main

MACHINE = Machine(
    processor="Processor <1>",
    cores=2,
    memory=2**34,
    threads={"polyattn": 2, "openblas": 2},
    system="Linux 6.1 x86_64",
    python="3.11.2",
    polyattn="0.1.0",
    libraries={"numpy": "2.4.6", "torch": "2.13.0"},
    devices={"cuda:0": "NVIDIA H100, 80 GiB"},
    environment={},
    load=0.1,
    when="2026-01-01 00:00 UTC",
)
CALL = Workload(causal=True, window=(255, None))
PEAKS = [Peak("numpy", "cpu", 2e11, 2e10), Peak("torch:cuda", "cuda:0", 6e11, 2e12)]
TIMES = {"numpy": 4e-3, "torch:cuda": 5e-5, "array-api": 2e-2}


def row(length, backend, **changes):
    device = "cuda:0" if "cuda" in backend else "cpu"
    seconds = TIMES[backend] * length / 256
    spread = {"seconds": seconds, "low": 0.9 * seconds, "high": 1.2 * seconds, "rounds": 5}
    known = {"kernel": "tiled", "first": 1.0, "ratio": seconds / TIMES["numpy"]}
    return Timing(length, backend, device, **{**spread, **known, **changes})


OUT = Timing(512, "array-api", "cpu", note="left out: a call would take about 9 ms")
REPORT = BenchResults(
    MACHINE,
    CALL,
    "polyattn bench --backends numpy",
    PEAKS,
    [row(256, name) for name in TIMES] + [row(512, "numpy"), row(512, "torch:cuda"), OUT],
)


def changed(**changes):
    return replace(REPORT, **changes)


NATIVE = {"kernel": "native", "origin": "polyattn-native"}
SHARED = changed(rows=[replace(r, **NATIVE) for r in REPORT.rows[:4]])


# ---- the value ----


def test_json_holds_the_results_and_what_follows_from_them(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(REPORT.as_json(), encoding="utf-8")
    assert read(file) == REPORT
    first, other, *_, last = json.loads(REPORT.as_json())["rows"]
    assert first["rate"] == CALL.flops(256) / 4e-3
    assert first["of_roof"] == first["rate"] / 2e11
    assert other["of_roof"] == pytest.approx(other["rate"] / 6e11)
    assert last["rate"] is None

    rows = list(csv.DictReader(SHARED.as_csv().splitlines()))
    known = json.loads(SHARED.as_json())["rows"]
    assert [{name: "" if x is None else str(x) for name, x in one.items()} for one in known] == rows
    assert rows[0]["same_kernel_as"] == "array-api"


def test_backends_that_run_one_kernel_at_a_length_and_device_are_told():
    alike = [["array-api"], [], ["numpy"], []]  # the others: on another device, at another length
    assert [SHARED.same_kernel(one) for one in SHARED.rows] == alike
    assert SHARED.marked_kernel(SHARED.rows[2]) == "native*"
    assert SHARED.marked_kernel(SHARED.rows[3]) == "native"
    assert not any(map(REPORT.same_kernel, REPORT.rows))  # of one name only


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "was not written by polyattn bench --json"),
        ('{"format": "other", "version": 9}', "was not written by"),
        ('{"format": "polyattn bench", "version": 9}', "has version 9, and this polyattn reads"),
    ],
)
def test_a_file_of_others_is_refused_by_its_name(text, message, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        read(file)
    assert str(file) in str(caught.value)


# ---- the table ----


def printed(report):
    names = list(TIMES)
    groups = [[r for r in report.rows if r.length == length] for length in (256, 512)]
    lines = [*table.head(report), *table.heading(report, names)]
    lines += [line for rows in groups for line in table.group(report, rows, names)]
    return lines + table.footer(report, list(TIMES))


def test_a_share_far_above_the_limit_is_a_dash_with_a_line_below():
    wrong = changed(peaks=[Peak("numpy", "cpu", 2e9, 2e10), PEAKS[1]])
    assert wrong.of_roof(wrong.rows[0]) > table.WRONG
    (line,) = table.group(wrong, wrong.rows[:1], TIMES)[:-1]
    assert re.search(r"  16\.8 +1\.00 +-$", line)
    assert "faster than the limit" in " ".join(table.footer(wrong, list(TIMES)))
    right = changed(peaks=[Peak(peak.backend, peak.device, 2e14, 2e14) for peak in PEAKS])
    assert "faster than the limit" not in " ".join(table.footer(right, list(TIMES)))


def test_the_table_fits_the_terminal(monkeypatch):
    width = 80
    monkeypatch.setenv("COLUMNS", str(width))
    lines = printed(REPORT)
    assert max(map(len, lines)) <= min(width, 100)
    rows = [line for line in lines if re.match(r" +(256|512) ", line) and "left out" not in line]
    assert len({len(line) for line in rows}) == 1
    assert max(map(len, compare(REPORT, REPORT))) <= width


def test_the_table_says_what_was_measured():
    text = "\n".join(printed(REPORT))
    rate = CALL.flops(256) / 4e-3 / 1e9
    for said in (
        f"numpy       tiled       4.00      3.60-4.80     {rate:.1f}    1.00   8.4%",
        "cpu: 200 GFLOP/s in a matrix product (numpy), 20.0 GB/s",
        "512  array-api   left out: a call would take about 9 ms",
        "batch 1, 8 heads of 64, float32, causal, window 255 before",
        "repeat     polyattn bench --backends numpy",
        "Processor <1>, 2 cores to use, 16 GiB",
        "cuda:0: NVIDIA H100",
    ):
        assert said in text
    shared = "\n".join(printed(SHARED))
    assert "numpy       native* " in shared
    assert "*: the same kernel, called by several backends" in " ".join(shared.split())


# ---- the picture ----


def test_each_backend_has_a_line_of_its_own_under_the_roof_of_its_device():
    axes = picture.draw(REPORT).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["roof of cpu", "roof of cuda:0", *[f"{x} tiled" for x in TIMES]]
    rates = [CALL.flops(256) / 4e-3 / 1e9, CALL.flops(512) / 8e-3 / 1e9]
    np.testing.assert_allclose(lines["numpy tiled"].get_xdata(), [256, 512])
    np.testing.assert_allclose(lines["numpy tiled"].get_ydata(), rates)
    np.testing.assert_allclose(lines["roof of cpu"].get_ydata(), [200, 200])
    picture.draw(changed(rows=[], peaks=[], interrupted=True))


# ---- comparing ----


def faster(times, machine=MACHINE, **changes):
    def divided(row):
        spread = {name: getattr(row, name) / times for name in ("seconds", "low", "high")}
        return replace(row, **spread)

    rows = [divided(row) if row.seconds else row for row in REPORT.rows]
    return changed(rows=rows, machine=machine, **changes)


OTHER = replace(MACHINE, processor="Processor 2", libraries={"numpy": "2.5.0"})
ONE = changed(rows=[REPORT.rows[0]])


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (REPORT, faster(2, OTHER), r"A: Processor <1>(.|\n)*B: Processor 2(.|\n)*B: numpy 2\.5\.0"),
        (REPORT, faster(2, OTHER), r" +256  numpy +4\.00 +2\.00 +0\.500 +0\.375-0\.667\n"),
        # A range that holds 1 is no difference.
        (REPORT, faster(1.05), r"numpy +4\.00 +3\.81 +0\.952 +0\.714-1\.27 ~"),
        (
            REPORT,
            changed(rows=[replace(REPORT.rows[0], rounds=1, kernel="dense")]),
            r"numpy .* unknown: only one call  \(tiled and dense\)",
        ),
        (REPORT, ONE, "only A     torch:cuda at 256, 512; array-api at 256; numpy at 512"),
    ],
)
def test_two_runs_are_compared_row_by_row(first, second, said):
    assert re.search(said, "\n".join(compare(first, second)))


def test_what_cannot_be_compared_is_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"different calls(.|\n)*A: .*causal(.|\n)*B: .*float16"):
        compare(REPORT, changed(workload=replace(CALL, dtype="float16")))
    with pytest.raises(ValueError, match=r"at the same length in both(.|\n)*numpy at 512"):
        compare(ONE, changed(rows=[REPORT.rows[3]]))


# ---- the command ----

HASTE = ["bench", "--heads", "2", "--size", "8", "--seconds", "1", "--backends", "numpy"]


@pytest.fixture
def hasty(monkeypatch):
    """Let windows and rests take no time, and measure no roof."""
    monkeypatch.setattr(measure, "TURNS", timing.Turns(window=0.0, rest=0.0))
    monkeypatch.setattr(
        measure.peaks, "measure", lambda one, *_: Peak(one.name, one.hardware, 1e11, 1e10)
    )


def test_one_command_prints_a_table_and_writes_every_file(tmp_path, capsys, hasty):
    files = {name: tmp_path / f"a.{name}" for name in ("json", "csv", "png")}
    written = ["--json", str(files["json"]), "--csv", str(files["csv"])]
    written += ["--plot", str(files["png"])]
    assert main([*HASTE, "--lengths", "16:32", "--causal", *written]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(re.findall(r"^ +(?:16|32)  numpy ", captured.out, re.MULTILINE)) == 2
    report = read(files["json"])
    assert [r.length for r in report.rows] == [16, 32]
    assert report.workload == Workload(heads=2, key_heads=2, size=8, causal=True)
    assert files["csv"].read_text(encoding="utf-8") == report.as_csv()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--compare", str(files["json"]), str(files["json"])]) == 0
    assert re.search(r"numpy .* 1\.00 .* ~", capsys.readouterr().out)


def test_the_command_that_is_shown_repeats_the_run(tmp_path, hasty):
    file = tmp_path / "a.json"
    options = ["--lengths", "8,24", "--key-heads", "1", "--window", "3,none", "--decode"]
    options += ["--dtype", "float64", "--kernel", "all", "--batch", "3"]
    assert main([*HASTE, *options, "--json", str(file)]) == 0
    first = read(file)
    assert [row.kernel for row in first.rows] == ["small", "tiled", "dense"] * 2
    assert main([*shlex.split(first.command)[1:], "--json", str(file)]) == 0
    assert (read(file).workload, read(file).command) == (first.workload, first.command)


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt, 130), (BrokenPipeError, 1)],  # a reader that leaves
)
def test_an_interrupted_run_keeps_its_rows_or_older_results(
    error, code, tmp_path, hasty, monkeypatch
):
    def leave(*arguments):
        raise error

    file = tmp_path / "a.json"
    file.write_text("older", encoding="utf-8")
    for where in ("heading", "group"):
        assert file.read_text(encoding="utf-8") == "older"
        with monkeypatch.context() as patch:
            patch.setattr(table, where, leave)
            assert main([*HASTE, "--lengths", "8:32", "--json", str(file)]) == code
    assert [r.length for r in read(file).rows] == [8]
    assert read(file).interrupted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--backends nunpy --json a.json", "did you mean 'numpy'?"),
        ("--backends onnx", "'onnx' cannot be timed: it makes a graph"),
        ("--backends numpy,jax --dtype float64", "jax:cpu does not support this call"),
        ("--backends numpy --kernel sdpa", "it has small, tiled, dense"),
        ("--json /nowhere/a.json", "--json needs a file in an existing folder"),
        ("--compare a b --json c.json", "--json has nothing to write"),
        ("--compare /nowhere/a /nowhere/b", "/nowhere/a cannot be read"),
        ("--lengths 8:2", "doubling from the first to the last, or 512,1000,2048; got '8:2'"),
        ("--seconds nan", "a positive number of seconds is required; got 'nan'"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_measured(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "measure_peaks", lambda *_: pytest.fail("it measures"))
    try:
        code = main(["bench", *arguments.split()])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert message in captured.err
    assert not any(tmp_path.iterdir())
