"""The options of `attention`, shared by the other functions that take them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypedDict

from polyattn.arrays import Array
from polyattn.call.options import Start
from polyattn.expressions.masks import Mask
from polyattn.expressions.replacements import Normalizer, ScaleRule, Similarity
from polyattn.expressions.scores import Score
from polyattn.plugin import Kernel

__all__ = ["AttentionOptions", "check_names"]


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `attention`, which documents them."""

    mask: Array | Mask | Callable[..., Array] | None
    bias: Array | None
    is_causal: bool
    window: tuple[int | None, int | None] | None
    query_offset: int | Array | None
    scale: float | ScaleRule | None
    softcap: float | None
    score_mod: Score | Callable[..., Array] | None
    sinks: Array | None
    dropout: tuple[float, int | Array] | tuple[float, int | Array, Start | Array] | None
    similarity: Similarity | None
    normalizer: Normalizer | None
    layout: str
    backend: str | Sequence[str] | None
    kernel: str | Kernel | None


def check_names(function: str, options: Collection[str], without: Collection[str] = ()) -> None:
    """Raise if a keyword is not an option of `attention`, as Python does for a full signature."""
    for name in options:
        if name not in AttentionOptions.__annotations__ or name in without:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
