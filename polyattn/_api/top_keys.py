"""The keys with the largest scores, for attention over selected keys."""

from __future__ import annotations

from typing import Any, Unpack

from polyattn._api.attention import AttentionOptions
from polyattn._api.names import check_names, with_our_names
from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, broadcast_shapes, facts_of, library_of
from polyattn._base.autocast import autocast
from polyattn._base.host import destination_of
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe, placed
from polyattn._core.call.layout import heads_first, is_flat, result_heads_first
from polyattn._core.call.options import AUTOCAST
from polyattn._dispatch.request import request
from polyattn._dispatch.select import select
from polyattn._kernels.top_keys import TopKeys


@with_our_names()
def top_keys(
    query: Array,
    key: Array,
    count: int,
    *,
    head_weights: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Return the keys with the largest scores of each row, which `masks.selected` takes.

    Scores are computed in tiles, never L · S of them at once. They are those of `attention` after
    its step 5: a hidden key is not among the result. No gradient flows through it.

    Parameters
    ----------
    query : Array
        Queries, as for `attention`; in a model mostly smaller ones, of an indexer.
    key : Array
        Keys, as for `attention`.
    count : int
        Number of keys for each row, at least 1.
    head_weights : Array, optional
        Weights of heads, shape (..., H, L), or (..., L, H) with ``layout="...LHD"``. Then all heads
        share a selection, by the sum over heads of ``weight * max(score, 0)``, as in the lightning
        indexer of DeepSeek-V3.2. Heads from which a key is hidden add 0 to its sum.
    **options
        As for `attention`: mask, bias, is_causal, window, query_offset, key_lengths, block_table,
        scale, softcap, score_mod, similarity, layout and backend.

    Returns
    -------
    Array of int32
        The keys of each row in ascending order, and −1 at the end where fewer are visible, shape
        (..., H, L, count) in either layout, or (..., 1, L, count) with `head_weights`. Of equal
        scores the lower key is taken; a score that is NaN comes first. Arrays of rank 2 give
        (L, count).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        If `count` or `head_weights` is wrong; otherwise as for `attention`.

    See Also
    --------
    attention_weights : Return weights, or the largest of them, in order of size.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, 2.1,
    https://arxiv.org/abs/2512.02556

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import top_keys
    >>> query, key = np.array([[1.0]]), np.array([[3.0], [1.0], [4.0], [1.0], [5.0]])
    >>> top_keys(query, key, 3)
    array([[0, 2, 4]], dtype=int32)
    """
    check_names("top_keys", options, without=("dropout", "kernel", "normalizer", "sinks"))
    kernel = TopKeys(check_int("count", count, least=1))
    # A sum over heads that autograd records would keep each tile.
    given: tuple[Any, ...] = query, key, head_weights
    query, key, head_weights = (x.detach() if hasattr(x, "detach") else x for x in given)
    arguments = autocast({"query": query, "key": key, "value": None, **options}, AUTOCAST)
    backend = arguments.pop("backend", None)
    call, operands = describe(**arguments, for_weights=True)
    problem = examine(call)
    plan = select(call, problem, request(backend), kernel, library_of(operands.query).xp)
    of_heads: Any = placed("head_weights", head_weights, destination_of(operands.query))
    if of_heads is not None:
        facts = facts_of(of_heads, "head_weights")
        of_heads = result_heads_first(call, "logsumexp", of_heads)
        if broadcast_shapes(tuple(of_heads.shape), problem.scores[:-1]) != problem.scores[:-1]:
            letters = "(..., L, H)" if call.layout == "...LHD" else "(..., H, L)"
            raise ValueError(
                f"head_weights {facts.shape} must broadcast to {letters} of the scores"
                f" {problem.scores}, (..., H, L, S): give a weight for each head and row"
            )
        if not facts.dtype.startswith(("float", "bfloat")):
            raise TypeError(f"head_weights must be floats; got {facts}")
    keys, _ = plan.weights(heads_first(call, operands), of_heads)
    return keys[0, ...] if is_flat(call) else keys
