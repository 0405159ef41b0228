"""Declarations of a kernel, which decide its calls, and the checks of its results."""

from typing import ClassVar

import numpy as np
import pytest
from arrays import close, draw
from optional import torch

import polyattn
from polyattn import (
    attention,
    attention_jvp,
    attention_partial,
    attention_vjp,
    explain,
    masks,
    scores,
)
from polyattn._kernels.dense_kernel import Dense

(X,) = draw((2, 4, 5, 8))


class Half(Dense):
    """Computes a softcap, and differentiates it in forward mode only."""

    name = "half"
    features = frozenset({"causal", "logsumexp", "softcap"})
    differentiates: ClassVar = {"backward": frozenset({"causal"}), "jvp": features}

    def backward(self, problem, *given):
        return super().backward(problem._replace(softcap=None), *given)


def test_a_kernel_differentiates_what_it_declares_and_no_more():
    output, pullback = attention_vjp(X, X, X, is_causal=True, kernel=Half())
    wanted = attention_vjp(X, X, X, is_causal=True)[1](X).query
    close(pullback(X).query, wanted)
    assert attention_jvp((X, X, X), (X, X, X), softcap=2.0, kernel=Half())[0].shape == output.shape
    _, pullback = attention_vjp(X, X, X, softcap=2.0, kernel=Half())
    with pytest.raises(polyattn.UnsupportedError, match="computes softcap, and has no gradient of"):
        pullback(X)
    with pytest.raises(polyattn.UnsupportedError, match="it does not compute bias"):
        attention_vjp(X, X, X, bias=X[..., :5], kernel=Half())


@pytest.mark.needs("torch")
def test_autograd_differentiates_by_operations_what_a_kernel_does_not():
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    outputs = [attention(x, x, x, softcap=2.0, kernel=kernel) for kernel in (Half(), None)]
    close(*(torch.autograd.grad(output.sum(), x)[0] for output in outputs))


class NotEmpty(Dense):
    takes_empty = False


def test_a_kernel_that_takes_no_empty_arrays_gets_none():
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x = np.ones(shape, np.float32)
        with pytest.raises(polyattn.UnsupportedError, match="it does not support empty arrays"):
            attention(x, x, x, kernel=NotEmpty())
    assert attention(X, X, X, kernel=NotEmpty()).shape == X.shape


COUNTED = [
    {"is_causal": True, "dropout": (0.5, 1)},
    {"window": (10, 0), "mask": masks.padding(2**30, 1)},
    {"window": (10, 0), "query_offset": (1,)},
    {"mask": masks.global_tokens(2**30 - 1)},
    {"mask": lambda b, h, i, j: j > i},
    {"score_mod": scores.alibi([0.5])},
]


@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_a_kernel_that_counts_in_32_bits_gets_no_longer_sequence(library):
    shapes = (1, 1, 2, 4), *[(1, 1, 2**30 + 1, 4)] * 2
    assert explain(*shapes, library=library).chosen is not None
    for options in COUNTED:
        explanation = explain(*shapes, library=library, **options)
        assert explanation.chosen is None
        assert "it counts to 2**30, and S or L is 1,073,741,825" in str(explanation)


def test_keys_beyond_what_a_kernel_counts_are_refused_by_name():
    query, key = np.zeros((1, 2, 1), "float32"), np.zeros((1, 1, 1), "float32")
    far = np.broadcast_to(key, (1, 2**31 + 9, 1))  # without memory
    with pytest.raises(polyattn.UnsupportedError, match="for mask_expression it counts to 2"):
        attention(query, far, far, window=(10, 0), key_lengths=2**31)
    one, mask = torch.zeros(1, 1, 1).expand(1, 2**31 + 9, 1), masks.padding(2**31, 1)
    with pytest.raises(polyattn.UnsupportedError, match="for mask_expression, window it counts"):
        attention(torch.zeros(1, 2, 1), one, one, window=(10, 0), mask=mask)


class Changed(Dense):
    """A kernel whose results are changed."""

    name = "changed"

    def __init__(self, output=lambda x: x, logsumexp=lambda x: x, gradient=lambda x: x):
        self.changes, self.gradient = (output, logsumexp), gradient

    def _changed(self, results):
        pairs = zip(self.changes, results, strict=True)
        return tuple(None if x is None else change(x) for change, x in pairs)

    def __call__(self, problem, operands, backend):
        return self._changed(super().__call__(problem, operands, backend))

    def jvp(self, *given):
        return self._changed(super().jvp(*given))

    def backward(self, *given):
        found = super().backward(*given)
        return found._replace(key=self.gradient(found.key))


WRONG = {
    "None": (lambda x: None, "it returned None"),
    "a list": (lambda x: x.tolist(), "it returned a list"),
    "another shape": (lambda x: x[..., None], r"it returned an array of numpy, \(.*, 1\) float32"),
    "another length": (lambda x: x[:1], r"it returned an array of numpy, \(1, .*\) float32"),
    "another dtype": (lambda x: x.astype("f8"), r"it returned an array of numpy, .* float64"),
    "another library": (lambda x: torch.asarray(x), r"it returned an array of torch, .* float32"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_result_that_is_not_what_a_kernel_must_return_is_refused(mistake):
    change, got = WRONG[mistake]

    def refused(what, shape):
        wanted = rf"the kernel changed must return its {what} as an array of numpy, \({shape}\)"
        return pytest.raises(TypeError, match=rf"^{wanted} float32; {got}$")

    output, gradient = Changed(output=change), Changed(gradient=change)
    for _ in range(2):  # a repeated call too
        with refused("output", "2, 4, 5, 8"):
            attention(X, X, X, kernel=output)
        with refused("output", "2, 4, 5, 8"):
            polyattn.attention_jvp((X, X, X), (X, X, X), kernel=output)
        with refused("gradient of key", "2, 4, 5, 8"):
            polyattn.attention_vjp(X, X, X, kernel=gradient)[1](X)
        if mistake != "None":
            with refused("logsumexp", "2, 4, 5"):
                attention_partial(X, X, X, kernel=Changed(logsumexp=change))
