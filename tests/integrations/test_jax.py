"""Masks and scores as arguments of functions that JAX transforms."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from optional import jax, jnp

from polyattn import attention, masks, scores

ours = pytest.importorskip("polyattn.integrations.jax")
register = ours.register
X = np.random.default_rng(0).standard_normal((2, 3, 5, 8), dtype=np.float32)
IDS = np.array([0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("mask", "leaves"),
    [
        (masks.causal() & ~masks.window(1, 0) | masks.prefix(1), 0),
        (masks.compile(lambda b, h, i, j: i >= j, 5, 5) & masks.segments(IDS, IDS), 2),
    ],
)
def test_a_mask_is_an_argument(mask, leaves):
    register()
    assert len(jax.tree.leaves(mask)) == leaves
    program = jax.jit(lambda x, mask: attention(x, x, x, mask=mask))
    np.testing.assert_allclose(program(X, mask), attention(X, X, X, mask=mask), atol=1e-6)
    moved = jax.tree.map(lambda leaf: leaf, mask)
    assert moved == mask
    program(X, moved)
    assert program._cache_size() == 1  # what is equal is not compiled again


def test_of_a_score_the_arrays_are_differentiated_and_mapped():
    register()
    x, slopes = jnp.asarray(X), jnp.asarray([0.5, 0.25, 0.125])

    @jax.jit
    def loss(score):
        return (attention(x, x, x, score_mod=score) ** 2).sum()

    found = jax.grad(loss)(scores.alibi(slopes))
    expected = jax.grad(lambda slopes: loss(scores.alibi(slopes)))(slopes)
    np.testing.assert_allclose(jax.tree.leaves(found), [expected], rtol=1e-5)
    each = jax.vmap(loss)(scores.alibi(jnp.stack([slopes, 2 * slopes])))
    np.testing.assert_allclose(each[1], loss(scores.alibi(2 * slopes)), rtol=1e-5)


def test_threads_that_register_at_once_wait_for_each_other(monkeypatch):
    meet, registered = threading.Barrier(2), []

    def slowly(kind, *functions):
        time.sleep(0.001)
        registered.append(kind)

    for name in ("register_pytree_node", "register_pytree_with_keys"):
        monkeypatch.setattr(jax.tree_util, name, slowly)
    monkeypatch.setattr(ours, "_registered", set())

    def first_call():
        meet.wait(30)
        register()
        return len(registered)

    with ThreadPoolExecutor(2) as threads:
        counts = [one.result() for one in [threads.submit(first_call) for _ in range(2)]]
    assert counts == [len(set(registered))] * 2
