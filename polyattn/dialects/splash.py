"""Make attention as JAX's splash attention for TPUs is made, on any array.

The names are those of `jax.experimental.pallas.ops.tpu.splash_attention`, whose mask classes, and
others with their names and fields, are translated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polyattn import masks
from polyattn._api.attention import attention
from polyattn._api.partial import attention_partial
from polyattn._base.arrays import Array, is_array
from polyattn._core.expressions.masks import Mask
from polyattn.dialects._shared import check_axes

__all__ = [
    "SegmentIds", "SplashAttentionKernel", "make_splash_mha", "make_splash_mha_single_device",
    "make_splash_mqa", "make_splash_mqa_single_device",
]  # fmt: skip
__dir__ = __all__.copy


class SegmentIds(NamedTuple):
    """The segments of rows and keys: a row sees the keys of its own.

    Attributes
    ----------
    q, kv : Array of int
        Shapes (L,) and (S,).
    """

    q: Array
    kv: Array


@dataclass(frozen=True)
class SplashAttentionKernel:
    """Attention with a mask, which a call applies to one batch item; `jax.vmap` adds a batch axis.

    Attributes
    ----------
    mask : Mask
        The keys that rows see, of `polyattn.masks`.
    offset : int
        The position of the first row among the keys.
    shape : tuple of int
        H, L and S.
    is_mqa : bool
        Whether keys and values have no axis of heads.
    save_residuals : bool
        Whether a call returns the logsumexp too.
    softcap : float or None
        Bounds the scores.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.splash import make_splash_mha
    >>> kernel = make_splash_mha(np.tri(5, dtype=bool)[None].repeat(8, 0))
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> kernel(x / 8, x, x).shape
    (8, 5, 64)
    """

    mask: Mask
    offset: int
    shape: tuple[int, int, int]
    is_mqa: bool = False
    save_residuals: bool = False
    softcap: float | None = None

    def __call__(
        self, q: Array, k: Array, v: Array, segment_ids: Any = None, sinks: Array | None = None
    ) -> Any:
        """Return attention of queries, scaled already, (H, L, E); a row that sees no key gets 0.

        Parameters
        ----------
        q, k, v : Array
            Shapes (H, L, D), (G, S, D) and (G, S, E); of MQA (S, D) and (S, E).
        segment_ids : SegmentIds, optional
            Integers of rows and keys; a row sees the keys with its own number only.
        sinks : Array, optional
            A score of each head that no value belongs to, (H,).

        Returns
        -------
        Array or tuple
            The output; with ``save_residuals`` also ``(logsumexp,)``, (H, L).
        """
        keys = "" if self.is_mqa else "G"
        ids = (None, None) if segment_ids is None else segment_ids
        check_axes(
            f"q HLD, k {keys}SD, v {keys}SE, segment_ids.q L, segment_ids.kv S, sinks H",
            q, k, v, *ids, sinks, **dict(zip("HLS", self.shape, strict=True)),
        )  # fmt: skip
        mask = self.mask if segment_ids is None else self.mask & masks.segments(*ids)
        if self.is_mqa:
            k, v = k[None, ...], v[None, ...]
        options: dict[str, Any] = {
            **{"mask": mask, "query_offset": self.offset, "scale": 1.0},
            **{"softcap": self.softcap, "sinks": sinks},
        }
        if not self.save_residuals:
            return attention(q, k, v, **options)
        output, logsumexp = attention_partial(q, k, v, **options)
        return output, (logsumexp,)

    def manual_sharding_spec(self, sharding: Any) -> Any:
        """Refuse: the kernel has no arrays that are spread over devices.

        Parameters
        ----------
        sharding : NamedSharding
            Ignored.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(
            "manual_sharding_spec: the mask of this kernel is a formula, and no argument of"
            " shard_map: close over the kernel, or use polyattn.parallel for sharded sequences"
        )


def make_splash_mha(
    mask: Any, *, block_sizes: Any = None, save_residuals: bool = False, mask_value: Any = None,
    attn_logits_soft_cap: float | None = None, downcast_smem_data: bool = True,
    head_shards: int = 1, q_seq_shards: int = 1, residual_checkpoint_name: str | None = None,
    interpret: bool = False,
) -> SplashAttentionKernel:  # fmt: skip
    """Make attention with a mask, as `make_splash_mha` of JAX's splash attention does.

    Parameters
    ----------
    mask : Mask or Array of bool
        A ``MultiHeadMask``, or an array (H, L, S). ``CausalMask``, ``LocalMask``,
        ``ChunkedCausalMask``, ``FullMask``, ``NumpyMask`` and their compositions become
        `polyattn.masks`; of other classes the array of all rows and keys is taken.
    block_sizes : BlockSizes, optional
        Ignored, as other arguments that change no number are.
    save_residuals : bool
        Whether a call returns the logsumexp too.
    mask_value : float, optional
        Ignored: hidden keys are hidden. A row that sees no key gets 0, where splash attention
        returns the mean of the values.
    attn_logits_soft_cap : float, optional
        Bounds the scores.
    downcast_smem_data, head_shards, q_seq_shards : object
        Ignored.
    residual_checkpoint_name, interpret : object
        Ignored.

    Returns
    -------
    SplashAttentionKernel
        A function ``(q, k, v, segment_ids=None, sinks=None)``.

    Raises
    ------
    ValueError
        If the mask has not three axes.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn.dialects.splash import make_splash_mha
    >>> make_splash_mha(np.ones((2, 3, 4), dtype=bool)).shape
    (2, 3, 4)
    """
    return _kernel(mask, False, save_residuals, attn_logits_soft_cap)


def make_splash_mqa(
    mask: Any, *, block_sizes: Any = None, save_residuals: bool = False, mask_value: Any = None,
    attn_logits_soft_cap: float | None = None, downcast_smem_data: bool = True,
    head_shards: int = 1, q_seq_shards: int = 1, residual_checkpoint_name: str | None = None,
    interpret: bool = False,
) -> SplashAttentionKernel:  # fmt: skip
    """Make attention as `make_splash_mha`, of one key head: keys (S, D) and values (S, E)."""
    return _kernel(mask, True, save_residuals, attn_logits_soft_cap)


make_splash_mha_single_device = make_splash_mha
make_splash_mqa_single_device = make_splash_mqa


def _kernel(
    mask: Any, is_mqa: bool, save_residuals: bool, softcap: float | None
) -> SplashAttentionKernel:
    shape = tuple(mask.shape)
    if len(shape) != 3:
        raise ValueError(f"mask must have the axes (H, L, S); got {shape}")
    given = list(mask.masks) if hasattr(mask, "masks") else [mask]
    offsets = {n for one in given for n in _offsets(one)} or {0}
    offset = offsets.pop()
    if offsets or not all(map(_counts_from_first, given)):
        found: Mask = masks.dense(_array(mask, len(shape)))
    else:
        found = _of_heads(given, offset)
    return SplashAttentionKernel(found, offset, shape, is_mqa, save_residuals, softcap)


def _of_heads(given: list[Any], offset: int) -> Mask:
    """Return the mask of all heads; where they differ, each is beside an array of its heads."""
    different: list[Any] = []
    for one in given:
        if not any(one is other or bool(_is_equal(one, other)) for other in different):
            different.append(one)
    if len(different) == 1:
        return _translated(different[0], offset)
    found = None
    for one in different:
        own = np.array([one is other or bool(_is_equal(one, other)) for other in given])
        part = _translated(one, offset) & masks.dense(own[:, None, None])
        found = part if found is None else found | part
    assert found is not None
    return found


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and not is_array(one) and one == other


def _parts(mask: Any) -> list[Any]:
    name = type(mask).__name__
    return [mask.left, mask.right] if name in ("LogicalOr", "LogicalAnd") else []


def _offsets(mask: Any) -> set[int]:
    """Return the offsets that the parts of a mask count from."""
    if parts := _parts(mask):
        return {n for part in parts for n in _offsets(part)}
    name = type(mask).__name__
    if name == "ChunkedCausalMask":
        return {0}
    return {int(mask.offset)} if name in ("CausalMask", "LocalMask") else set()


def _counts_from_first(mask: Any) -> bool:
    """Return whether the rows of a mask are in order, as they are but for shards."""
    if parts := _parts(mask):
        return all(map(_counts_from_first, parts))
    rows = getattr(mask, "q_sequence", None)
    return rows is None or np.array_equal(rows, np.arange(mask.shape[-2]))


def _array(mask: Any, rank: int) -> Array:
    """Return a mask as an array of all rows and keys."""
    if is_array(mask):
        return mask if str(mask.dtype).endswith("bool") else mask != 0
    return np.asarray(mask[(slice(None),) * rank])


def _translated(mask: Any, offset: int) -> Mask:
    """Return a mask whose rows count from `offset`."""
    name = type(mask).__name__
    if parts := _parts(mask):
        one, other = (_translated(part, offset) for part in parts)
        return one | other if name == "LogicalOr" else one & other
    if name == "CausalMask":
        return masks.causal()
    if name == "LocalMask":
        return masks.window(*mask.window_size)
    if name == "ChunkedCausalMask":
        rows, keys = (np.arange(n) // mask.chunk_size for n in mask.shape[-2:])
        return masks.causal() & masks.segments(rows, keys)
    if name == "FullMask":
        return masks.window(None, None)
    if name == "NumpyMask":
        return masks.dense(mask.array)
    return masks.dense(_array(mask, len(mask.shape)))
