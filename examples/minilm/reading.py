"""Find the head in which a word attends to different words, and its attention weights there.

Requirements: code chooses the head by a rule, and every share is a weight of the model. Nothing is
dropped and renormalised; `is_word` excludes `[CLS]`, `[SEP]` and the full stop, where BERT puts
attention that no word needs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .encoder import Encoder
from .weights import tokenize

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Interpretation:
    """The attention of a word in one sentence."""

    sentence: str
    tokens: list[str]
    at: int  # the word's index among the tokens
    layer: int  # from 0, as is the head
    head: int
    maps: NDArray[np.float32]  # (layers, H, L, L)

    @property
    def shares(self) -> NDArray[np.float32]:
        """The word's attention to each token, in the one head; the sum is 1."""
        return self.maps[self.layer, self.head, self.at]

    @property
    def words(self) -> list[int]:
        """The indices of the words."""
        return [j for j, token in enumerate(self.tokens) if is_word(token)]

    @property
    def ranking(self) -> list[int]:
        """The indices of the words, by descending share."""
        return sorted(self.words, key=lambda j: float(self.shares[j]), reverse=True)

    @property
    def mean_between_words(self) -> NDArray[np.float32]:
        """Attention from every word to every other, the mean of the layer's heads."""
        return self.maps[self.layer].mean(axis=0)[np.ix_(self.words, self.words)]

    @property
    def top(self) -> int:
        """The index of the word with the largest share."""
        return self.ranking[0]


def is_word(token: str) -> bool:
    """Return whether a token is a word, and not `[CLS]`, `[SEP]` or a full stop."""
    return token not in {"[CLS]", "[SEP]", "."}


def most_different_head(one: NDArray[np.float32], other: NDArray[np.float32]) -> tuple[int, int]:
    """Return the layer and head whose attention differs most between two sentences.

    The arrays are the attention of one word to the tokens of each sentence, shape (layers, H, L).
    The measure is the total variation distance: the share of the attention that moves.
    """
    moved = np.abs(one - other).sum(axis=-1) / 2
    layer, head = np.unravel_index(np.argmax(moved), moved.shape)
    return int(layer), int(head)


def read_pair(
    encoder: Encoder,
    tokenizer: "Tokenizer",
    pair: tuple[str, str],
    word: str,
    head: tuple[int, int] | None = None,
) -> tuple[Interpretation, Interpretation]:
    """Return the attention of a word in two sentences with equally many tokens.

    `head` is a layer and a head; by default `most_different_head` chooses.
    """
    maps = encoder.attention_weights(*tokenize(tokenizer, pair))
    tokens = [tokenizer.encode(sentence).tokens for sentence in pair]
    at = tokens[0].index(word)
    layer, head_of_layer = head or most_different_head(maps[0, :, :, at], maps[1, :, :, at])
    one, other = (
        Interpretation(sentence, words, at, layer, head_of_layer, its_maps)
        for sentence, words, its_maps in zip(pair, tokens, maps, strict=True)
    )
    return one, other
