"""Compute neighbourhood attention as the functions of NATTEN are called, on any array."""

from __future__ import annotations

from typing import Any

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial, merge
from polyattn._base.arrays import Array, library_of
from polyattn._core.expressions.neighborhood import PerAxis
from polyattn.dialects._shared import check_axes, joined_axes, pair, scaled, shape_of

__all__ = ["na1d", "na2d", "na3d"]
__dir__ = __all__.copy

#: The letters of the axes of a grid.
_GRID = "XYZ"


def na2d(
    query: Array, key: Array, value: Array, kernel_size: PerAxis, stride: PerAxis = 1,
    dilation: PerAxis = 1, is_causal: bool | tuple[bool, ...] | None = False,
    scale: float | None = None, additional_keys: Array | None = None,
    additional_values: Array | None = None, attention_kwargs: dict[str, Any] | None = None,
    *, return_lse: bool = False, **tuning: Any,
) -> Any:  # fmt: skip
    """Compute attention as `natten.na2d` is called, on any array.

    Parameters
    ----------
    query, key, value : Array
        Shapes (B, X, Y, H, D), (B, X, Y, G, D) and (B, X, Y, G, E); H is a multiple of G.
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
        Shape (B, X, Y, H, E); with `return_lse` also the logsumexp, (B, X, Y, H).

    Raises
    ------
    TypeError, ValueError
        If the shapes do not fit, or `polyattn.masks.neighborhood` refuses a number.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.natten import na2d
    >>> x = np.ones((2, 14, 14, 8, 64), dtype=np.float32)
    >>> na2d(x, x, x, kernel_size=7, dilation=2).shape
    (2, 14, 14, 8, 64)
    """
    return _attend(
        2, query, key, value, kernel_size, stride, dilation, is_causal, scale,
        pair("additional_keys and additional_values", additional_keys, additional_values),
        return_lse, tuning,
    )  # fmt: skip


def na1d(
    query: Array, key: Array, value: Array, kernel_size: PerAxis, stride: PerAxis = 1,
    dilation: PerAxis = 1, is_causal: bool | tuple[bool, ...] | None = False,
    scale: float | None = None, additional_keys: Array | None = None,
    additional_values: Array | None = None, attention_kwargs: dict[str, Any] | None = None,
    *, return_lse: bool = False, **tuning: Any,
) -> Any:  # fmt: skip
    """Compute attention as `natten.na1d` is called: `na2d` of arrays (B, X, H, D).

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.natten import na1d
    >>> x = np.ones((2, 100, 8, 64), dtype=np.float32)
    >>> na1d(x, x, x, kernel_size=7, is_causal=True).shape
    (2, 100, 8, 64)
    """
    return _attend(
        1, query, key, value, kernel_size, stride, dilation, is_causal, scale,
        pair("additional_keys and additional_values", additional_keys, additional_values),
        return_lse, tuning,
    )  # fmt: skip


def na3d(
    query: Array, key: Array, value: Array, kernel_size: PerAxis, stride: PerAxis = 1,
    dilation: PerAxis = 1, is_causal: bool | tuple[bool, ...] | None = False,
    scale: float | None = None, additional_keys: Array | None = None,
    additional_values: Array | None = None, attention_kwargs: dict[str, Any] | None = None,
    *, return_lse: bool = False, **tuning: Any,
) -> Any:  # fmt: skip
    """Compute attention as `natten.na3d` is called: `na2d` of arrays (B, X, Y, Z, H, D).

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.natten import na3d
    >>> x = np.ones((1, 4, 6, 6, 2, 8), dtype=np.float32)
    >>> na3d(x, x, x, kernel_size=(2, 3, 3), is_causal=(True, False, False)).shape
    (1, 4, 6, 6, 2, 8)
    """
    return _attend(
        3, query, key, value, kernel_size, stride, dilation, is_causal, scale,
        pair("additional_keys and additional_values", additional_keys, additional_values),
        return_lse, tuning,
    )  # fmt: skip


#: Arguments that choose a kernel and its tiles.
_TUNING = {
    *("backend", "kernel_schedule", "run_persistent_kernel", "torch_compile"),
    *("q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"),
    *("backward_kv_splits", "backward_use_pt_reduction"),
}


def _attend(
    rank: int, query: Array, key: Array, value: Array, kernel_size: PerAxis, stride: PerAxis,
    dilation: PerAxis, is_causal: Any, scale: Any, additional: tuple[Array, Array] | None,
    return_lse: bool, tuning: dict[str, Any],
) -> Any:  # fmt: skip
    if unknown := tuning.keys() - _TUNING:
        raise TypeError(f"na{rank}d() got an unexpected keyword argument {min(unknown)!r}")
    letters = _GRID[:rank]
    check_axes(
        f"query B{letters}HD, key B{letters}GD, value B{letters}GE, additional_keys? BnGD,"
        " additional_values? BnGE",
        query, key, value, *(additional or (None, None)),
    )  # fmt: skip
    shape = shape_of(query, "query")
    is_causal = False if is_causal is None else is_causal
    size, stride, dilation, is_causal = (
        tuple(one) if isinstance(one, list) else one
        for one in (kernel_size, stride, dilation, is_causal)
    )
    mask = masks.neighborhood(
        tuple(shape[1:-2]), size, stride=stride, dilation=dilation, is_causal=is_causal
    )
    xp = library_of(query, "query").xp
    query, scale = scaled(query, scale)
    heads_first = [xp.moveaxis(joined_axes(x, 1, 1 + rank), 2, 1) for x in (query, key, value)]
    if additional is None and not return_lse:
        output = attention(*heads_first, mask=mask, scale=scale)
        return xp.reshape(xp.moveaxis(output, 1, 2), (*shape[:-1], value.shape[-1]))
    parts = [attention_partial(*heads_first, mask=mask, scale=scale)]
    if additional is not None:
        more = [xp.moveaxis(x, 2, 1) for x in additional]
        parts.append(attention_partial(heads_first[0], *more, scale=scale))
    output, lse = (xp.moveaxis(x, 1, 2) for x in merge(*parts))
    output = xp.reshape(output, (*shape[:-1], value.shape[-1]))
    return (output, xp.reshape(lse, shape[:-1])) if return_lse else output
