"""The sentence encoder all-MiniLM-L6-v2 on `polyattn.nn`, in any array library.

Requirements: the vectors equal those of the model's own implementation to within float32 rounding,
in every library and on every backend, and padding does not change them.
"""

from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace, device

from polyattn import masks, nn


@dataclass(frozen=True)
class Encoder:
    """Apply six post-norm transformer blocks, then average the tokens of each sentence.

    The model comes from `polyattn.nn.load.model`; `backend` is an option of `polyattn.attention`.

    References
    ----------
    .. [1] Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
       Understanding", 2019, https://arxiv.org/abs/1810.04805
    .. [2] Wang et al., "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression
       of Pre-Trained Transformers", 2020, https://arxiv.org/abs/2002.10957
    .. [3] Reimers and Gurevych, "Sentence-BERT: Sentence Embeddings using Siamese
       BERT-Networks", 2019, https://arxiv.org/abs/1908.10084
    """

    model: nn.Transformer
    backend: str | None = None

    def embed(self, ids: Any, keep: Any) -> Any:
        """Return a vector of length 1 for each sentence, so that dot products are cosines.

        `ids` are tokens and `keep` is False where a token is padding, both of shape (B, L).
        """
        xp = array_namespace(ids)
        # Pack the tokens of all sentences into one sequence without padding; each token sees those
        # of its own sentence.
        sentence, position = xp.nonzero(keep)
        packing = {"positions": position, "mask": masks.segments(sentence)}
        tokens = self.model(ids[keep], **packing, backend=self.backend)
        # The sum has the direction of the mean, and the length does not matter.
        which = sentence == xp.arange(ids.shape[0], device=device(ids))[:, None]
        total = xp.astype(which, tokens.dtype) @ tokens
        return total / xp.linalg.vector_norm(total, axis=-1, keepdims=True)

    def attention_weights(self, ids: Any, keep: Any) -> Any:
        """Return the attention weights, (B, layers, H, L, L); arguments as for `embed`."""
        options = {"mask": keep[:, None, None, :], "backend": self.backend}
        x, maps = self.model.embed(ids), []
        for block in self.model.stack.blocks:
            maps.append(block.attention.weights(x, **options))
            x = block(x, **options)
        return array_namespace(ids).stack(maps, axis=1)
