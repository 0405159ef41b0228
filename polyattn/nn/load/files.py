"""Weights and settings of a model as they lie in files: safetensors and config.json.

The safetensors package is imported when a file is read, and nothing in a file is ever run.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyattn.arrays import Array

__all__ = ["read_config", "read_weights"]

Weights = Mapping[str, Array] | str | os.PathLike[str]


def read_weights(weights: Weights) -> Mapping[str, Array]:
    """Return the arrays of a file, of the files of a folder, or these if they are arrays already.

    Raises
    ------
    FileNotFoundError
        If the path has none.
    ImportError
        If a package that reads them is not installed.
    """
    if isinstance(weights, Mapping):
        return weights
    path = Path(_checked(weights))
    found: dict[str, Array] = {}
    for file in _files(path):
        found |= _read(file)
    return found


def read_config(weights: Weights, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the settings: `config`, or those that lie beside the weights."""
    if config is not None:
        if not isinstance(config, Mapping):
            raise TypeError(
                f"config is a {type(config).__name__}, not a mapping; pass config.to_dict(), or"
                " what json.load makes of a config.json"
            )
        return config
    if isinstance(weights, Mapping):
        raise TypeError(
            "arrays do not tell all of a model: pass config=, such as model's to_dict()"
        )
    path = Path(_checked(weights))
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: pass config=")
    config = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(config, dict), f"{file} is no object of JSON"
    return config


def _checked(weights: Any) -> str | os.PathLike[str]:
    if not isinstance(weights, (str, os.PathLike)):
        raise TypeError(
            f"weights is a {type(weights).__name__}; pass a mapping of names to arrays, such as"
            " model.state_dict(), or the path of a .safetensors file or of a folder with one"
        )
    return weights


def _files(path: Path) -> list[Path]:
    """Return the file, or those of a folder: one, or the many that an index names."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [path / name for name in sorted(set(names))]
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is no .safetensors file; of others pass the arrays by name")
    return [path]


def _read(file: Path) -> dict[str, Array]:
    safetensors = _imported("safetensors.numpy", "safetensors")
    try:
        return dict(safetensors.load_file(file))
    except TypeError as error:
        if "bfloat16" not in str(error):
            raise
    # NumPy has this dtype by another package, once that is imported.
    _imported("ml_dtypes", "ml_dtypes")
    return dict(safetensors.load_file(file))


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(
            f"to read the weights' file, install {package}: pip install {package}"
        ) from None
