"""The attention functions of other libraries, by name, each checked in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from polyattn._base.arguments import did_you_mean
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks.autodiff import VJP
from polyattn.conformance.checks.target import Target
from polyattn.conformance.functions.check import RAISES, Finding
from polyattn.conformance.functions.report import Row, grouped, planned

#: After so many seconds without an answer, a call counts as one that ends its process.
PATIENCE = 120


class Peer(NamedTuple):
    """An attention function of another library."""

    title: str
    needs: str  # the distributions, the library itself first
    setup: str  # Python code that defines it as `attend`
    arrays: str = "numpy"  # the module that makes its arrays
    # What is set before the library is imported.
    environment: dict[str, str] = {}  # noqa: RUF012 -- nobody writes to it

    @property
    def versions(self) -> dict[str, str]:
        """The installed versions of what it needs; raises ImportError if one is not installed."""
        return {name: metadata.version(name) for name in self.needs.split()}

    @property
    def is_differentiable(self) -> bool:
        """Whether the library of its arrays can differentiate."""
        return self.arrays.partition(".")[0] in VJP


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: The subjects by name.
SUBJECTS = {name: Peer(**fields) for name, fields in _TABLE.items()}


def subject_of(name: str) -> Peer:
    """Return a subject by its name; raise ValueError if there is none, or it is not installed."""
    if name not in SUBJECTS:
        known = did_you_mean(name, SUBJECTS) or f"; the subjects are {', '.join(SUBJECTS)}"
        raise ValueError(f"there is no subject {name!r}{known}")
    try:
        SUBJECTS[name].versions  # noqa: B018 -- for what it raises
    except ImportError as error:
        needs = SUBJECTS[name].needs
        raise ValueError(f"{name} needs pip install {needs}: {error}") from error
    return SUBJECTS[name]


def measure(
    subject: Peer, cases: Sequence[Case], bar: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> list[Row]:
    """Check a subject with cases of `CASES`, in a process of its own; a crash is a finding."""
    plan = planned(cases, subject.is_differentiable)
    answers = _answers(subject, [case.name for case in cases], len(plan))
    return grouped(plan, [next(answers) for _ in bar(plan)])


def _answers(subject: Peer, cases: Sequence[str], count: int) -> Iterator[Finding]:
    """Yield what is found in each case; start again behind one that ends the process."""
    spawn, done = multiprocessing.get_context("spawn"), 0
    while done < count:
        here, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_work, args=(there, subject, cases, done), daemon=True)
        process.start()
        there.close()
        end = f"no answer within {PATIENCE} s"
        try:
            while here.poll(PATIENCE):
                yield here.recv()
                done += 1
        except EOFError:
            process.join()
            code = process.exitcode or 0
            end = signal.Signals(-code).name if code < 0 else f"exit {code}"
        finally:
            process.kill()
            process.join()
        if done < count:
            yield Finding(RAISES, error=f"the process ended: {end}")
            done += 1


def _work(pipe: Any, subject: Peer, cases: Sequence[str], first: int) -> None:
    """Send what is found in each case from the first on."""
    names = dict[str, Any]()
    os.environ.update(subject.environment)
    target = Target("array-api", subject.arrays)
    exec(subject.setup, names)
    plan = planned([CASES[case] for case in cases], subject.is_differentiable)
    for case, _, check in plan[first:]:
        pipe.send(check(names["attend"], case, target.to, target.back))
