"""A call keeps none of its arrays alive, also while Python's garbage collector does not run."""

import gc
import weakref

import numpy as np
import pytest
from arrays import draw
from optional import jax, jnp, torch

from polyattn import (
    attention,
    attention_backward,
    attention_partial,
    attention_vjp,
    masks,
    nn,
    scores,
)
from polyattn.dialects import flash_attn

SHAPE = 2, 2, 8, 4
#: Options of a call, made from arrays of the library that `a` converts to.
OPTIONS = {
    "segments": lambda a: {"mask": masks.segments(a([0, 0, 0, 1, 1, 1, 2, 2]))},
    "selected": lambda a: {"mask": masks.selected(a(np.zeros((2, 2, 8, 1), int)))},
    "mask function": lambda a: {"mask": lambda b, h, i, j: j <= i},
    "lengths": lambda a: {"key_lengths": a([3, 8])},
    "alibi": lambda a: {"score_mod": scores.alibi(2)},
    "score function": lambda a: {"score_mod": lambda s, b, h, i, j: s + (j - i)},
    "distance": lambda a: {"similarity": scores.distance()},
    "by_norm": lambda a: {"scale": scores.by_norm(2.0)},
    "bias": lambda a: {"bias": a(np.zeros((8, 8), np.float32))},
    "dropout": lambda a: {"dropout": (0.5, 1)},
}


def forward(query, key, value, options):
    return attention(query, key, value, **options)


def by_vjp(query, key, value, options):
    output, pullback = attention_vjp(query, key, value, **options)
    return pullback(output)


def backward(query, key, value, options):
    partial = attention_partial(query, key, value, **options)
    return attention_backward(query, key, value, partial, partial.output, **options)


def by_autograd(query, key, value, options):
    tensors = [x.requires_grad_() for x in (query, key, value)]
    attention(*tensors, **options).sum().backward()


def by_grad(query, key, value, options):
    return jax.grad(lambda q: attention(q, key, value, **options).sum())(query)


TO = {"numpy": np.asarray, "torch": lambda x: torch.asarray(np.asarray(x)), "jax": jnp.asarray}


@pytest.fixture(autouse=True)
def without_collector():
    gc.disable()
    yield
    gc.enable()


def alive(call, arrays, *rest):
    """Return which of the arrays outlive a call with them, whose result is dropped."""
    references = [weakref.ref(x) for x in arrays]
    call(*arrays, *rest)
    arrays.clear()
    return [n for n, reference in enumerate(references) if reference() is not None]


@pytest.mark.parametrize(
    ("library", "mode"),
    [
        ("numpy", forward), ("numpy", by_vjp), ("torch", by_vjp), ("torch", backward),
        ("torch", by_autograd), pytest.param("jax", by_grad, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_call_releases_its_arrays(library, mode):
    names = OPTIONS if library != "jax" else ["segments"]
    for name in names:
        if (mode, name) == (by_vjp, "score function"):
            continue  # which has no derivative on NumPy
        options = OPTIONS[name](TO[library])
        assert alive(mode, draw(*3 * [SHAPE], to=TO[library]), options) == [], name


def packed(query, key, value):
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    query, key, value = (x[0].swapaxes(0, 1).requires_grad_() for x in (query, key, value))
    flash_attn.flash_attn_varlen_func(query, key, value, ends, ends, 5, 5).sum().backward()


def moved(query, key, value):
    attention(query, key, value, backend="numpy", mask=masks.causal())


def decoded(query, key, value):
    cache = nn.QuantizedCache.init(2, 4, 64, like=key, batch=(2,), window=2, block=4)
    cache.append(key, value).attention(query, is_causal=True)


@pytest.mark.parametrize(
    ("library", "call"), [("torch", packed), ("torch", moved), ("numpy", decoded)]
)
def test_sequences_moved_arrays_and_integers_are_released(library, call):
    assert alive(call, draw(*3 * [SHAPE], to=TO[library])) == []
