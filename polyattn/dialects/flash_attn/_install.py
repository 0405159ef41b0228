"""Let code that imports FlashAttention find these modules."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from typing import Any

#: The version of each package whose documentation these functions follow.
VERSION = "2.8.3"
_DISTRIBUTIONS = {
    "flash_attn": ("flash-attn", VERSION),
    "flash_attn_interface": ("flash-attn-3", "3.0.0"),
}
_HERE = "polyattn.dialects."
#: The modules to import, by the names that code imports them by.
_MODULES = {
    "flash_attn": _HERE + "flash_attn",
    "flash_attn.flash_attn_interface": _HERE + "flash_attn",
    "flash_attn.bert_padding": _HERE + "flash_attn.bert_padding",
    "flash_attn_interface": _HERE + "flash_attn_interface",
}


class _Distribution(importlib.metadata.Distribution):
    """What is said about an installed package: its name, version and modules."""

    def __init__(self, module: str) -> None:
        name, version = _DISTRIBUTIONS[module]
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{module}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError("a module of polyattn in place of another package has no files")


class _Finder(MetaPathFinder):
    """Answers `importlib.metadata`; the modules themselves are in ``sys.modules``."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any) -> Iterator[importlib.metadata.Distribution]:
        for module, (name, _) in _DISTRIBUTIONS.items():
            asked = None if context.name is None else context.name.replace("_", "-").lower()
            if asked in (None, name, module.replace("_", "-")):
                yield _Distribution(module)


class Installed:
    """The modules in their places, until they are removed: a context manager."""

    def __init__(self) -> None:
        self._finder = _Finder()
        sys.meta_path.append(self._finder)
        sys.modules.update({name: importlib.import_module(own) for name, own in _MODULES.items()})
        importlib.invalidate_caches()

    def uninstall(self) -> None:
        """Take the modules away again; twice does no harm."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            for name in _MODULES:
                sys.modules.pop(name, None)

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install() -> Installed:
    """Let ``import flash_attn`` and ``import flash_attn_interface`` find these functions.

    `importlib.util.find_spec`, `importlib.metadata.version` and ``packages_distributions`` answer
    as if FlashAttention 2 and 3 were installed. Code that asks for a GPU besides, as transformers
    does for ``attn_implementation="flash_attention_2"``, still refuses: there, set
    ``attn_implementation="polyattn"``.

    Returns
    -------
    Installed
        A context manager that takes the modules away at its end, as ``uninstall()`` does.

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
                f"{name} is installed already: uninstall it, or what an earlier install() returned,"
                " first"
            )
    return Installed()
