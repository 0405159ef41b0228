"""The record of a checked call, which kernels get."""

from __future__ import annotations

from typing import NamedTuple

from polyattn._base.arguments import Shape, WindowSize
from polyattn._base.arrays import Chunks, accumulator_of
from polyattn._core.call.features import MASKING
from polyattn._core.call.options import FROM_ZERO, Start
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.patterns import Band
from polyattn._core.expressions.replacements import ByNorm, Normalizer, Similarity
from polyattn._core.expressions.scores import Score


class Problem(NamedTuple):
    """The facts of a checked call, in the letters of the semantics.

    Where arrays are not made yet, as in a graph for export, a length of the batch, L or S may be
    unknown: None.
    """

    library: str
    device: str  #: empty if it is not known
    dtype: str  #: of the arrays
    batch: Shape  #: broadcast
    heads: int  #: H
    key_heads: int  #: G
    query_length: int  #: L
    key_length: int  #: S
    head_size: int  #: D
    value_size: int  #: E
    is_causal: bool  #: whether a row sees no key after its position
    window: WindowSize  #: how far a row sees to either side of its position
    #: The position of the first row; None if an array gives it, and if it is S − L of lengths that
    #: are unknown. S − L if positions do not matter.
    query_offset: int | None
    scale: float  #: the factor of q·k
    softcap: float | None  #: the bound of the scores
    mask: Shape | None  #: the shape of the array, if there is one
    bias: Shape | None  #: likewise
    bias_dtype: str | None
    features: frozenset[str]  #: which of `FEATURES` the call needs
    requires_grad: bool  #: whether an array carries a graph of gradients
    #: Which of ``vmap``, ``grad`` and ``jvp`` of torch.func are transforming the call.
    transforms: frozenset[str]
    #: Whether an array has no values yet, or only lazily: under ``jax.jit``, in a dask graph.
    traced: bool = False
    #: Whether the arrays come from another library or device than the kernel's.
    converted: bool = False
    #: The expressions given for mask, score_mod and similarity, with facts in place of arrays, and
    #: compiled masks without their tables, except in `explain`.
    mask_spec: Mask | None = None
    score_spec: Score | None = None
    similarity_spec: Similarity | None = None
    score_norm: ByNorm | None = None  #: divides the scores of each row by their norm
    normalizer: Normalizer | None = None  #: the replacement for softmax
    dropout: float = 0.0  #: the rate at which weights are dropped
    #: What the flat batch item, head, row and key of the call begin with in the hash of dropout;
    #: None if an array gives them.
    dropout_start: Start | None = FROM_ZERO
    #: The lengths of the chunks of each array that is cut, along its axes, by the array's name.
    chunks: tuple[tuple[str, Chunks], ...] = ()
    #: The axes of the caller's arrays if `traced`; a kernel gets them heads first, where a compiler
    #: may see through the swap. Otherwise "...HLD": programs kept by Problem serve either layout.
    layout: str = "...HLD"
    page: int | None = None  #: the number of keys in a page, if there is a block table
    #: In a call for gradients, those of query, key, value, bias and sinks whose gradients nobody
    #: asked for: a kernel may return None for them.
    constants: frozenset[str] = frozenset()
    #: The arrays that carry a graph of gradients, by the names that they have as arguments.
    trained: frozenset[str] = frozenset()
    #: Whether a row must have the same bits for each cut of its sequence, in `polyattn.same_bits`.
    same_bits: bool = False

    @property
    def may_be_differentiated(self) -> bool:
        """Whether the library may differentiate the operations of the call."""
        return self.traced or self.requires_grad or bool(self.transforms)

    @property
    def device_kind(self) -> str:
        """The device without its number: ``cpu``, ``cuda``, ``mps``."""
        return self.device.partition(":")[0]

    @property
    def accumulator(self) -> str:
        """The dtype of scores, sums and logsumexp."""
        return accumulator_of(self.dtype)

    @property
    def scores(self) -> Shape:
        """The shape (..., H, L, S) of the scores, which mask and bias broadcast to."""
        return (*self.batch, self.heads, self.query_length, self.key_length)

    @property
    def group_size(self) -> int:
        """The number of query heads that read one key/value head; 1 if there are none."""
        return self.heads // (self.key_heads or 1) or 1

    @property
    def is_empty(self) -> bool:
        """Whether a length or size is 0."""
        return 0 in (*self.scores, self.head_size, self.value_size)

    @property
    def is_symbolic(self) -> bool:
        """Whether a length is unknown."""
        return None in self.scores

    @property
    def band(self) -> Band | None:
        """Causal and window as one mask, or None if neither is given."""
        left, right = self.window
        right = 0 if self.is_causal else right
        return None if left is None and right is None else Band(left, right)

    @property
    def masks_by_position(self) -> bool:
        """Whether causal or window is given."""
        return not self.features.isdisjoint(("causal", "window"))

    @property
    def masks_by_position_only(self) -> bool:
        """Whether only causal and window may hide keys."""
        return self.features.isdisjoint(MASKING - {"causal", "window"})

    @property
    def masks(self) -> bool:
        """Whether any key may be absent for any row."""
        return not self.features.isdisjoint(MASKING)
