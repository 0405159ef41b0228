"""Problem: a call in the letters of the semantics, once all that must hold of it is checked.

A check sees shapes, dtypes, libraries and options, never an array's values, so that all of them
work on traced and lazy arrays and cost no device a wait. Each refusal quotes what the caller gave
and says how to mend it, and comes before any conversion or device work.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from polyattn.arrays import ArrayFacts, broadcast_shapes
from polyattn.call import Call, Ends, Operands, Shape
from polyattn.patterns import Mask
from polyattn.places import Dims, is_ambiguous
from polyattn.steps import ByNorm, LongSequence, Normalizer, Score, Similarity
from polyattn.values import carries_function

__all__ = ["DTYPES", "FEATURES", "Operands", "Problem", "examine"]

DTYPES = ("float16", "bfloat16", "float32", "float64")

#: What a call can ask of a kernel. A kernel declares which of these it computes, and is never
#: given a problem that needs another.
FEATURES: dict[str, str] = {
    "batch_broadcast": "batch axes of query, key and value that differ",
    "bias": "bias=, added to the scores",
    "causal": "is_causal=True",
    "dropout": "dropout=",
    "grouped_heads": "fewer key/value heads than query heads",
    "logsumexp": "the logsumexp of each row beside the output",
    "mask": "mask= as an array",
    "mask_mod": "mask= as a function",
    "mask_value": "mask= as a value of polyattn.masks that no other option says",
    "normalizer": "normalizer=, in place of softmax",
    "query_offset": "query_offset= as a number other than S − L",
    "query_offset_array": "query_offset= as an array",
    "scale": "scale= other than 1/√D",
    "score_mod": "score_mod= as a function",
    "score_norm": "scale=scores.by_norm()",
    "score_value": "score_mod= as a value of polyattn.scores that no other option says",
    "similarity": "similarity=, in place of q·k",
    "sinks": "sinks=",
    "softcap": "softcap=",
    "value_size": "value vectors of another size than query and key vectors",
    "window": "window=",
}


#: Those by which a key may be absent.
MASKING = frozenset(
    {"bias", "causal", "mask", "mask_mod", "mask_value", "score_mod", "score_value", "window"}
)


class Problem(NamedTuple):
    """The facts of a checked call, in the letters of the semantics: all that a kernel may ask.

    Attributes
    ----------
    library, device, dtype : str
        Where the kernel finds the arrays, and of what they are; an empty device is not known.
    batch : tuple of int
        The batch axes, broadcast.
    heads, key_heads : int
        H and G.
    query_length, key_length : int
        L and S.
    head_size, value_size : int
        D and E.
    is_causal : bool
        Whether a row sees no key after its position.
    window : tuple of (int or None, int or None)
        How far a row sees to either side of its position.
    query_offset : int or None
        The position of the first row; None if an array gives it. S − L where none matters.
    scale : float
        What multiplies q·k.
    softcap : float or None
        The bound of the scores.
    mask, bias : tuple of int or None
        The shape of the array, if there is one.
    bias_dtype : str or None
        The dtype of the bias.
    features : frozenset of str
        Which of `FEATURES` the call needs.
    requires_grad : bool
        Whether an array carries a graph of gradients.
    transforms : frozenset of str
        Which of ``vmap``, ``grad`` and ``jvp`` of torch.func are at work.
    traced : bool
        Whether an array has no values yet, or only lazily: under ``jax.jit``, in a dask graph.
    converted : bool
        Whether the arrays come from another library or device than the kernel's.
    mask_form, score_form, similarity_form : Mask, Score, Similarity or None
        The values given for mask, score_mod and similarity, with facts in place of arrays, and
        compiled masks without their tables.
    score_norm : ByNorm or None
        What divides each row's scores by their norm.
    normalizer : Normalizer or None
        What stands in place of softmax.
    dropout : float
        The rate at which weights are dropped.
    """

    library: str
    device: str
    dtype: str
    batch: Shape
    heads: int
    key_heads: int
    query_length: int
    key_length: int
    head_size: int
    value_size: int
    is_causal: bool
    window: Ends
    query_offset: int | None
    scale: float
    softcap: float | None
    mask: Shape | None
    bias: Shape | None
    bias_dtype: str | None
    features: frozenset[str]
    requires_grad: bool
    transforms: frozenset[str]
    traced: bool = False
    converted: bool = False
    mask_form: Mask | None = None
    score_form: Score | None = None
    similarity_form: Similarity | None = None
    score_norm: ByNorm | None = None
    normalizer: Normalizer | None = None
    dropout: float = 0.0

    @property
    def device_kind(self) -> str:
        """The device without its number: ``cpu``, ``cuda``, ``mps``."""
        return self.device.partition(":")[0]

    @property
    def accumulator(self) -> str:
        """The dtype of scores, sums and logsumexp."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def scores(self) -> Shape:
        """The shape (..., H, L, S) of the scores, which mask and bias broadcast to."""
        return (*self.batch, self.heads, self.query_length, self.key_length)

    @property
    def masks_by_position(self) -> bool:
        """Whether causal or window is given."""
        return not self.features.isdisjoint(("causal", "window"))

    @property
    def masks(self) -> bool:
        """Whether any key may be absent for any row."""
        return not self.features.isdisjoint(
            (
                "causal",
                "window",
                "mask",
                "mask_mod",
                "mask_value",
                "bias",
                "score_mod",
                "score_value",
            )
        )


def examine(call: Call, *, conversion: bool = False) -> Problem:
    """Check a call as a whole and return its Problem.

    Parameters
    ----------
    call : Call
        The facts of the call.
    conversion : bool
        Whether a backend is named, so that arrays of several libraries and devices may meet.

    Returns
    -------
    Problem
        The same facts in the letters of the semantics.
    """
    _check_dtypes(call)
    if not conversion:
        _check_one_place(call)
    _check_known_lengths(call)
    _check_range(call)
    batch, heads, key_heads, *lengths_and_sizes = _common_shape(call)
    query_length, key_length, head_size, value_size = lengths_and_sizes
    scores = (*batch, heads, query_length, key_length)
    _check_operand_shapes(call, scores)
    default_scale = 1 / math.sqrt(head_size) if head_size and call.similarity is None else 1.0
    offset = call.query_offset
    positions_matter = (
        call.is_causal
        or (call.window or (None, None)) != (None, None)
        or isinstance(call.mask, Mask)
        or isinstance(call.score_mod, Score)
    )
    if offset is None or not positions_matter:
        offset = key_length - query_length
    arrays = call.arrays()
    problem = Problem(
        library=call.query.library,
        device=call.query.device,
        dtype=call.query.dtype,
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        query_length=query_length,
        key_length=key_length,
        head_size=head_size,
        value_size=value_size,
        is_causal=call.is_causal,
        window=call.window or (None, None),
        query_offset=None if isinstance(offset, ArrayFacts) else offset,
        scale=_scale(call.scale, default_scale, key_length),
        softcap=call.softcap,
        mask=call.mask.shape if isinstance(call.mask, ArrayFacts) else None,
        bias=None if call.bias is None else call.bias.shape,
        bias_dtype=None if call.bias is None else call.bias.dtype,
        features=frozenset(),
        requires_grad=any(facts.requires_grad for _, facts in arrays),
        transforms=call.transforms,
        traced=any(facts.traced for _, facts in arrays),
        mask_form=call.mask if isinstance(call.mask, Mask) else None,
        score_form=call.score_mod if isinstance(call.score_mod, Score) else None,
        similarity_form=call.similarity,
        score_norm=call.scale if isinstance(call.scale, ByNorm) else None,
        normalizer=call.normalizer,
        dropout=call.dropout,
    )
    _check_values(call, problem)
    features = _features(call, problem, default_scale)
    return problem._replace(features=features)


def _scale(given: Any, default: float, key_length: int) -> float:
    if isinstance(given, LongSequence):
        return default / math.sqrt(max(key_length, 1))
    return default if given is None or isinstance(given, ByNorm) else float(given)


def _check_values(call: Call, problem: Problem) -> None:
    dims = Dims(
        problem.batch, problem.heads, problem.query_length, problem.key_length, problem.query_offset
    )
    if problem.mask_form is not None:
        problem.mask_form.check(dims)
    if problem.score_form is not None:
        problem.score_form.check(dims)
    if problem.similarity_form is not None:
        problem.similarity_form.check(problem.head_size)
    if problem.normalizer is not None:
        asked = call.logsumexp or call.known_logsumexp is not None
        for name, given in (("sinks", call.sinks is not None), ("a logsumexp", asked)):
            if given:
                raise ValueError(
                    f"{name} is of softmax alone, and normalizer={problem.normalizer!r} was given"
                )


def _features(call: Call, problem: Problem, default_scale: float) -> frozenset[str]:
    needed = {
        "batch_broadcast": not call.query.shape[:-3]
        == call.key.shape[:-3]
        == call.value.shape[:-3],
        "bias": call.bias is not None,
        "causal": call.is_causal,
        "dropout": call.dropout > 0,
        "grouped_heads": problem.heads != problem.key_heads,
        "logsumexp": call.logsumexp,
        "mask": isinstance(call.mask, ArrayFacts),
        "mask_mod": isinstance(call.mask, str) or carries_function(problem.mask_form),
        "mask_value": problem.mask_form is not None,
        "normalizer": call.normalizer is not None,
        "query_offset": problem.query_offset is not None
        and problem.query_offset != problem.key_length - problem.query_length,
        "query_offset_array": problem.query_offset is None,
        "scale": problem.scale != default_scale,
        "score_mod": isinstance(call.score_mod, str) or carries_function(problem.score_form),
        "score_norm": problem.score_norm is not None,
        "score_value": problem.score_form is not None,
        "similarity": problem.similarity_form is not None,
        "sinks": call.sinks is not None,
        "softcap": call.softcap is not None,
        "value_size": problem.value_size != problem.head_size,
        "window": problem.window != (None, None),
    }
    return frozenset([name for name, holds in needed.items() if holds])


def _check_dtypes(call: Call) -> None:
    three = (("query", call.query), ("key", call.key), ("value", call.value))
    for name, facts in three:
        if facts.dtype not in DTYPES:
            raise TypeError(
                f"{name} has dtype {facts.dtype}; attention takes {', '.join(DTYPES)}:"
                " cast it first"
            )
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        given = ", ".join(f"{name} {facts.dtype}" for name, facts in three)
        raise TypeError(f"query, key and value must have one dtype; got {given}: cast them to one")
    if isinstance(call.mask, ArrayFacts) and call.mask.dtype != "bool":
        dtype = call.mask.dtype
        if "float" in dtype:
            hint = "a float array that is added to the scores goes in bias="
        else:
            hint = "True takes part, False does not: pass mask != 0 or mask == 0, as you mean it"
        raise TypeError(f"mask must be a bool array or a function; got dtype {dtype}: {hint}")
    for name, extra in (("bias", call.bias), ("sinks", call.sinks)):
        if extra is not None and extra.dtype not in DTYPES:
            hint = "; a bool array goes in mask=" if extra.dtype == "bool" else ""
            raise TypeError(f"{name} must be a float array; got dtype {extra.dtype}{hint}")
    offset = call.query_offset
    if isinstance(offset, ArrayFacts) and "int" not in offset.dtype:
        raise TypeError(f"query_offset must hold integers; got dtype {offset.dtype}")


def _check_one_place(call: Call) -> None:
    for name, facts in call.arrays():
        if facts.library != call.query.library:
            raise TypeError(
                f"query is an array of {call.query.library} and {name} one of {facts.library};"
                " convert one of them, or name the backend that is to take them all, for example"
                ' backend="numpy"'
            )
    # One that is nowhere in particular goes where the others are.
    placed = [(name, facts) for name, facts in call.arrays() if facts.device]
    for name, facts in placed:
        first, where = placed[0]
        if facts.device != where.device:
            raise ValueError(
                f"{first} is on {where.device} and {name} on {facts.device}; move one of them,"
                ' or name the backend that is to take them all, for example backend="numpy"'
            )


def _check_known_lengths(call: Call) -> None:
    for name, facts in call.arrays():
        for length in facts.shape:
            if length is None or length != length:  # dask: NaN stands for an unknown length
                raise ValueError(
                    f"{name} has the shape {facts.shape}, whose lengths are not all known;"
                    " compute them first (dask: compute_chunk_sizes())"
                )


def _check_range(call: Call) -> None:
    # Scores are float32 for all but float64.
    largest, smallest = (1.7e308, 2.3e-308) if call.query.dtype == "float64" else (3.4e38, 1.2e-38)
    for name, value in (("scale", call.scale), ("softcap", call.softcap)):
        if isinstance(value, float) and value != 0 and not smallest <= abs(value) <= largest:
            raise ValueError(
                f"{name} must be within the range of the scores' dtype, {smallest} to {largest};"
                f" got {value!r}"
            )


def _common_shape(call: Call) -> tuple[Any, ...]:
    given = f"query {call.query.shape}, key {call.key.shape}, value {call.value.shape}"
    letters = (
        "(..., H, L, D), (..., G, S, D), (..., G, S, E)"
        if call.layout == "...HLD"
        else "(..., L, H, D), (..., S, G, D), (..., S, G, E)"
    )
    for name, facts in (("query", call.query), ("key", call.key), ("value", call.value)):
        if len(facts.shape) < 2:
            raise ValueError(
                f"{name} needs at least the axes length and size; got {given}, for {letters}"
            )
    q_batch, heads, query_length, head_size = _axes(call.query.shape, call.layout)
    k_batch, key_heads, key_length, key_size = _axes(call.key.shape, call.layout)
    v_batch, value_heads, value_length, value_size = _axes(call.value.shape, call.layout)
    if head_size != key_size:
        raise ValueError(
            f"vectors of query and key must have one size D; got {head_size} and {key_size}:"
            f" {given}, for {letters}"
        )
    if key_length != value_length:
        raise ValueError(
            f"key and value must have one length S; got {key_length} and {value_length}:"
            f" {given}, for {letters}"
        )
    if key_heads != value_heads:
        raise ValueError(
            f"key and value must have one number of heads G; got {key_heads} and {value_heads}:"
            f" {given}, for {letters}"
        )
    if (key_heads == 0 and heads != 0) or (key_heads and heads % key_heads):
        other = "" if call.layout == "...LHD" else '; if length comes before heads, layout="...LHD"'
        raise ValueError(
            f"the number of query heads must be a multiple of that of key heads; got {heads} and"
            f" {key_heads}: {given}, for {letters}{other}"
        )
    batch = broadcast_shapes(q_batch, k_batch, v_batch)
    if batch is None:
        raise ValueError(
            f"batch axes must be equal or 1 to broadcast; got {q_batch}, {k_batch}, {v_batch}:"
            f" {given}, for {letters}"
        )
    return batch, heads, key_heads, query_length, key_length, head_size, value_size


def _axes(shape: Shape, layout: str) -> tuple[Shape, int, int, int]:
    if len(shape) == 2:
        return (), 1, shape[0], shape[1]
    heads, length = (shape[-3], shape[-2]) if layout == "...HLD" else (shape[-2], shape[-3])
    return shape[:-3], heads, length, shape[-1]


def _check_operand_shapes(call: Call, scores: Shape) -> None:
    rank = max(2, *(len(facts.shape) for facts in (call.query, call.key, call.value)))
    if isinstance(call.mask, ArrayFacts):
        mask = call.mask.shape
        if is_ambiguous(mask, rank):
            raise ValueError(
                f"mask {mask} has {len(mask)} axes for scores {scores} of {rank}, so its first"
                " could be batch or heads: write mask[:, None] for a mask per batch item,"
                " mask[None] for one per head"
            )
        _check_broadcasts("mask", mask, scores[-rank:])
    if call.bias is not None:
        _check_broadcasts("bias", call.bias.shape, scores[-rank:])
    if call.sinks is not None and call.sinks.shape != (scores[-3],):
        raise ValueError(
            f"sinks must hold one number per query head, shape ({scores[-3]},); got"
            f" {call.sinks.shape}"
        )
    if call.known_logsumexp is not None:
        known, whole = call.known_logsumexp, scores[:-1][-max(1, rank - 1) :]
        if call.layout == "...LHD" and rank > 2:
            whole = (*whole[:-2], whole[-1], whole[-2])
        if known.shape != whole or known.dtype not in ("float32", "float64"):
            raise ValueError(
                f"logsumexp must be what attention_partial gave for this call, {whole} in float32"
                f" or float64; got {known}"
            )
    if isinstance(call.query_offset, ArrayFacts):
        offset, batch = call.query_offset.shape, scores[:-3]
        if len(offset) > len(batch) or broadcast_shapes(offset, batch) != batch:
            raise ValueError(
                "query_offset as an array gives one offset per batch item: its shape must broadcast"
                f" to {batch}; got {offset}"
            )


def _check_broadcasts(name: str, shape: Shape, scores: Shape) -> None:
    if len(shape) > len(scores) or broadcast_shapes(shape, scores) != scores:
        letters = ("L", "S") if len(scores) == 2 else ("...", "H", "L", "S")
        raise ValueError(
            f"{name} {shape} does not broadcast to the scores ({', '.join(letters)}) = {scores}"
        )
