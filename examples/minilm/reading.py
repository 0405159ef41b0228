"""What one word attends to, and in which head: the numbers that the demo prints and draws.

What must hold true: the head is found by a rule, in code, and every share is the model's own
weight. Nothing is dropped and renormalised; `[CLS]`, `[SEP]` and the full stop, where BERT puts
attention that it has no use for, are told apart by `is_word`.
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
    """What a word attends to in one sentence."""

    sentence: str
    tokens: list[str]
    at: int  # the word's place among the tokens
    layer: int  # from 0, as is the head
    head: int
    maps: NDArray[np.float32]  # (layers, H, L, L)

    @property
    def shares(self) -> NDArray[np.float32]:
        """The word's attention to each token, in the one head; the sum is 1."""
        return self.maps[self.layer, self.head, self.at]

    @property
    def words(self) -> list[int]:
        """The places of the words."""
        return [j for j, token in enumerate(self.tokens) if is_word(token)]

    @property
    def ranking(self) -> list[int]:
        """The places of the words, the most attended to first."""
        return sorted(self.words, key=lambda j: float(self.shares[j]), reverse=True)

    @property
    def mean_between_words(self) -> NDArray[np.float32]:
        """Attention from every word to every other, the mean of the layer's heads."""
        return self.maps[self.layer].mean(axis=0)[np.ix_(self.words, self.words)]

    @property
    def top(self) -> int:
        """The place of the word that is attended to most."""
        return self.ranking[0]


def is_word(token: str) -> bool:
    """Whether a token is a word, and not `[CLS]`, `[SEP]` or a full stop."""
    return token not in {"[CLS]", "[SEP]", "."}


def most_different_head(one: NDArray[np.float32], other: NDArray[np.float32]) -> tuple[int, int]:
    """Find the head whose attention differs most between two sentences.

    Parameters
    ----------
    one, other : ndarray, shape (layers, H, L)
        The attention of one word to the tokens of each sentence; the sentences are of one length.

    Returns
    -------
    layer, head : int
        Where the total variation distance is largest: the share of the attention that moves.
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
    """Read two sentences that differ in one word, through one head.

    Parameters
    ----------
    encoder : Encoder
        The model.
    tokenizer : tokenizers.Tokenizer
        Its tokeniser.
    pair : tuple of str
        Two sentences with as many tokens.
    word : str
        The word whose attention is looked at; a token of both sentences.
    head : tuple of int, optional
        Layer and head. By default `most_different_head` chooses.

    Returns
    -------
    tuple of Reading
        One for each sentence.
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
