"""Let code that imports FlashAttention find these modules."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
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

    def find_spec(self, *_: Any) -> None:
        return None  # the modules are in ``sys.modules``

    def find_distributions(self, context: Any) -> Iterator[importlib.metadata.Distribution]:
        asked = context.name and context.name.replace("_", "-").lower()
        for module, (name, _) in _DISTRIBUTIONS.items():
            if asked in (None, name, module.replace("_", "-")):
                yield _Distribution(module)


def install() -> contextlib.ExitStack:
    """Let ``import flash_attn`` and ``import flash_attn_interface`` find these functions.

    `importlib.util.find_spec`, `importlib.metadata.version` and ``packages_distributions`` answer
    as if FlashAttention 2 and 3 were installed. Code that asks for a GPU besides, as transformers
    does for ``attn_implementation="flash_attention_2"``, still refuses: there, set
    ``attn_implementation="polyattn"``.

    Returns
    -------
    ExitStack
        A context manager that takes the modules away at its end, as ``close()`` does.

    Raises
    ------
    RuntimeError
        If a real FlashAttention is installed, or these modules already are.

    Examples
    --------
    >>> from polyattn.dialects import flash_attn
    >>> with flash_attn.install():
    ...     from flash_attn import flash_attn_func
    >>> flash_attn_func is flash_attn.flash_attn_func
    True
    """
    for name in _DISTRIBUTIONS:
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            raise RuntimeError(
                f"{name} is installed already: uninstall it, or close what install() returned"
            )
    installed = _Installed()
    for name, own in _MODULES.items():
        sys.modules[name] = importlib.import_module(own)
        installed.callback(sys.modules.pop, name, None)
    sys.meta_path.append(installed)
    installed.callback(sys.meta_path.remove, installed)
    return installed
