"""Load models of the families of transformers, as it stores their weights and config.

A setting that `polyattn.nn` does not support is refused by name: a model is loaded correctly or not
at all.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from polyattn._base.arguments import short
from polyattn._base.arrays import Array
from polyattn.nn.load.decoders import DECODERS
from polyattn.nn.load.encoders import ENCODERS
from polyattn.nn.load.files import Weights, read_config, read_weights
from polyattn.nn.load.model_plan import Family, ModelPlan, Wanted, embedding_name
from polyattn.nn.load.settings import Settings
from polyattn.nn.load.stored import block_names, fill, renamed
from polyattn.nn.models import Transformer

#: The weight of an output map, whose name is the same with and without the prefix of a family.
HEAD = "lm_head.weight"
UNQUANTIZED = "load the checkpoint of 16 or 32 bits that this one was made from"
FAMILIES: dict[str, Family] = DECODERS | ENCODERS


def model(
    weights: Weights,
    config: Mapping[str, Any] | None = None,
    *,
    like: Array,
    logits: bool | None = None,
    length: int | None = None,
) -> Transformer:
    """Load a model of the family that its config names as ``model_type``.

    Parameters
    ----------
    weights : mapping of str to Array, or path
        A state dict of the family's base model or of one with a head, a ``.safetensors`` file, or
        a folder of ``save_pretrained``. Heads are left out, but for the logits of a decoder.
    config : mapping, optional
        The content of ``config.json``, or ``config.to_dict()``; by default the file beside the
        weights.
    like : Array
        An array of the library, device and dtype of the parameters.
    logits : bool, optional
        Whether a decoder returns logits, as by default, rather than the last hidden states; a base
        model, which has no output map, needs False unless the embedding is tied to it.
    length : int, optional
        For dynamic scaling of rotary positions, the sequence length to scale to; by default the
        length of each call, as in transformers, where it is above that of training.

    Returns
    -------
    Transformer
        A decoder from token ids to logits, which is causal by itself; or an encoder to the last
        hidden states, from token ids, from the pixels of images, (..., C, height, width),
        or from spectrograms, (..., bands, T). Padding needs a ``mask``, such as
        ``mask=attention_mask[:, None, None, :] == 1``.

    Raises
    ------
    ValueError
        If names or shapes do not fit, the config has an unsupported setting or family, an encoder
        is asked for logits, or a file is damaged or names one outside its folder.
    FileNotFoundError, ImportError
        If there is no file, or safetensors is not installed to read it.
    """
    family, settings = family_of(*read_config(weights, config))
    if logits and family in ENCODERS.values():
        raise ValueError(f"{family.title} is an encoder, which has no logits: leave out logits=")
    source = "weights" if isinstance(weights, Mapping) else f"weights of {weights}"
    # The plan reads all settings before it asks for the blocks, and so for the weights.
    read: dict[str, Array] = {}

    def blocks(prefix: str, count: int, setting: str) -> list[str]:
        read.update(_base_weights(weights, family))
        return block_names(read, source, prefix, count, setting)

    plan = family.plan(settings, blocks, Wanted(logits is not False, length))
    _use_or_drop_head(read, plan, settings)
    advice = {HEAD: "a base model has no output map: pass logits=False for hidden states"}
    origin = f"{family.title} of this config"
    filled = fill(plan.model, read, like=like, origin=origin, source=source, advice=advice)
    return plan.finished(filled)


def family_of(config: Mapping[str, Any], origin: str) -> tuple[Family, Settings]:
    """Return the family of a config and its settings, or refuse those it does not support."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        missing = "; add it to the config" if name is None else ""
        raise ValueError(
            f"{origin}: model_type is {reprlib.repr(name)}{missing}; this function reads {known}"
        )
    family = FAMILIES[name]
    settings = Settings({**family.defaults, **config}, origin)
    _check_not_quantized(settings)
    for setting, supported in family.refused.items():
        settings.only(setting, supported)
    return family, settings


def _check_not_quantized(settings: Settings) -> None:
    """Raise for weights of few bits, which mean nothing without their scales."""
    quantization = settings.section("quantization_config")
    if len(quantization):
        raise quantization.refusal(
            "quant_method",
            f"absent: {UNQUANTIZED}, or pass a config without quantization_config if the weights"
            " are of 16 or 32 bits",
        )


def _base_weights(weights: Weights, family: Family) -> dict[str, Array]:
    """Return the weights by their names in the base model, without buffers and other heads."""
    arrays = read_weights(weights)
    packed = next(
        (name for name in arrays if str(name).endswith((".qweight", ".weight_packed"))), None
    )
    if packed is not None:
        raise ValueError(
            f"{short(packed)} is quantized, as GPTQ and AWQ store weights: {UNQUANTIZED}"
        )
    return renamed(arrays, partial(_base_name, family))


def _base_name(family: Family, name: str) -> str | None:
    name = name.removeprefix(family.prefix)
    for pattern, new in family.old.items():
        name = re.sub(pattern, new, name)
    return None if re.fullmatch(family.skip, name) else name


def _use_or_drop_head(weights: dict[str, Array], plan: ModelPlan, settings: Settings) -> None:
    """Remove an unused output map, and check that weights tied under either name are equal."""
    if plan.model.output is not None or HEAD not in weights:
        return
    embedding = embedding_name(plan.model)
    head, known = weights.pop(HEAD), weights.get(embedding)
    if known is None and settings.flag("tie_word_embeddings"):
        weights[embedding] = head
    elif known is None or not plan.model.tied:
        return
    elif head.shape != known.shape or not bool((head == known).all()):
        raise ValueError(
            f"config says that {HEAD} and {embedding} are tied, but they are not equal; if they are"
            ' meant to differ, pass a config with "tie_word_embeddings": False'
        )
