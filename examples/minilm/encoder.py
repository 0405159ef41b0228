"""A BERT encoder in NumPy; attention is one call of `polyattn.attention`.

What must hold true: the numbers are those of the model's own implementation to within float32
rounding, on every backend, and padding changes no sentence.

Letters: B sentences, L tokens in the longest of them, W = 384 the width, H = 12 heads, each of
size D = W / H = 32.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from polyattn import attention

LAYERS = 6
WIDTH = 384
HEADS = 12
EPSILON = 1e-12

Floats = NDArray[np.float32]

# NumPy has no erf, and this model was trained with the exact GELU, not its tanh approximation.
erf = np.vectorize(math.erf, otypes=[np.float32])


def gelu(x: Floats) -> Floats:
    """Gaussian error linear unit, exact: x times the normal distribution function of x."""
    return x * (erf(x / np.float32(math.sqrt(2))) + 1) / 2


def split_heads(x: Floats) -> Floats:
    """Go from (B, L, W) to (B, H, L, D)."""
    return x.reshape(*x.shape[:-1], HEADS, -1).swapaxes(-2, -3)


def join_heads(x: Floats) -> Floats:
    """Go from (B, H, L, D) to (B, L, W)."""
    x = x.swapaxes(-2, -3)
    return x.reshape(*x.shape[:-2], -1)


class Encoder:
    """The sentence encoder all-MiniLM-L6-v2: six post-norm transformer layers, then a mean.

    Parameters
    ----------
    weights : mapping of str to ndarray
        The arrays of ``model.safetensors``, by name.
    backend : str, optional
        Passed to `polyattn.attention`. By default the arrays' own library, NumPy, computes.

    References
    ----------
    .. [1] Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
       Understanding", 2019, https://arxiv.org/abs/1810.04805
    .. [2] Wang et al., "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression
       of Pre-Trained Transformers", 2020, https://arxiv.org/abs/2002.10957
    .. [3] Reimers and Gurevych, "Sentence-BERT: Sentence Embeddings using Siamese
       BERT-Networks", 2019, https://arxiv.org/abs/1908.10084
    """

    def __init__(self, weights: Mapping[str, Floats], backend: str | None = None) -> None:
        self.weights = weights
        self.backend = backend

    def embed(self, ids: NDArray[np.int64], keep: NDArray[np.bool_]) -> Floats:
        """Give each sentence one vector; the dot product of two is their cosine similarity.

        Parameters
        ----------
        ids : ndarray of int64, shape (B, L)
            Tokens, as rows of the vocabulary.
        keep : ndarray of bool, shape (B, L)
            False where a token is padding.

        Returns
        -------
        ndarray of float32, shape (B, W)
            Vectors of length 1.
        """
        tokens = self.hidden_states(ids, keep)[-1]
        count = keep.sum(axis=-1, keepdims=True).astype(np.float32)
        mean = np.where(keep[..., None], tokens, 0).sum(axis=-2) / count
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    def attention_weights(self, ids: NDArray[np.int64], keep: NDArray[np.bool_]) -> Floats:
        """Show how much each token attends to each other, in every layer and head.

        Parameters
        ----------
        ids, keep : ndarray, shape (B, L)
            As in `embed`.

        Returns
        -------
        ndarray of float32, shape (B, layers, H, L, L)
            A row per attending token; each row sums to 1.
        """
        # Attention returns weights @ value, and weights @ I = weights: with the identity for
        # values, the call that computes the model hands out what it computes with.
        length = ids.shape[-1]
        shape = (len(ids), HEADS, length, length)
        identity = np.broadcast_to(np.eye(length, dtype=np.float32), shape)
        states = self.hidden_states(ids, keep)[:-1]
        maps = [self._attend(x, keep, layer, identity) for layer, x in enumerate(states)]
        return np.stack(maps, axis=1)

    def hidden_states(self, ids: NDArray[np.int64], keep: NDArray[np.bool_]) -> list[Floats]:
        """Run the layers, keeping what each is given.

        Parameters
        ----------
        ids, keep : ndarray, shape (B, L)
            As in `embed`.

        Returns
        -------
        list of ndarray of float32, each of shape (B, L, W)
            What enters the first layer, then what leaves each.
        """
        states = [self._embeddings(ids)]
        for layer in range(LAYERS):
            states.append(self._layer(states[-1], keep, layer))
        return states

    def _embeddings(self, ids: NDArray[np.int64]) -> Floats:
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        positions = self.weights["embeddings.position_embeddings.weight"][: ids.shape[-1]]
        segment = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm(words + positions + segment, "embeddings.LayerNorm")

    def _layer(self, x: Floats, keep: NDArray[np.bool_], layer: int) -> Floats:
        name = f"encoder.layer.{layer}"
        value = split_heads(self._dense(x, f"{name}.attention.self.value"))
        mixed = join_heads(self._attend(x, keep, layer, value))
        mixed = self._dense(mixed, f"{name}.attention.output.dense")
        x = self._norm(x + mixed, f"{name}.attention.output.LayerNorm")

        hidden = gelu(self._dense(x, f"{name}.intermediate.dense"))
        hidden = self._dense(hidden, f"{name}.output.dense")
        return self._norm(x + hidden, f"{name}.output.LayerNorm")

    def _attend(self, x: Floats, keep: NDArray[np.bool_], layer: int, value: Floats) -> Floats:
        name = f"encoder.layer.{layer}.attention.self"
        query = split_heads(self._dense(x, f"{name}.query"))
        key = split_heads(self._dense(x, f"{name}.key"))
        # No token attends to padding, in any head, from any row: (B, 1, 1, L).
        mask = keep[:, None, None, :]
        return attention(query, key, value, mask=mask, backend=self.backend)

    def _dense(self, x: Floats, name: str) -> Floats:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: Floats, name: str) -> Floats:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(variance + np.float32(EPSILON))
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
