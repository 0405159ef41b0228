"""The closed list of features that a call can need of a kernel."""

from __future__ import annotations

__all__ = ["DTYPES", "FEATURES", "MASKING"]

DTYPES = ("float16", "bfloat16", "float32", "float64")


#: The features that a call can need. A kernel declares those that it computes, and never gets a
#: problem that needs another.
FEATURES: dict[str, str] = {
    "backward": "gradients by attention_backward",
    "batch_broadcast": "batch axes of query, key and value that differ",
    "bias": "bias=, added to the scores",
    "causal": "is_causal=True",
    "dropout": "dropout=",
    "jvp": "directional derivatives by attention_jvp",
    "grouped_heads": "fewer key/value heads than query heads",
    "logsumexp": "the logsumexp of each row beside the output",
    "mask": "mask= as an array",
    "mask_mod": "mask= as a function",
    "mask_expression": "mask= as a mask expression that no other option expresses",
    "normalizer": "normalizer=, in place of softmax",
    "query_offset": "query_offset= as a number other than S − L",
    "query_offset_array": "query_offset= as an array",
    "scale": "scale= other than 1/√D",
    "score_mod": "score_mod= as a function",
    "score_norm": "scale=scores.by_norm()",
    "score_expression": "score_mod= as a score expression that no other option expresses",
    "similarity": "similarity=, in place of q·k",
    "sinks": "sinks=",
    "softcap": "softcap=",
    "value_size": "value vectors of another size than query and key vectors",
    "window": "window=",
}


#: Features that can mask keys.
MASKING = frozenset(
    {
        "bias",
        "causal",
        "mask",
        "mask_mod",
        "mask_expression",
        "score_mod",
        "score_expression",
        "window",
    }
)
