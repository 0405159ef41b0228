"""Examine a call: check it as a whole and state its facts in the letters of the semantics.

Checks see only shapes, dtypes, libraries and options, never the contents of an array. So they work
on traced and lazy arrays, and do not wait for a device. They come before any conversion.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from polyattn._base.arguments import Shape, WindowSize
from polyattn._base.arrays import ArrayFacts, Chunks, accumulator_of
from polyattn._core.call import checks
from polyattn._core.call.facts import Call, Letters, axes_of
from polyattn._core.call.features import FEATURES, MASKING, default_scale, newest_offset
from polyattn._core.call.layout import chunks_heads_first, positions_matter
from polyattn._core.call.options import FROM_ZERO, OPTIONS, Start
from polyattn._core.expressions.indices import ScoreDims
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.patterns import Band
from polyattn._core.expressions.replacements import ByNorm, LongSequence, Normalizer, Similarity
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


# The options that a problem has too; but for those that `examine` states, as they are in the call.
_OPTIONS = tuple([name for name in OPTIONS if name in Problem._fields])


def examine(call: Call) -> Problem:
    """Check a call as a whole and return its Problem."""
    checks.check_dtypes(call)
    arrays = call.arrays()
    checks.check_lengths(arrays)
    checks.check_pages(call)
    page = None if call.block_table is None else axes_of(call.key.shape, call.layout)[2]
    if page is not None:
        call = call.with_whole_keys()
        arrays = call.arrays()
    checks.check_range(call)
    letters = _with_numbers(call, checks.letters_of(call))
    scores = (*letters.batch, letters.heads, letters.query_length, letters.key_length)
    checks.check_operand_shapes(call, scores)
    traced = any(facts.traced for _, facts in arrays)
    stated: dict[str, Any] = letters._asdict() | {
        "library": call.query.library,
        "device": call.query.device,
        "dtype": call.query.dtype,
        "window": call.window or (None, None),
        "mask": call.mask.shape if isinstance(call.mask, ArrayFacts) else None,
        "bias": None if call.bias is None else call.bias.shape,
        "bias_dtype": None if call.bias is None else call.bias.dtype,
        "features": frozenset([n for n, one in FEATURES.items() if one.needs(call, letters)]),
        "requires_grad": any(facts.requires_grad for _, facts in arrays),
        "trained": frozenset([name for name, facts in arrays if facts.requires_grad]),
        "transforms": call.transforms,
        "traced": traced,
        "mask_spec": call.mask if isinstance(call.mask, Mask) else None,
        "score_spec": call.score_mod if isinstance(call.score_mod, Score) else None,
        "similarity_spec": call.similarity,
        "score_norm": call.scale if isinstance(call.scale, ByNorm) else None,
        "dropout_start": None if isinstance(call.dropout_start, ArrayFacts) else call.dropout_start,
        "chunks": chunks_heads_first(call, arrays),
        "layout": call.layout if traced else "...HLD",
        "page": page,
    }
    problem = Problem(**{name: getattr(call, name) for name in _OPTIONS} | stated)
    _check_values(call, problem)
    return problem


def _with_numbers(call: Call, letters: Letters) -> Letters:
    """Return the letters with the offset, None if an array gives it, and the scale."""
    offset = call.query_offset if positions_matter(call) else None
    if offset is None:
        offset = newest_offset(call, letters)
    scale = _scale(call.scale, default_scale(call, letters), letters.key_length)
    number = None if isinstance(offset, ArrayFacts) else offset
    return letters._replace(query_offset=number, scale=scale)


def _scale(given: Any, default: float, key_length: int | None) -> float:
    if isinstance(given, LongSequence):
        keys = key_length if given.keys is None else given.keys
        if keys is None:
            raise ValueError(f"scale={given!r} needs a key length that is known")
        return default / math.sqrt(max(keys, 1))
    return default if given is None or isinstance(given, ByNorm) else float(given)


def _check_values(call: Call, problem: Problem) -> None:
    dims = ScoreDims(
        problem.batch, problem.heads, problem.query_length, problem.key_length, problem.query_offset
    )
    if problem.mask_spec is not None:
        problem.mask_spec.check(dims)
    if problem.score_spec is not None:
        problem.score_spec.check(dims)
    if problem.similarity_spec is not None:
        problem.similarity_spec.check(problem.head_size)
    if problem.normalizer is not None:
        known = call.residuals.logsumexp if call.residuals else call.known_logsumexp
        asked = call.logsumexp or known is not None
        for name, given in (("sinks", call.sinks is not None), ("logsumexp", asked)):
            if given:
                raise ValueError(
                    f"normalizer={problem.normalizer!r} supports no {name}; only softmax does"
                )
