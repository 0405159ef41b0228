"""What was measured, as a value: it goes to JSON and comes back the same."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyattn.bench.machine import Machine
from polyattn.bench.peaks import Peak, roof, roofs
from polyattn.bench.timing import Spread
from polyattn.bench.workload import Workload

__all__ = ["Report", "Row", "read"]

FORMAT, VERSION = "polyattn bench", 1


@dataclass(frozen=True)
class Row:
    """A backend at a length.

    Attributes
    ----------
    length : int
        The length.
    backend, device : str
        The backend, and its device by the name that all libraries share.
    kernel : str or None
        Which kernel ran.
    seconds, low, high : float or None
        The median of a call over the rounds, and the quartiles.
    rounds : int
        How many there were.
    first : float or None
        The seconds of the first call, in which a library may compile.
    error : float or None
        The largest error against float64; None if it is no number.
    memory : int or None
        The bytes beside inputs and output, if that can be told.
    note : str or None
        Why there is no time, or what is to be known of it.
    """

    length: int
    backend: str
    device: str
    kernel: str | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    first: float | None = None
    error: float | None = None
    memory: int | None = None
    note: str | None = None

    @property
    def spread(self) -> Spread:
        """The times of a row that has one."""
        assert self.seconds is not None
        # A row that has the one has the others.
        return Spread(self.seconds, self.low or self.seconds, self.high or self.seconds)


@dataclass
class Report:
    """What was measured, on what, and how to repeat it.

    Attributes
    ----------
    machine : Machine
        What it ran on.
    workload : Workload
        The call.
    command : str
        What repeats it.
    peaks : list of Peak
        What each backend reached in a matrix product and a sum.
    rows : list of Row
        A row for each length and backend.
    interrupted : bool
        Whether it was stopped before its end.
    """

    machine: Machine
    workload: Workload
    command: str
    peaks: list[Peak] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    @property
    def roofs(self) -> dict[str, Peak]:
        """The largest rates of each device."""
        return roofs(self.peaks)

    def rate(self, row: Row) -> float | None:
        """Return the operations a second that a row reached; only visible scores count."""
        return None if row.seconds is None else self.workload.flops(row.length) / row.seconds

    def of_product(self, row: Row) -> float | None:
        """Return a row's rate as a share of the matrix product's on its device."""
        rate, peak = self.rate(row), self.roofs.get(row.device)
        return None if rate is None or peak is None else rate / peak.product

    def of_roof(self, row: Row) -> float | None:
        """Return a row's rate as a share of the roof over its length."""
        rate, peak = self.rate(row), self.roofs.get(row.device)
        if rate is None or peak is None:
            return None
        return rate / roof(peak, self.workload, row.length)

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain types, for JSON, with the shares that follow from it."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "command": self.command,
            "machine": asdict(self.machine),
            "workload": self.workload.as_dict(),
            "peaks": [asdict(peak) for peak in self.peaks],
            "rows": [
                asdict(row)
                | {
                    "flops": self.workload.flops(row.length),
                    "bytes": self.workload.bytes(row.length),
                }
                | {"rate": self.rate(row), "of_product": self.of_product(row)}
                | {"of_roof": self.of_roof(row)}
                for row in self.rows
            ],
            "interrupted": self.interrupted,
        }

    def as_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Report:
        """Return the report that `as_dict` describes."""
        names = Row.__dataclass_fields__
        return cls(
            machine=Machine(**given["machine"]),
            workload=Workload.from_dict(given["workload"]),
            command=given["command"],
            peaks=[Peak(**peak) for peak in given["peaks"]],
            rows=[Row(**{name: row[name] for name in names}) for row in given["rows"]],
            interrupted=given["interrupted"],
        )


def read(file: Path) -> Report:
    """Return the report of a file that ``polyattn bench --json`` wrote."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)
        form, version = given["format"], given["version"]
        if form != FORMAT:
            raise KeyError(form)
        if version == VERSION:
            return _checked(Report.from_dict(given))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise ValueError(f"{file} is not what polyattn bench --json wrote") from None
    raise ValueError(
        f"{file} is of version {version!r}, and this polyattn reads version {VERSION}: compare with"
        " the release that wrote it, or measure again"
    )


def _refuse(name: str) -> None:
    raise ValueError(name)


def _checked(report: Report) -> Report:
    """Return a report of which all that is read again is what it should be."""
    report.machine.lines()
    for row in report.rows:
        times = (row.seconds, row.low, row.high)
        if not (isinstance(row.backend, str) and row.length > 0):
            raise TypeError(row)
        if any(time is not None for time in times) and not all(
            time is not None and 0 < time < math.inf for time in times
        ):
            raise ValueError(row)
    return report


def number(value: float) -> float | None:
    """Return a number for JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None
