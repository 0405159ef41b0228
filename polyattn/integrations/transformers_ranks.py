"""Models of transformers whose sequences are spread over a process group.

Each rank gives the model its tokens with their positions. The masks that transformers makes count
tokens from 0 on each rank, so they are made again here for the whole sequence.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import sdpa_mask

from polyattn import masks, parallel
from polyattn._base.arrays import is_one_of
from polyattn.parallel.over import communicator_of

#: The parts of mask functions that arguments of the attention express: causality and window.
EXPRESSED = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay"}


class Ranks(NamedTuple):
    """The ranks of a model, and how they share attention."""

    over: Any
    strategy: str
    layout: str

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
        whole = length * parallel.size_of(self.over)
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
        if row_offset or key_offset or not is_one_of(keys, length, whole):
            raise NotImplementedError(
                "over= does not support a cache: call the model with use_cache=False"
            )
        if {_name(part) for part in _parts(function)} <= EXPRESSED:
            return None if padding is None else padding[:, None, None, :].bool()
        if any(x.shape[-1] < whole for x in _tensors(function) if x.ndim > 1):
            raise NotImplementedError(
                "with over= a rank cannot tell packed sequences from their positions, as it knows"
                " only its own: give the model the attention_mask of the whole sequence, and"
                " cu_seq_lens_q= with the ends of the sequences in it"
            )
        options = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: torch.Tensor | None = sdpa_mask(
            batch_size, whole, whole, 0, 0, function, padding, **options
        )
        return mask

    def visibility(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        packed: torch.Tensor | None,
        is_causal: bool | None,
        sliding_window: int | None,
    ) -> dict[str, Any]:
        """Return which keys each row of the whole sequence sees, as options of attention."""
        parts: list[Any] = [] if mask is None else [masks.dense(mask)]
        if packed is not None and len(packed) > 2:
            whole = query.shape[-2] * parallel.size_of(self.over)
            at = torch.arange(whole, device=query.device)
            parts.append(masks.segments(torch.bucketize(at, packed[1:].to(at), right=True)))
        options: dict[str, Any] = {"mask": functools.reduce(operator.and_, parts)} if parts else {}
        if mask is not None and mask.shape[-2] > 1:  # it includes causality and the window
            return options
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if is_causal:
            options |= {"is_causal": True, "query_offset": 0}
        if sliding_window is not None:
            if not is_causal:
                raise NotImplementedError("over= supports a sliding window in causal models only")
            options["window"] = (sliding_window - 1, None)
        return options

    def seed(self, like: torch.Tensor) -> torch.Tensor:
        """Return a new seed of dropout, that of the first rank on all."""
        own = torch.randint(2**62, (1,), device=like.device)
        seed: torch.Tensor = communicator_of(self.over).gather(own, 0)[0]
        return seed

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
                raise NotImplementedError(f"over= does not support {name}")
        output: torch.Tensor = parallel.attention(query, key, value, **self._asdict(), **options)
        return output


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", "")).partition(".")[0]


def _held(function: Any) -> Iterator[Any]:
    """Yield what a function's closure holds, with the items of tuples."""
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
