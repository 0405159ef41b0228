"""Follow torch.autocast, as torch's own functions do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyattn._base.arrays import ArrayFacts, as_facts, cast, is_array, library_of
from polyattn._base.tracing import autocast_dtype, is_autocast_on, torch_is_imported


def casts(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return the dtypes to which autocast casts arguments or their facts, by name: often empty."""
    dtypes: dict[str, str] = {}
    if not (torch_is_imported() and is_autocast_on()):
        return dtypes
    for name in names:
        array = arguments.get(name)
        if not is_array(array):
            continue
        facts = as_facts(array, name)
        if facts.library != "torch" or "float" not in facts.dtype or facts.dtype == "float64":
            continue
        dtype = autocast_dtype(facts.device.partition(":")[0])
        if dtype is not None and dtype != facts.dtype:
            dtypes[name] = dtype
    return dtypes


def autocast(arguments: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return arguments as autocast gives them to a function of torch."""
    dtypes = casts(arguments, names)
    if not dtypes:
        return arguments
    return arguments | {name: _in_dtype(arguments[name], dtype) for name, dtype in dtypes.items()}


def _in_dtype(array: Any, dtype: str) -> Any:
    if isinstance(array, ArrayFacts):
        return array._replace(dtype=dtype)
    xp = library_of(array).xp
    return cast(xp, array, getattr(xp, dtype))
