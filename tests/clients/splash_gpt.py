"""A GPT in JAX whose layers have masks of splash attention: causal, local and chunked ones."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

VOCABULARY, WIDTH, HEADS, KV_HEADS, LENGTH = 61, 64, 4, 2, 48
MASKS = [
    mask_lib.CausalMask((LENGTH, LENGTH)),
    mask_lib.LocalMask((LENGTH, LENGTH), (8, 0), 0),
    mask_lib.ChunkedCausalMask((LENGTH, LENGTH), 16),
]


def parameters():
    """Return the weights of the embedding, which is the head too, and of each layer."""
    rng = np.random.default_rng(0)
    size = WIDTH + 2 * WIDTH * KV_HEADS // HEADS
    layers = [
        {"qkv": rng.normal(size=(WIDTH, size)), "out": rng.normal(size=(WIDTH, WIDTH))}
        for _ in MASKS
    ]
    weights = {"embedding": rng.normal(size=(VOCABULARY, WIDTH)), "layers": layers}
    return jax.tree.map(lambda x: jnp.asarray(x / WIDTH**0.5, jnp.float32), weights)


def inputs():
    rng = np.random.default_rng(1)
    documents = np.sort(rng.integers(0, 3, (2, LENGTH)))
    return jnp.asarray(rng.integers(0, VOCABULARY, (2, LENGTH))), jnp.asarray(documents)


def loss(weights, tokens, documents, splash):
    """Return the loss of the next tokens; `splash` is the module of the kernels."""
    x = weights["embedding"][tokens]
    for mask, layer in zip(MASKS, weights["layers"], strict=True):
        kernel = splash.make_splash_mha(
            mask_lib.MultiHeadMask([mask] * HEADS), head_shards=1, q_seq_shards=1
        )
        qkv = (x @ layer["qkv"]).reshape(*tokens.shape, -1, WIDTH // HEADS).swapaxes(1, 2)
        q, k, v = jnp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        segments = splash.SegmentIds(documents, documents)
        y = jax.vmap(kernel)(q * (WIDTH // HEADS) ** -0.5, k, v, segments)
        x = x + y.swapaxes(1, 2).reshape(x.shape) @ layer["out"]
    logits = jax.nn.log_softmax(x[:, :-1] @ weights["embedding"].T)
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()


class ByHand:
    """The same kernels by their masks as arrays."""

    @staticmethod
    def SegmentIds(q, kv):  # noqa: N802
        return q, kv

    @staticmethod
    def make_splash_mha(mask, head_shards, q_seq_shards):
        seen = np.asarray(mask[:, :, :])

        def attend(q, k, v, segments):
            k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=0) for x in (k, v))
            shown = seen & (segments[0][:, None] == segments[1])
            scores = jnp.where(shown, q @ k.swapaxes(-1, -2), -jnp.inf)
            return jax.nn.softmax(scores) @ v

        return attend
