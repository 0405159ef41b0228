"""The names of the arguments of attention, and those that other libraries give them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from polyattn._core.call.options import OPTIONS

_F = TypeVar("_F", bound=Callable[..., Any])

_MASK = "mask= for bools, where True takes part, or bias= for floats"
_DROPOUT = "dropout=(rate, seed)"
_WINDOW = "window=(left, right), with None where FlashAttention has -1"
_LENGTHS = "mask=masks.padding(key_lengths, query_lengths)"
_PACKED = "mask=masks.segments(query_ids, key_ids)"
_LOGSUMEXP = "nothing, and call attention_partial, which returns the logsumexp"
_WEIGHTS = "nothing, and call attention_weights, which returns the weights"

_AXES = 'nothing: the axes are (..., heads, length, size), or layout="...LHD" names another order'
_HEADS = "nothing: heads are an axis of query, key and value, (..., heads, length, size)"

#: The keyword arguments of `attention` that are not options of the formula.
BESIDE = ("layout", "backend", "kernel")

#: Names of other libraries, with what to pass instead.
FOREIGN = {
    "q": "query=",
    "k": "key=",
    "v": "value=",
    "mask_mod": "mask=",
    "attn_mask": _MASK,
    "attention_mask": f"{_MASK}; of shape (batch, S), mask=(attention_mask != 0)[:, None, None, :]",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None, :], or mask=masks.padding(lengths)",
    "block_mask": "mask= with the function that it was made of, block_mask.mask_mod",
    "attn_bias": "bias=",
    "causal": "is_causal=",
    "window_size": _WINDOW,
    "local_window_size": _WINDOW,
    "sliding_window": "window=(size - 1, 0)",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "logits_soft_cap": "softcap=",
    "logit_cap": "softcap=",
    "attn_logits_soft_cap": "softcap=",
    "alibi_slopes": "score_mod=scores.alibi(slopes)",
    "s_aux": "sinks=",
    "dropout_p": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "enable_gqa": "nothing: fewer key than query heads are always grouped",
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "seqused_k": "key_lengths=",
    "cache_seqlens": "key_lengths=",
    "seq_lens": "key_lengths=",
    "nonpad_kv_seqlen": "key_lengths=",
    "page_table": "block_table=",
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "cu_seq_q": _PACKED,
    "cu_seq_k": _PACKED,
    "return_lse": _LOGSUMEXP,
    "return_softmax_lse": _LOGSUMEXP,
    "need_weights": _WEIGHTS,
    "return_attn_probs": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "axis": _AXES,
    "dim": _AXES,
    "heads": _HEADS,
    "num_heads": _HEADS,
    "implementation": "backend= or kernel=",
}

#: Those of `polyattn.nn.generate`.
OF_GENERATE = {
    "max_new_tokens": "steps=",
    "max_length": "steps=, the number of new tokens",
    "max_tokens": "steps=",
    "do_sample": "temperature=, 0 for the most likely token",
    "eos_token_id": "stop=",
    "streamer": "on_token=",
}


def with_our_names(*beside: str) -> Callable[[_F], _F]:
    """Make a function refuse unknown keyword arguments, with the name to use instead.

    Names in `beside` are accepted like its parameters.
    """

    def decorate(function: _F) -> _F:
        parameters = inspect.signature(function).parameters
        own = frozenset((*parameters, *beside))
        kinds = [parameter.kind for parameter in parameters.values()]
        most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        takes_options = "options" in own

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Before Python binds the arguments: q= for query= would be a missing argument.
            for name in kwargs:
                if name not in own and not (takes_options and (name in OPTIONS or name in BESIDE)):
                    raise _unknown(function.__name__, name, own | {*OPTIONS, *BESIDE})
            if len(args) > most and "query" in own:
                raise TypeError(
                    f"{function.__name__}() takes {most} arguments by position, got {len(args)}:"
                    " pass mask= and all other options by name"
                )
            return function(*args, **kwargs)

        return cast(_F, call)

    return decorate


def check_names(function: str, options: Collection[str], without: Collection[str] = ()) -> None:
    """Raise if a keyword is not an option of `attention`, as Python does for a full signature."""
    ours = {*OPTIONS, *BESIDE} - {*without}
    for name in options:
        if name not in ours:
            raise _unknown(function, name, ours)


def _unknown(function: str, name: str, ours: Collection[str]) -> TypeError:
    """Return the error for an argument that a function does not have."""
    if function == "generate" and name in OF_GENERATE:
        return TypeError(f"generate() has no argument {name!r}; pass {OF_GENERATE[name]}")
    if name in FOREIGN:
        return TypeError(
            f"{function}() has no argument {name!r}; pass {FOREIGN[name]}. The page"
            ' docs/how-to/troubleshooting.md has all names, under "Names of other libraries"'
        )
    near = difflib.get_close_matches(name, sorted(ours) + sorted(FOREIGN), n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    if near and near[0] in FOREIGN:
        meant += f" Pass {FOREIGN[near[0]]}"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")
