"""The static facts of a node, ONNX's operator Attention, and its attributes and inputs by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Node(NamedTuple):
    """The static facts of a node.

    Attributes
    ----------
    opset : int
        The version of the operator: 23, 24 or 25.
    dtype : str
        That of query, key, value and output.
    heads, key_heads, head_size, value_size : int
        H, G, D and E.
    is_causal : bool
        Whether row i sees no key after i + offset, which is 0, or the number of keys − L with
        `counted`.
    window : tuple of (int, int)
        How many keys a row sees before and after its position; −1 for no bound.
    scale, softcap : float
        The factor of q·k, more than 0, and the bound of the scores, 0 for none.
    mask : str or None
        The dtype of the input ``attn_mask``, if there is one.
    counted : bool
        Whether there is an input ``nonpad_kv_seqlen``, the number of keys of each batch item.
    """

    opset: int
    dtype: str
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    is_causal: bool
    window: tuple[int, int]
    scale: float
    softcap: float
    mask: str | None
    counted: bool

    def attributes(self) -> dict[str, Any]:
        """Return the operator's attributes that are not at their defaults.

        Returns
        -------
        dict of str to (int or float)
            By name.
        """
        found: dict[str, Any] = {"is_causal": int(self.is_causal), "scale": self.scale}
        found |= {"softcap": self.softcap} if self.softcap else {}
        for name, size in zip(("left_window_size", "right_window_size"), self.window, strict=True):
            found |= {name: size} if size >= 0 else {}
        return found

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs at their places among the operator's.

        Parameters
        ----------
        inputs : sequence
            Those that the node has.

        Returns
        -------
        list
            None at the places between of inputs that it does not have.
        """
        query, key, value, *more = inputs
        mask = more.pop(0) if self.mask else None
        found = [query, key, value, mask, None, None, more.pop() if self.counted else None]
        while found[-1] is None:
            found.pop()
        return found
