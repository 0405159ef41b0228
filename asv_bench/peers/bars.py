"""Bars of the compiled kernel beside `attention.py native`: masks, programs and calls.

A row divides the time of a call by that of another in turns, and by its share of the keys, or takes
the difference. ``--cases`` runs those of *streaming*, *gallery*, *GPT*, *token* or *added*, and the
exit status is 1 where a row misses its bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import masks as gallery
import numpy as np
import script
import torch
from cases import Case

import polyattn
from polyattn import masks
from polyattn.dialects.flash_attn import flash_attn_with_kvcache

RNG = np.random.default_rng(0)
WIDTH, HEADS, CAP, RATE = 256, 4, 20.0, 0.1  # of the small GPT


class Row(NamedTuple):
    """A call over another: the bar of the ratio by `share`, or of the microseconds more."""

    title: str
    over: script.Call
    call: script.Call
    bar: float
    share: float = 1.0
    is_added: bool = False


def arrays(heads: int, rows: int, keys: int = 0) -> list[Any]:
    """Return a query, a key and a value."""
    return Case(1, heads, heads, rows, keys or rows, 64).arguments()[0]


def of_masks(is_quick: bool) -> Iterator[Row]:
    """Compare streaming with its window, and each mask with its share of the full time."""
    attend = partial(polyattn.attention, kernel="native")
    band = masks.window(1024, 0)
    for length in (1024,) if is_quick else (8192, 32768, 262144):
        mask, x = masks.causal() & (band | masks.prefix(4)), arrays(1, length)
        calls = [partial(attend, *x, mask=one) for one in (band, mask)]
        yield Row(f"streaming, {length} tokens", *calls, 1.2)
    length = 1024 if is_quick else gallery.LENGTH
    found, x = gallery.cases(length), arrays(1, length)
    found |= {"random bools": RNG.random((length, length)) < 0.5, "dilated(4)": masks.dilated(4)}
    del found["full"]
    full, causal = partial(attend, *x), partial(attend, *x, is_causal=True)
    for name, mask in found.items():
        # Of scores of 0 the logsumexp is the logarithm of the number of keys.
        counted = polyattn.attention_partial(*[array * 0 for array in x], mask=mask).logsumexp
        call, share = partial(attend, *x, mask=mask), float(np.exp(counted).sum()) / length**2
        yield Row(f"gallery, {name}", full, call, 1.5, share)
        if "causal" in name or name.startswith("window"):
            yield Row(f"gallery, {name}, over causal", causal, call, 1.03)


def of_calls(is_quick: bool) -> Iterator[Row]:
    """Compare a token whose lengths are a tensor with torch's function, and options with none."""
    for keys, bar in ((128, 2.0), (4096, 0.6)):
        query, key, value = map(torch.from_numpy, arrays(8, 1, keys))
        own, lengths = [x.swapaxes(1, 2) for x in (query, key, value)], torch.tensor([keys - 3])
        mask = (torch.arange(keys) < lengths)[None, None, None]
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, mask)
        call = partial(flash_attn_with_kvcache, *own, cache_seqlens=lengths)
        yield Row(f"token, {keys} keys", sdpa, call, bar)
    plain = partial(polyattn.attention, *arrays(8, 64))
    streaming = {"mask": masks.causal() & (masks.window(16, 0) | masks.prefix(4))}
    yield Row("added µs, streaming", plain, partial(plain, **streaming), 15, is_added=True)
    for kind, bar in (("documents", 40), ("padding", 40), ("alibi", 40), ("dropout", 100)):
        _, options = Case(1, 8, 8, 64, 64, 64, kind).arguments()
        yield Row(f"added µs, {kind}", plain, partial(plain, **options), bar, is_added=True)


def loss(attend: Callable[..., Any], tanh: Any, x: Any, weights: list[Any]) -> Any:
    """Return the loss of a GPT of two layers, whose outputs are to be its inputs."""
    start, (batch, length, _) = x, x.shape
    for project, back, up, down in zip(*[iter(weights)] * 4, strict=True):
        heads = (x @ project).reshape(batch, length, 3, HEADS, -1)
        found = attend(*[heads[:, :, n].swapaxes(1, 2) for n in range(3)])
        x = x + found.swapaxes(1, 2).reshape(batch, length, -1) @ back
        x = x + tanh(x @ up) @ down
    return ((x - start) ** 2).mean()


def ours(ids: Any, seed: Any, q: Any, k: Any, v: Any) -> Any:
    """Return attention within documents, a window and a softcap, with dropout."""
    mask = masks.segments(ids) & masks.causal() & masks.window(255, 0)
    return polyattn.attention(q, k, v, mask=mask, softcap=CAP, dropout=(RATE, seed))


def formula(xp: Any, softmax: Any, drop: Any, hidden: Any, q: Any, k: Any, v: Any) -> Any:
    """Return the same by the formula."""
    capped = CAP * xp.tanh(q @ k.swapaxes(-1, -2) / (CAP * q.shape[-1] ** 0.5))
    return drop(softmax(xp.where(hidden, -np.inf, capped), -1)) @ v


def on_torch(weights: Any, x: Any, hidden: Any, ids: Any, seed: Any) -> list[script.Call]:
    """Return the steps: by the formula, by us, and by us compiled."""
    x, hidden, ids, seed = map(torch.from_numpy, (x, hidden, ids, seed))
    trained = [torch.from_numpy(one).requires_grad_() for one in weights]
    drop = partial(torch.nn.functional.dropout, p=RATE)
    attends = partial(formula, torch, torch.softmax, drop, hidden), partial(ours, ids, seed)
    losses = [partial(loss, attend, torch.tanh) for attend in attends]
    losses.append(torch.compile(losses[1], fullgraph=True))
    return [lambda of=of: torch.autograd.grad(of(x, trained), trained) for of in losses]


def on_jax(*given: Any) -> list[script.Call]:
    """Return the same steps under `jit`: by the formula and by us."""

    def of(weights: Any, x: Any, hidden: Any, ids: Any, seed: Any, is_ours: bool) -> Any:
        def drop(p: Any) -> Any:
            keeps = jax.random.bernoulli(jax.random.key(seed), 1 - RATE, p.shape)
            return jax.numpy.where(keeps, p / (1 - RATE), 0)

        by_hand = partial(formula, jax.numpy, jax.nn.softmax, drop, hidden)
        return loss(partial(ours, ids, seed) if is_ours else by_hand, jax.numpy.tanh, x, weights)

    placed = jax.tree.map(jax.numpy.asarray, given)
    steps = [jax.jit(jax.grad(partial(of, is_ours=one))) for one in (False, True)]
    return [lambda step=step: jax.block_until_ready(step(*placed)) for step in steps]


def of_programs(is_quick: bool) -> Iterator[Row]:
    """Compare a step of training with that of the formula, on torch and JAX."""
    shapes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * 2
    weights = [RNG.standard_normal(shape, dtype=np.float32) / 32 for shape in shapes]
    for length in (64,) if is_quick else (512, 1024):
        x, at = RNG.standard_normal((2, length, WIDTH), dtype=np.float32), np.arange(length)
        ids, far = (at + np.array([[0], [97]])) // 200, at[:, None] - at
        hidden = ((far < 0) | (far > 255) | (ids[:, :, None] != ids[:, None]))[:, None]
        for make, bars in ((on_torch, {"eager": 0.45, "compiled": 0.4}), (on_jax, {"jit": 0.6})):
            over, *calls = make(weights, x, hidden, ids, np.array(3))
            for (name, bar), call in zip(bars.items(), calls, strict=True):
                yield Row(f"GPT {make.__name__}, {name}, {length} tokens", over, call, bar)


def main() -> int:
    """Print the rows with their verdicts."""
    flags = ("quick", "threads", "cases", "cpu-time", "json")
    options = script.read(script.parser(__doc__ or "", 7, *flags))
    torch.set_num_threads(options.threads)
    missed = 0
    parts = of_masks, of_calls, of_programs
    with script.measuring(options) as show:
        for row in chain.from_iterable(part(options.quick) for part in parts):
            if options.cases in row.title:
                over, own = script.compare({"over": row.over, "native": row.call}, options)
                more = (own.seconds - over.seconds) * 1e6
                found = more if row.is_added else own.ratio.median / row.share
                missed += found > row.bar
                verdict = f"  {found:.2f}, at most {row.bar:g}{', missed' * (found > row.bar)}"
                show(row.title, [over, own], lambda one: verdict if one is own else "")  # noqa: B023
    return missed > 0 and not options.quick


if __name__ == "__main__":
    sys.exit(main())
