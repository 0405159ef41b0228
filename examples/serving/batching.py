"""Continuous batching: texts join and leave a batch while it runs, and share a prompt's pages.

A row of the batch is an item of paged caches. Each step forks them to the texts that go on and
those that join, so the batch grows and shrinks; a text that joins begins with the pages of the
common prompt. All new tokens go through the model in one call: one of each text that goes on, and
all of those that join.

Run ``python examples/serving/batching.py``, with ``--library torch`` for PyTorch.
"""

import argparse
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from polyattn import nn


@dataclass
class Text:
    """A request, and the tokens that it got so far."""

    question: list[int]
    steps: int
    answer: list[int] = field(default_factory=list)


class Server:
    """Texts that continue one prompt, at most `most` at a time."""

    def __init__(self, model, prompt, most, to=np.asarray, page=8):
        self.model, self.most, self.to = model, most, to
        self.waiting, self.running = deque(), []
        caches = model.caches(len(prompt), batch=(1,), kind=nn.PagedCache, page=page)
        # Item 0 is the prompt, of which the texts are forks.
        _, self.caches = model(to([prompt]), caches=caches)

    def step(self):
        """Add a token to each text, and return the texts that have ended."""
        going = [number for number, text in enumerate(self.running, 1) if text is not None]
        texts, items = [self.running[number - 1] for number in going], [0, *going]
        while self.waiting and len(texts) < self.most:
            texts.append(self.waiting.popleft())
            items.append(0)  # it begins as the prompt

        new = [[], *[text.answer[-1:] or text.question for text in texts]]
        counts = [len(tokens) for tokens in new]
        ids = [tokens + [0] * (max(counts) - len(tokens)) for tokens in new]
        caches = tuple(cache.fork(items) for cache in self.caches)
        logits, self.caches = self.model(self.to(ids), caches=caches, counts=counts)
        for text, row, count in zip(texts, logits[1:], counts[1:], strict=True):
            text.answer.append(int(row[count - 1].argmax()))
        ended = [text for text in texts if len(text.answer) == text.steps]
        self.running = [None if text in ended else text for text in texts]
        return ended

    def pages(self):
        """Return the number of pages that the texts and the prompt use in each block."""
        cache = self.caches[0]
        rows = zip(cache.block_table, cache.lengths, strict=True)
        return len({int(page) for row, n in rows for page in row[: -(-int(n) // cache.page)]})


def main():
    """Answer random questions, and show how the batch grows and shrinks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=["numpy", "torch"], default="numpy")
    to = np.asarray
    if parser.parse_args().library == "torch":
        import torch

        to = torch.tensor
    like = to(np.zeros(1, np.float32))
    model = nn.Transformer.init(100, 64, 4, 2, like=like, is_causal=True, rotary=nn.Rotary(16))
    rng = np.random.default_rng(0)
    server = Server(model, rng.integers(0, 100, 50).tolist(), most=4, to=to)
    for _ in range(10):
        question = rng.integers(0, 100, rng.integers(1, 9)).tolist()
        server.waiting.append(Text(question, steps=int(rng.integers(3, 20))))
    while server.waiting or any(server.running):
        ended = server.step()
        print(f"{len(server.running)} texts in {server.pages()} pages, {len(ended)} ended")


if __name__ == "__main__":
    main()
