"""Read heads, length and size from a shape in the caller's layout."""

from __future__ import annotations

from polyattn._base.arguments import Shape


def axes_of(shape: Shape, layout: str) -> tuple[Shape, int, int, int]:
    """Return the batch axes, heads, length and size of query, key or value."""
    if len(shape) == 2:
        return (), 1, shape[0], shape[1]
    heads, length = (shape[-3], shape[-2]) if layout == "...HLD" else (shape[-2], shape[-3])
    return shape[:-3], heads, length, shape[-1]
