"""The decision about a call: which kernel would run, and the reasons against the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from polyattn._base.text_table import paragraph, table
from polyattn._base.tracing import shape_text
from polyattn._core.call.facts import Call
from polyattn._core.call.options import OPTIONS
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression


class Candidate(NamedTuple):
    """A kernel of a backend, or a backend refused as a whole, and its status."""

    backend: str  # with its device if one was requested
    kernel: str | None  # None if the backend was refused before its kernels were examined
    # "chosen"; "next" if it could run but another comes first; "on request" if it runs only when
    # kernel= names it; "not allowed" if it is of another distribution, and nobody allowed it;
    # "refused"; or "unavailable" if the backend cannot be loaded here.
    status: str
    reasons: tuple[str, ...] = ()  # why it cannot run, or may not
    on_request: str | None = None  # why another kernel is better, although this one can run
    remark: str | None = None  # the kernel's note about how it would run
    origin: str | None = None  # the distribution that it comes from, if not its backend's own

    @property
    def text(self) -> str:
        """The reasons against it, why another is better, and the remark."""
        slower = self.on_request
        if slower and self.status != "on request":
            slower = f"only on request: {slower}"
        return "; ".join(filter(None, (*self.reasons, slower, self.remark)))

    @property
    def title(self) -> str:
        """The kernel, with the distribution that it comes from."""
        return f"{self.kernel} ({self.origin})" if self.origin else self.kernel or ""


def arrays_of(call: Call, problem: Problem) -> str:
    """Return the arrays of a call in words."""
    where = f" on {problem.device}" if problem.device else ""
    shapes = ", ".join([f"{name} {shape_text(facts.shape)}" for name, facts in call.operands()])
    return f"{shapes}, {problem.dtype}, {problem.library}{where}"


def needs_of(problem: Problem) -> str:
    """Return what a call needs of a kernel in words."""
    return ", ".join(sorted(problem.features)) or "nothing beyond the plain formula"


@dataclass(frozen=True, repr=False)
class Explanation:
    """The kernel that `attention` would run for a call, and the reasons against the others.

    It prints as a table.

    Attributes
    ----------
    call : Call
        The arguments of the call, described by shapes, dtypes and devices.
    problem : Problem
        The call as the kernels get it.
    source : str
        The source of the choice of backends: an argument, a context, the environment or the arrays.
    candidates : tuple of Candidate
        All candidates, in the order in which they were tried.
    autocast : tuple of str
        The arguments that torch.autocast casts to the dtype of the call.
    notes : tuple of str
        Facts about the call that are easily overlooked, whatever kernel runs.
    """

    call: Call
    problem: Problem
    source: str
    candidates: tuple[Candidate, ...]
    autocast: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that would run, or None if none can."""
        return next((c for c in self.candidates if c.status == "chosen"), None)

    @property
    def unavailable(self) -> bool:
        """Whether every requested backend failed to load."""
        return all(c.status == "unavailable" for c in self.candidates)

    def as_dict(self) -> dict[str, object]:
        """Return the decision in plain types, for JSON."""
        return {
            **{name: list(facts.shape) for name, facts in self.call.operands()},
            "dtype": self.problem.dtype,
            "autocast": list(self.autocast),
            "notes": list(self.notes),
            "library": self.problem.library,
            "device": self.problem.device,
            "needs": sorted(self.problem.features),
            "values": {name: repr(value) for name, value in self._values().items()},
            "selected_by": self.source,
            "chosen": self.chosen
            and {"backend": self.chosen.backend, "kernel": self.chosen.kernel},
            "candidates": [c._asdict() | {"reasons": list(c.reasons)} for c in self.candidates],
        }

    def _values(self) -> dict[str, object]:
        """Return the expressions that replace steps of the formula, by option name."""
        given = [(name, getattr(self.call, name, None)) for name in OPTIONS]
        return {name: value for name, value in given if isinstance(value, Expression)}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        runs = f"{self.chosen.backend} {self.chosen.kernel}" if self.chosen else "nothing"
        others = len(self.candidates) - bool(self.chosen)
        return f"<Explanation: {runs} runs; print it for the reasons against {others} others>"

    def lines(self) -> list[str]:
        """Return the printed lines: the call, what selected the backends, and each candidate."""
        head = [part for line in self._head() for part in paragraph(line, " " * 11)]
        return [*head, *table(self._cells())]

    def _head(self) -> list[str]:
        call, problem = self.call, self.problem
        values = [f"{name + ': ':<11}{value!r}" for name, value in self._values().items()]
        cast = [f"autocast:  {', '.join(self.autocast)} to {problem.dtype}"] * bool(self.autocast)
        return [
            f"attention: {arrays_of(call, problem)}",
            *cast,
            f"needs:     {needs_of(problem)}",
            *values,
            *[f"note:      {note}" for note in self.notes],
            f"selected by {self.source}",
        ]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (c.backend, c.title, "CHOSEN" if c.status == "chosen" else c.status, c.text)
            for c in self.candidates
        ]
