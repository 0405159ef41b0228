"""Let code that imports FlashAttention find these modules."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

#: The version of FlashAttention 2 whose documentation these functions follow.
VERSION = "2.8.3"
_DISTRIBUTIONS = {
    "flash_attn": ("flash-attn", VERSION),
    "flash_attn_interface": ("flash-attn-3", "3.0.0"),
}
_HERE = "polyattn.dialects."
#: The modules, by the names that code imports them by.
_MODULES = {
    "flash_attn": _HERE + "flash_attn",
    "flash_attn.flash_attn_interface": _HERE + "flash_attn",
    "flash_attn.bert_padding": _HERE + "flash_attn.bert_padding",
    "flash_attn.ops": _HERE + "flash_attn.ops",
    "flash_attn.ops.triton": _HERE + "flash_attn.ops.triton",
    "flash_attn.ops.triton.rotary": _HERE + "flash_attn.ops.triton.rotary",
    "flash_attn_interface": _HERE + "flash_attn_interface",
}


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, module: str) -> None:
        name, version = _DISTRIBUTIONS[module]
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self._texts = {"METADATA": head, "top_level.txt": module}

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError("a module in place of another package has no files")


class _Installed(MetaPathFinder, contextlib.ExitStack):
    """The modules in their places, until `close`; it answers `importlib.metadata` too."""

    packages: tuple[str, ...] = ()

    def find_spec(self, *_: Any) -> None:
        return None  # the modules are in ``sys.modules``

    def find_distributions(self, context: Any) -> Iterator[importlib.metadata.Distribution]:
        asked = context.name and context.name.replace("_", "-").lower()
        for module in self.packages:
            name, _ = _DISTRIBUTIONS[module]
            if asked in (None, name, module.replace("_", "-")):
                yield _Distribution(module)


def install(*packages: str, tuples: bool = False) -> contextlib.ExitStack:
    """Let ``import flash_attn`` find these functions.

    `importlib.util.find_spec`, `importlib.metadata.version` and ``packages_distributions`` answer
    as if FlashAttention were installed. Code that asks for a GPU besides, as transformers does for
    ``attn_implementation="flash_attention_2"``, still refuses: there, set
    ``attn_implementation="polyattn"``.

    Parameters
    ----------
    *packages : {"flash_attn", "flash_attn_interface"}
        FlashAttention 2, FlashAttention 3, or both; by default FlashAttention 2. Code that can use
        both prefers 3 where it finds it.
    tuples : bool
        Whether the functions of ``flash_attn_interface``, except that for caches, return
        ``(output, logsumexp)``, as they did before August 2025. Code of that time takes the first
        item: without this, ``output, _ = flash_attn_varlen_func(...)`` takes two rows.

    Returns
    -------
    ExitStack
        A context manager that takes the modules away at its end, as ``close()`` does.

    Raises
    ------
    NotImplementedError
        If another package is asked for, such as ``flash_attn.cute``, FlashAttention 4.
    RuntimeError
        If a real FlashAttention is installed, or these modules already are.
    ValueError
        If `tuples` is given without ``flash_attn_interface``.

    Examples
    --------
    >>> from polyattn.dialects import flash_attn
    >>> with flash_attn.install():
    ...     from flash_attn import flash_attn_func
    >>> flash_attn_func is flash_attn.flash_attn_func
    True
    """
    packages = packages or ("flash_attn",)
    for name in packages:
        if name not in _DISTRIBUTIONS:
            raise NotImplementedError(
                "install() brings flash_attn and flash_attn_interface, FlashAttention 2 and 3; got"
                f" {name!r}"
            )
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            raise RuntimeError(
                f"{name} is installed already: uninstall it, or close what install() returned"
            )
    if tuples and "flash_attn_interface" not in packages:
        raise ValueError("tuples=True is about flash_attn_interface: name it too")
    installed = _Installed()
    installed.packages = packages
    for name, own in _MODULES.items():
        if name.partition(".")[0] in packages:
            module = importlib.import_module(own)
            is_older = tuples and name == "flash_attn_interface"
            sys.modules[name] = _with_tuples(module) if is_older else module
            installed.callback(sys.modules.pop, name, None)
    sys.meta_path.append(installed)
    installed.callback(sys.meta_path.remove, installed)
    return installed


def _with_tuples(module: ModuleType) -> ModuleType:
    """Return the module of FlashAttention 3 with functions that return the logsumexp too."""
    older = ModuleType(module.__name__)
    vars(older).update(vars(module))
    for name in ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"):
        setattr(older, name, functools.partial(getattr(module, name), return_attn_probs=True))
    return older
