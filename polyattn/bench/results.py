"""Hold the results of a run, write them as JSON or CSV, and read the JSON."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyattn.bench.machine import Machine
from polyattn.bench.peaks import Peak, roof, roofs
from polyattn.bench.timing import Spread
from polyattn.bench.workload import Workload

FORMAT, VERSION = "polyattn bench", 2


@dataclass(frozen=True)
class Timing:
    """A backend at a length."""

    length: int
    backend: str
    device: str  # by the name that all libraries share
    kernel: str | None = None
    origin: str | None = None  # the distribution of a kernel that joined several backends
    seconds: float | None = None  # the median of a call over the rounds
    low: float | None = None  # the quartiles
    high: float | None = None
    ratio: float | None = None  # of the time to that of the run's first backend, by rounds
    rounds: int = 0
    first: float | None = None  # seconds of the first call, in which a library may compile
    note: str | None = None  # why there is no time, or a remark on it

    @property
    def spread(self) -> Spread:
        """The median and the quartiles; only for a row with times."""
        seconds: Any = self.seconds
        return Spread(seconds, self.low or seconds, self.high or seconds)

    @property
    def title(self) -> str:
        """The backend without the kernel, which ``--kernel all`` adds to the name."""
        return self.backend.removesuffix(f"/{self.kernel}")


@dataclass
class BenchResults:
    """The results, the machine, and the command to repeat the run."""

    machine: Machine
    workload: Workload
    command: str
    peaks: list[Peak] = field(default_factory=list)
    rows: list[Timing] = field(default_factory=list)
    interrupted: bool = False

    @property
    def roofs(self) -> dict[str, Peak]:
        """The largest rates of each device."""
        return roofs(self.peaks)

    def rate(self, row: Timing) -> float | None:
        """Return a row's operations per second; only visible scores count."""
        return None if row.seconds is None else self.workload.flops(row.length) / row.seconds

    def of_roof(self, row: Timing) -> float | None:
        """Return a row's rate as a share of the roofline at its length."""
        rate, peak = self.rate(row), self.roofs.get(row.device)
        return (
            None if rate is None or peak is None else rate / roof(peak, self.workload, row.length)
        )

    def same_kernel(self, row: Timing) -> list[str]:
        """Return the other backends that run a row's kernel, which joined all of them."""
        return [
            other.title
            for other in self.rows
            if row.origin is not None
            and (other.length, other.device) == (row.length, row.device)
            and (other.kernel, other.origin) == (row.kernel, row.origin)
            and other.backend != row.backend
        ]

    def marked_kernel(self, row: Timing) -> str:
        """Return a row's kernel, with a star if other backends run the same one."""
        return f"{row.kernel}{'*' * bool(self.same_kernel(row))}"

    def as_json(self) -> str:
        """Return everything as JSON, with what follows from the times."""
        everything = {"format": FORMAT, "version": VERSION, **asdict(self), "rows": self._records()}
        return json.dumps(everything, indent=1, allow_nan=False) + "\n"

    def as_csv(self) -> str:
        """Return the rows as CSV, with what follows from the times."""
        text, records = io.StringIO(), self._records()
        writer = csv.DictWriter(text, records[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def _records(self) -> list[dict[str, Any]]:
        return [
            asdict(row)
            | {
                "flops": self.workload.flops(row.length),
                "bytes": self.workload.bytes(row.length),
                "rate": self.rate(row),
                "of_roof": self.of_roof(row),
                "same_kernel_as": ", ".join(self.same_kernel(row)),
            }
            for row in self.rows
        ]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BenchResults:
        """Return the results that `as_json` writes, from the numbers in it."""
        names = Timing.__dataclass_fields__
        return cls(
            machine=Machine(**data["machine"]),
            workload=Workload.from_dict(data["workload"]),
            command=data["command"],
            peaks=[Peak(**peak) for peak in data["peaks"]],
            rows=[Timing(**{name: row[name] for name in names}) for row in data["rows"]],
            interrupted=data["interrupted"],
        )


def read(file: Path) -> BenchResults:
    """Return the results of a file that ``polyattn bench --json`` wrote."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        kind, version = data["format"], data["version"]
        if kind != FORMAT:
            raise TypeError(kind)
        if version == VERSION:
            return BenchResults.from_dict(data)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{file} was not written by polyattn bench --json") from None
    raise ValueError(
        f"{file} has version {version!r}, and this polyattn reads version {VERSION}: compare with"
        " the release that wrote it, or measure again"
    )
