"""List the cases that a kernel is tried with, for the suite and for ``polyattn check --list``.

There are three amounts. Each is a part of the one before:

- *all*: the cases of a catalogue, `CASES` or those of a derivative;
- *essential*: `ESSENTIAL`, one case for each feature and corner, by ``--quick`` and in a suite that
  is not thorough;
- *few*: about fifteen of them that together need every feature, dtype and topic which the kernel
  takes, where more cases would take long, or show what another suite shows (`why_few`).

Cases that the library or the kernel rules out beforehand belong to none: a dtype that is lacking, a
promise that is not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from polyattn._base.arguments import did_you_mean
from polyattn._base.text_table import table
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.checks.cases import aspects, cases_for, takes
from polyattn.conformance.checks.gradients import ALL_DERIVATIVES, DERIVATIVES, Taken
from polyattn.conformance.checks.lazy import is_lazy
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.plugin import undeclared

RUNS, REFUSED, LEFT_OUT, RULED_OUT = "runs", "refused", "left out", "-"


def named(names: Iterable[str]) -> dict[str, Case]:
    """Return the cases of these names, or raise."""
    for name in names:
        if name not in CASES:
            raise ValueError(f"--case: there is no case {name!r}{did_you_mean(name, CASES)}")
    return {name: CASES[name] for name in names}


def chosen(
    target: Target,
    variant: KernelVariant,
    test: str = "case",
    cases: Mapping[str, Case] = CASES,
    *,
    few: bool = False,
) -> list[Case]:
    """Return the cases of a test of a kernel, all or few of them.

    The test is ``"case"``, ``"lazy"`` or a derivative, which has cases of its own.
    """
    is_taken: Taken = takes
    if test in ALL_DERIVATIVES:
        derivative = ALL_DERIVATIVES[test]
        is_taken = derivative.is_taken
        cases = derivative.cases if derivative.is_offered(target, variant) else {}
    elif test == "lazy":
        cases = ESSENTIAL if is_lazy(target) else {}
    applicable = cases_for(target, variant, cases)
    if few:
        return covering(target, variant, applicable, is_taken)
    if test == "case":  # in those that it does not support, the kernel must raise
        return applicable
    if test in DERIVATIVES:  # running a case is cheaper than asking
        return [x for x in applicable if not undeclared(variant.kernel, x.features | {test})]
    return [case for case in applicable if is_taken(target, variant, case)]


def why_few(target: Target, variant: KernelVariant, test: str, *, thorough: bool = True) -> str:
    """Return why few cases will do for a test of the suite, or ""."""
    kernel, is_own = variant.kernel, variant.kernel in target.own
    if kernel.compiles:
        return "it compiles each call"
    if target.own and not is_own:
        return "it is one of the core's, which array-api tries"
    if kernel.tile is not None and not (variant.small_tiles or is_own):
        return "one tile holds all scores, as in dense"
    if test in DERIVATIVES and variant.small_tiles and is_own:
        return "a derivative in small tiles takes a second"
    if thorough:
        return ""
    if test == "case" and is_lazy(target):
        return "the test of lazy calls tries the others"
    if test in ALL_DERIVATIVES or variant.small_tiles:
        return "the library is slow"
    return ""


def covering(
    target: Target,
    variant: KernelVariant,
    cases: Iterable[Case],
    is_taken: Taken = takes,
) -> list[Case]:
    """Return few supported cases that cover every feature, dtype and topic.

    Each is the one that adds most to those before it.
    """
    covers = {case: aspects(case) for case in cases if _may_take(target, variant, case)}
    wanted: set[str] = set().union(*covers.values())
    few: list[Case] = []
    while wanted and covers:
        best = max(covers, key=lambda case: len(covers[case] & wanted))
        added = covers.pop(best) & wanted
        if not added:
            break
        if is_taken(target, variant, best):
            few.append(best)
            wanted -= added
    return few


def _may_take(target: Target, variant: KernelVariant, case: Case) -> bool:
    """Return whether nothing speaks against a case that is known without the library's arrays."""
    kernel = variant.kernel
    # Those of the core refuse the same calls on every library.
    return case.features <= kernel.features and (
        kernel in target.own or not kernel.reasons_against(case.problem)
    )


# ---- the list of ``polyattn check`` ------------------------------------------------------------


def states(target: Target, variant: KernelVariant, cases: Mapping[str, Case]) -> dict[Case, str]:
    """Return what ``polyattn check`` does with each case that is not ruled out for a kernel."""
    applicable = few = chosen(target, variant, cases=cases)
    if variant.kernel.compiles:
        few = chosen(target, variant, cases=cases, few=True)

    def state(case: Case) -> str:
        if not takes(target, variant, case):
            return REFUSED
        return RUNS if case in few else LEFT_OUT

    return {case: state(case) for case in applicable}


def lines(
    targets: Iterable[Target], cases: Mapping[str, Case], kernels: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the list of each backend: a row for each case, a column for each kernel."""
    for target in targets:
        variants = target.variants(kernels)
        columns = [states(target, variant, cases) for variant in variants]
        everything = dict.fromkeys(case for column in columns for case in column)
        rows = [("case", "essential", *map(str, variants), "about")]
        for case in everything:
            about = case.topic if case.topic != "formula" else ", ".join(sorted(case.features))
            essential = "essential" if case.name in ESSENTIAL else ""
            ran = (column.get(case, RULED_OUT) for column in columns)
            rows.append((case.name, essential, *ran, about or "plain"))
        yield f"{target}: {len(everything)} cases"
        yield from table(rows)
        yield "  refused: the kernel must raise.  -: it lacks the dtype, or does not promise this."
        for variant, column in zip(variants, columns, strict=True):
            if LEFT_OUT in column.values():
                yield f"  {variant} runs few cases: {why_few(target, variant, 'case')}"
