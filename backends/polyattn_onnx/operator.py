"""Write a call as ONNX's operator Attention, or say why the operator cannot compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from polyattn._base.arrays import length_of
from polyattn._core.tiles.visibility import made_shape, score_axes, why_too_large
from polyattn.plugin import (
    Array,
    CachePadding,
    Indices,
    Kernel,
    Operands,
    Problem,
    Span,
    band,
    may_have_empty_rows,
    one_batch_axis,
    visible_keys,
    with_rank,
)

#: The first opset with the input nonpad_kv_seqlen, and the first with the attributes of windows.
COUNTS, WINDOWS = 24, 25
#: The features whose mask differs by head, and those that may differ by batch item.
BY_HEAD = frozenset({"score_expression", "sinks"})
BY_ITEM = frozenset({"bias", "mask", "mask_expression", "mask_mod", "query_offset_array"})
# Beyond any length; a sum of two fits in 32 bits.
FAR = 2**30


class Node(NamedTuple):
    """The static facts of a node."""

    opset: int  # the version of the operator: 23, 24 or 25
    dtype: str  # of query, key, value and output
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    #: Whether row i sees no key after i + offset, which is 0, or the number of keys − L with
    #: `counted`.
    is_causal: bool
    window: tuple[int, int]  # how many keys a row sees before and after; −1 for no bound
    scale: float  # more than 0
    softcap: float  # 0 for none
    mask: str | None  # the dtype of the input attn_mask, if there is one
    #: Whether there is an input nonpad_kv_seqlen, the number of keys of each batch item.
    counted: bool

    def attributes(self) -> dict[str, Any]:
        """Return the operator's attributes that are not at their defaults, by name."""
        attributes: dict[str, Any] = {"is_causal": int(self.is_causal), "scale": self.scale}
        attributes |= {"softcap": self.softcap} if self.softcap else {}
        for name, size in zip(("left_window_size", "right_window_size"), self.window, strict=True):
            attributes |= {name: size} if size >= 0 else {}
        return attributes

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs at their places among the operator's, None between for those it lacks."""
        query, key, value, *more = inputs
        mask = more.pop(0) if self.mask else None
        arguments = [query, key, value, mask, None, None, more.pop() if self.counted else None]
        while arguments[-1] is None:
            arguments.pop()
        return arguments


class Operator(Kernel):
    """A call that is one node, which a subclass runs."""

    # Options without an attribute of the operator become a mask: causal, windows, mask expressions,
    # and the numbers that ``score_mod=`` adds. Sinks become the mask of one more key, of zeros.

    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "mask", "mask_expression", "mask_mod",
        "query_offset", "query_offset_array", "scale", "score_expression", "sinks", "softcap",
        "value_size", "window",
    })  # fmt: skip
    # Every runtime multiplies the weight 0 of a masked key by its value, which may be NaN.
    promises = Kernel.promises - {"poison_safe"}
    takes_empty: ClassVar[bool] = False  # runtimes refuse empty arrays
    takes_band: ClassVar[bool] = True

    def opset(self, problem: Problem) -> int:
        """Return the opset that the node is for: 23, 24 or 25."""
        raise NotImplementedError

    def remark(self, problem: Problem) -> str | None:
        """Return what the call becomes."""
        return f"one node, Attention of opset {self.opset(problem)}"

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return what the operator cannot compute, and what ONNX Runtime refuses."""
        reasons = []
        if problem.dtype == "float64" and problem.softcap != _rounded(problem.softcap):
            reasons.append("the attribute softcap is a float32, and the call is in float64")
        if problem.is_symbolic and (
            len(problem.batch) > 1 or "batch_broadcast" in problem.features
        ):
            reasons.append("with symbolic lengths it supports one batch axis, that of all arrays")
        if problem.dtype == "float64" and may_have_empty_rows(problem):
            reasons.append("ONNX Runtime gives NaN for a row without keys in float64")
        if problem.score_spec is not None and not problem.score_spec.is_additive:
            reasons.append("it supports only a score_mod= that adds to the scores")
        return reasons

    def only_on_request(self, problem: Problem) -> str | None:
        """Leave calls to other kernels for which a large mask would be built."""
        made = _made(problem, self.opset(problem))
        return why_too_large(made)

    def output(self, problem: Problem, operands: Operands, output: Array, xp: Any) -> Array:
        """Return the node's output, of rank 4, as a kernel's, in the dtype of the query."""
        if output.dtype != operands.query.dtype:
            output = xp.astype(output, operands.query.dtype)
        if len(problem.batch) == 1:
            return output
        shape = (problem.heads, problem.query_length, problem.value_size)
        return xp.reshape(output, (*problem.batch, *shape)) if problem.batch else output[0, ...]

    def node(self, problem: Problem, operands: Operands, xp: Any) -> tuple[Node, list[Array]]:
        """Return the node of a call and its inputs, of rank 4 but the numbers of keys."""
        opset = self.opset(problem)
        positions = _positions(problem, opset)
        query, scale = _scaled(problem, operands.query)
        inputs = [one_batch_axis(problem, x, xp) for x in (query, *operands[1:3])]
        # In float16 a runtime would round the scores, and what a large bias leaves of them.
        dtype = problem.accumulator
        if dtype != problem.dtype:
            inputs = [xp.astype(x, getattr(xp, dtype)) for x in inputs]
        keys = length_of(inputs[1], -2)
        first_keys = getattr(operands.mask, "first_keys", None)
        is_cache = isinstance(operands.mask, CachePadding)
        # Without a cache, causal rows count from the last of all keys.
        if (is_cache or band(problem) == (None, None)) and positions.counted:
            if not is_cache:  # whose lengths are from 0 to that of the keys
                first_keys = xp.astype(xp.clip(xp.asarray(first_keys), min=0, max=keys), xp.int64)
            keys, operands = first_keys, operands._replace(mask=None)
        mask = _mask(problem, operands, xp, banded=positions.by_mask)
        if operands.sinks is not None:
            inputs[1:], mask = _with_sinks(problem, operands, inputs[1:], mask, xp)
        if mask is not None:
            inputs.append(mask)
        if positions.counted:
            items = xp.arange(length_of(inputs[0], 0), dtype=xp.int64) * 0
            if len(problem.batch) > 1:  # all of their lengths are known
                keys = xp.reshape(xp.reshape(items, problem.batch) + keys, (-1,))
            inputs.append(items + keys)
        kind = None if mask is None else "bool" if mask.dtype == xp.bool else dtype
        node = Node(
            opset, dtype, problem.heads, problem.key_heads, problem.head_size,
            problem.value_size, positions.is_causal, positions.window, scale,
            problem.softcap or 0.0, kind, positions.counted,
        )  # fmt: skip
        return node, inputs


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(np.float32(number))


def _made(problem: Problem, opset: int) -> int:
    """Return how many elements the mask that must be built has at most."""
    if problem.features & BY_HEAD and not problem.is_symbolic:
        items = math.prod(problem.batch) if problem.features & BY_ITEM else 1
        return items * math.prod(problem.scores[-3:])
    whole = (*problem.batch, 1, *problem.scores[-2:])  # ONNX Runtime needs all rows and keys
    made = made_shape(problem, banded=_positions(problem, opset).by_mask, mask=whole)
    return 0 if made is None else math.prod(made)


class NodePositions(NamedTuple):
    """The options by position of a node: its facts of these names, or a mask in their place."""

    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    counted: bool = False
    by_mask: bool = False


def _positions(problem: Problem, opset: int) -> NodePositions:
    """Return what the node of a call does by positions."""
    # Without a number of keys, row 0 is at position 0; with one, the last row is the last of them.
    # Other offsets are left to a mask: the operator defines no positions after the last key.
    low, high = band(problem)
    # In float64 ONNX Runtime counts the positions of causal rows from the first key regardless.
    counts = opset >= COUNTS and problem.dtype != "float64"
    # Keys that are the memory of a cache, whose last tokens are the rows.
    is_filled = counts and isinstance(problem.mask_spec, CachePadding)
    if "sinks" in problem.features:  # their key takes the first position
        return NodePositions(by_mask=(low, high) != (None, None))
    if low is None and high is None:
        first_keys = None if problem.mask_spec is None else problem.mask_spec.first_keys
        return NodePositions(counted=counts and first_keys is not None)
    is_causal = problem.is_causal and high is not None
    left, right = problem.window
    left, right = None if low is None else left, None if high is None or is_causal else right
    from_zero = problem.query_offset == 0
    is_newest = problem.features.isdisjoint(("query_offset", "query_offset_array"))
    from_end = counts and (is_newest or is_filled)
    is_window = (left, right) != (None, None)
    if not (from_zero or from_end) or (is_window and opset < WINDOWS):
        return NodePositions(by_mask=True)
    window = tuple(-1 if end is None else min(end, FAR) for end in (left, right))
    return NodePositions(is_causal, (window[0], window[1]), counted=not from_zero)


def _scaled(problem: Problem, query: Array) -> tuple[Array, float]:
    """Return the query and the attribute scale, which runtimes need as a float32 above 0."""
    # ONNX Runtime multiplies query and key by its root each, which it rounds to float32.
    scale = problem.scale
    if problem.dtype == "float64":
        return query * scale, 1.0
    if scale > 0:
        return query, scale
    return (query * -1.0, -scale) if scale < 0 else (query * 0.0, 1.0)


def _mask(problem: Problem, x: Operands, xp: Any, *, banded: bool) -> Array | None:
    """Return mask and bias, and causal and window if `banded`, as one array of rank 4, or None."""
    at = Indices(problem, xp, x, Span(0, problem.query_length), Span(0, problem.key_length))
    seen = visible_keys(problem, x, xp, banded=banded)
    added = _added(problem, x, at, xp)
    mask = seen if added is None else added
    if added is not None and seen is not None:
        mask = xp.where(seen, added, xp.asarray(-np.inf, dtype=added.dtype))
    if mask is None:
        return None
    # ONNX Runtime needs all rows and keys, the operator one or all batch items.
    if mask.shape[-2:] != problem.scores[-2:] or None in mask.shape[-2:]:
        whole = (at.row >= 0) & (at.column >= 0)
        zero = xp.asarray(0, dtype=mask.dtype)
        mask = mask & whole if seen is mask else xp.where(whole, mask, zero)
    return score_axes(problem, mask, xp)


def _added(problem: Problem, x: Operands, at: Indices, xp: Any) -> Array | None:
    """Return what ``score_mod=`` and the bias add to the scores."""
    dtype = getattr(xp, problem.accumulator)
    added: Array | None = None
    if problem.score_spec is not None:
        added = at.modified(xp.astype(at.row * 0 + at.column * 0, dtype))
    if x.bias is None:
        return added
    bias = xp.astype(at.of_scores(x.bias), dtype)
    return bias if added is None else added + bias


def _with_sinks(
    problem: Problem, x: Operands, pair: list[Array], mask: Array | None, xp: Any
) -> tuple[list[Array], Array]:
    """Return key and value with one of zeros first, and the mask with its logits, the sinks."""
    # Zeros have the score 0, softcapped or not, and add nothing to the output.
    dtype = getattr(xp, problem.accumulator)
    # One batch axis, as the operands have; the indices of batch items are not used.
    one = problem._replace(batch=problem.batch[:1])
    at = Indices(one, xp, x, Span(0, problem.query_length), Span(0, problem.key_length))
    if mask is None or mask.dtype == xp.bool:
        zero = with_rank(xp.astype(at.row * 0 + at.column * 0, dtype), 4)
        mask = zero if mask is None else xp.where(mask, zero, xp.asarray(-np.inf, dtype=dtype))
    mask = mask + xp.astype(at.head * 0, dtype)  # of all heads
    items = xp.zeros_like(mask[:, :1, :, :1])
    first = items + xp.reshape(xp.astype(x.sinks, dtype), (-1, 1, 1))
    key, value = (xp.concat([xp.zeros_like(y[:, :, :1, :]), y], axis=-2) for y in pair)
    return [key, value], xp.concat([first, mask], axis=-1)
