"""Weights and settings of a model as they lie in files: safetensors and config.json.

The safetensors package is imported when a file is read, and nothing in a file is ever run. A file
may come from anyone: what is wrong with its content is one ValueError that names it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

from polyattn.arrays import Array
from polyattn.nn.load.settings import Settings

__all__ = ["Weights", "read_settings", "read_weights"]

Weights = Mapping[str, Array] | str | os.PathLike[str]


def read_weights(weights: Weights) -> Mapping[str, Array]:
    """Return the arrays of a file, of the files of a folder, or these if they are arrays already.

    Raises
    ------
    ValueError
        If the content of a file is not what it must be.
    FileNotFoundError
        If the path has none.
    ImportError
        If a package that reads them is not installed.
    """
    if isinstance(weights, Mapping):
        return weights
    path = Path(_checked(weights))
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.is_file():
            return _read_shards(index)
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is no .safetensors file; of others pass the arrays by name")
    return _read(path)


def read_settings(family: str, weights: Weights, config: Mapping[str, Any] | None) -> Settings:
    """Return the settings of a family's model: `config`, or those that lie beside the weights."""
    if config is None:
        file = _config_file(weights)
        settings = Settings(_read_json(file), str(file))
    elif isinstance(config, Mapping):
        settings = Settings(config)
    else:
        raise TypeError(
            f"config is a {type(config).__name__}, not a mapping; pass config.to_dict(), or"
            " what json.load makes of a config.json"
        )
    settings.check_family(family)
    return settings


def _config_file(weights: Weights) -> Path:
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
    return file


def _checked(weights: Any) -> str | os.PathLike[str]:
    if not isinstance(weights, (str, os.PathLike)):
        raise TypeError(
            f"weights is a {type(weights).__name__}; pass a mapping of names to arrays, such as"
            " model.state_dict(), or the path of a .safetensors file or of a folder with one"
        )
    return weights


# ---- a model in many files ---------------------------------------------------------------------


def _read_shards(index: Path) -> dict[str, Array]:
    """Return the arrays that an index names, each from the file that it says."""
    names = _shards(index)
    for shard in names:
        # Only the name is held to the folder: caches keep links there, to files elsewhere.
        name = PureWindowsPath(shard)  # It knows both separators, and drives.
        if name.anchor or ".." in name.parts:
            raise ValueError(
                f"{index} names the file {shard!r}, which leaves the folder: weights are read"
                " from the index's own folder alone"
            )
        if not (index.parent / shard).is_file():
            raise FileNotFoundError(f"there is no {index.parent / shard}, which {index} names")
    found: dict[str, Array] = {}
    for shard, promised in names.items():
        arrays = _read(index.parent / shard)
        missing = [name for name in promised if name not in arrays]
        if missing:
            raise ValueError(
                f"{index.parent / shard} has no {', '.join(missing)}, which {index} says it has"
            )
        found |= {name: arrays[name] for name in promised}
    return found


def _shards(index: Path) -> dict[str, list[str]]:
    """Return the names of an index's files, and of the arrays in each."""
    placed = _read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(one, str) for one in placed.values()):
        raise ValueError(f"{index} has no weight_map of names to the names of files")
    names: dict[str, list[str]] = {}
    for name, shard in sorted(placed.items()):
        names.setdefault(shard, []).append(name)
    return names


# ---- one file ----------------------------------------------------------------------------------


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Make one ValueError that names the file of whatever a parser raises of its content."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        said = str(error) or type(error).__name__
        raise ValueError(f"{file} is damaged, or of a kind not read here: {said}") from error


def _read_json(file: Path) -> dict[str, Any]:
    with _reading(file):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file} must be an object of JSON; it is a {type(found).__name__}")
    return found


def _read(file: Path) -> dict[str, Array]:
    safetensors = _imported("safetensors.numpy", "safetensors")
    with _reading(file):
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
