"""The planted mistakes: one that does not run is one failure among the others."""

import sys

import mutations
import pytest

FILE, OLD = "tests/mutations.py", '"""One planted mistake'
TEXTS = {"raises": '"""A mistake', "is found": '"""A mistake', "no syntax": 'import = """'}


@pytest.mark.parametrize(
    ("options", "code", "lines"),
    [
        (["--check"], 2, ["no syntax: invalid syntax (mistake, line"]),
        (["is found"], 0, ["[1/1] is found: plain", "1 of 1 mistakes are found"]),
        (["is found", "raises"], 1, ["raises: DID NOT RUN: ImportError('no module')", "1 of 2"]),
        ([], 2, ["no syntax: invalid syntax", "is found: plain", "raises: DID NOT RUN", "1 of 2"]),
    ],
    ids=["--check", "found", "does not run", "does not compile"],
)
def test_a_mistake_that_does_not_run_is_one_failure(
    options, code, lines, monkeypatch, tmp_path, capsys
):
    def found_by(mutation, hint, copies):
        if mutation.name == "raises":
            raise ImportError("no module")
        return "plain"

    rows = tuple(mutations.Mutation(name, FILE, ((OLD, new),)) for name, new in TEXTS.items())
    replaced = {"MUTATIONS": rows, "FOUND": tmp_path / "found.json", "found_by": found_by}
    for name, value in (replaced | {"copy_to": lambda folder: folder}).items():
        monkeypatch.setattr(mutations, name, value)
    monkeypatch.setattr(sys, "argv", ["mutations", *options])
    assert mutations.main() == code
    said = capsys.readouterr().out
    assert all(line in said for line in lines), said
