"""Save models under the names and in the layout of their family in transformers."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from polyattn._base.arrays import Array, facts_of, library_of
from polyattn._base.extras import require_for_weights
from polyattn._base.files import check_file, replacing
from polyattn._dispatch.transfer import convert_like
from polyattn.nn.load.files import read_config
from polyattn.nn.load.model_plan import Wanted
from polyattn.nn.load.models import HEAD, family_of
from polyattn.nn.load.stored import Stored
from polyattn.nn.models import Transformer

FILES, INDEX = ("model.safetensors", "config.json"), "model.safetensors.index.json"


def save(
    model: Transformer,
    folder: str | os.PathLike[str],
    config: Mapping[str, Any] | str | os.PathLike[str],
) -> None:
    """Save a model as transformers does: ``model.safetensors`` and ``config.json``.

    Parameters
    ----------
    model : Transformer
        A model of a family that `load.model` reads, of any library.
    folder : path
        Where to write; it is made if there is none. Files of these names are replaced, symbolic
        links too, and an index of other files is removed. If one cannot be written, all are as
        before.
    config : mapping or path
        The settings of the model, with its ``model_type``, or the folder that they are read from.

    Raises
    ------
    ValueError
        If the model is not one of this config, in a parameter's shape or a setting; or if one of
        the files exists and is not a regular file.
    OSError
        If the files cannot be written.
    ImportError
        If safetensors is not installed.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from polyattn import nn
    >>> like = np.zeros(1, dtype=np.float32)
    >>> settings = {"is_causal": True, "tied": True, "fused": True, "activation": "gelu_tanh"}
    >>> gpt = nn.Transformer.init(100, 64, 4, 2, like=like, positions=32, **settings)
    >>> config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nn.save(gpt, folder, config | {"vocab_size": 100, "n_positions": 32})
    ...     type(nn.load.model(folder, like=like)).__name__
    'Transformer'
    """
    if isinstance(config, (str, os.PathLike)):
        settings = read_config(config, None)
    else:
        settings = read_config(None, config)
    text = json.dumps(dict(settings[0]), indent=2)
    arrays = _stored_arrays(model, *settings)
    safetensors = require_for_weights("safetensors.numpy", "safetensors")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, INDEX):
        check_file("nn.save", path / name)
    with replacing(path, *FILES) as made:
        try:
            safetensors.save_file(arrays, made / FILES[0], metadata={"format": "pt"})
        except require_for_weights("safetensors", "safetensors").SafetensorError as error:
            raise OSError(f"{path / FILES[0]} cannot be written: {error}") from error
        (made / FILES[1]).write_text(text + "\n", encoding="utf-8")
        # safetensors lets only the owner read its file.
        shutil.copymode(made / FILES[1], made / FILES[0])
    (path / INDEX).unlink(missing_ok=True)


def _stored_arrays(model: Transformer, config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a model's parameters as its family stores them, in NumPy."""
    family, settings = family_of(config, origin)
    count = len(model.stack.blocks)

    def blocks(prefix: str, number: int, setting: str) -> list[str]:
        if number != count:
            raise ValueError(f"{origin}: {setting} is {number}, and the model has {count} blocks")
        return [f"{prefix}{block}" for block in range(number)]

    logits = model.tied or model.output is not None
    plan = family.plan(settings, blocks, Wanted(logits))
    parameters, wanted = model.parameters(), plan.model.parameters()
    same = plan.finished(plan.model.with_parameters(parameters))
    if repr(same) != repr(model):
        lines = zip_longest(repr(same).splitlines(), repr(model).splitlines(), fillvalue="less")
        expected, found = next(pair for pair in lines if pair[0] != pair[1])
        raise ValueError(
            f"{origin} says {expected.strip()}, and the model has {found.strip()}: pass the config"
            " of this model"
        )
    stored = _unmade((wanted[name], array) for name, array in parameters.items())
    # A model with logits has the base model, whose names get a prefix, and the output map.
    prefix = family.prefix if logits else ""
    return {name if name == HEAD else prefix + name: array for name, array in stored.items()}


def _unmade(pairs: Iterable[tuple[Stored, Array]]) -> dict[str, Any]:
    """Return the arrays that parameters were made from, whose numbers are in another order."""
    # Making one from the places of these numbers says where each belongs.
    arrays: dict[str, Any] = {}
    for stored, parameter in pairs:
        values = _on_numpy(parameter)
        xp = library_of(values).xp
        for name, shape in stored.sources.items():
            arrays.setdefault(name, np.zeros(shape, values.dtype))
        sizes = [math.prod(shape) for shape in stored.sources.values()]
        starts = np.cumsum([0, *sizes])
        whole = np.concatenate([arrays[name].ravel() for name in stored.sources])
        places = [
            np.arange(start, start + size).reshape(shape)
            for start, size, shape in zip(starts, sizes, stored.sources.values(), strict=False)
        ]
        whole[stored.make(xp, *places)] = values
        for start, (name, shape) in zip(starts, stored.sources.items(), strict=False):
            arrays[name] = whole[start : start + math.prod(shape)].reshape(shape)
    return arrays


def _on_numpy(array: Array) -> Any:
    """Return a parameter in NumPy, in its own dtype."""
    plain = array.detach() if hasattr(array, "detach") else array
    dtype = facts_of(plain).dtype
    if dtype == "bfloat16":
        dtype = require_for_weights("ml_dtypes", "ml_dtypes").bfloat16
    return convert_like(plain, np.zeros(1, dtype=dtype))
