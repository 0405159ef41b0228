"""Continue a text with a model, a letter at a time.

Requirements: each letter costs one step of one row, because the cache holds the previous keys and
values; equal seeds give equal texts.
"""

from collections.abc import Iterator

import numpy as np

from .learners import Learner
from .text import Text


def write(
    learner: Learner, text: Text, prompt: str, number: int, temperature: float, seed: int
) -> Iterator[str]:
    """Yield letters that follow a prompt of at least one letter.

    The temperature divides the logits: below 1 it favours likely letters, and 0 means always the
    likeliest one.
    """
    random = np.random.default_rng(seed)
    decode = learner.decoder(len(prompt) + number)
    ids = text.encode(prompt)
    for _ in range(number):
        chosen = sample(decode(ids), temperature, random)
        ids = np.asarray([chosen], dtype=np.int64)
        yield text.letters[chosen]


def sample(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """Return the index of a random letter."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    return int(random.choice(len(shares), p=shares / shares.sum()))
