"""Plans are cached by facts, and keep nothing of the caller alive."""

import gc
import weakref

import numpy as np
import pytest
from arrays import close, draw, formula

from polyattn import attention, attention_vjp, masks, scores
from polyattn._dispatch import cache
from polyattn._kernels.dense_kernel import Dense

(X,) = draw((2, 4, 5, 8))


def test_a_plan_is_remembered_by_facts_not_by_values():
    cache.forget()
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((3, 11, 13))
        attention(x, x, x, softcap=1.5)
    assert cache._plan.cache_info().misses == cache.cached_call.cache_info().misses == 1


@pytest.mark.parametrize("kernel", [None, Dense()])
def test_gradients_of_16_bits_select_once(kernel, monkeypatch):
    x = np.ones((3, 7, 11), "float16")

    def differentiate():
        output, pullback = attention_vjp(x, x, x, softcap=1.5, kernel=kernel)
        pullback(output)

    differentiate()
    monkeypatch.setattr(cache, "select", lambda *_: 1 / 0)
    differentiate()


class Carried:
    """A mask or score function that supports weak references."""

    def __call__(self, *args):
        return args[-1] >= 0 if len(args) == 4 else args[0]


class Given(Dense):
    """A kernel of the caller's."""


@pytest.mark.parametrize(
    ("make", "options_of"),
    [
        (Carried, lambda f: {"mask": f}),
        (Carried, lambda f: {"mask": masks.compile(f, 5)}),
        (Carried, lambda f: {"score_mod": scores.function(f) >> scores.temperature(2.0)}),
        (Given, lambda kernel: {"kernel": kernel}),
        (lambda: np.ones(5, np.int64), lambda ids: {"mask": masks.segments(ids) | masks.prefix(1)}),
    ],
)
def test_the_plan_cache_keeps_no_object_of_the_caller_alive(make, options_of):
    x = np.ones((2, 4, 5, 8))
    gc.freeze()  # what is there already, which takes a second to go through
    try:
        thing = make()
        for _ in range(2):
            attention(x, x, x, **options_of(thing))
        alive = weakref.ref(thing)
        del thing
        gc.collect()
        assert alive() is None
    finally:
        gc.unfreeze()


def test_a_plan_with_a_kernel_object_is_cached_while_the_object_lives(monkeypatch):
    kernel = Given()
    attention(X, X, X, kernel=kernel)
    monkeypatch.setattr(cache, "select", lambda *_: 1 / 0)
    attention(X, X, X, kernel=kernel)
    with pytest.raises(ZeroDivisionError):
        attention(X, X, X, kernel=Given())


def test_compiled_masks_with_other_tables_share_only_the_plan():
    cache.forget()
    given = draw((2, 64, 8), (2, 64, 8), (2, 64, 8))
    row, key = np.ogrid[:64, :64]
    for keys in (17, 40):
        mask = masks.compile(masks.prefix(np.array(keys)), 64, tile=8)
        mask = masks.global_tokens(0) | mask
        output = attention(*given, mask=mask, window=(None, 16))
        assert cache._plan.cache_info().misses == 1
        seen = ((key < keys) | (row == 0)) & (key <= row + 16)
        close(output, formula(*given, mask=seen)[0])
