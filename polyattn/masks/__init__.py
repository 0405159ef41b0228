"""Create masks, which state the keys that each row may see and compose by ``&``, ``|`` and ``~``.

The position of row i is ``i + query_offset``, as for ``is_causal=`` and ``window=``::

    attention(q, k, v, mask=masks.causal() & masks.window(256, 0) | masks.prefix(16))
"""

from __future__ import annotations

from polyattn._core.expressions.masks import Mask
from polyattn._core.tiles.compiled import compile
from polyattn.masks._by_position import (
    causal,
    dilated,
    global_tokens,
    neighborhood,
    padding,
    positions,
    prefix,
    segments,
    window,
)
from polyattn.masks._named import blocks, dense, edges, rule, selected, tree

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "compile",
    "dense",
    "dilated",
    "edges",
    "global_tokens",
    "neighborhood",
    "padding",
    "positions",
    "prefix",
    "rule",
    "segments",
    "selected",
    "tree",
    "window",
]
__dir__ = __all__.copy
