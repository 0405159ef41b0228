"""What ``polyattn bench`` prints and writes, and what it says of a wrong command line."""

import json
import re
import shlex
import sys
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from polyattn.bench import command, measure, picture, table, timing
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
    known = {"kernel": "tiled", "first": 1.0, "error": 3.21e-7, "memory": 3 * 2**20}
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


# ---- the value ----


def test_a_report_goes_to_json_and_comes_back_the_same(tmp_path):
    file = tmp_path / "a.json"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read(file)
    file.write_text(REPORT.as_json(), encoding="utf-8")
    assert read(file) == REPORT
    assert read(file).workload.window == (255, None)


def test_json_holds_what_follows_from_the_times():
    given = json.loads(REPORT.as_json())
    assert (given["format"], given["version"]) == ("polyattn bench", 1)
    first = given["rows"][0]
    assert first["rate"] == CALL.flops(256) / 4e-3
    assert first["of_product"] == first["rate"] / 2e11
    memory_bound = given["rows"][1]
    assert memory_bound["of_product"] == pytest.approx(CALL.flops(256) / 5e-5 / 6e11)
    assert memory_bound["of_roof"] == memory_bound["of_product"]
    assert given["rows"][-1]["rate"] is None


def test_a_share_of_the_roof_is_of_the_memorys_where_that_is_lower():
    slow = changed(peaks=[Peak("numpy", "cpu", 2e11, 1e8), PEAKS[1]])
    bound = CALL.flops(256) / CALL.bytes(256) * 1e8
    assert slow.of_roof(slow.rows[0]) == pytest.approx(CALL.flops(256) / 4e-3 / bound)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "was not written by polyattn bench --json"),
        ("[1]", "was not written by"),
        ('{"format": "other", "version": 9}', "was not written by"),
        ('{"format": "polyattn bench", "version": 1}', "was not written by"),
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
    return lines + [line for rows in groups for line in table.group(report, rows, names)]


def test_the_table_fits_a_terminal_and_stands_in_columns():
    lines = printed(REPORT) + table.footer(REPORT, TIMES)
    assert max(map(len, lines)) <= 100
    assert all(line.isascii() for line in lines)
    rows = [line for line in lines if re.match(r" +(256|512) ", line) and "left out" not in line]
    assert len(rows) == 5
    assert len({len(line) for line in rows}) == 1
    assert len(rows[0]) == len(next(line for line in lines if "quartiles  GFLOP/s" in line))


def test_a_share_far_above_the_limit_is_a_dash_with_a_line_below():
    wrong = changed(peaks=[Peak("numpy", "cpu", 2e9, 2e10), PEAKS[1]])
    assert wrong.of_product(wrong.rows[0]) > table.WRONG
    (line,) = table.group(wrong, wrong.rows[:1], TIMES)[:-1]
    assert re.search(r"  16\.8 +- +- +3\.2e-07 ", line)
    assert "faster than the limit" in " ".join(table.footer(wrong, TIMES))
    right = changed(peaks=[Peak(peak.backend, peak.device, 2e14, 2e14) for peak in PEAKS])
    assert "faster than the limit" not in " ".join(table.footer(right, TIMES))


@pytest.mark.parametrize(
    ("width", "left_out"), [(80, ["product", "roof", "memory"]), (95, ["product"]), (200, [])]
)
def test_the_table_leaves_out_what_a_narrow_terminal_has_no_room_for(width, left_out, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    command = " ".join(["polyattn bench", *["--causal"] * 20])
    lines = printed(changed(command=command))
    lines.remove(f"  repeat     {command}")  # one line, to be pasted
    assert max(map(len, lines)) <= width
    (titles,) = (line.split() for line in lines if "quartiles" in line)
    assert [name for name in table.COLUMNS if name not in titles] == ["rate", *left_out]
    (row,) = (line.split() for line in lines if re.match(" +256 +numpy", line))
    assert len(row) == len(titles) + ("memory" in titles)  # a size is two words
    said = " ".join(" ".join(table.footer(REPORT, TIMES)).split())
    assert ("Not shown, for lack of width: " + ", ".join(left_out) in said) == bool(left_out)
    assert max(map(len, compare(REPORT, REPORT))) <= width


def test_the_table_says_what_was_measured():
    text = "\n".join(printed(REPORT))
    rate = CALL.flops(256) / 4e-3 / 1e9
    assert f"numpy       tiled      4.00        3.60-4.80     {rate:.1f}" in text
    assert "3.2e-07     3.0 MiB" in text
    assert "cpu: 200 GFLOP/s in a matrix product (numpy), 20.0 GB/s" in text
    assert "512  array-api   left out: a call would take about 9 ms" in text
    assert "batch 1, 8 heads of 64, float32, causal, window 255 before" in text
    assert "repeat     polyattn bench --backends numpy" in text
    for fact in ("Processor <1>, 2 cores to use, 16 GiB", "cuda:0: NVIDIA H100", "numpy 2.4.6"):
        assert fact in text


def test_a_fast_device_is_told_in_teraflops():
    fast = changed(peaks=[PEAKS[0], Peak("torch:cuda", "cuda:0", 6e14, 3e12)])
    assert "cuda:0: 600 TFLOP/s in a matrix product" in "\n".join(printed(fast))
    assert table.rate_unit(fast) == ("TFLOP/s", 1e12)


def test_what_is_not_known_is_a_dash_and_what_is_no_number_is_said():
    line, _ = table.group(REPORT, [row(256, "numpy", memory=None, error=None)], ["numpy"])
    assert re.search(r"  not finite +-$", line)


def test_numbers_have_three_digits_and_small_shares_two():
    told = {0.01234: "0.0123", 1.2345: "1.23", 99.94: "99.9", 1234.5: "1234", 0: "0"}
    assert {value: table.digits(value) for value in told} == told
    shares = [table.share(part) for part in (1.06, 0.45, 0.012, 0.0994)]
    assert shares == ["106%", "45%", "1.2%", "9.9%"]


# ---- the picture ----


def test_each_backend_has_a_line_of_its_own_under_the_roof_of_its_device():
    axes = picture.draw(REPORT).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["roof of cpu", "roof of cuda:0", *TIMES]
    backends = [lines[name] for name in TIMES]
    for look in ("get_color", "get_marker"):
        assert len({getattr(line, look)() for line in backends}) == 3
    np.testing.assert_allclose(lines["numpy"].get_xdata(), [256, 512])
    rates = [CALL.flops(256) / 4e-3 / 1e9, CALL.flops(512) / 8e-3 / 1e9]
    np.testing.assert_allclose(lines["numpy"].get_ydata(), rates)
    np.testing.assert_allclose(lines["roof of cpu"].get_ydata(), [200, 200])
    assert list(lines["array-api"].get_xdata()) == [256]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([band.min(), band.max()], [rates[0] / 1.2, rates[1] / 0.9])


def test_nothing_in_the_picture_is_written_over_anything_else():
    lengths = [256, 300, 400, 512, 5000, 5200, 70000]
    call = replace(CALL, heads=128, key_heads=16, decode=True, kernel="somebody's own")
    crowded = changed(workload=call, rows=[row(length, "numpy") for length in lengths])
    figure = picture.draw(crowded)
    figure.savefig(BytesIO(), dpi=figure.dpi)  # which lays it out
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(boxes) >= 4
    for left, right in pairwise(boxes):
        assert left.x1 < right.x0
    heights = [label.get_window_extent() for label in axes.get_yticklabels(which="both")]
    heights = sorted((box for box in heights if box.height), key=lambda box: box.y0)
    for low, high in pairwise(heights):
        assert low.y1 < high.y0 or low == high
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 < axes.xaxis.label.get_window_extent().y0
    title = axes._left_title.get_window_extent()
    assert title.y0 >= axes.get_window_extent().y1
    assert title.x1 < figure.bbox.x1


@pytest.mark.parametrize("there", [{"rows": [OUT]}, {"rows": []}, {"rows": [], "peaks": []}])
def test_a_run_that_was_stopped_before_any_time_is_drawn_and_written_too(there):
    report = changed(**there, interrupted=True)
    picture.draw(report).savefig(BytesIO())
    assert BenchResults.from_dict(json.loads(report.as_json())) == report


# ---- comparing ----


def faster(times, machine=MACHINE, **changes):
    rows = [
        replace(r, seconds=r.seconds / times, low=r.low / times, high=r.high / times)
        if r.seconds
        else r
        for r in REPORT.rows
    ]
    return changed(rows=rows, machine=machine, **changes)


def test_two_runs_are_compared_row_by_row_and_what_differs_is_said_first():
    other = replace(MACHINE, processor="Processor 2", libraries={"numpy": "2.5.0"})
    lines = compare(REPORT, faster(2, other), "a.json", "b.json")
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert text.index("A: Processor <1>") < text.index("B: Processor 2") < text.index("length")
    assert "B: numpy 2.5.0" in text
    assert "threads" not in text
    assert re.search(r"^ +256  numpy +4\.00 +2\.00 +0\.500 +0\.375-0\.667$", text, re.MULTILINE)


BUSY = replace(MACHINE, load=1.9)
ONE = changed(rows=[REPORT.rows[0]])


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        # A range that holds 1 is no difference.
        (REPORT, faster(1.05), r"numpy +4\.00 +3\.81 +0\.952 +0\.714-1\.27 ~"),
        (REPORT, faster(1.05), "The same processor and libraries"),
        (changed(machine=BUSY), faster(2, BUSY), "machine is busy(.|\n)*machine is busy"),
        (REPORT, faster(2, interrupted=True), "B was interrupted"),
        (changed(interrupted=True), REPORT, "A was interrupted"),
        (
            REPORT,
            changed(rows=[replace(REPORT.rows[0], rounds=1, kernel="dense")]),
            r"numpy .* unknown: only one call  \(tiled and dense\)",
        ),
        (REPORT, ONE, "only A     torch:cuda at 256, 512; array-api at 256; numpy at 512"),
        (ONE, REPORT, "only B     torch:cuda at 256, 512"),
    ],
)
def test_what_makes_times_doubtful_or_alone_is_said(first, second, said):
    text = "\n".join(compare(first, second))
    assert re.search(said, text)
    assert text.count("interrupted") == first.interrupted + second.interrupted


def test_what_cannot_be_compared_is_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"different calls(.|\n)*A: .*causal(.|\n)*B: .*float16"):
        compare(REPORT, changed(workload=replace(CALL, dtype="float16")))
    with pytest.raises(ValueError, match=r"at the same length in both(.|\n)*numpy at 512"):
        compare(changed(rows=[REPORT.rows[0]]), changed(rows=[REPORT.rows[3]]))


# ---- the command ----

HASTE = ["bench", "--heads", "2", "--size", "8", "--seconds", "1"]


@pytest.fixture
def hasty(monkeypatch):
    """Let windows and rests take no time, and measure no roof."""
    monkeypatch.setattr(timing, "REST", 0.0)
    monkeypatch.setattr(measure, "REST", 0.0)
    monkeypatch.setattr(timing, "WINDOW", 0.0)
    monkeypatch.setattr(
        measure.peaks, "measure", lambda one, *_: Peak(one.name, one.hardware, 1e11, 1e10)
    )


@pytest.mark.slow
def test_one_command_prints_a_table_and_writes_every_file(tmp_path, capsys, hasty):
    files = {name: tmp_path / f"a.{name}" for name in ("json", "png")}
    written = ["--json", files["json"], "--plot", files["png"]]
    arguments = [*HASTE, "--backends", "numpy,array-api", "--lengths", "16:32", "--causal"]
    assert main([*arguments, *map(str, written)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(re.findall(r"^ +(?:16|32)  (?:numpy|array-api) ", captured.out, re.MULTILINE)) == 4
    report = read(files["json"])
    assert [(r.length, r.backend) for r in report.rows] == [
        (length, name) for length in (16, 32) for name in ("numpy", "array-api")
    ]
    assert report.workload == Workload(heads=2, key_heads=2, size=8, causal=True)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--compare", str(files["json"]), str(files["json"])]) == 0
    assert re.search(r"numpy .* 1\.00 .* ~", capsys.readouterr().out)


@pytest.mark.slow
def test_the_command_that_is_shown_repeats_the_run(tmp_path, hasty):
    file = tmp_path / "a.json"
    options = ["--lengths", "8,24", "--key-heads", "1", "--window", "3,none", "--decode"]
    options += ["--dtype", "float64", "--kernel", "dense", "--batch", "3"]
    assert main([*HASTE, "--backends", "numpy", *options, "--json", str(file)]) == 0
    first = read(file)
    again = [*shlex.split(first.command)[1:], "--json", str(file)]
    assert main(again) == 0
    assert read(file).workload == first.workload
    assert read(file).command == first.command
    assert [r.length for r in read(file).rows] == [8, 24]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt, 130, "interrupted after 1 rows"), (BrokenPipeError, 1, "")],
)
def test_what_ends_a_run_loses_no_row(error, code, said, tmp_path, capsys, hasty, monkeypatch):
    """An interrupt, or a reader that leaves."""
    file = tmp_path / "a.json"

    def leave(*arguments):
        raise error

    monkeypatch.setattr(table, "group", leave)
    assert main([*HASTE, "--backends", "numpy", "--lengths", "8:32", "--json", str(file)]) == code
    assert said in capsys.readouterr().err
    assert [r.length for r in read(file).rows] == [8]
    assert read(file).interrupted


@pytest.mark.slow
def test_a_file_that_fails_to_be_written_stops_no_other(tmp_path, hasty, capsys, monkeypatch):
    genuine = Path.write_text

    def write_text(self, *arguments, **options):
        if self.suffix == ".json":
            raise OSError(28, "No space left on device")
        return genuine(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    picture, file = tmp_path / "a.svg", tmp_path / "a.json"
    arguments = ["--lengths", "8", "--json", str(file), "--plot", str(picture)]
    assert main([*HASTE, "--backends", "numpy", *arguments]) == 1
    assert "--json" in capsys.readouterr().err
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_a_run_without_any_time_is_a_failure(hasty, monkeypatch, capsys):
    def start(*arguments):
        raise MemoryError("full")

    monkeypatch.setattr(measure, "_start", start)
    assert main([*HASTE, "--backends", "numpy", "--lengths", "8"]) == 1
    assert "MemoryError: full" in capsys.readouterr().out


@pytest.mark.slow
def test_a_backend_that_nobody_named_and_that_cannot_sits_out(hasty, capsys):
    assert main([*HASTE, "--lengths", "8", "--dtype", "float64"]) == 0
    captured = capsys.readouterr()
    assert "jax:cpu does not support this call and is left out" in captured.err
    assert re.search(r"^ +8  torch:cpu ", captured.out, re.MULTILINE)
    assert not re.search(r"^ +8  jax", captured.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--backends nunpy --json a.json", "did you mean 'numpy'?"),
        pytest.param(
            "--backends torch:tpu",
            "no device 'tpu' here; it has cpu",
            marks=pytest.mark.needs("torch"),
        ),
        ("--backends numpy,jax --dtype float64", "jax:cpu does not support this call"),
        ("--backends numpy --kernel sdpa", "it has small, tiled, dense"),
        ("--backends numpy --key-heads 3", "got 8 and 3"),
        ("--backends=", "a backend's name is missing"),
        ("--json /nowhere/a.json", "--json needs a file in an existing folder"),
        ("--plot a.png --json a.png", "name a different file for --json"),
        ("--plot a.txt", "--plot writes .png, .svg or .pdf; got a.txt"),
        ("--compare a b --json c.json", "--json has nothing to write"),
        ("--compare /nowhere/a /nowhere/b", "/nowhere/a cannot be read"),
        ("--lengths 8:2", "doubling from the first to the last, or 512,1000,2048; got '8:2'"),
        ("--lengths x", "got 'x'"),
        ("--lengths 0,4", "got '0,4'"),
        ("--batch 0", "a positive integer is required; got '0'"),
        ("--seconds nan", "a positive number of seconds is required; got 'nan'"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--window a", "a window is written 255,0 or none,0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
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


def test_without_matplotlib_the_command_that_installs_it_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", str(tmp_path / "a.png")]) == 2
    assert 'pip install "polyattn[plot]"' in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_a_file_that_may_not_be_written_is_an_error(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert main(["bench", "--json", str(tmp_path / "a.json")]) == 2
    assert "--json cannot write" in capsys.readouterr().err


def test_lengths_are_doubled_or_given():
    assert command._lengths("256:4096") == (256, 512, 1024, 2048, 4096)
    assert command._lengths("100:399") == (100, 200)
    assert command._lengths("2048,512,512") == (512, 2048)


def test_an_interruption_before_the_first_row_leaves_older_results(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("polyattn.bench.measure.measure_peaks", interrupted)
    file = tmp_path / "a.json"
    file.write_text("older", encoding="utf-8")
    assert main(["bench", "--backends", "numpy", "--lengths", "8", "--json", str(file)]) == 130
    assert "interrupted after 0 rows" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "older"
