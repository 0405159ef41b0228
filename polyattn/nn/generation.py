"""Generate tokens with a decoder: the most likely ones, or samples, step by step over a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from polyattn._api.names import with_our_names
from polyattn._base.arguments import check_int, got
from polyattn._base.arrays import Array, facts_of, index_range, is_array, library_of, numbers_like
from polyattn._base.host import as_array, destination_of
from polyattn._base.same_bits import same_bits as same_bits_block
from polyattn._dispatch.transfer import as_float64, convert_like
from polyattn.nn.attention import Cache
from polyattn.nn.cache import KVCache
from polyattn.nn.ids import check_range
from polyattn.nn.layers import Embedding
from polyattn.nn.models import Transformer, with_contiguous_rows
from polyattn.nn.page_plan import Ledger, on_host, to_device
from polyattn.nn.paged_cache import PagedCache
from polyattn.nn.positions import LearnedPositions


@with_our_names("cache", "counts", "positions", "segments")
def generate(
    model: Transformer,
    ids: Any,
    steps: int,
    *,
    lengths: Any = None,
    caches: tuple[Cache, ...] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | Iterable[int] | None = None,
    on_token: Callable[[Array], Any] | None = None,
    jit: Callable[[Any], Any] | None = None,
    same_bits: bool = False,
    **options: Any,
) -> Any:
    """Continue token sequences with a decoder.

    Parameters
    ----------
    model : Transformer
        A decoder with logits, such as ``nn.load.model`` returns for GPT-2 or Llama.
    ids : Array of int, or sequence of sequences of int
        The prompts, shape (..., L). Prompts of different lengths, a ragged batch, are a list of
        lists, or an array (B, L) that is padded on the right, with `lengths`.
    steps : int
        Number of tokens to add at most.
    lengths : Array of int or sequence of int, optional
        Number of tokens of each prompt, shape (B,); L by default.
    caches : tuple of KVCache, PagedCache or QuantizedCache, optional
        A cache for each block, with the tokens before `ids`, such as ``model.caches(64, batch=(2,),
        kind=nn.PagedCache)``, which has none. By default KVCaches, or PagedCaches for prompts of
        different lengths: only these have a length for each item.
    temperature : float
        Divides the logits before a sample is drawn; 0 takes the most likely token.
    top_k : int, optional
        Number of tokens to draw from, the most likely ones; more if the last of them is tied.
    top_p : float
        Draw from the fewest most likely tokens whose probabilities have this sum, of those that
        `top_k` leaves.
    seed : int
        Equal seeds draw equal samples in every library, up to the rounding of the logits. Each
        sequence has its own random numbers, whatever else is in the batch.
    stop : int or iterable of int, optional
        Tokens that end a sequence. The rest of its row repeats the token that ended it, and the
        function returns once all sequences have ended.
    on_token : callable, optional
        Called at each step with the new tokens, shape (...); if it returns True, generation ends.
    jit : callable, optional
        Compiles the function of a step, such as ``jax.jit`` once
        `polyattn.integrations.jax.register` was called. Without it JAX compiles each operation
        for each length.
    same_bits : bool
        Whether each step runs in `polyattn.same_bits`, so that tokens and samples depend on their
        own prompt only, bit by bit: not on other prompts, chunks and kinds of caches. On NumPy and
        torch on the CPU, with polyattn-native and without `jit`. Weights that are transposed in
        memory, as of models that torch stored, are copied for the time of the call.
    **options : Any
        Further options of the model, such as ``backend``; not positions and segments, which differ
        at each step.

    Returns
    -------
    Array of int, or list of lists of int
        The prompts and the new tokens, shape (..., L + n), n at most `steps`. With `lengths` the
        new tokens follow each prompt, and the last one is repeated to the end of the row. For a
        list of prompts, a list for each, which ends with the token that stopped it.

    Raises
    ------
    ValueError, TypeError
        If the model has no logits or is not causal, or an argument is out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> like = np.zeros(1, dtype=np.float32)
    >>> gpt = nn.Transformer.init(100, 64, 4, 2, like=like, is_causal=True, positions=32, tied=True)
    >>> nn.generate(gpt, np.asarray([[5, 7, 11]]), 4, temperature=0.8, seed=1).shape
    (1, 7)
    """
    _check_model(model, options)
    if same_bits and jit is not None:
        raise TypeError("same_bits=True computes each step by a compiled library: omit jit")
    prompts, kept = _prompts(ids, lengths, model)
    xp, batch = library_of(prompts).xp, tuple(prompts.shape[:-1])
    choose = _chooser(temperature, top_k, top_p, seed)
    stops = [check_int("stop", token) for token in _listed(stop)]
    _check_options(options)
    check_int("steps", steps, least=1)
    _check_tokens(model, prompts)
    held = _first_caches(model, prompts, kept, steps, caches, jit is not None)
    model = with_contiguous_rows(model) if same_bits else model
    run = _step(options, same_bits)
    step = run if jit is None else jit(run)
    new, parts = prompts, [prompts]
    ended, last = np.zeros(batch, dtype=bool), np.zeros(batch, dtype=np.int64)
    grown = np.zeros(batch, dtype=np.int64)
    for number in range(steps):
        first = None if number or kept is None else to_device(kept, held[0].lengths)
        logits, held = step(model, new, held, first)
        last = np.where(ended, last, choose(as_float64(logits)))
        new = numbers_like(xp, last[..., None], prompts.dtype, prompts)
        parts.append(new)
        grown += ~ended
        ended |= np.isin(last, stops)
        if (on_token is not None and on_token(new[..., 0]) is True) or ended.all():
            break
    whole = _joined(xp.concat(parts, axis=-1), prompts.shape[-1], kept)
    if not isinstance(ids, (list, tuple)):
        return whole
    ends = grown + (prompts.shape[-1] if kept is None else kept)
    rows = convert_like(whole, np.zeros(0)).tolist()
    return [row[:end] for row, end in zip(rows, ends.tolist(), strict=True)]


def _check_model(model: Transformer, options: Mapping[str, Any]) -> None:
    """Raise if a model has no logits, or nothing says what each token sees."""
    if not model.tied and model.output is None:
        raise ValueError(
            "the model has no logits: load a decoder with logits=True; an encoder, such as BERT,"
            " has nothing to generate"
        )
    causal = all(block.attention.is_causal for block in model.stack.blocks)
    if not causal and options.get("is_causal") is None:
        raise ValueError(
            "the model is not causal: pass is_causal=True here, or is_causal=False and the mask of"
            " what each token sees"
        )


def _check_tokens(model: Transformer, prompts: Array) -> None:
    """Raise for ids that the model does not have, now: a compiled step reads no numbers."""
    if not isinstance(model.embedding, Embedding):
        return
    tokens, dtype = range(model.embedding.weight.shape[0]), facts_of(prompts).dtype
    if tokens and np.iinfo(dtype).max < tokens[-1]:
        raise TypeError(
            f"ids of {dtype} cannot hold the model's tokens, up to {tokens[-1]}; give int32 or"
            " int64"
        )
    check_range("token id", prompts, tokens, may_wait=True)


def _step(options: Mapping[str, Any], same_bits: bool) -> Callable[..., Any]:
    """Return the function of a step: the logits of the last token of each row, and the caches."""

    def run(model: Transformer, new: Array, caches: Any, kept: Any) -> tuple[Array, Any]:
        own = {} if kept is None else {"counts": kept}
        x, caches = model.hidden(new, caches=caches, **options, **own)
        if kept is None:
            return model.logits(x[..., -1:, :])[..., 0, :], caches
        xp = library_of(x).xp
        rows = index_range(xp, 0, x.shape[0], kept) * x.shape[1] + kept - 1
        x = xp.take(xp.reshape(x, (-1, x.shape[-1])), rows, axis=0)
        return model.logits(x[:, None, :])[:, 0, :], caches

    return same_bits_block()(run) if same_bits else run


def _prompts(ids: Any, lengths: Any, model: Transformer) -> tuple[Array, Any]:
    """Return prompts (..., L), and the length of each on the host, None if all have L."""
    if isinstance(ids, (list, tuple)):
        if lengths is not None:
            raise TypeError("the lists of ids have lengths: omit lengths, which an array needs")
        rows = [np.asarray(as_array("a prompt", row)) for row in ids]
        if not rows or any(x.ndim != 1 or not len(x) for x in rows):
            raise ValueError(
                "a list of prompts holds a sequence of at least one token for each, such as"
                f" [[5, 7], [11]]; {got(ids)}"
            )
        lengths = np.asarray([len(row) for row in rows])
        padded = np.zeros((len(rows), lengths.max()), np.result_type(*rows))
        for row, one in zip(padded, rows, strict=True):
            row[: len(one)] = one
        like = next(iter(model.parameters().values()))
        destination = destination_of(like)
        ids = convert_like(padded, like) if destination is None else destination.put("ids", padded)
    xp = library_of(ids, "ids").xp
    if not xp.isdtype(ids.dtype, "integral") or not ids.shape or not ids.shape[-1]:
        raise TypeError(f"ids must be integers of the shape (..., L), L > 0; got {facts_of(ids)}")
    if lengths is None:
        return ids, None
    kept = on_host(as_array("lengths", lengths))
    whole = len(ids.shape) == 2 and getattr(kept, "shape", None) == ids.shape[:1]
    if not whole or kept.dtype.kind not in "iu" or ((kept < 1) | (kept > ids.shape[1])).any():
        raise ValueError(
            "lengths must be integers from 1 to L, one for each prompt of ids (B, L); got ids"
            f" {facts_of(ids)} and {got(lengths)}"
        )
    if (kept == ids.shape[1]).all():
        return ids, None
    inside = np.arange(ids.shape[1]) < kept[:, None]
    # Padding may be no token.
    return xp.where(numbers_like(xp, inside, xp.bool, ids), ids, xp.zeros_like(ids)), kept


def _first_caches(
    model: Transformer, prompts: Array, kept: Any, steps: int, caches: Any, compiles: bool
) -> Any:
    """Return caches that have room for so many new tokens, or raise."""
    blocks, new = len(model.stack.blocks), prompts.shape[-1] + steps
    given = None if caches is None else tuple(caches)
    if given is not None and (
        len(given) != blocks or not all(isinstance(one, Cache) for one in given)
    ):
        raise TypeError(f"caches must hold a cache for each of the {blocks} blocks; {got(caches)}")
    if given and kept is not None and not all(isinstance(one, PagedCache) for one in given):
        raise TypeError(
            "prompts of different lengths need caches with a length for each item: omit caches, or"
            " give model.caches(capacity, batch=(B,), kind=nn.PagedCache)"
        )
    before: Any = given[0].next_position if given else 0
    before = int(on_host(before).max(initial=0)) if is_array(before) else before
    if isinstance(model.positions, LearnedPositions):
        model.positions.check(before + new - 1)  # nothing follows the last token
    if given is None:
        kind = KVCache if kept is None else PagedCache
        return model.caches(new, batch=tuple(prompts.shape[:-1]), kind=kind)
    for cache in given if compiles else ():
        if before + new - 1 > cache.capacity:
            raise ValueError(
                f"a compiled step cannot enlarge a cache: {before + new - 1} tokens need a capacity"
                f" of as many; got {cache.capacity}"
            )
        table = cache._on_host() if isinstance(cache, PagedCache) else None
        counts = steps - 1 + (prompts.shape[-1] if kept is None else kept)
        if table and Ledger(table).place(table, 0 * table.lengths + counts, 0) is None:
            raise ValueError(
                f"a compiled step cannot add pages, and the {table.total} of this cache are too"
                " few: give a cache that was made with a larger capacity, or more pages="
            )
    return given


def _joined(whole: Array, length: int, kept: Any) -> Array:
    """Return prompts of this padded length and their new tokens, which follow each prompt."""
    if kept is None:
        return whole
    xp, (items, total) = library_of(whole).xp, whole.shape
    place = np.arange(total) - kept[:, None]
    place = np.where(place < 0, np.arange(total), length + np.minimum(place, total - length - 1))
    flat = to_device(place + np.arange(items)[:, None] * total, index_range(xp, 0, 1, whole))
    return xp.reshape(xp.take(xp.reshape(whole, (-1,)), xp.reshape(flat, (-1,))), whole.shape)


def _listed(stop: Any) -> list[Any]:
    """Return `stop` as a list."""
    if stop is None:
        return []
    return list(stop) if getattr(stop, "shape", True) and isinstance(stop, Iterable) else [stop]


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise for an option that differs from step to step."""
    for name in ("positions", "segments", "counts"):
        if options.get(name) is not None:
            raise TypeError(
                f"generate places each token after the one before it, in segment 0: omit {name}, or"
                " call the model with caches= yourself"
            )


def _chooser(
    temperature: float, top_k: int | None, top_p: float, seed: int
) -> Callable[[Any], Any]:
    """Return a function from logits, shape (..., tokens), to a token of each row."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number; got {temperature!r}")
    if top_k is not None:
        check_int("top_k", top_k, least=1)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p!r}")
    check_int("seed", seed, least=0)
    if temperature == 0:
        return lambda logits: np.argmax(logits, axis=-1)
    generators: list[Any] = []

    def choose(logits: Any) -> Any:
        rows = logits.reshape(-1, logits.shape[-1])
        while len(generators) < len(rows):  # at the first step
            # NumPy guarantees the same words of a bit generator in every version.
            words = np.random.SeedSequence([seed, len(generators)])
            generators.append(np.random.Philox(words))
        drawn = [
            _draw(row / temperature, top_k, top_p, (int(words.random_raw()) >> 11) * 2.0**-53)
            for row, words in zip(rows, generators, strict=True)
        ]
        return np.asarray(drawn, dtype=np.int64).reshape(logits.shape[:-1])

    return choose


def _draw(scores: Any, top_k: int | None, top_p: float, uniform: float) -> int:
    """Return the token at a uniform number's place in the distribution of one row."""
    order = np.argsort(-scores, kind="stable")  # the most likely first
    ranked = scores[order]
    if top_k is not None and top_k < len(ranked):
        ranked = ranked[ranked >= ranked[top_k - 1]]
    weights = np.exp(ranked - ranked[0])
    sums = np.cumsum(weights / weights.sum())
    # A token counts if those before it have less than top_p.
    sums = sums[: 1 + int(np.searchsorted(sums, top_p))]
    return int(order[min(np.searchsorted(sums, uniform * sums[-1], side="right"), len(sums) - 1)])
