"""Define ModelPlan: a model whose parameters are names of stored arrays, made from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polyattn.nn.layers import Embedding, Linear
from polyattn.nn.load.settings import Settings
from polyattn.nn.load.stored import linear
from polyattn.nn.models import Transformer
from polyattn.nn.positions import Rotary

#: Returns the names of the blocks, from their prefix, their number and the setting it is from.
Blocks = Callable[[str, int, str], list[str]]


@dataclass(frozen=True)
class Wanted:
    """The parts of a model that the caller wants."""

    logits: bool = True
    length: int | None = None


@dataclass(frozen=True)
class ModelPlan:
    """A model with `Stored` in place of parameters, and the rotary positions of its blocks."""

    # The positions are functions, called once the weights are known to fit: a damaged config may
    # ask for billions of frequencies.

    model: Transformer
    rotary: tuple[Callable[[], Rotary] | None, ...] = ()

    def finished(self, model: Transformer) -> Transformer:
        """Return a filled model with its rotary positions."""
        made = {make: make() for make in set(self.rotary) if make is not None}
        if not made:
            return model
        blocks = [
            replace(block, attention=replace(block.attention, rotary=make and made[make]))
            for block, make in zip(model.stack.blocks, self.rotary, strict=True)
        ]
        return replace(model, stack=replace(model.stack, blocks=tuple(blocks)))


@dataclass(frozen=True)
class Family:
    """The models of one ``model_type`` of transformers."""

    title: str  # with an article
    plan: Callable[[Settings, Blocks, Wanted], ModelPlan]
    prefix: str  # what the names of weights begin with in a model with a head
    skip: str  # names, without the prefix, of buffers and heads that are left out
    #: Patterns of old names, and what stands for them now.
    old: Mapping[str, str] = field(default_factory=dict)
    #: Settings that a config may leave out, unlike those that it gives as null.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: The one supported value of settings that no model here has otherwise.
    refused: Mapping[str, Any] = field(default_factory=dict)


def output_map(
    settings: Settings, wanted: Wanted, size: int, tokens: int
) -> tuple[Linear | None, bool]:
    """Return the output map, and whether the embedding computes the logits instead."""
    if not wanted.logits:
        return None, False
    if settings.flag("tie_word_embeddings"):
        return None, True
    return linear("lm_head", size, tokens, bias=False), False


def embedding_name(model: Transformer) -> str:
    """Return the name of the stored vectors of the tokens."""
    assert isinstance(model.embedding, Embedding)
    return str(next(iter(model.embedding.weight.sources)))
