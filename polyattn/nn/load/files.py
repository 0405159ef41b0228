"""Read the weights and settings of a model from files: safetensors and config.json.

The safetensors package is imported when a file is read, and nothing in a file is ever run. A file
may come from anyone: every defect of its content raises a ValueError that names the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

from polyattn._base.arguments import few, short
from polyattn._base.arrays import Array
from polyattn._base.extras import require_for_weights

Weights = Mapping[str, Array] | str | os.PathLike[str]
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*(?<!\.safetensors)(?<!\.json)")


def read_weights(weights: Weights) -> Mapping[str, Array]:
    """Return the arrays of a file or folder; a mapping is returned as it is."""
    if isinstance(weights, Mapping):
        return weights
    path = _path_of(weights)
    if path.is_dir():
        whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
        if index.is_file() and not whole.is_file():  # as transformers chooses
            return _read_shards(index)
        path = whole
    if not path.is_file():
        raise _absent(path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is not a .safetensors file; read other files yourself and pass the arrays"
        )
    return _read(path)


def read_config(
    weights: Weights | None, config: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], str]:
    """Return the settings of a model and their origin: `config`, or the file beside the weights."""
    if isinstance(config, Mapping):
        return config, "config"
    if config is None and weights is not None:
        file = _config_file(weights)
        return _read_json(file), str(file)
    raise TypeError(
        f"config is of type {type(config).__name__}, not a mapping; pass config.to_dict(), or"
        " a config.json as json.load returns it"
    )


def _config_file(weights: Weights) -> Path:
    if isinstance(weights, Mapping):
        raise TypeError(
            "arrays do not contain a model's settings: pass config=, such as model.config.to_dict()"
        )
    path = _path_of(weights)
    if not path.exists():
        raise _absent(path, is_name=isinstance(weights, str))
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        raise _absent(file, "pass config=")
    return file


def _path_of(weights: Any) -> Path:
    """Return the path of weights, or raise for a folder of an adapter or of pickled weights."""
    if not isinstance(weights, (str, os.PathLike)):
        raise TypeError(
            f"weights is of type {type(weights).__name__}; pass a mapping of names to arrays, such"
            " as model.state_dict(), or the path of a .safetensors file or of a folder with one"
        )
    path = Path(weights)
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} has an adapter of PEFT, adapter_config.json, which changes another model:"
            " merge them by peft.AutoPeftModel.from_pretrained(folder).merge_and_unload()"
            ".save_pretrained(other), and load that folder"
        )
    pickled = [name for name in PICKLED if (path / name).is_file()]
    if pickled and not any(path.glob("model.safetensors*")):
        raise FileNotFoundError(
            f"there is no {path / 'model.safetensors'}: there is {pickled[0]}, a pickle, which can"
            " run any code. Let transformers write safetensors:"
            " AutoModel.from_pretrained(folder).save_pretrained(other); or pass the arrays of"
            " torch.load(file, weights_only=True)"
        )
    return path


def _absent(path: Path, advice: str = "", *, is_name: bool = False) -> FileNotFoundError:
    """Return the error for a path that does not exist or is not a file."""
    if path.exists():
        advice = f"{'a folder' if path.is_dir() else 'a device or pipe'} has this name"
    elif is_name and HUB_ID.fullmatch(str(path)):
        advice = (
            "polyattn fetches nothing: if it is a model of the Hugging Face hub, pass the folder"
            f" that huggingface_hub.snapshot_download({str(path)!r}) returns"
        )
    return FileNotFoundError(f"there is no {path}" + (f": {advice}" if advice else ""))


# ---- a model in many files ---------------------------------------------------------------------


def _read_shards(index: Path) -> dict[str, Array]:
    """Return the arrays that an index lists, each from its file."""
    names = _shards(index)
    for shard in names:
        # Only the name must stay in the folder: download caches keep links to files elsewhere.
        name = PureWindowsPath(shard)  # It understands both separators, and drives.
        if name.anchor or ".." in name.parts:
            raise ValueError(
                f"{index} names the file {short(repr(shard), 200)}, which is outside the folder:"
                " weights are read only from the folder of the index"
            )
        try:
            is_there = (index.parent / shard).is_file()
        except OSError as error:
            raise ValueError(
                f"{index} names the file {short(shard)}, which no file can be: {error.strerror}"
            ) from None
        if not is_there:
            raise FileNotFoundError(f"there is no {_place(index, shard)}, which {index} names")
    weights: dict[str, Array] = {}
    for shard, listed in names.items():
        arrays = _read(index.parent / shard)
        missing = [name for name in listed if name not in arrays]
        if missing:
            raise ValueError(
                f"{_place(index, shard)} has no {few(map(short, missing), len(missing))}, which"
                f" {index} says it has"
            )
        weights |= {name: arrays[name] for name in listed}
    return weights


def _place(index: Path, shard: str) -> str:
    """Return the path of a file that an index names, for a message."""
    return f"{index.parent / short(shard)}"


def _shards(index: Path) -> dict[str, list[str]]:
    """Return the files that an index lists, with the names of the arrays in each."""
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} has no weight_map from the names of arrays to those of files")
    names: dict[str, list[str]] = {}
    for name, shard in sorted(files.items()):
        names.setdefault(shard, []).append(name)
    return names


# ---- one file ----------------------------------------------------------------------------------


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn every error of a parser into a ValueError that names the file."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        reason = short(error, 600) or type(error).__name__
        raise ValueError(f"{file} is damaged, or of an unsupported kind: {reason}") from error


def _read_json(file: Path) -> dict[str, Any]:
    with _reading(file):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be a JSON object; it is of type {type(content).__name__}")
    return content


def _read(file: Path) -> dict[str, Array]:
    safetensors = require_for_weights("safetensors.numpy", "safetensors")
    with _reading(file):
        try:
            return dict(safetensors.load_file(file))
        except TypeError as error:
            if "bfloat16" not in str(error):
                raise
        # NumPy has this dtype once ml_dtypes is imported.
        require_for_weights("ml_dtypes", "ml_dtypes")
        return dict(safetensors.load_file(file))
