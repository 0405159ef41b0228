"""Compute neighbourhood attention as the functions of NATTEN are called, on any array."""

from __future__ import annotations

import functools
import math
from typing import Any

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial, merge
from polyattn._base.arrays import Array, library_of
from polyattn._core.expressions.neighborhood import Neighborhood, PerAxis
from polyattn.dialects._shared import check_axes, integers, joined_axes, pair, scaled, shape_of

__all__ = [
    "na1d", "na2d", "na3d", "natten1dav", "natten1dqk", "natten1dqkrpb",
    "natten2dav", "natten2dqk", "natten2dqkrpb",
]  # fmt: skip
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


# ---- the functions of older versions: scores and weights of the windows in arrays ----


def natten1dqkrpb(
    query: Array, key: Array, rpb: Array | None, kernel_size: int, dilation: int = 1
) -> Array:
    """Compute the scores within windows, as `natten.functional.natten1dqkrpb` is called.

    The keys of all windows are gathered. `na1d` makes no such array.

    Parameters
    ----------
    query, key : Array
        Shape (B, H, X, D); the query is scaled already.
    rpb : Array, optional
        A bias by relative position, (H, 2K − 1).
    kernel_size, dilation : int
        The size K of a window, and the distance between its tokens.

    Returns
    -------
    Array
        Shape (B, H, X, K).

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.natten import natten1dav, natten1dqkrpb
    >>> x = np.ones((2, 4, 10, 8))
    >>> scores = natten1dqkrpb(x, x, np.zeros((4, 5)), kernel_size=3, dilation=2)
    >>> natten1dav(scores / 3, x, kernel_size=3, dilation=2).shape
    (2, 4, 10, 8)
    """
    return _scores(1, query, key, rpb, kernel_size, dilation)


def natten2dqkrpb(
    query: Array, key: Array, rpb: Array | None, kernel_size: int, dilation: int = 1
) -> Array:
    """Compute scores as `natten1dqkrpb` of arrays (B, H, X, Y, D): (B, H, X, Y, K²).

    `rpb` is (H, 2K − 1, 2K − 1).
    """
    return _scores(2, query, key, rpb, kernel_size, dilation)


def natten1dqk(query: Array, key: Array, kernel_size: int, dilation: int = 1) -> Array:
    """Compute scores as `natten1dqkrpb` without a bias."""
    return _scores(1, query, key, None, kernel_size, dilation)


def natten2dqk(query: Array, key: Array, kernel_size: int, dilation: int = 1) -> Array:
    """Compute scores as `natten2dqkrpb` without a bias."""
    return _scores(2, query, key, None, kernel_size, dilation)


def natten1dav(attn: Array, value: Array, kernel_size: int, dilation: int = 1) -> Array:
    """Sum the values of windows by weights (B, H, X, K), as `natten1dav` is called.

    The result has the shape (B, H, X, E).
    """
    return _sums(1, attn, value, kernel_size, dilation)


def natten2dav(attn: Array, value: Array, kernel_size: int, dilation: int = 1) -> Array:
    """Sum the values of windows by weights (B, H, X, Y, K²), as `natten2dav` is called.

    The result has the shape (B, H, X, Y, E).
    """
    return _sums(2, attn, value, kernel_size, dilation)


@functools.lru_cache(16)
def _windows(shape: tuple[int, ...], kernel_size: int, dilation: int) -> tuple[Any, Any]:
    """Return the tokens of each token's window, and their places in a bias, (N, K^axes) each."""
    import numpy as np

    mask = masks.neighborhood(shape, kernel_size, dilation=dilation)
    assert isinstance(mask, Neighborhood)
    at = np.arange(math.prod(shape))[:, None]
    tokens = places = np.zeros_like(at)
    for axis in mask.grid:
        x = axis.coordinate(at)
        seen = axis.window(x)[0] + np.arange(kernel_size)
        offsets = seen - x // dilation + kernel_size - 1
        seen = (seen * dilation + x % dilation) * axis.step
        tokens = (tokens[:, :, None] + seen[:, None]).reshape(len(at), -1)
        places = (places[:, :, None] * (2 * kernel_size - 1) + offsets[:, None]).reshape(
            tokens.shape
        )
    return tokens, places


def _gathered(array: Array, kernel_size: int, dilation: int) -> tuple[Any, Array]:
    """Return an array (B, H, ..., D) at each window, (B, H, N, K^axes, D), and the places."""
    xp = library_of(array).xp
    shape = shape_of(array, "key or value")
    tokens, places = _windows(shape[2:-1], kernel_size, dilation)
    indices = integers("tokens", tokens.reshape(-1), array)
    taken = xp.take(joined_axes(array, 2, -1), indices, axis=2)
    return places, xp.reshape(taken, (*shape[:2], *tokens.shape, shape[-1]))


def _scores(
    rank: int, query: Array, key: Array, rpb: Array | None, kernel_size: int, dilation: int
) -> Array:
    letters, xp = _GRID[:rank], library_of(query, "query").xp
    check_axes(
        f"query BH{letters}D, key BH{letters}D, rpb? H{'P' * rank}",
        query, key, rpb, P=2 * kernel_size - 1,
    )  # fmt: skip
    places, keys = _gathered(key, kernel_size, dilation)
    scores = xp.matmul(keys, joined_axes(query, 2, -1)[..., None])[..., 0]
    if rpb is not None:
        flat = xp.reshape(rpb, (rpb.shape[0], -1))
        added = xp.take(flat, integers("places", places.reshape(-1), rpb), axis=1)
        scores = scores + xp.reshape(added, (rpb.shape[0], *places.shape))
    return xp.reshape(scores, (*query.shape[:-1], places.shape[-1]))


def _sums(rank: int, attn: Array, value: Array, kernel_size: int, dilation: int) -> Array:
    letters, xp = _GRID[:rank], library_of(attn, "attn").xp
    check_axes(f"attn BH{letters}K, value BH{letters}E", attn, value, K=kernel_size**rank)
    _, values = _gathered(value, kernel_size, dilation)
    weights = joined_axes(attn, 2, -1)[..., None, :]
    return xp.reshape(xp.matmul(weights, values), (*attn.shape[:-1], value.shape[-1]))
