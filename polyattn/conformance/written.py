"""Write cases with their exact results and limits as files: `docs/how-to/check-kernels.md`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import polyattn
from polyattn.conformance.cases.case import ARRAYS, Case, bits
from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.cases.gradient_cases import GRADIENT_CASES
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.conformance.reference.oracle import Array
from polyattn.conformance.reference.tolerance import (
    Yardstick,
    accumulation_dtype,
    logsumexp_yardstick,
    output_yardstick,
)

#: The version of the format: a change that a reader must know adds 1.
VERSION = 1
#: The most numbers in the arrays of a case.
MOST_NUMBERS = 40_000
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CODES |= {"int64": "I64", "int32": "I32", "bool": "BOOL"}


def cases_to_write() -> list[Case]:
    """Return the small cases of numbers and arrays: essential, with gradients, or of one thing."""
    return [
        case
        for name, case in (CASES | GRADIENT_CASES).items()
        if name in ESSENTIAL.keys() | GRADIENT_CASES.keys()
        or (case.dtype == "float32" and " x " not in name and not name.startswith("long"))
        if _is_plain(case)
    ]


def _is_plain(case: Case) -> bool:
    """Return whether a case is small, and has no function, expression, dropout or view."""
    arrays, options = case.arguments()
    plain = (bool, int, float, str, tuple, np.ndarray)
    is_held = all(isinstance(x, plain) for x in options.values()) and case.view is None
    is_small = sum(x.size for x in arrays) <= MOST_NUMBERS
    return is_held and is_small and "dropout" not in options


def write(folder: Path, cases: Iterable[Case]) -> str:
    """Write cases to a new or empty folder, and return a line that says what it has."""
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--write-cases needs a folder in an existing one; got {folder}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"--write-cases needs a new or empty folder; {folder} exists already")
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Array] = {}
    listed = [_written(case, f"{n}/", tensors) for n, case in enumerate(cases)]
    content = safetensors(tensors)
    (folder / "cases.safetensors").write_bytes(content)
    head = {"format": "polyattn-cases", "version": VERSION, "polyattn": polyattn.__version__}
    text = json.dumps(head | {"cases": listed}, indent=1, allow_nan=False)
    (folder / "cases.json").write_text(text, encoding="utf-8")
    graded, size = sum("cotangent" in x for x in listed), (len(content) + len(text)) / 1e6
    return f"{folder}: {len(listed)} cases, {graded} of them with gradients, in {size:.1f} MB"


def _written(case: Case, prefix: str, tensors: dict[str, Array]) -> dict[str, Any]:
    """Return a case as JSON has it, and add its tensors."""
    arrays, options = case.arguments()

    def held(name: str, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        tensors[prefix + name] = x
        return {"tensor": prefix + name}

    entry = {
        **{"name": case.name, "topic": case.topic, "features": sorted(case.features)},
        **{"dtype": case.dtype, "rows": case.rows},
        "arguments": {
            name: held(name, x)
            for name, x in (dict(zip(ARRAYS, arrays, strict=True)) | options).items()
        },
    }
    results = {"output": output_yardstick(case), "logsumexp": logsumexp_yardstick(case)}
    if case.name in GRADIENT_CASES:
        entry["cotangent"] = held("cotangent", cotangent(case))
        results |= {f"gradient of {n}": yard for n, yard in gradient_yardsticks(case).items()}
    entry["results"] = {
        name: {key: held(f"{name}.{key}", x) for key, x in _limits(case, name, yard)}
        for name, yard in results.items()
    }
    return entry


def _limits(case: Case, name: str, yard: Yardstick) -> Iterator[tuple[str, Any]]:
    """Yield what a reader needs to judge a result: tensors in float64, and numbers."""
    exact, unit = (x.astype(np.float64) for x in (yard.exact, yard.unit))
    with np.errstate(invalid="ignore"):
        rest = np.nan_to_num((yard.exact - exact).astype(np.float64))
    yield "exact", exact
    if case.dtype == "float64" and np.any(rest):
        yield "rest", rest
    yield "limit", yard.allowed.astype(np.float64)
    yield "unit", np.where(np.isfinite(unit), unit, 0)
    yield "dtype", accumulation_dtype(case.dtype) if name == "logsumexp" else case.dtype
    yield "nan_for_infinity", bool(np.any(yard.or_nan))
    yield "row_axis", None if yard.rows is None else yard.axis
    floors = np.broadcast_to(yard.floor, unit.shape)[np.isfinite(unit) & (unit > 0)]
    yield "textbook", float(yard.textbook)
    yield "floor", [float(f(floors)) for f in (np.min, np.max)] if len(floors) else None


def safetensors(tensors: Mapping[str, Array]) -> bytes:
    """Return arrays as a file of the safetensors format: a length, JSON, and the bits."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, x in tensors.items():
        parts.append(bits(x))
        ends = [at, at := at + len(parts[-1])]
        header[name] = {"dtype": _CODES[x.dtype.name], "shape": x.shape, "data_offsets": ends}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])
