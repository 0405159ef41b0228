"""The planted mistakes: one that does not run is one failure among the others."""

import sys

import mutations
import pytest


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Return a function that plants three mistakes without copies of the package."""

    def found_by(mutation, hint, copies):
        if mutation.name == "raises":
            raise ImportError("no module")
        return "plain"

    file, old = "tests/mutations.py", '"""One planted mistake'
    texts = {"raises": '"""A mistake', "is found": '"""A mistake', "no syntax": 'import = """'}
    rows = tuple(mutations.Mutation(name, file, ((old, new),)) for name, new in texts.items())
    monkeypatch.setattr(mutations, "MUTATIONS", rows)
    monkeypatch.setattr(mutations, "FOUND", tmp_path / "found.json")
    monkeypatch.setattr(mutations, "found_by", found_by)
    monkeypatch.setattr(mutations, "copy_to", lambda folder: folder)

    def planted(*options):
        monkeypatch.setattr(sys, "argv", ["mutations", *options])
        return mutations.main()

    return planted


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
def test_a_mistake_that_does_not_run_is_one_failure(planted, capsys, options, code, lines):
    assert planted(*options) == code
    said = capsys.readouterr().out
    for line in lines:
        assert line in said
