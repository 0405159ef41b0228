"""The planted mistakes: one that does not run is one failure among the others."""

import sys
import tomllib

import mutations
import pytest

ROW = """
[[test]]
name = "{}"
file = "tests/mutations.py"
changes = [['\"""One planted mistake', '{}']]
"""
TEXTS = {"raises": '"""A mistake', "is found": '"""A mistake', "no syntax": 'import = """'}


@pytest.mark.parametrize(
    ("options", "code", "lines"),
    [
        (["--check"], 2, ["no syntax: invalid syntax (mistake, line"]),
        (["is found"], 0, ["[1/1] is found: a test", "1 of 1 mistakes are found"]),
        (["is found", "raises"], 1, ["raises: DID NOT RUN: ImportError('no module')", "1 of 2"]),
        ([], 2, ["no syntax: invalid syntax", "is found: a test", "raises: DID NOT RUN", "1 of 2"]),
    ],
    ids=["--check", "found", "does not run", "does not compile"],
)
def test_a_mistake_that_does_not_run_is_one_failure(
    options, code, lines, monkeypatch, tmp_path, capsys
):
    def finder_of(mutation, copies, cheap):
        if mutation.name == "raises":
            raise ImportError("no module")
        return "a test"

    table = tmp_path / "mutations.toml"
    table.write_text("".join(ROW.format(*row) for row in TEXTS.items()))
    replaced = {"TABLE": table, "finder_of": finder_of, "copy_to": lambda folder: folder}
    replaced["cheap_tests"] = set
    for name, value in replaced.items():
        monkeypatch.setattr(mutations, name, value)
    monkeypatch.setattr(sys, "argv", ["mutations", *options])
    assert mutations.main() == code
    said = capsys.readouterr().out
    assert all(line in said for line in lines), said
    rows = tomllib.loads(table.read_text())["test"]
    found = {} if "--check" in options else {"is found": "a test"}
    assert {row["name"]: row["found_by"] for row in rows if "found_by" in row} == found
