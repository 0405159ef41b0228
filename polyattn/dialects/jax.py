"""Compute attention as a function of `jax.nn` is called."""

from __future__ import annotations

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.partial import Partial, attention_partial
from polyattn._base.arrays import Array
from polyattn.dialects._shared import check_axes, scaled, shape_of, with_all_axes

__all__ = ["dot_product_attention"]
__dir__ = __all__.copy


def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None,
    *, scale: float | None = None, is_causal: bool = False,
    query_seq_lengths: Array | None = None, key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
    return_residual: bool = False,
) -> Array | Partial:  # fmt: skip
    """Compute attention as `jax.nn.dot_product_attention` is called.

    Parameters
    ----------
    query, key, value : Array
        Shapes (B, L, H, D), (B, S, G, D) and (B, S, G, E), or all without B.
    bias : Array, optional
        Added to the scores; broadcasts to (B, H, L, S), so one of rank 3 is per head.
    mask : Array of bool, optional
        True where a key takes part; broadcasts to (B, H, L, S), so one of rank 3 is per head.
    scale : float or Array without axes, optional
        Multiplies the scores; 1/√D by default.
    is_causal : bool
        Whether row i sees the keys j <= i.
    query_seq_lengths, key_value_seq_lengths : Array of int, optional
        Number of real (non-padding) rows and keys per batch item, shape (B,). The output of the
        other rows is 0.
    local_window_size : int or tuple of int, optional
        Number of keys that a row sees before and after its position; an integer is for both sides.
    implementation : str, optional
        Ignored: the kernel is chosen as for `polyattn.attention`.
    return_residual : bool
        Whether to return the logsumexp too, (B, L, H), in float32 at least.

    Returns
    -------
    Array or Partial
        Shape (B, L, H, E); with `return_residual` the Partial.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects import dot_product_attention
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> dot_product_attention(x, x, x, local_window_size=(2, 0)).shape
    (2, 5, 8, 64)
    """
    window, rank = local_window_size, len(shape_of(query, "query"))
    own = "B" if rank == 4 else ""
    check_axes(
        f"query {own}LHD, key {own}SGD, value {own}SGE, query_seq_lengths B,"
        " key_value_seq_lengths B",
        query, key, value, query_seq_lengths, key_value_seq_lengths, **({} if own else {"B": 1}),
    )  # fmt: skip
    padding = [
        n if n is None or rank == 4 else n[0] for n in (key_value_seq_lengths, query_seq_lengths)
    ]
    mask = with_all_axes(mask, rank, "mask")
    if any(lengths is not None for lengths in padding):
        real = masks.padding(*padding)
        mask = real if mask is None else real & masks.dense(mask)
    query, scale = scaled(query, scale)
    call = attention_partial if return_residual else attention
    return call(
        query, key, value, scale=scale, is_causal=is_causal, query_offset=0, layout="...LHD",
        window=(window, window) if isinstance(window, int) else window,
        bias=with_all_axes(bias, rank, "bias"), mask=mask,
    )  # fmt: skip
