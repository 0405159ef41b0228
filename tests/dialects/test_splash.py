"""Splash attention of JAX in interpret mode, with its own mask classes, and its reference."""

from typing import Any

import numpy as np
import pytest
from optional import jax

from polyattn import masks
from polyattn.dialects import splash

own: Any = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention")
jnp = jax.numpy
parts = own.splash_attention_mask
RNG = np.random.default_rng(0)
L, S = 128, 256
SHAPE = (L, S)


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32) / 4


ARRAY = RNG.random(SHAPE) < 0.3
ARRAY[:, 0] = True
MASKS = {
    "causal": parts.CausalMask(SHAPE, 128),
    "causal from the first": parts.CausalMask(SHAPE),
    "local": parts.LocalMask(SHAPE, (20, 3), 64),
    "local to the left": parts.LocalMask(SHAPE, (20, None), 0),
    "local & causal": parts.LocalMask(SHAPE, (20, None), 0) & parts.CausalMask(SHAPE),
    "two offsets": parts.LocalMask(SHAPE, (20, 0), 2) | parts.CausalMask(SHAPE),
    "chunked": parts.ChunkedCausalMask(SHAPE, 48),
    "full": parts.FullMask(SHAPE),
    "array": parts.NumpyMask(ARRAY),
    "causal | array": parts.CausalMask(SHAPE, 128) | parts.NumpyMask(ARRAY),
    "shards": parts.CausalMask(SHAPE, 0, 2),
}


def expected(mask, q, k, v, **options):
    """Return output and logsumexp of each head by the reference of splash attention."""
    whole = np.asarray(mask[(slice(None),) * 3])
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    sinks = options.pop("sinks", [None] * len(q))
    ids = options.pop("segment_ids", None)
    kernel = own.splash_attention_kernel
    found = [
        kernel.attention_reference(*x, ids, sink, save_residuals=True, **options)
        for *x, sink in zip(jnp.asarray(whole), q, k, v, sinks, strict=True)
    ]
    return np.stack([x for x, _ in found]), np.stack([x for _, (x,) in found])


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_class(name):
    mask = parts.MultiHeadMask([MASKS[name]] * 2)
    q, k, v = normal(2, L, 16), normal(1, S, 16), normal(1, S, 8)
    for arrays in ((q, k, v), tuple(map(jnp.asarray, (q, k, v)))):
        found, (lse,) = splash.make_splash_mha(mask, save_residuals=True)(*arrays)
        output, logsumexp = expected(mask, q, k, v)
        np.testing.assert_allclose(found, output, atol=2e-6)
        np.testing.assert_allclose(lse, logsumexp, atol=2e-6)


def test_known_classes_make_no_array():
    lazy = [name for name in MASKS if "array" not in name and name not in ("two offsets", "shards")]
    for name in lazy:
        kernel = splash.make_splash_mha(parts.MultiHeadMask([MASKS[name]] * 2))
        assert "dense" not in repr(kernel.mask), name
    kernel = splash.make_splash_mha(parts.MultiHeadMask([MASKS["causal"]] * 2))
    assert kernel.mask == masks.causal()
    assert kernel.offset == 128


def test_each_head_has_a_mask_of_its_own():
    mask = parts.MultiHeadMask(
        [parts.CausalMask(SHAPE), MASKS["local to the left"], parts.CausalMask(SHAPE)]
    )
    q, k, v = normal(3, L, 16), normal(3, S, 16), normal(3, S, 8)
    output, _ = expected(mask, q, k, v)
    np.testing.assert_allclose(splash.make_splash_mha(mask)(q, k, v), output, atol=2e-6)
    as_array = np.asarray(mask[:, :, :])
    np.testing.assert_allclose(splash.make_splash_mha(as_array)(q, k, v), output, atol=2e-6)


def test_segments_sinks_and_softcap_in_a_batch_of_jax_under_jit_and_grad():
    mask = parts.MultiHeadMask([parts.CausalMask((L, L))] * 4)
    kernel = splash.make_splash_mha(mask, attn_logits_soft_cap=2.0)
    q, k, v = normal(2, 4, L, 16), normal(2, 2, L, 16), normal(2, 2, L, 16)
    ids, sinks = np.sort(RNG.integers(0, 4, (2, L))), normal(4)
    segments = splash.SegmentIds(jnp.asarray(ids), jnp.asarray(ids))

    def call(q, k, v):
        return jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, segments, jnp.asarray(sinks))

    def reference(q, k, v):
        whole = jnp.tril(jnp.ones((L, L), bool))
        one = own.splash_attention_kernel.attention_reference
        k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
        heads = jax.vmap(
            lambda q, k, v, ids, sink: one(whole, q, k, v, ids, sink, attn_logits_soft_cap=2.0),
            (0, 0, 0, None, 0),
        )
        return jax.vmap(heads, (0, 0, 0, 0, None))(q, k, v, segments, jnp.asarray(sinks))

    arrays = tuple(map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(jax.jit(call)(*arrays), reference(*arrays), atol=2e-6)
    grads = [
        jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2))(*arrays) for f in (call, reference)
    ]
    for one, other in zip(*grads, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_one_key_head_and_the_kernel_itself_in_interpret_mode():
    mask = parts.MultiHeadMask([parts.LocalMask((L, L), (30, 0), 0)] * 2)
    q, k, v = normal(2, L, 128), normal(L, 128), normal(L, 128)
    theirs = own.make_splash_mqa_single_device(mask, interpret=True)
    found = splash.make_splash_mqa_single_device(mask, interpret=True)(q, k, v)
    np.testing.assert_allclose(found, theirs(*map(jnp.asarray, (q, k, v))), atol=1e-5)


def test_wrong_masks_and_shapes():
    with pytest.raises(ValueError, match=r"axes \(H, L, S\)"):
        splash.make_splash_mha(parts.CausalMask(SHAPE))
    kernel = splash.make_splash_mha(parts.MultiHeadMask([parts.CausalMask(SHAPE)] * 2))
    with pytest.raises(ValueError, match=r"k must have .*\(G, S, D\), where G is 2, S is 256"):
        kernel(normal(2, L, 16), normal(2, L, 16), normal(2, L, 16))
    with pytest.raises(NotImplementedError, match="close over the kernel"):
        kernel.manual_sharding_spec(None)
