"""The static facts of a node, ONNX's operator Attention, and its attributes and inputs by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Node(NamedTuple):
    """The static facts of a node."""

    opset: int  # the version of the operator: 23, 24 or 25
    dtype: str  # of query, key, value and output
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    #: Whether row i sees no key after i + offset, which is 0, or the number of keys − L with
    #: `counted`.
    is_causal: bool
    window: tuple[int, int]  # how many keys a row sees before and after; −1 for no bound
    scale: float  # more than 0
    softcap: float  # 0 for none
    mask: str | None  # the dtype of the input attn_mask, if there is one
    #: Whether there is an input nonpad_kv_seqlen, the number of keys of each batch item.
    counted: bool

    def attributes(self) -> dict[str, Any]:
        """Return the operator's attributes that are not at their defaults, by name."""
        found: dict[str, Any] = {"is_causal": int(self.is_causal), "scale": self.scale}
        found |= {"softcap": self.softcap} if self.softcap else {}
        for name, size in zip(("left_window_size", "right_window_size"), self.window, strict=True):
            found |= {name: size} if size >= 0 else {}
        return found

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs at their places among the operator's, None between for those it lacks."""
        query, key, value, *more = inputs
        mask = more.pop(0) if self.mask else None
        found = [query, key, value, mask, None, None, more.pop() if self.counted else None]
        while found[-1] is None:
            found.pop()
        return found
