"""Run the cases of the suite without pytest, and find which features cause a failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from polyattn._base.streams import progress
from polyattn._core.call.features import DTYPES
from polyattn._dispatch import registry
from polyattn._dispatch.registry import ARRAY_API
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.frames import call_named
from polyattn.conformance.checks.gradients import ALL_DERIVATIVES, BY_LIBRARY, Derivative
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.conformance.functions.interpretations import interpret
from polyattn.conformance.reference.tolerance import exact
from polyattn.conformance.report.report import (
    CHECKED_ROWS,
    EXTREME,
    ROWS,
    Failure,
    Report,
    Section,
    rows_of,
)
from polyattn.conformance.selection import LEFT_OUT, chosen, states

#: The checks of a plugin as a whole, which take its name.
PLUGIN = {
    "loading the plugin's spec imports no array library": promises.check_import_hygiene,
    "arrays keep the declared dtypes": promises.check_dtypes_are_kept,
}


#: The promises by their rows.
CHECKED = {promise.row: promise for promise in promises.PROMISES.values()}


class CheckStep(NamedTuple):
    """A case or a promise of a kernel to check."""

    section: Section
    variant: KernelVariant | None  # None for the plugin as a whole
    what: Case | str
    few: bool = False  # whether to check derivatives with few cases


def steps(
    targets: Iterable[Target],
    cases: Mapping[str, Case] = CASES,
    kernels: Sequence[str] = (),
) -> list[CheckStep]:
    """Return the steps of a report; raise if a backend has no kernel of a name."""
    result: list[CheckStep] = []
    for target in targets:
        section = Section(target, target.variants(kernels))
        for variant in section.kernels:
            if variant.kernel.compiles:
                of_cases = states(target, variant, cases)
                work = [case for case, state in of_cases.items() if state != LEFT_OUT]
            else:
                work = chosen(target, variant, cases=cases)
            every: list[Case | str] = [*work, *CHECKED_ROWS]
            result += [CheckStep(section, variant, what, cases is not CASES) for what in every]
        if target.backend != ARRAY_API:
            result += [CheckStep(section, None, what) for what in PLUGIN]
    return result


def run(
    work: Sequence[CheckStep], bar: Callable[[Iterable[CheckStep]], Iterable[CheckStep]] = iter
) -> Report:
    """Run the steps; an interrupt ends them and keeps the results so far."""
    report = Report(total=len(work))
    failed: list[_Failed] = []
    with suppress(KeyboardInterrupt):
        for section, variant, what, few in bar(work):
            if section not in report.sections:
                report.sections.append(section)
            where = f"{section.target}, {variant or 'plugin'}: {what}"
            failed += call_named(where, _do, section, variant, what, few)
            report.done += 1
    for section in report.sections:
        _charge(section, [f for f in failed if f.section is section])
        _note_what_does_not_apply(section)
    return report


def _do(
    section: Section, variant: KernelVariant | None, what: Case | str, few: bool
) -> list[_Failed]:
    """Do a step, and return the failures that are to be charged to features."""
    if isinstance(what, Case):
        return _do_case(section, variant, what) if variant else []
    try:
        if variant is None:
            PLUGIN[what](section.target.backend.partition(":")[0])
            section.plugin[what] = "yes"
        elif what in ALL_DERIVATIVES:
            _do_derivative(section, variant, ALL_DERIVATIVES[what], few)
        else:
            applies = CHECKED[what].applies(section.target, variant)
            if applies:
                CHECKED[what].check(section.target, variant)
            section.cell(what, variant).note = "holds" if applies else CHECKED[what].otherwise
    except Exception as error:
        _fail(section, variant, what, error)
    return []


class _Failed(NamedTuple):
    section: Section
    variant: KernelVariant
    case: Case
    features: frozenset[str]  # that the failure may be due to
    text: str


def _do_case(section: Section, variant: KernelVariant, case: Case) -> list[_Failed]:
    try:
        outcome = checks.check_case(section.target, variant, case)
    except Exception as error:
        text = _text(error)
        about = case.features
        if text.startswith(f"{case}: logsumexp"):  # and not the output
            about = frozenset({"logsumexp"})
        return [_Failed(section, variant, case, about, text)]
    for row in rows_of(case):
        section.cell(row.name, variant).add(case.name, outcome.output, outcome.refusal)
    if outcome.logsumexp is not None and case.topic != EXTREME:
        section.cell("logsumexp", variant).add(case.name, outcome.logsumexp, None)
    return []


def _fail(section: Section, variant: KernelVariant | None, name: str, error: Exception) -> None:
    if variant is None:
        section.plugin[name] = "no"
    else:
        section.cell(name, variant).failures.append(_text(error))
    section.failures.append(Failure(str(variant or ""), name, _text(error)))


def _do_derivative(
    section: Section, variant: KernelVariant, derivative: Derivative, few: bool
) -> None:
    name, target = derivative.name, section.target
    cell, compiles = section.cell(name, variant), variant.kernel.compiles
    if not derivative.is_offered(target, variant):
        cell.note = derivative.otherwise
        return
    if derivative is BY_LIBRARY and compiles:
        cell.note = "not checked"
        return
    for case in chosen(target, variant, name, few=compiles or few):
        try:
            deviations = derivative.check(target, variant, case) or {}
        except Exception as error:
            _fail(section, variant, name, error)
            continue
        for off in deviations.values():
            cell.add(case.name, off, None)
    if not cell.agreed + len(cell.failures):
        cell.note = "none supported"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"raised {error!r}"


def _charge(section: Section, failed: list[_Failed]) -> None:
    """Charge each failing case to the smallest set of features that fails.

    If the plain formula is wrong, or softcap without bias, then a case of softcap and bias shows
    nothing about bias.
    """
    failed.sort(key=lambda f: len(f.features))
    sets: dict[KernelVariant, set[frozenset[str]]] = defaultdict(set)
    for f in failed:
        sets[f.variant].add(f.features)
    explained: set[tuple[KernelVariant, frozenset[str]]] = set()
    for _, variant, case, about, text in failed:
        within = [features for features in sets[variant] if features <= about]
        fewest = [f for f in within if not any(other < f for other in within)]
        blamed = frozenset[str]().union(*fewest) or frozenset({"plain"})
        if (variant, blamed) not in explained:
            meaning = _as_if(section.target, variant, case)
            if meaning is not None:
                explained.add((variant, blamed))
                text += meaning
        for row in ROWS:
            if row not in rows_of(case) and row.name not in blamed:
                continue
            cell = section.cell(row.name, variant)
            if row.group != "features" or row.name in blamed:
                cell.failures.append(text)
            else:
                cell.elsewhere += 1
        section.failures.append(Failure(str(variant), ", ".join(sorted(blamed)), text))


def _as_if(target: Target, variant: KernelVariant, case: Case) -> str | None:
    """Return which other meaning a wrong result agrees with; None if there is no result."""
    try:
        output = target.back(target.call(case, variant.for_case(case)))
        if output.shape != exact(case).output.shape:
            return None
        meaning = interpret(case, output)
    except Exception:
        return None
    return f"; as if {meaning}" if meaning else ""


def _note_what_does_not_apply(section: Section) -> None:
    for kernel in section.target.elsewhere:
        kinds = ", ".join(sorted(kernel.devices or ())) or "no device with these libraries"
        section.plugin[f"the kernel {kernel.name}"] = f"not checked: it runs on {kinds}"
    for variant in section.kernels:
        for dtype in DTYPES:
            if dtype not in section.target.dtypes:
                section.cell(dtype, variant).note = "not supported"
        if "poison_safe" not in variant.kernel.promises:
            section.cell("NaN and infinity", variant).note = "not declared"
        if "logsumexp" not in variant.kernel.features:
            section.cell("logsumexp", variant).reasons["it does not compute logsumexp"] = 1
            section.cell("logsumexp", variant).refused = 1


def default_targets(library: str | None) -> list[Target]:
    """Return all installed backends, or ``array-api`` if a library is named."""
    if library is not None:
        return [Target(registry.ARRAY_API, library)]
    return [Target(name) for name in registry.names() if registry.load(name) is None]


def described(work: Iterable[CheckStep]) -> Iterator[CheckStep]:
    """Yield the steps under a progress bar that names each."""
    bar = progress(list(work), unit="case")
    for step in bar:
        bar.set_description(f"{step.section.target} {step.variant or step.what}", refresh=False)
        yield step
