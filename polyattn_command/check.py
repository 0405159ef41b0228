"""List what a file takes from packages for GPUs, and polyattn does not have."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from polyattn_command.stand_ins import PACKAGES, start

_ROOTS = {name.partition(".")[0] for name in PACKAGES}


def check(files: list[str], names: list[str]) -> int:
    """Print each import, attribute and call that would fail; return 1 if there is one."""
    finder, found = start(names), 0
    try:
        for file in files:
            try:
                uses = _Uses(ast.parse(Path(file).read_bytes(), file), finder.packages)
            except (OSError, SyntaxError, ValueError) as error:
                print(f"polyattn run: {file} cannot be read: {error}", file=sys.stderr)
                return 2
            for line, message in sorted(set(uses.faults)):
                print(f"{file}:{line}: {message}")
            found += len(set(uses.faults))
            if not uses.faults:
                print(f"{file}: {len(uses.resolved)} names of {', '.join(names)} resolve")
    finally:
        finder.close()
    return 1 if found else 0


class _Uses(ast.NodeVisitor):
    """The names of the packages that a file uses, and those that do not resolve, with lines."""

    def __init__(self, tree: ast.Module, names: tuple[str, ...]) -> None:
        self._names = names
        self.resolved: set[str] = set()
        self.faults: list[tuple[int, str]] = []
        self._paths: dict[str, str] = {}  # what a name of the file stands for
        for node in ast.walk(tree):  # before the uses, wherever the imports are
            if isinstance(node, ast.Import):
                self._add_modules(node)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self._add_names(node)
        self.visit(tree)

    def _add_modules(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if root in _ROOTS:
                self._paths[alias.asname or root] = alias.name if alias.asname else root
                self._find(alias.name, node)

    def _add_names(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.partition(".")[0] in _ROOTS and self._find(module, node) is not None:
            for alias in node.names:
                if alias.name != "*":
                    self._paths[alias.asname or alias.name] = path = f"{module}.{alias.name}"
                    self._find(path, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Find the longest path at once, and not its parts."""
        path = self._path_of(node)
        if path is None:
            self.generic_visit(node)
        else:
            self._find(path, node)

    def visit_Call(self, node: ast.Call) -> None:
        """Compare the arguments of a call with the signature."""
        self.generic_visit(node)
        path = self._path_of(node.func)
        if path not in self.resolved:
            return
        is_starred = any(isinstance(one, ast.Starred) for one in node.args)
        named = {one.arg: None for one in node.keywords if one.arg}
        try:
            signature = inspect.signature(_resolve(path))
        except (TypeError, ValueError):  # no function
            return
        is_partial = is_starred or len(named) < len(node.keywords)
        bind = signature.bind_partial if is_partial else signature.bind
        try:
            bind(*[None] * (0 if is_starred else len(node.args)), **named)
        except TypeError as error:
            self.faults.append((node.lineno, f"{path}(): {error}"))

    def _path_of(self, node: ast.expr) -> str | None:
        """Return the path in a package that ``name.attribute.attribute`` stands for."""
        if isinstance(node, ast.Name):
            return self._paths.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        inner = self._path_of(node.value)
        return inner and f"{inner}.{node.attr}"

    def _find(self, path: str, node: ast.stmt | ast.expr) -> Any:
        try:
            found = _resolve(path)
        except (ImportError, AttributeError) as error:
            package = path.partition(".")[0]
            by_name = f"; it comes by name, --as {package}" * (package not in self._names)
            self.faults.append((node.lineno, f"{path}: {error}{by_name}"))
            return None
        self.resolved.add(path)
        return found


def _resolve(path: str) -> Any:
    """Return what ``import`` and attributes find."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        module, _, name = path.rpartition(".")
        if not module or error.name not in (path, module):
            raise
    return getattr(_resolve(module), name)
