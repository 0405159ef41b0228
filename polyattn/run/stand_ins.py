"""Modules of polyattn in the place of packages that are written for GPUs.

Nothing of polyattn is imported before a program asks for such a package, because this module is
part of the start of each program of `polyattn run`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # in place of that of `typing`, whose import takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution
    from types import ModuleType
    from typing import Any

VARIABLE = "POLYATTN_INSTALL"
#: Each package with its distribution, and the version whose documentation the modules follow.
PACKAGES = {
    "flash_attn": ("flash-attn", "2.8.3"),
    "flash_attn_interface": ("flash-attn-3", "3.0.0"),
    "natten": ("natten", "0.21.0"),
    "xformers": ("xformers", "0.0.35"),
}
#: What `polyattn run` brings. Programs prefer FlashAttention 3 if they find it, and most expect
#: results that it returned until 2025: it comes by name.
BY_DEFAULT = ("flash_attn", "xformers")
#: The suffix for functions that return tuples.
TUPLES = ":tuples"
_MADE_OF = {
    "flash_attn.flash_attn_interface": "flash_attn",
    "flash_attn.ops.rms_norm": "flash_attn.ops.layer_norm",
    "flash_attn.ops.triton.cross_entropy": "flash_attn.losses.cross_entropy",
    "flash_attn.ops.triton.layer_norm": "flash_attn.ops.layer_norm",
    "natten.functional": "natten",
}
#: Compiled modules and Triton kernels that code imports, and what to call instead.
KERNELS = {
    "dropout_layer_norm": "flash_attn.ops.layer_norm.dropout_add_layer_norm",
    "flash_attn.flash_attn_triton": "flash_attn.flash_attn_func",
    "flash_attn_2_cuda": "flash_attn.flash_attn_func, or _flash_attn_forward beside it",
    "flash_attn_3_cuda": "flash_attn_interface.flash_attn_func",
    "rotary_emb": "flash_attn.layers.rotary.apply_rotary_emb",
    "xentropy_cuda_lib": "flash_attn.losses.cross_entropy.CrossEntropyLoss",
}


def names_of(text: str, source: str = VARIABLE) -> list[str]:
    """Return the names of a list such as ``flash_attn,xformers``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*PACKAGES, f"flash_attn_interface{TUPLES}"]
    for name in names:
        if name not in known:
            raise ValueError(f"{source} takes names of {','.join(known)}; got {name!r}")
    return names


class Finder:
    """Finds the modules of some packages among the dialects, and answers `importlib.metadata`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.packages = tuple(name.partition(":")[0] for name in self.names)

    def find_spec(self, name: str, *rest: Any) -> ModuleSpec | None:
        """Return where a module is; its file is not read."""
        own = _MADE_OF.get(name, name)
        if name in KERNELS and "flash_attn" in self.packages:
            _refuse_import(name, *rest)
            return None
        if name.partition(".")[0] not in self.packages or "._" in own:
            return None
        from pathlib import Path

        path = Path(__file__).resolve().parents[1].joinpath("dialects", *own.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                is_package = name == own and (
                    file.stem == "__init__" or any(one.startswith(f"{name}.") for one in _MADE_OF)
                )
                return ModuleSpec(name, self, origin=str(file), is_package=is_package)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python, whose module has no path where modules would be found twice."""

    def exec_module(self, module: ModuleType) -> None:
        """Give a module the names of the dialect."""
        name = module.__name__
        own = import_module(f"polyattn.dialects.{_MADE_OF.get(name, name)}")
        kept = vars(module).keys() - {"__doc__"}
        vars(module).update((key, value) for key, value in vars(own).items() if key not in kept)
        if name + TUPLES in self.names:
            vars(module).update(own._with_tuples())

    def find_distributions(self, context: Any) -> Iterator[Distribution]:
        """Yield the packages as distributions that are installed."""
        from importlib.metadata import Distribution

        class StandIn(Distribution):
            def __init__(self, **texts: str) -> None:
                self.texts = texts

            def read_text(self, filename: str) -> str | None:
                return self.texts.get(filename.partition(".")[0])

            def locate_file(self, path: Any) -> Any:
                raise NotImplementedError("a module in place of another package has no files")

        if context.path is not sys.path:  # some folders only, as those that pip looks through
            return
        asked = context.name and context.name.replace("_", "-").lower()
        for package in self.packages:
            name, version = PACKAGES[package]
            if asked in (None, name, package.replace("_", "-")):
                head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                yield StandIn(METADATA=head, top_level=package)

    def close(self) -> None:
        """Take the modules away."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in list(sys.modules.items()):
            if getattr(getattr(module, "__spec__", None), "loader", None) is self:
                del sys.modules[name]


def _refuse_import(name: str, *rest: Any) -> None:
    """Raise if a module is imported that is nowhere; if a program asks for it, it is not there."""
    asker = sys._getframe(2).f_back  # the caller of the function of Python that asks all finders
    others = (one for one in sys.meta_path if not isinstance(one, Finder))
    if (
        asker is not None
        and asker.f_code.co_name == "_find_and_load_unlocked"
        and not any(one.find_spec(name, *rest) for one in others)  # the program's own
    ):
        raise ModuleNotFoundError(
            f"{name} is made of kernels for GPUs, which polyattn does not stand in for: call"
            f" {KERNELS[name]}",
            name=name,
        )


def start(names: Iterable[str]) -> Finder:
    """Let imports find the packages with these names here, before what is installed."""
    finder = Finder(names)
    sys.meta_path.insert(0, finder)
    return finder


def spec_of(name: str) -> ModuleSpec | None:
    """Return what imports find, here or elsewhere; a folder without code is no package."""
    parent = name.rpartition(".")[0]
    package = spec_of(parent) if parent else None
    if parent and package is None:
        return None
    path = None if package is None else package.submodule_search_locations
    specs = (one.find_spec(name, path) for one in sys.meta_path if hasattr(one, "find_spec"))
    return next((spec for spec in specs if spec is not None and spec.origin is not None), None)


def is_real(name: str) -> bool:
    """Return whether imports find a package elsewhere."""
    spec = spec_of(name)
    return spec is not None and not isinstance(spec.loader, Finder)
