"""Run ``polyattn check --callable`` and ``polyattn check --subject``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from polyattn._base.streams import progress, show
from polyattn.conformance.cases.case import Case
from polyattn.conformance.functions import check as callables
from polyattn.conformance.functions import repro, same_bits, subjects
from polyattn.conformance.functions.report import Row, as_dict, lines, summarise
from polyattn.conformance.report import files


def check(options: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Print the results of functions; return 1 if one does not agree, else 0."""
    option = "--callable" if options.subject is None else "--subject"
    others = {"a backend": options.backends, "--kernel": options.kernel}
    if options.subject is not None:
        unused = {"--callable": "callable", "--library": "library", "--repro": "repro"}
        others |= {name: [getattr(options, field)] for name, field in unused.items()}
    for name, given in others.items():
        if values := [str(x) for x in given if x]:
            raise ValueError(f"{option} takes the place of {name}; got {' '.join(values)}")
    bar = partial(progress, unit="case")
    make_script: files.MakeScript | None = None
    if options.subject is None:
        sys.path.append("")  # the current folder last: no file in it replaces an installed module
        function = callables.load(options.callable)
        target = callables.target_of(options.callable, options.library)
        if options.same_bits:
            counts = same_bits.rows_with_other_bits(function, target)
            show(files.as_json(counts) if options.json else "\n".join(same_bits.lines(counts)))
            return int(any(not isinstance(one, str) and one[0] for one in counts.values()))
        rows = summarise(function, cases, target.to, target.back, bar)
        if not rows:
            raise ValueError("--case: no function of others has these options, which are our own")
        found = {f"{options.callable} on arrays of {target.library}": rows}
        failing = [n for row in rows for n, f in row.findings.items() if f.status in _FAILING]
        subject = repro.Subject(function, options.callable, target)
        make_script = partial(repro.script, subject, failing) if failing else None
    else:
        named = {name: subjects.subject_of(name) for name in options.subject.split(",")}
        found = {}
        for name, peer in named.items():
            versions = ", ".join(map(" ".join, peer.versions.items()))
            found[f"{name} ({versions})"] = subjects.measure(peer, cases, bar)
    plain = {name: [as_dict(row) for row in rows] for name, rows in found.items()}
    # Of one function its rows, of subjects those of each.
    json = files.as_json(plain if options.subject else next(iter(plain.values())))
    files.give(json if options.json else _text(found), options.repro, make_script)
    return int(any(row.differing for rows in found.values() for row in rows))


_FAILING = (callables.DIFFERS, callables.RAISES)


def _text(found: dict[str, list[Row]]) -> str:
    """Return the results of functions as text."""
    text = []
    for name, rows in found.items():
        differ = sum(row.differing for row in rows)
        end = f"  {differ or 'no'} case{'s' * (differ != 1)} differ{'s' * (differ == 1)}"
        text += [name, "", *lines(rows), end]
    return "\n".join(text)
