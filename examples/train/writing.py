"""Text that a model goes on with, a letter at a time.

What must hold true: each letter costs one step of one row, for the cache holds what came before;
and the same seed draws the same text.
"""

from collections.abc import Iterator

import numpy as np

from .learners import Learner
from .text import Text


def write(
    learner: Learner, text: Text, prompt: str, number: int, temperature: float, seed: int
) -> Iterator[str]:
    """Yield letters that follow a prompt.

    Parameters
    ----------
    learner : Learner
        The model.
    text : Text
        What it has learnt from.
    prompt : str
        What comes before, a letter at least.
    number : int
        How many letters to write.
    temperature : float
        What divides the logits: below 1 for the likelier letters, 0 for the likeliest alone.
    seed : int
        Of the draws.

    Yields
    ------
    str
        One letter.
    """
    random = np.random.default_rng(seed)
    decode = learner.decoder(len(prompt) + number)
    ids = text.encode(prompt)
    for _ in range(number):
        chosen = draw(decode(ids), temperature, random)
        ids = np.asarray([chosen], dtype=np.int64)
        yield text.letters[chosen]


def draw(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """Return the number of a letter."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    return int(random.choice(len(shares), p=shares / shares.sum()))
