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
from polyattn.plugin import FEATURES, Backend, BackendSpec, Kernel

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
PROMISES = {
    "poison_safe": "NaN or ±inf in a masked key or value leaves the row unchanged",
    "rounds_once": "gradients keep the digits of float32 where keys have much in common",
    "batch_invariant": "a batch item has the same bits with and without other items",
    "cut_invariant": "a row has the same bits, however its sequence is cut",
    "deterministic": "the same call twice gives the same bits",
}
INTRO = """# Capabilities: what each kernel computes

`python docs/capabilities.py` writes this page from what the kernels declare. A kernel never gets a
call with a feature that it does not declare. `polyattn.explain` says what a call needs, and gives
the reasons that depend on shapes and dtypes. `polyattn check` tests that each declaration is true.

`native` of numpy, torch and jax is [the compiled kernel](native.md), which `polyattn-native` adds.
"""


def ours() -> dict[str, tuple[Kernel, ...]]:
    """Return the kernels of each first-party plugin, and those that end every list."""
    own = {spec.name: (*joining(spec), *implementation(spec).kernels) for spec in SPECS}
    return own | {"every library": registry.kernels_of(None)}


def implementation(spec: BackendSpec) -> type[Backend]:
    """Return the class of a backend, which may be unable to run here."""
    found: type[Backend] = imported(spec.implementation)
    return found


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
    if feature in PROMISES:
        return YES if getattr(kernel, feature) else ""
    if feature not in kernel.features | kernel.differentiates.keys():
        return ""
    return ", ".join(sorted(kernel.only_on.get(feature, (YES,))))


def table(kernels: dict[str, tuple[Kernel, ...]]) -> list[str]:
    """Return what every kernel has, and a table of the rest with a column for each kernel."""
    rows = {f"`{name}`: {meaning}": name for name, (meaning, *_) in FEATURES.items()}
    rows |= {f"*{promise}*: {meaning}": promise for promise, meaning in PROMISES.items()}
    columns: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # kernels that are alike share one
    for library, some in kernels.items():
        for kernel in some:
            cells = tuple(cell(kernel, name) for name in rows.values())
            columns.setdefault((kernel.name, cells), []).append(library)
    by_row = dict(zip(rows, zip(*(cells for _, cells in columns), strict=True), strict=True))
    common = [row for row, cells in by_row.items() if set(cells) == {YES}]
    heads = (f"{', '.join(names)} `{kernel}`" for (kernel, _), names in columns.items())
    return [
        f"Every kernel has {'; '.join(common)}. The rest:",
        "",
        f"| | {' | '.join(heads)} |",
        "|---|" + ":-:|" * len(columns),
        *(f"| {row} | {' | '.join(by_row[row])} |" for row in by_row if row not in common),
    ]


def dtypes() -> list[str]:
    """Return a sentence for each plugin: its dtypes and devices."""
    return [
        f"- **{spec.name}** supports {', '.join(spec.dtypes)} on {', '.join(spec.devices)}."
        for spec in SPECS
    ]


def page(outcomes: dict[str, str]) -> str:
    """Return the whole page, with what happens with each type of array."""
    return "\n".join([INTRO, *table(ours()), "", *dtypes(), "", array_types.section(outcomes)])


if __name__ == "__main__":
    PAGE.write_text(page(array_types.outcomes()), encoding="utf-8")
