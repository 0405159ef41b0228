"""Models of transformers whose sequences are spread over a process group.

Each rank gives the model its tokens with their positions. The masks that transformers makes count
tokens from 0 on each rank, so they are made again here for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from polyattn import parallel

__all__ = ["Ranks"]

#: The parts of mask functions that arguments of the attention express: causality and window.
EXPRESSED = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay"}


class Ranks(NamedTuple):
    """The ranks of a model, and how they share attention."""

    over: Any
    strategy: str
    layout: str

    def size(self) -> int:
        """Return the number of ranks."""
        return parallel.size_of(self.over)

    def mask(
        self,
        batch_size: int,
        length: int,
        keys: int,
        row_offset: Any,
        key_offset: Any,
        function: Any,
        padding: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """Return the mask of the whole sequence, or the part that no other argument expresses."""
        whole = length * self.size()
        if padding is None and self.layout != "contiguous":
            raise ValueError(
                f"with layout={self.layout!r} give the model an attention_mask of the whole"
                f" sequence, ({batch_size}, {whole}), of ones if nothing is hidden: without it"
                " transformers takes the positions for those of packed sequences"
            )
        if padding is not None and padding.shape[-1] != whole:
            raise ValueError(
                f"attention_mask must be that of the whole sequence, ({batch_size}, {whole}), on"
                f" every rank; got {tuple(padding.shape)}"
            )
        if row_offset or key_offset or keys not in (length, whole):
            raise NotImplementedError(
                "with over= there is no cache: call the model with use_cache=False"
            )
        if function is causal_mask_function or function is bidirectional_mask_function:
            return _of_keys(padding)
        if {_name(part) for part in _parts(function)} <= EXPRESSED:
            return _of_keys(padding)
        if any(x.shape[-1] < whole for x in _tensors(function) if x.ndim > 1):
            raise NotImplementedError(
                "with over= a sequence may not be packed of several: positions restart, and a rank"
                " knows its own only"
            )
        options = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        found: torch.Tensor | None = sdpa_mask(
            batch_size, whole, whole, 0, 0, function, padding, **options
        )
        return found

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        refused: dict[str, Any],
        **options: Any,
    ) -> torch.Tensor:
        """Return the output of this rank's rows."""
        for name, given in refused.items():
            if given is not None and given is not False:
                raise NotImplementedError(f"with over= polyattn supports no {name}")
        output: torch.Tensor = parallel.attention(
            query,
            key,
            value,
            over=self.over,
            strategy=self.strategy,
            layout=self.layout,
            **options,
        )
        return output


def _of_keys(padding: torch.Tensor | None) -> torch.Tensor | None:
    """Return the keys that are not padding, (batch, 1, 1, S)."""
    return None if padding is None else padding[:, None, None, :].bool()


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", "")).partition(".")[0]


def _held(function: Any) -> Iterator[Any]:
    """Yield what a function's closure holds, tuples taken apart."""
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        yield from held if isinstance(held, (tuple, list)) else (held,)


def _parts(function: Any) -> Iterator[Any]:
    """Yield the functions that transformers' and_masks joined."""
    if _name(function) != "and_masks":
        yield function
        return
    for part in _held(function):
        yield from _parts(part)


def _tensors(function: Any) -> Iterator[torch.Tensor]:
    for held in _held(function):
        if isinstance(held, torch.Tensor):
            yield held
        elif callable(held):
            yield from _tensors(held)
