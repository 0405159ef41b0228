"""Create masks, which state the keys that each row may see and compose by ``&``, ``|`` and ``~``.

The position of row i is ``i + query_offset``, as for ``is_causal=`` and ``window=``::

    attention(q, k, v, mask=masks.causal() & masks.window(256, 0) | masks.prefix(16))
"""

from __future__ import annotations

from polyattn._core.expressions.masks import Mask
from polyattn._core.tiles.compiled import compile
from polyattn.masks import _by_position, _named
from polyattn.masks._by_position import *  # noqa: F403 -- the masks that it lists
from polyattn.masks._named import *  # noqa: F403

__all__ = ["Mask", "compile"]
__all__ += _by_position.__all__
__all__ += _named.__all__
__dir__ = __all__.copy
