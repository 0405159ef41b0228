"""Compute neighbourhood attention as the functions of NATTEN are called, on any array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial, merge
from polyattn._base.arrays import Array, library_of
from polyattn._core.expressions.neighborhood import PerAxis
from polyattn.dialects._shared import check_axes, joined_axes, pair, scaled, shape_of

__all__ = ["na1d", "na2d", "na3d"]
__dir__ = __all__.copy

#: Arguments that choose a kernel and its tiles.
_TUNING = {
    *("backend", "kernel_schedule", "run_persistent_kernel", "torch_compile"),
    *("q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"),
    *("backward_kv_splits", "backward_use_pt_reduction"),
}
_DOCS = """Compute attention as `natten.{name}` is called, on any array.

    Parameters
    ----------
    query, key, value : Array
        Shapes (B, {grid}, H, D), (B, {grid}, G, D) and (B, {grid}, G, E); H is a multiple of G.
    kernel_size, stride, dilation, is_causal : int or bool, or tuple
        As for `polyattn.masks.neighborhood`.
    scale : float or Array without axes, optional
        Multiplies the scores; 1/√D by default.
    additional_keys, additional_values : Array, optional
        Keys and values that every row sees besides, (B, n, G, D) and (B, n, G, E).
    attention_kwargs : dict, optional
        Ignored, as the sizes of tiles and the names of backends are: they change no number here.
    return_lse : bool
        Whether to return the logsumexp too.
    **tuning : object
        Ignored too.

    Returns
    -------
    Array or tuple
        Shape (B, {grid}, H, E); with `return_lse` also the logsumexp, (B, {grid}, H).

    Raises
    ------
    TypeError, ValueError
        If the shapes do not fit, or `polyattn.masks.neighborhood` refuses a number.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.natten import {name}
    >>> x = np.ones({shape}, dtype=np.float32)
    >>> {name}(x, x, x, {options}).shape
    {shape}
    """


def _of_grid(axes: str, shape: tuple[int, ...], options: str) -> Callable[..., Any]:
    """Return the function of grids with these axes; shape and options are those of its example."""
    name = f"na{len(axes)}d"

    def attend(
        query: Array, key: Array, value: Array, kernel_size: PerAxis, stride: PerAxis = 1,
        dilation: PerAxis = 1, is_causal: bool | tuple[bool, ...] | None = False,
        scale: float | None = None, additional_keys: Array | None = None,
        additional_values: Array | None = None, attention_kwargs: dict[str, Any] | None = None,
        *, return_lse: bool = False, **tuning: Any,
    ) -> Any:  # fmt: skip
        more = pair("additional_keys and additional_values", additional_keys, additional_values)
        if unknown := tuning.keys() - _TUNING:
            raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
        check_axes(
            f"query B{axes}HD, key B{axes}GD, value B{axes}GE, additional_keys? BnGD,"
            " additional_values? BnGE",
            query, key, value, additional_keys, additional_values,
        )  # fmt: skip
        lengths = shape_of(query, "query")
        numbers: Any = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        numbers |= {"is_causal": False if is_causal is None else is_causal}
        numbers = {n: tuple(x) if isinstance(x, list) else x for n, x in numbers.items()}
        mask = masks.neighborhood(tuple(lengths[1:-2]), **numbers)
        xp = library_of(query, "query").xp
        query, scale = scaled(query, scale)
        arrays = [xp.moveaxis(joined_axes(x, 1, -2), 2, 1) for x in (query, key, value)]
        if more is None and not return_lse:
            output = attention(*arrays, mask=mask, scale=scale)
            return xp.reshape(xp.moveaxis(output, 1, 2), (*lengths[:-1], value.shape[-1]))
        parts = [attention_partial(*arrays, mask=mask, scale=scale)]
        if more is not None:
            keys = [xp.moveaxis(x, 2, 1) for x in more]
            parts.append(attention_partial(arrays[0], *keys, scale=scale))
        output, lse = (xp.moveaxis(x, 1, 2) for x in merge(*parts))
        output = xp.reshape(output, (*lengths[:-1], value.shape[-1]))
        return (output, xp.reshape(lse, lengths[:-1])) if return_lse else output

    attend.__name__ = attend.__qualname__ = name
    attend.__doc__ = _DOCS.format(name=name, grid=", ".join(axes), shape=shape, options=options)
    return attend


na1d = _of_grid("X", (2, 100, 8, 64), "kernel_size=7, is_causal=True")
na2d = _of_grid("XY", (2, 14, 14, 8, 64), "kernel_size=7, dilation=2")
na3d = _of_grid("XYZ", (1, 4, 6, 6, 2, 8), "kernel_size=(2, 3, 3), is_causal=(True, False, False)")
