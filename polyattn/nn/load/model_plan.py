"""Define ModelPlan: a model whose parameters are names of stored arrays, made from a config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polyattn.nn.attention import MultiHeadAttention
from polyattn.nn.blocks import EncoderBlock, Stack
from polyattn.nn.layers import Embedding, FeedForward, Linear
from polyattn.nn.load.settings import Settings
from polyattn.nn.load.stored import joined_linear, layer_norm, linear
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
class Family(ABC):
    """The models of one ``model_type`` of transformers."""

    title: str  # with an article
    prefix: str = "model."  # what the names of weights begin with in a model with a head
    skip: str = ""  # names, without the prefix, of buffers and heads that are left out
    #: Patterns of old names, and what stands for them now.
    old: Mapping[str, str] = field(default_factory=dict)
    #: Settings that a config may leave out, unlike those that it gives as null.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: The one supported value of settings that no model here has otherwise.
    refused: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def plan(self, settings: Settings, blocks: Blocks, wanted: Wanted) -> ModelPlan:
        """Return the plan of a model, having read all settings before it asks for the blocks."""


def plain_stack(
    names: list[str],
    parts: tuple[str, ...],
    sizes: tuple[int, int, int],
    epsilon: float,
    activation: str,
    make: Callable[[str, int, int], Linear] = linear,
    *,
    norm: str = "",
    biases: tuple[bool, ...] = (),
    is_causal: bool = False,
) -> Stack:
    """Return blocks of a size, heads and inner size, by the names of their maps and norms."""
    # With the name of a last norm, norms come first. With `biases`, of queries, keys and values,
    # these are three maps.
    size, heads, inner = sizes

    def block(name: str) -> EncoderBlock:
        *maps, output, up, down, first, second = (f"{name}.{part}" for part in parts)
        separate: list[Any] = [None, None, None]
        fused = None
        if biases:
            separate = [linear(x, size, size, bias) for x, bias in zip(maps, biases, strict=True)]
        elif len(maps) == 1:
            fused = make(maps[0], size, 3 * size)
        else:
            fused = joined_linear(maps, size, [size, size, size])
        given = (*separate, make(output, size, size), heads, heads, size // heads, fused)
        return EncoderBlock(
            MultiHeadAttention(*given, is_causal=is_causal),
            FeedForward(make(up, size, inner), make(down, inner, size), activation=activation),
            layer_norm(first, size, epsilon),
            layer_norm(second, size, epsilon),
            pre_norm=bool(norm),
        )

    last = layer_norm(norm, size, epsilon) if norm else None
    return Stack(tuple([block(name) for name in names]), last)


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
