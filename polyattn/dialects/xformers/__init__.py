"""Compute attention as a function of `xformers.ops` is called, with the classes of its biases.

``install`` lets code that imports xFormers find it here.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial
from polyattn._base.arrays import Array, cast, is_array, library_of
from polyattn.dialects._packed import Packed, PositionRule, from_pages, packed_attention
from polyattn.dialects._shared import (
    check_axes,
    dropout_of,
    joined_axes,
    scaled,
    shape_of,
    with_all_axes,
)
from polyattn.run.install import install as install_packages
from polyattn.run.stand_ins import PACKAGES

__all__ = ["install", "memory_efficient_attention"]
__dir__ = __all__.copy

__version__ = PACKAGES["xformers"][1]


#: The classes of biases; their names, and fields with windows, lengths and pages, are the meaning.
BIASES = """
    LowerTriangularMask LowerTriangularMaskWithTensorBias LowerTriangularFromBottomRightMask
    LowerTriangularFromBottomRightLocalAttentionMask LocalAttentionFromBottomRightMask
    BlockDiagonalMask BlockDiagonalCausalMask BlockDiagonalCausalFromBottomRightMask
    BlockDiagonalCausalLocalAttentionMask BlockDiagonalCausalLocalAttentionFromBottomRightMask
    BlockDiagonalPaddedKeysMask BlockDiagonalLocalAttentionPaddedKeysMask
    BlockDiagonalCausalWithOffsetPaddedKeysMask BlockDiagonalCausalLocalAttentionPaddedKeysMask
    BlockDiagonalGappyKeysMask BlockDiagonalCausalWithOffsetGappyKeysMask
    BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask
    PagedBlockDiagonalPaddedKeysMask PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    PagedBlockDiagonalCausalLocalPaddedKeysMask
    PagedBlockDiagonalGappyKeysMask PagedBlockDiagonalCausalWithOffsetGappyKeysMask
""".split()  # noqa: SIM905 -- a name a line is too long


def memory_efficient_attention(
    query: Array, key: Array, value: Array, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: Any = None,
) -> Array:  # fmt: skip
    """Compute attention as `xformers.ops.memory_efficient_attention` is called, on any array.

    Parameters
    ----------
    query, key, value : Array
        Shapes (B, L, H, D), (B, S, H, D) and (B, S, H, E); or all without H, or with two axes of
        heads.
    attn_bias : Array or AttentionBias, optional
        Added to the scores: an array (B, H, L, S), with the axes of heads of `query`; or an object
        of a class in `xformers.ops.fmha.attn_bias`, known by its name and its fields.
    p : float
        The rate at which weights are dropped; the seed comes from the generator of torch or NumPy.
    scale : float or Array without axes, optional
        Multiplies the scores; 1/√D by default.
    op : object, optional
        Ignored: the kernel is chosen as for `polyattn.attention`.
    output_dtype : dtype, optional
        The dtype of the result; that of `query` by default.

    Returns
    -------
    Array
        Shape of `query`, with E in place of D.

    Raises
    ------
    NotImplementedError
        If `attn_bias` is of another class.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.xformers import memory_efficient_attention
    >>> class LowerTriangularMask:
    ...     pass
    >>> x = np.ones((2, 5, 8, 64), dtype=np.float32)
    >>> memory_efficient_attention(x, x, x, LowerTriangularMask()).shape
    (2, 5, 8, 64)
    """
    output = attended(query, key, value, attn_bias, p, scale)
    return output if output_dtype is None else cast(library_of(query).xp, output, output_dtype)


def install() -> ExitStack:
    """Let ``import xformers.ops`` find these functions, the classes of biases, and SwiGLU.

    Returns
    -------
    ExitStack
        A context manager that takes the modules away at its end, as ``close()`` does.

    Raises
    ------
    RuntimeError
        If the real package is installed, or these modules already are.

    Examples
    --------
    >>> from polyattn.dialects import xformers
    >>> with xformers.install():
    ...     import importlib.metadata
    ...     importlib.metadata.version("xformers") == xformers.__version__
    True
    """
    return install_packages("xformers")


def attended(
    query: Array, key: Array, value: Array, bias: Any = None, p: float = 0.0,
    scale: float | None = None, logsumexp: bool = False,
) -> Any:  # fmt: skip
    """Return the output, and the logsumexp, (B, H, L), if it is asked for."""
    xp = library_of(query, "query").xp
    own, other = {3: ("", ""), 5: ("HI", "FG")}.get(len(shape_of(query, "query")), ("H", "G"))
    check_axes(f"query BL{own}D, key BS{other}D, value BS{other}E", query, key, value)
    shape = (*query.shape[:-1], value.shape[-1])
    rule = None if bias is None else rule_of(bias)
    query, scale = scaled(query, scale)
    options: dict[str, Any] = {"scale": scale, "dropout": dropout_of(query, p)}
    arrays = [_one_axis_of_heads(x) for x in (query, key, value)]
    if rule is not None and hasattr(bias, "q_seqinfo"):
        results = _of_blocks(xp, arrays, bias, rule._replace(logsumexp=logsumexp), options)
        lse = results[1][None, ...] if logsumexp else None
    else:
        options |= _of_scores(xp, bias, rule, arrays[0])
        compute = attention_partial if logsumexp else attention
        results = compute(*arrays, layout="...LHD", **options)
        lse = xp.permute_dims(results[1], (0, 2, 1)) if logsumexp else None
    output = xp.reshape(results[0] if logsumexp else results, shape)
    return (output, lse) if logsumexp else output


def _one_axis_of_heads(x: Array) -> Array:
    return x if len(x.shape) == 4 else joined_axes(x, 2, -1)


def rule_of(bias: Any) -> PositionRule | None:
    """Return what the class of a bias and its fields mean; None for an array."""
    names = [cls.__name__ for cls in type(bias).__mro__]
    name = next((name for name in names if name in BIASES), None)
    if name is None and is_array(bias):
        return None
    if name is None:
        raise NotImplementedError(
            f"attn_bias is of the class {names[0]}, which is not one of xformers' that are known:"
            f" {', '.join(BIASES)}"
        )
    size = getattr(bias, "_window_size", None)
    window = getattr(bias, "window_left", None), getattr(bias, "window_right", None)
    return PositionRule(
        causal="Causal" in name or "Triangular" in name,
        window=window if size is None else (size - 1, 0),
        from_first=not any(word in name for word in ("BottomRight", "Offset", "Padded")),
    )


def _of_scores(xp: Any, bias: Any, rule: PositionRule | None, query: Array) -> dict[str, Any]:
    """Return the options that mean a bias of the whole score matrix."""
    if rule is None:
        return {} if bias is None else {"bias": _with_heads(bias, query)}
    options: dict[str, Any] = {"is_causal": rule.causal, "window": rule.window}
    if rule.from_first:
        options["query_offset"] = 0
    # Newer versions are tensors around the tensor that is added.
    added = getattr(bias, "_bias", None)
    if added is None and type(bias).__name__ == "LowerTriangularMaskWithTensorBias":
        added = bias._subtensor
    return options if added is None else options | {"bias": _with_heads(added, query)}


def _with_heads(bias: Array, query: Array) -> Array:
    """Return a bias as (B, H, L, S), from any axes of heads."""
    if len(bias.shape) == 5:
        return joined_axes(bias, 1, 3)
    if len(bias.shape) == 3 and query.shape[2] == 1:
        return bias[:, None, ...]
    return with_all_axes(bias, 4, "attn_bias")


def _of_blocks(
    xp: Any, arrays: list[Array], bias: Any, rule: PositionRule, options: dict[str, Any]
) -> Array:
    """Return attention of packed sequences, a batch of one."""
    for x in arrays:
        if x.shape[0] != 1:
            name = type(bias).__name__
            raise ValueError(f"{name} is for a batch of one, (1, T, H, D); got {tuple(x.shape)}")
    query, key, value = (x[0, ...] for x in arrays)
    keys = Packed(bias.k_seqinfo.seqstart_py, getattr(bias.k_seqinfo, "seqlen_py", None))
    if hasattr(bias, "block_tables"):
        key, value, keys = _paged(xp, key, value, bias)
    given = {name: option for name, option in options.items() if option is not None}
    rows = Packed(bias.q_seqinfo.seqstart_py)
    return packed_attention(query, key, value, rows, keys, rule, **given)


def _paged(xp: Any, key: Array, value: Array, bias: Any) -> tuple[Array, Array, Packed]:
    size, info, table = bias.page_size, bias.k_seqinfo, bias.block_tables
    key, value = (xp.reshape(x, (x.shape[0] // size, size, *x.shape[1:])) for x in (key, value))
    # With gaps, the first key of each sequence and the end are places among its own pages.
    batch = table.shape[0]
    first = info.seqstart_py[:batch] if "Gappy" in type(bias).__name__ else [0] * batch
    used = [stop - start for start, stop in zip(first, info.seqlen_py, strict=True)]
    return from_pages(key, value, table, used, first)
