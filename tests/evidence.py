"""Measure what each test costs, and find what no cheaper one shows.

`make evidence` runs the tests with this module as a plugin of pytest, which writes the processor
time of each into a folder, and with coverage, which adds the lines that each one runs. Then
`python tests/evidence.py FOLDER` adds the planted mistakes that each one finds, and prints the
tests that run no line and find no mistake that cheaper ones do not: those to delete, to join to
another, or to mark as slow. What a test runs in other processes is not seen, nor what it shows by
its values.
"""

import argparse
import os
from collections import defaultdict
from pathlib import Path

import mutations
import pytest


def pytest_addoption(parser):
    """Let the command line name the folder."""
    parser.addoption("--evidence", type=Path, help="the folder for the time of each test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Write down the processor time of a test, in this process and in those that it starts."""
    before = os.times()
    result = yield
    spent = sum(os.times()[:4]) - sum(before[:4])
    with (item.config.option.evidence / f"{os.getpid()}.tsv").open("a", encoding="utf-8") as file:
        file.write(f"{spent:.4f}\t{item.nodeid}\n")
    return result


def seconds(folder):
    """Return the processor time of each test in seconds, by its name."""
    times = {}
    for file in folder.glob("*.tsv"):
        for row in file.read_text(encoding="utf-8").splitlines():
            spent, test = row.split("\t", 1)
            times[test] = float(spent)
    return times


def lines_run(folder, tests):
    """Return the lines that each test runs, as (file, line) pairs."""
    from coverage import CoverageData

    lines = defaultdict(set)
    data = CoverageData(str(folder / "coverage"))
    data.read()
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                test = context.rpartition("|")[0]
                if test in tests:
                    lines[test].add((file, line))
    return lines


def mistakes_found():
    """Return the mistakes that each test finds, by its name."""
    found = defaultdict(set)
    for mistake in mutations.read_table():
        found[mistake.found_by].add(mistake.name)
    return found


def by_function(table):
    """Return a table of numbers or sets by functions, from one by tests."""
    joined = {}
    for test, entry in table.items():
        function = test.partition("[")[0]
        before = joined.get(function, type(entry)())
        joined[function] = before | entry if isinstance(entry, set) else before + entry
    return joined


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what a run of the tests has written")
    parser.add_argument("--functions", action="store_true", help="by test functions, not by tests")
    parser.add_argument("--all", action="store_true", help="those that show something too")
    options = parser.parse_args()
    times = seconds(options.folder)
    lines, found = lines_run(options.folder, times), mistakes_found()
    if options.functions:
        times, lines, found = by_function(times), by_function(lines), by_function(found)
    known, known_mistakes = set(), set()
    print("seconds\tlines\tnew\tmistakes\ttest")
    for test in sorted(times, key=times.get):
        new = lines.get(test, set()) - known
        mistakes = found.get(test, set()) - known_mistakes
        known |= new
        known_mistakes |= mistakes
        if options.all or not (new or mistakes):
            row = f"{times[test]:.2f}", len(lines.get(test, ())), len(new), len(mistakes), test
            print(*row, sep="\t")


if __name__ == "__main__":
    main()
