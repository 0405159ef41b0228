"""Compute attention as a function of `flax.nnx` and `flax.linen` is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn._api.attention import attention
from polyattn._base.arrays import Array, cast, library_of
from polyattn.dialects._shared import check_axes, shape_of, with_all_axes

__all__ = ["dot_product_attention"]
__dir__ = __all__.copy


def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None,
    broadcast_dropout: bool = True, dropout_rng: Any = None, dropout_rate: float = 0.0,
    deterministic: bool = False, dtype: Any = None, precision: Any = None, module: Any = None,
    promote_dtype: Callable[..., Any] | None = None, is_causal: bool = False,
    force_fp32_for_softmax: bool = False, einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None, attn_weights_value_einsum: Any = None,
) -> Array:  # fmt: skip
    """Compute attention as ``dot_product_attention`` of Flax is called, as by its layers.

    It has the arguments of both functions, so ``attention_fn`` of a layer may be this one.

    Parameters
    ----------
    query, key, value : Array
        Shapes (..., L, H, D), (..., S, G, D) and (..., S, G, E); H is a multiple of G.
    bias : Array of float, optional
        Added to the scores; broadcasts to (..., H, L, S).
    mask : Array, optional
        True, or not 0, where a key takes part; broadcasts to (..., H, L, S).
    broadcast_dropout : bool
        Must be False where there is dropout: each item and head drops weights of its own.
    dropout_rng : Array or int, optional
        A key of `jax.random`, or a number, from which the dropped weights follow.
    dropout_rate : float
        Share of the weights that are dropped.
    deterministic : bool
        Whether no weights are dropped.
    dtype : dtype, optional
        The dtype of the result, to which query, key and value are cast.
    precision, module : optional
        Must be None. A layer passes itself as the module to store its weights
        (``sow_weights=True``).
    promote_dtype : function, optional
        Called as ``promote_dtype((query, key, value), dtype=dtype)``, in place of the cast.
    is_causal : bool
        Whether row i sees the keys j <= i.
    force_fp32_for_softmax : bool
        Ignored: the softmax is computed in float32 at least.
    einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum : optional
        Must be None.

    Returns
    -------
    Array
        Shape (..., L, H, E).

    Raises
    ------
    ValueError
        If shapes do not fit, or an option is not supported.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.flax import dot_product_attention
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> dot_product_attention(x, x, x, mask=np.tri(5)).shape
    (2, 5, 8, 64)
    """
    drops = not deterministic and dropout_rate != 0
    _refuse(
        broadcast_dropout=drops and broadcast_dropout, precision=precision,
        sow_weights=module is not None, einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )  # fmt: skip
    rank = len(shape_of(query, "query"))
    own = "ABCUVWXYZ"[: rank - 3]
    check_axes(f"query {own}LHD, key {own}SGD, value {own}SGE", query, key, value)
    if promote_dtype is not None:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    elif dtype is not None:
        query, key, value = (_as_dtype(x, dtype) for x in (query, key, value))
    if mask is not None:
        xp = library_of(mask, "mask").xp
        mask = with_all_axes(cast(xp, mask, xp.bool), rank, "mask")
    return attention(
        query, key, value, layout="...LHD", bias=with_all_axes(bias, rank, "bias"), mask=mask,
        is_causal=bool(is_causal), query_offset=0 if is_causal else None,
        dropout=(dropout_rate, _seed(dropout_rng)) if drops else None,
    )  # fmt: skip


def _refuse(**options: Any) -> None:
    for name, given in options.items():
        if given is not None and given is not False:
            needed = False if given is True else None
            raise ValueError(f"{name} must be {needed}; got {given!r}")


def _as_dtype(x: Array, dtype: Any) -> Array:
    xp = library_of(x).xp
    return cast(xp, x, getattr(xp, dtype) if isinstance(dtype, str) else dtype)


def _seed(rng: Any) -> Any:
    """Return a number of a key of `jax.random`, or the number given."""
    if rng is None:
        raise ValueError("dropout_rng must be a key of jax.random or an integer; got None")
    if type(rng).__module__.partition(".")[0] not in ("jax", "jaxlib"):
        return rng
    import jax

    return jax.random.bits(rng)
