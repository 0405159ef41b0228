"""Generate tokens with a decoder: the most likely ones, or samples, step by step over a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from polyattn._api.names import with_our_names
from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, cast, facts_of, library_of, numbers_like
from polyattn._dispatch.transfer import convert_like
from polyattn.nn.ids import check_range
from polyattn.nn.layers import Embedding
from polyattn.nn.models import Transformer


@with_our_names("cache", "caches", "positions", "segments")
def generate(
    model: Transformer,
    ids: Array,
    steps: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | Iterable[int] | None = None,
    on_token: Callable[[Array], Any] | None = None,
    jit: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Array:
    """Continue token sequences with a decoder.

    Parameters
    ----------
    model : Transformer
        A decoder with logits, such as ``nn.load.model`` returns for GPT-2 or Llama.
    ids : Array of int
        The prompts, shape (..., L): all of one length, without padding.
    steps : int
        Number of tokens to add at most.
    temperature : float
        Divides the logits before a sample is drawn; 0 takes the most likely token.
    top_k : int, optional
        Number of tokens to draw from, the most likely ones; more if the last of them is tied.
    top_p : float
        Draw from the fewest most likely tokens whose probabilities have this sum, of those that
        `top_k` leaves.
    seed : int
        Equal seeds draw equal samples in every library, up to the rounding of the logits. Each
        sequence has its own random numbers, whatever is beside it in the batch.
    stop : int or iterable of int, optional
        Tokens that end a sequence. The rest of its row repeats the token that ended it, and the
        function returns once all sequences have ended.
    on_token : callable, optional
        Called at each step with the new tokens, shape (...); if it returns True, generation ends.
    jit : callable, optional
        Compiles the function of a step, such as ``jax.jit`` once
        `polyattn.integrations.jax.register` was called. Without it JAX compiles each operation
        for each length.
    **options : Any
        Further options of the model, such as ``backend``; not caches, positions and segments,
        which differ at each step.

    Returns
    -------
    Array of int
        The prompts and the new tokens, shape (..., L + n), n at most `steps`.

    Raises
    ------
    ValueError, TypeError
        If the model has no logits, or an argument is out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import nn
    >>> like = np.zeros(1, dtype=np.float32)
    >>> gpt = nn.Transformer.init(100, 64, 4, 2, like=like, positions=32, tied=True)
    >>> nn.generate(gpt, np.asarray([[5, 7, 11]]), 4, temperature=0.8, seed=1).shape
    (1, 7)
    """
    xp = library_of(ids, "ids").xp
    if not xp.isdtype(ids.dtype, "integral") or not ids.shape or not ids.shape[-1]:
        raise TypeError(f"ids must be integers of the shape (..., L), L > 0; got {facts_of(ids)}")
    if not model.tied and model.output is None:
        raise ValueError(
            "the model has no logits: load a decoder with logits=True; an encoder, such as BERT,"
            " has nothing to generate"
        )
    choose = _chooser(temperature, top_k, top_p, seed)
    stops = [check_int("stop", token) for token in _listed(stop)]
    _check_options(options)
    batch, length = tuple(ids.shape[:-1]), ids.shape[-1]
    if check_int("steps", steps) < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    if model.positions is not None:
        model.positions.check(length + steps - 1)  # nothing follows the last token
    if isinstance(model.embedding, Embedding):  # now, because a compiled step reads no numbers
        check_range("token id", ids, range(model.embedding.weight.shape[0]), may_wait=True)
    caches = model.caches(length + steps, batch=batch)

    def run(model: Transformer, new: Array, caches: Any) -> tuple[Array, Any]:
        x, caches = model.hidden(new, caches=caches, **({"is_causal": True} | options))
        return model.logits(x[..., -1:, :])[..., 0, :], caches

    step = run if jit is None else jit(run)
    new, parts = ids, [ids]
    ended, last = np.zeros(batch, dtype=bool), np.zeros(batch, dtype=np.int64)
    for _ in range(steps):
        logits, caches = step(model, new, caches)
        last = np.where(ended, last, choose(_numbers(logits)))
        new = numbers_like(xp, last[..., None], ids.dtype, ids)
        parts.append(new)
        ended |= np.isin(last, stops)
        if (on_token is not None and on_token(new[..., 0]) is True) or ended.all():
            break
    return xp.concat(parts, axis=-1)


def _listed(stop: Any) -> list[Any]:
    """Return `stop` as a list."""
    if stop is None:
        return []
    return list(stop) if getattr(stop, "shape", True) and isinstance(stop, Iterable) else [stop]


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise for an option that differs from step to step."""
    if "caches" in options or "cache" in options:
        raise TypeError(
            "generate makes its own caches: pass all tokens so far as ids, or call the model with"
            " caches= yourself"
        )
    for name in ("positions", "segments"):
        if options.get(name) is not None:
            raise TypeError(
                f"generate places each token after the one before it, in segment 0: omit {name}, or"
                " call the model with caches= yourself"
            )


def _numbers(logits: Array) -> Any:
    """Return logits as float64 in NumPy."""
    plain = logits.detach() if hasattr(logits, "detach") else logits
    xp = library_of(plain).xp
    return convert_like(cast(xp, plain, xp.float32), np.zeros(1, np.float32)).astype(np.float64)


def _chooser(
    temperature: float, top_k: int | None, top_p: float, seed: int
) -> Callable[[Any], Any]:
    """Return a function from logits, shape (..., tokens), to a token of each row."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number; got {temperature!r}")
    if top_k is not None and check_int("top_k", top_k) < 1:
        raise ValueError(f"top_k must be at least 1; got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p!r}")
    if check_int("seed", seed) < 0:
        raise ValueError(f"seed must be at least 0; got {seed}")
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
