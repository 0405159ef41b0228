"""Check a function with the cases that ``polyattn check --write-cases DIR`` writes.

It needs Python and NumPy only; `ml_dtypes` adds bfloat16. ``python check_cases.py DIR
[MODULE:FUNCTION [MODULE:GRADIENTS]]`` gives a function the arguments of each case by name, and
counts the cases whose result is right. A case with an option that it has no parameter for is left
out. The function returns the output, or output and logsumexp; GRADIENTS gets a cotangent too and
returns a dict.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

import numpy as np

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}


def read_tensors(file):
    """Return the arrays of a safetensors file by name: a length, JSON, then their bits."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, x in json.loads(content[8:start]).items():
        first, last = x["data_offsets"]
        dtype = bfloat16 if x["dtype"] == "BF16" else DTYPES[x["dtype"]]
        if dtype is not None:
            data = np.frombuffer(content[start + first : start + last], dtype)
            tensors[name] = data.reshape(x["shape"])
    return tensors


def read_cases(folder):
    """Return the cases of a folder, with arrays in place of their names."""
    listed = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    if (listed["format"], listed["version"]) != ("polyattn-cases", 1):
        raise ValueError(f"{folder} has another format: {listed['format']} {listed['version']}")
    tensors = read_tensors(folder / "cases.safetensors")

    def filled(x):
        if isinstance(x, list):
            return [filled(y) for y in x]
        if not isinstance(x, dict):
            return x
        if x.keys() == {"tensor"}:
            return tensors.get(x["tensor"])
        return {name: filled(y) for name, y in x.items()}

    return [case for case in filled(listed["cases"]) if case["arguments"]["query"] is not None]


def fault(actual, expected, rows=None):
    """Return what is wrong with a result, or None."""
    if str(actual.dtype) != expected["dtype"]:
        return f"dtype {actual.dtype}, must be {expected['dtype']}"
    if expected["row_axis"] is not None:
        actual = np.take(actual, rows, expected["row_axis"])
    actual, exact = actual.astype(np.float64), expected["exact"]
    if actual.shape != exact.shape:
        return f"shape {actual.shape}, must be {exact.shape}"
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(actual - exact - expected.get("rest", 0))
    right = (actual == exact) | (np.isnan(actual) & np.isnan(exact)) | (error <= expected["limit"])
    if expected["nan_for_infinity"]:
        right |= np.isnan(actual) & np.isinf(exact)
    for at in map(tuple, np.argwhere(~right)[:1].tolist()):
        return f"{at} is {actual[at]:.9g}, must be {exact[at]:.9g} ± {expected['limit'][at]:.3g}"
    return None


def check(case, function, gradients=None):
    """Return the faults of the results of a case by name; None if it has no such option."""
    given = case["arguments"]
    if not given.keys() <= inspect.signature(function).parameters.keys():
        return None
    output, *others = result if isinstance(result := function(**given), tuple) else (result,)
    results = {"output": output} | dict(zip(["logsumexp"], others, strict=False))
    if gradients is not None and "cotangent" in case:
        computed = gradients(**given, cotangent=case["cotangent"])
        results |= {f"gradient of {name}": x for name, x in computed.items()}
    faults = {n: fault(x, case["results"][n], case["rows"]) for n, x in results.items()}
    return {name: text for name, text in faults.items() if text is not None}


if __name__ == "__main__":
    folder, *names = sys.argv[1:] or sys.exit(__doc__)
    names = names or ["attention:attention", "attention:gradients"]
    functions = [getattr(importlib.import_module((x := n.split(":"))[0]), x[1]) for n in names]
    found = {case["name"]: check(case, *functions) for case in read_cases(Path(folder))}
    for name, faults in (wrong := {n: faults for n, faults in found.items() if faults}).items():
        print(f"{name}: {'; '.join(map(': '.join, faults.items()))}")
    print(f"{len(found)} cases: {len(wrong)} wrong, {list(found.values()).count(None)} left out")
    sys.exit(1 if wrong else 0)
