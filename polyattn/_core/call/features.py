"""The closed list of features that a call can need of a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn._base.arrays import ArrayFacts
from polyattn._core.call.facts import Call
from polyattn._core.call.layout import positions_matter
from polyattn._core.expressions.expression import has_function
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.replacements import ByNorm
from polyattn._core.expressions.scores import Score

DTYPES = ("float16", "bfloat16", "float32", "float64")


def default_scale(call: Call, head_size: int) -> float:
    """Return the scale of a call that names none."""
    return 1 / math.sqrt(head_size) if head_size and call.similarity is None else 1.0


def newest_offset(call: Call, query_length: int | None, key_length: int | None) -> int | None:
    """Return the offset S − L; None if it is an array, because a length is unknown."""
    if query_length is not None and key_length is not None:
        return key_length - query_length
    return None if positions_matter(call) else 0


def _is_given_offset(call: Call, problem: Any) -> bool:
    newest = newest_offset(call, problem.query_length, problem.key_length)
    return problem.query_offset is not None and problem.query_offset != newest


class Feature(NamedTuple):
    """A feature that a call can need of a kernel."""

    #: What a caller asks for.
    meaning: str
    #: Whether a call, whose `Problem` has all but its features, needs it.
    needs: Callable[[Call, Any], bool]
    #: Whether it may hide keys.
    hides_keys: bool = False
    #: Whether a derivative can need it: derivatives get gathered pages, and the logsumexp itself.
    in_derivatives: bool = True


#: The features that a call c, whose problem is p, can need. A kernel declares those that it
#: computes, and never gets a problem that needs another.
FEATURES: dict[str, Feature] = {
    "backward": Feature("gradients by attention_backward", lambda c, p: c.cotangents is not None),
    "batch_broadcast": Feature(
        "batch axes of query, key and value that differ",
        lambda c, p: any(x.shape[:-3] != c.query.shape[:-3] for x in (c.key, c.value or c.key)),
    ),
    "bias": Feature("bias=, added to the scores", lambda c, p: c.bias is not None, hides_keys=True),
    "block_table": Feature(
        "paged keys and values, read in place; other kernels get a gathered, contiguous copy",
        lambda c, p: c.block_table is not None,
        in_derivatives=False,
    ),
    "causal": Feature("is_causal=True", lambda c, p: c.is_causal, hides_keys=True),
    "dropout": Feature("dropout=", lambda c, p: c.dropout > 0),
    "jvp": Feature("directional derivatives by attention_jvp", lambda c, p: c.tangents is not None),
    "grouped_heads": Feature(
        "fewer key/value heads than query heads", lambda c, p: p.heads != p.key_heads
    ),
    "logsumexp": Feature(
        "the logsumexp of each row beside the output",
        lambda c, p: c.logsumexp,
        in_derivatives=False,
    ),
    "mask": Feature(
        "mask= as an array", lambda c, p: isinstance(c.mask, ArrayFacts), hides_keys=True
    ),
    "mask_mod": Feature(
        "mask= as a function",
        lambda c, p: has_function(c.mask),
        hides_keys=True,
    ),
    "mask_expression": Feature(
        "mask= as a mask expression that no other option expresses",
        lambda c, p: isinstance(c.mask, Mask),
        hides_keys=True,
    ),
    "normalizer": Feature(
        "normalizer=, in place of softmax", lambda c, p: c.normalizer is not None
    ),
    "query_offset": Feature("query_offset= as a number other than S − L", _is_given_offset),
    "query_offset_array": Feature(
        "query_offset= as an array",
        lambda c, p: isinstance(c.query_offset, ArrayFacts) and p.query_offset is None,
    ),
    "scale": Feature(
        "scale= other than 1/√D", lambda c, p: p.scale != default_scale(c, p.head_size)
    ),
    "score_mod": Feature(
        "score_mod= as a function",
        lambda c, p: has_function(c.score_mod),
        hides_keys=True,
    ),
    "score_norm": Feature("scale=scores.by_norm()", lambda c, p: isinstance(c.scale, ByNorm)),
    "score_expression": Feature(
        "score_mod= as a score expression that no other option expresses",
        lambda c, p: isinstance(c.score_mod, Score),
        hides_keys=True,
    ),
    "similarity": Feature("similarity=, in place of q·k", lambda c, p: c.similarity is not None),
    "sinks": Feature("sinks=", lambda c, p: c.sinks is not None),
    "softcap": Feature("softcap=", lambda c, p: c.softcap is not None),
    "value_size": Feature(
        "value vectors of another size than query and key vectors",
        lambda c, p: p.value_size != p.head_size,
    ),
    "window": Feature(
        "window=", lambda c, p: c.window not in (None, (None, None)), hides_keys=True
    ),
}


#: The features that ask for a derivative, with their names in messages. A kernel declares for each
#: what it differentiates.
DERIVATIVES = {"backward": "gradient", "jvp": "directional derivative"}

#: The features that no derivative can need.
NOT_IN_DERIVATIVES = frozenset([name for name, one in FEATURES.items() if not one.in_derivatives])

#: Features that can mask keys.
MASKING = frozenset([name for name, feature in FEATURES.items() if feature.hides_keys])
#: Features that count rows or keys.
COUNTING = MASKING - {"bias", "mask"} | {"dropout", "query_offset_array"}
