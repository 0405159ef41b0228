"""Write capabilities.md: what each kernel declares, and what happens with each type of array."""

import importlib
import sys
from pathlib import Path
from typing import Any

import array_types

import polyattn_cupy
import polyattn_dask
import polyattn_jax
import polyattn_mlx
import polyattn_numpy
import polyattn_onnx
import polyattn_onnxruntime
import polyattn_torch
from polyattn._dispatch import registry
from polyattn.plugin import FEATURES, PROMISES, BackendSpec, Kernel

PAGE = Path(__file__).with_name("capabilities.md")
NATIVE = PAGE.parents[1] / "backends" / "polyattn_native"
SPECS = (
    polyattn_numpy.SPEC,
    polyattn_torch.SPEC,
    polyattn_cupy.SPEC,
    polyattn_jax.SPEC,
    polyattn_mlx.SPEC,
    polyattn_dask.SPEC,
    polyattn_onnx.SPEC,
    polyattn_onnxruntime.SPEC,
)
YES = "●"
INTRO = """# Capabilities: what each kernel computes

`python docs/capabilities.py` writes this page from what the kernels declare, and `polyattn check`
tests that each declaration is true. A kernel never gets a call with a feature that it does not
declare. `polyattn.explain` says what a call needs, and gives refusals that depend on shapes and
dtypes. `native` of numpy, torch and jax is [the compiled kernel](native.md). *All* dtypes are
float16, bfloat16, float32 and float64.
"""


def ours() -> dict[str, tuple[Kernel, ...]]:
    """Return the kernels of each first-party plugin, and those that end every list."""
    own = {spec.name: (*joining(spec), *imported(spec.implementation).kernels) for spec in SPECS}
    return own | {"every library": registry.kernels_of(None)}


def joining(spec: BackendSpec) -> tuple[Kernel, ...]:
    """Return the compiled kernel of a backend that has one: its class needs no library."""
    if str(NATIVE) not in sys.path:  # not installed where nothing compiles it
        sys.path.append(str(NATIVE))
        if getattr(sys.modules.get("polyattn_native"), "__file__", None) is None:
            sys.modules.pop("polyattn_native", None)  # the folder around it, as a namespace
    path = imported("polyattn_native:SPEC").kernels.get(spec.name)
    return () if path is None else (imported(path)(),)


def imported(path: str) -> Any:
    """Return what an import path names, "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def cell(kernel: Kernel, feature: str) -> str:
    """Return a mark if a kernel has a feature or promise, or the devices where it does."""
    if feature not in kernel.features | kernel.differentiates.keys() | kernel.promises:
        return ""
    return ", ".join(sorted(kernel.only_on.get(feature, (YES,))))


def listed(cells: dict[tuple[str, str], str], devices: str) -> str:
    """Return kernels after their libraries, those of libraries that have the same together."""
    by_library: dict[str, list[str]] = {}
    for (library, kernel), mark in cells.items():
        part = f" {devices} {mark}" if mark not in ("", YES) else ""
        by_library.setdefault(library, []).append(f"`{kernel}`{part}")
    alike: dict[str, list[str]] = {}
    for library, names in by_library.items():
        alike.setdefault(", ".join(names), []).append(library)
    return "; ".join(f"{', '.join(libraries)} {names}" for names, libraries in alike.items())


def table(kernels: dict[str, tuple[Kernel, ...]]) -> list[str]:
    """Return a row for each feature and promise: the kernels that have it, or that lack it."""
    rows = {f"`{name}`: {meaning}": name for name, (meaning, *_) in FEATURES.items()}
    rows |= {f"*{promise}*: {meaning}": promise for promise, meaning in PROMISES.items()}
    lines = ["| feature or *promise* | kernels |", "|---|---|"]
    for row, name in rows.items():
        cells = {(x, k.name): cell(k, name) for x, some in kernels.items() for k in some}
        have = {kernel: mark for kernel, mark in cells.items() if mark}
        lack = {kernel: mark for kernel, mark in cells.items() if mark != YES}
        others = f"all but {listed(lack, 'outside of')}" if lack else "all"
        lines.append(f"| {row} | {others if len(lack) <= len(have) else listed(have, 'on')} |")
    return lines


def backends(kernels: dict[str, tuple[Kernel, ...]]) -> list[str]:
    """Return a row for each plugin: its kernels, dtypes and devices."""
    lines = ["| | kernels | dtypes | devices |", "|---|---|---|---|"]
    for spec in SPECS:
        names = ", ".join(f"`{kernel.name}`" for kernel in kernels[spec.name])
        dtypes = "all" if len(spec.dtypes) == 4 else ", ".join(spec.dtypes)
        lines.append(f"| {spec.name} | {names} | {dtypes} | {', '.join(spec.devices)} |")
    names = ", ".join(f"`{kernel.name}`" for kernel in kernels["every library"])
    return [*lines, f"| every library | {names} | | |"]


def page(outcomes: dict[str, str]) -> str:
    """Return the whole page, with what happens with each type of array."""
    kernels = ours()
    parts = (INTRO, *backends(kernels), "", *table(kernels), "", array_types.section(outcomes))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(array_types.outcomes()), encoding="utf-8")
