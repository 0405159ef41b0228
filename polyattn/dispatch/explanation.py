"""The decision as a value: what would run, why, and why each other candidate would not.

It prints as a table that a person can read and a bug report can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.call.describe import Call
from polyattn.call.problem import Problem
from polyattn.text_table import table

__all__ = ["Candidate", "Explanation"]


@dataclass(frozen=True)
class Candidate:
    """A kernel of a backend, or a backend as a whole, and what was decided of it.

    Attributes
    ----------
    backend : str
        The backend, with its device if that was asked for.
    kernel : str or None
        The kernel; None if the backend was refused before its kernels were looked at.
    status : str
        ``"chosen"``; ``"next"`` for one that could run and stands behind; ``"on request"`` for one
        that runs only if ``kernel=`` names it; ``"refused"``; or ``"unavailable"`` for a backend
        that cannot be loaded here.
    reasons : tuple of str
        Why it was refused, or waits.
    remark : str or None
        What the kernel says of how it would run.
    """

    backend: str
    kernel: str | None
    status: str
    reasons: tuple[str, ...] = ()
    remark: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What `attention` would do with a call.

    Attributes
    ----------
    call : Call
        What was given.
    problem : Problem
        Its facts.
    source : str
        What selected the backends: an argument, a context, the environment, or the arrays.
    candidates : tuple of Candidate
        All of them, in the order in which they were asked.
    """

    call: Call
    problem: Problem
    source: str
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that would run, or None if none can."""
        return next((c for c in self.candidates if c.status == "chosen"), None)

    @property
    def unavailable(self) -> bool:
        """Whether no backend that was asked for could so much as be loaded."""
        return all(c.status == "unavailable" for c in self.candidates)

    def as_dict(self) -> dict[str, object]:
        """Return the decision in plain types, for JSON."""
        return {
            **{name: list(facts.shape) for name, facts in self.call.operands()},
            "dtype": self.problem.dtype,
            "library": self.problem.library,
            "device": self.problem.device,
            "needs": sorted(self.problem.features),
            "values": {name: repr(value) for name, value in self._values().items()},
            "selected_by": self.source,
            "chosen": self.chosen
            and {"backend": self.chosen.backend, "kernel": self.chosen.kernel},
            "candidates": [
                {
                    "backend": c.backend,
                    "kernel": c.kernel,
                    "status": c.status,
                    "reasons": list(c.reasons),
                    "remark": c.remark,
                }
                for c in self.candidates
            ],
        }

    def _values(self) -> dict[str, object]:
        """Return the values that stand for steps, by what each stands for."""
        problem = self.problem
        given = {
            "mask": problem.mask_spec,
            "score_mod": problem.score_spec,
            "similarity": problem.similarity_spec,
            "scale": problem.score_norm,
            "normalizer": problem.normalizer,
        }
        return {name: value for name, value in given.items() if value is not None}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the lines that it prints as: the call, who selected, and each candidate."""
        call, problem = self.call, self.problem
        where = f" on {problem.device}" if problem.device else ""
        shapes = ", ".join(f"{name} {facts.shape}" for name, facts in call.operands())
        needs = ", ".join(sorted(problem.features))
        cells = [
            (
                c.backend,
                c.kernel or "",
                "CHOSEN" if c.status == "chosen" else c.status,
                "; ".join(c.reasons) or c.remark or "",
            )
            for c in self.candidates
        ]
        values = [f"{name + ': ':<11}{value!r}" for name, value in self._values().items()]
        return [
            f"attention: {shapes}, {problem.dtype}, {problem.library}{where}",
            f"needs:     {needs or 'nothing beyond the plain formula'}",
            *values,
            f"selected by {self.source}",
            *table(cells),
        ]
