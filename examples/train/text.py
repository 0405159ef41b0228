"""Encode the text as numbers, and split it into training and held-out text.

Requirements: the model is never trained on the held-out text, and equal seeds give equal batches in
every library.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("comedies.txt")
HELD_OUT = 0.04  # of the text, its end

Ids = NDArray[np.int64]


class Text(NamedTuple):
    """A text as indices into `letters`."""

    letters: str
    training: Ids
    held_out: Ids

    def encode(self, text: str) -> Ids:
        """Return the indices of letters; raise ValueError for unknown ones."""
        unknown = sorted(set(text) - set(self.letters))
        if unknown:
            raise ValueError(f"the training text has no {''.join(unknown)!r}")
        return np.asarray([self.letters.index(letter) for letter in text], dtype=np.int64)


def read() -> Text:
    """Read the text of the four comedies."""
    text = FILE.read_text(encoding="ascii")
    letters = "".join(sorted(set(text)))
    ids = Text(letters, *np.empty((2, 0), np.int64)).encode(text)
    end = int(len(ids) * (1 - HELD_OUT))
    return Text(letters, ids[:end], ids[end:])


def batches(ids: Ids, length: int, number: int, seed: int) -> Iterator[Ids]:
    """Yield windows from anywhere in the text, shape (number, length + 1), without end."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(ids) - length, number)
        yield ids[starts[:, None] + np.arange(length + 1)]


def windows(ids: Ids, length: int) -> Ids:
    """Return consecutive windows of a text, shape (number, length + 1).

    Each begins with the last letter of the previous one, so that every letter but the first is
    predicted once. An incomplete window at the end is omitted.
    """
    number = (len(ids) - 1) // length
    return ids[np.arange(number)[:, None] * length + np.arange(length + 1)]
