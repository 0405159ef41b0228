"""List what a file takes from packages for GPUs, and polyattn does not have."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from polyattn.run.stand_ins import KERNELS, PACKAGES, start


def check(files: list[str], names: list[str]) -> int:
    """Print each import, attribute and call that would fail; return 1 if there is one."""
    finder, code = start(names), 0
    try:
        for file in files:
            uses = _Uses(ast.parse(Path(file).read_bytes(), file), finder.packages)
            for line, message in sorted(set(uses.faults)):
                print(f"{file}:{line}: {message}")
                code = 1
            if not uses.faults:
                print(f"{file}: all names of {', '.join(names)} resolve: {len(uses.resolved)}")
    except (OSError, SyntaxError, ValueError) as error:
        print(f"polyattn run: {file} cannot be read: {error}", file=sys.stderr)
        return 2
    finally:
        finder.close()
    return code


class _Uses(ast.NodeVisitor):
    """The names of the packages that a file uses, and those that do not resolve, with lines."""

    def __init__(self, tree: ast.Module, names: tuple[str, ...]) -> None:
        self._names = names
        self.resolved: set[str] = set()
        self.faults: list[tuple[int, str]] = []
        self._paths: dict[str, str] = {}  # what a name of the file stands for
        for node in ast.walk(tree):  # before the uses, wherever the imports are
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    path = alias.name if alias.asname else root
                    self._bind(alias.asname or root, path, alias.name, node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    path = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                    self._bind(alias.asname or alias.name, path, path, node)
        self.visit(tree)

    def _bind(self, name: str, path: str, imported: str, node: ast.stmt) -> None:
        if (root := path.partition(".")[0]) in PACKAGES or root in KERNELS:
            self._paths[name] = path
            self._find(imported, node)

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
        if path not in self.resolved or not callable(function := _resolve(path)):
            return
        named = {one.arg: None for one in node.keywords if one.arg}
        is_starred = any(isinstance(one, ast.Starred) for one in node.args)
        is_partial = is_starred or len(named) < len(node.keywords)
        try:
            signature = inspect.signature(function)
            bind = signature.bind_partial if is_partial else signature.bind
            bind(*[None] * (0 if is_starred else len(node.args)), **named)
        except TypeError as error:
            self.faults.append((node.lineno, f"{path}(): {error}"))
        except ValueError:  # a function of C, which has no signature
            pass

    def _path_of(self, node: ast.expr) -> str | None:
        """Return the path in a package that ``name.attribute.attribute`` stands for."""
        if isinstance(node, ast.Name):
            return self._paths.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        inner = self._path_of(node.value)
        return inner and f"{inner}.{node.attr}"

    def _find(self, path: str, node: ast.stmt | ast.expr) -> None:
        try:
            _resolve(path)
        except (ImportError, AttributeError) as error:
            package = path.partition(".")[0]
            is_other = package in PACKAGES and package not in self._names
            by_name = f"; it comes by name, --as {package}" * is_other
            self.faults.append((node.lineno, f"{path}: {error}{by_name}"))
        else:
            self.resolved.add(path)


def _resolve(path: str) -> Any:
    """Return what ``import`` and attributes find."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        module, _, name = path.rpartition(".")
        if not module or not f"{path}.".startswith(f"{error.name}."):
            raise
    return getattr(_resolve(module), name)
