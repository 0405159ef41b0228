"""Small calls of programs, and the same written with torch: packed, padded and decoded tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

from polyattn import attention, nn
from polyattn.dialects import flash_attn

#: What is written with torch, and with polyattn.
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def pairs() -> dict[str, Pair]:
    """Return the rows of the table."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 16, 16)
    plain = {
        "(1, 1, 16, 16), over kernel='sdpa'": (
            lambda: attention(x, x, x, kernel="sdpa"),
            lambda: attention(x, x, x),
        )
    }
    for length in (32, 64):
        for causal in (False, True):
            row = f"(1, 12, {length}, 64), {'causal' if causal else 'full'}"
            plain[row] = _plain(torch.randn(1, 12, length, 64), causal)
    return {**plain, **_packed(), **_padding(), **_pages(), "a step of 4 layers of 128": _decoder()}


def _plain(x: torch.Tensor, causal: bool) -> Pair:
    return (
        lambda: F.scaled_dot_product_attention(x, x, x, is_causal=causal),
        lambda: attention(x, x, x, is_causal=causal),
    )


def _packed() -> dict[str, Pair]:
    rows: dict[str, Pair] = {}
    ends = torch.tensor([0, 50, 130], dtype=torch.int32)
    for heads, size in ((4, 32), (8, 64)):
        q, k, v = torch.randn(3, 130, heads, size)
        for causal in (False, True):

            def loop(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                parts = []
                for start, stop in pairwise((0, 50, 130)):
                    one = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
                    part = F.scaled_dot_product_attention(*one, is_causal=causal)
                    parts.append(part[0].transpose(0, 1))
                return torch.cat(parts)

            def ours(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                lengths = ends, ends, 80, 80
                return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=causal)

            row = f"packed 50 + 80 tokens, {heads} heads of {size}"
            rows[f"{row}{', causal' if causal else ''}"] = loop, ours
    return rows


class _Taken(torch.autograd.Function):
    """The rows of an array, as `flash_attn.bert_padding` takes them."""

    @staticmethod
    def forward(ctx: Any, x: Any, indices: Any) -> Any:
        ctx.save_for_backward(indices)
        ctx.length = x.shape[0]
        return torch.gather(x, 0, indices[:, None].expand(-1, x.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (indices,) = ctx.saved_tensors
        found = gradient.new_zeros(ctx.length, gradient.shape[1])
        found.scatter_(0, indices[:, None].expand(-1, gradient.shape[1]), gradient)
        return found, None


class _Put(torch.autograd.Function):
    """Zeros with some rows, as it puts them."""

    @staticmethod
    def forward(ctx: Any, rows: Any, indices: Any, length: int) -> Any:
        ctx.save_for_backward(indices)
        found = rows.new_zeros(length, rows.shape[1])
        found[indices] = rows
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None


def _padding() -> dict[str, Pair]:
    batch, mask = torch.randn(2, 80, 256), torch.arange(80) < torch.tensor([[50], [80]])
    indices = mask.flatten().nonzero().flatten()
    tokens = batch[mask]
    taken: Any = _Taken.apply
    put: Any = _Put.apply

    def unpadded(x: Any, mask: Any) -> Any:
        lengths, used = (mask.sum(-1, dtype=torch.int32) for _ in range(2))
        kept, longest = mask.flatten().nonzero().flatten(), lengths.max().item()
        ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return taken(x.flatten(0, 1), kept), kept, ends, longest, used

    def padded(x: Any, indices: Any, items: int, length: int) -> Any:
        return put(x, indices, items * length).view(items, length, -1)

    def trained(function: Any, x: Any, *rest: Any) -> Callable[[], Any]:
        x = x.clone().requires_grad_()

        def step() -> Any:
            found = function(x, *rest)
            found = found[0] if isinstance(found, tuple) else found
            return torch.autograd.grad(found, x, torch.ones_like(found))

        return step

    given, of_pad = (batch, mask), (tokens, indices, 2, 80)
    own, ours = (unpadded, padded), (flash_attn.unpad_input, flash_attn.pad_input)
    rows: dict[str, Pair] = {}
    for n, (name, x) in enumerate((("unpad_input", given), ("pad_input", of_pad))):
        rows[name] = lambda n=n, x=x: own[n](*x), lambda n=n, x=x: ours[n](*x)
        rows[f"{name}, with gradient"] = trained(own[n], *x), trained(ours[n], *x)
    return rows


def _pages() -> dict[str, Pair]:
    pools = torch.randn(2, 40, 16, 2, 64)
    table, q = torch.randperm(39)[:24].reshape(3, 8).int(), torch.randn(3, 1, 8, 64)
    lengths, new = torch.full((3,), 128, dtype=torch.int32), torch.randn(2, 3, 1, 2, 64)
    before = lengths - 1

    def loop() -> Any:
        parts = []
        for n in range(3):
            k, v = (x[table[n]].flatten(0, 1)[:128].transpose(0, 1)[None] for x in pools)
            one = q[n : n + 1].transpose(1, 2)
            part = F.scaled_dot_product_attention(one, k, v, enable_gqa=True)
            parts.append(part.transpose(1, 2))
        return torch.cat(parts)

    def written() -> Any:
        for n, length in enumerate(before.tolist()):
            pools[:, table[n, length // 16], length % 16] = new[:, n, 0]
        return loop()

    def ours(*new: Any, lengths: Any = lengths) -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, *pools, *new, cache_seqlens=lengths, block_table=table, causal=True
        )

    return {
        "decode 3 sequences over pages of 16": (loop, ours),
        "the same, with new keys": (written, lambda: ours(*new, lengths=before)),
    }


def _decoder() -> Pair:
    x, prompt = torch.randn(1, 1, 128), torch.randn(1, 64, 128)
    blocks = [nn.EncoderBlock.init(128, 4, like=x, is_causal=True, seed=n) for n in range(4)]
    first = []
    for block in blocks:
        prompt, cache = block(prompt, cache=block.attention.cache(256, like=x, batch=(1,)))
        first.append(cache)
    memory, caches, length = [(one.key.clone(), one.value.clone()) for one in first], [*first], [64]

    def ours() -> Any:
        if caches[0].length > 200:
            caches[:] = first
        y = x
        for n, block in enumerate(blocks):
            y, caches[n] = block(y, cache=caches[n])
        return y

    def mapped(layer: Any, y: Any) -> Any:
        return torch.addmm(layer.bias, y, layer.weight)

    def written() -> Any:
        at = length[0] = 64 if length[0] > 200 else length[0] + 1
        y = x[0]
        for block, memories in zip(blocks, memory, strict=True):
            own, norm, last = block.attention, block.attention_norm, block.feed_forward_norm
            z = F.layer_norm(y, (128,), norm.weight, norm.bias, norm.epsilon)
            q, *new = (
                mapped(layer, z).view(1, 1, 4, 32).transpose(1, 2)
                for layer in (own.query, own.key, own.value)
            )
            for kept, one in zip(memories, new, strict=True):
                kept[:, :, at : at + 1] = one
            heads = F.scaled_dot_product_attention(q, *(kept[:, :, : at + 1] for kept in memories))
            y = y + mapped(own.output, heads.transpose(1, 2).reshape(1, 128))
            z = F.layer_norm(y, (128,), last.weight, last.bias, last.epsilon)
            y = y + mapped(block.feed_forward.down, F.gelu(mapped(block.feed_forward.up, z)))
        return y

    return written, ours
