"""A small server: pages of keys, prompts with a shared prefix, requests that come and go."""

from collections import deque
from itertools import count

import torch
import torch.nn.functional as F
from by_hand import band, sdpa
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import nn

WIDTH, HEADS, KV_HEADS, SIZE, VOCABULARY, PAGE, PAGES = 64, 4, 2, 16, 61, 16, 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(256, WIDTH)
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE, bias=False) for _ in range(2)
        )
        self.out = nn.ModuleList(nn.Linear(HEADS * SIZE, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, positions, attend):
        """Return the logits of packed tokens; `attend(layer, q, k, v)` knows whose they are."""
        x = self.embedding(tokens) + self.positions(positions)
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            parts = qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (-1, SIZE))
            q, k, v = parts.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            x = x + out(attend(layer, q, k, v).flatten(1))
        return self.head(x)


class Request:
    """The tokens of a request, how many of them are in pages, and which pages."""

    def __init__(self, prompt, wanted):
        self.tokens, self.wanted = list(prompt), len(prompt) + wanted
        self.cached, self.pages = 0, []


class Server:
    """Serves at most three requests at a time; full pages of equal prefixes are shared."""

    def __init__(self, model):
        self.model = model
        shape = (2, PAGES, PAGE, KV_HEADS, SIZE)
        dtype = model.head.weight.dtype
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.free, self.known = deque(range(PAGES)), {}

    @torch.no_grad()
    def serve(self, prompts, wanted):
        """Return the tokens of each request, finished."""
        requests = [Request(*one) for one in zip(prompts, wanted, strict=True)]
        waiting, running = deque(requests), []
        for _ in count():
            new = [waiting.popleft() for _ in range(min(3 - len(running), len(waiting)))]
            if not new and not running:
                return [one.tokens for one in requests]
            if new:
                running += new
            self.step(new or running, is_prompt=bool(new))
            running = [one for one in running if len(one.tokens) < one.wanted]

    def step(self, requests, *, is_prompt):
        """Add a token to each request, after its prompt or its last token went into pages."""
        for one in requests:
            self.reserve(one)
        rows = [len(one.tokens) - one.cached for one in requests]
        positions = [torch.arange(one.cached, len(one.tokens)) for one in requests]
        slots = torch.cat(
            [
                torch.tensor(one.pages)[at // PAGE] * PAGE + at % PAGE
                for one, at in zip(requests, positions, strict=True)
            ]
        )
        tokens = torch.tensor([t for one in requests for t in one.tokens[one.cached :]])
        most = max(len(one.pages) for one in requests)
        table = torch.tensor([one.pages + [0] * (most - len(one.pages)) for one in requests])
        lengths = torch.tensor([len(one.tokens) for one in requests], dtype=torch.int32)
        starts = torch.tensor([0, *rows]).cumsum(0).int()

        def attend(layer, q, k, v):
            keys, values = self.keys[layer], self.values[layer]
            keys.view(-1, KV_HEADS, SIZE)[slots] = k
            values.view(-1, KV_HEADS, SIZE)[slots] = v
            if not is_prompt:
                return flash_attn_with_kvcache(
                    q[:, None],
                    keys,
                    values,
                    cache_seqlens=lengths,
                    block_table=table.int(),
                    causal=True,
                )[:, 0]
            key_starts = torch.cat([starts[:1], lengths.cumsum(0).int()])
            return flash_attn_varlen_func(
                q, keys, values, starts, key_starts, max(rows), int(lengths.max()), causal=True,
                block_table=table.int(),
            )  # fmt: skip

        logits = self.model(tokens, torch.cat(positions), attend)[starts[1:].long() - 1]
        for one, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            one.cached = len(one.tokens)
            one.tokens.append(token)

    def reserve(self, one):
        """Give a request its pages: known ones for full pages of its prompt, if it has none yet."""
        if not one.pages:
            for number in range((len(one.tokens) - 1) // PAGE):
                page = self.known.get(tuple(one.tokens[: (number + 1) * PAGE]))
                if page is None:
                    break
                one.pages.append(page)
                one.cached += PAGE
        while len(one.pages) * PAGE < len(one.tokens):
            one.pages.append(self.free.popleft())
        for number in range(len(one.tokens) // PAGE):
            self.known.setdefault(tuple(one.tokens[: (number + 1) * PAGE]), one.pages[number])


@torch.no_grad()
def by_hand(model, prompt, wanted):
    """Return the tokens of one request from whole passes, without pages."""
    tokens = list(prompt)

    def attend(layer, q, k, v):
        return sdpa(q[None], k[None], v[None], mask=band(len(q), len(q), right=0))[0]

    for _ in range(wanted):
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens
