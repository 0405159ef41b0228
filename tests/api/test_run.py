"""A repeated call: it skips the description, and what changes in it is seen."""

import sys

import numpy as np
import pytest
from optional import torch

import polyattn
from polyattn import attention, attention_partial, masks, scores
from polyattn._core.call.describe import describe
from polyattn._core.call.key import call_key
from polyattn._dispatch.cache import forget

pytestmark = pytest.mark.with_native

SHAPE = (2, 4, 4, 8)
X = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
T = torch.from_numpy(X) if torch else None
needs_torch = pytest.mark.needs("torch")
LIBRARIES = [pytest.param(X, id="numpy"), pytest.param(T, id="torch", marks=needs_torch)]
SEEN = np.tril(np.ones((4, 4), bool))
BIAS, SINKS, OFFSETS = X[:1, :1, :, :4], X[0, 0, 0, :4], np.arange(2, dtype=np.int32)


def outcome(arguments, options):
    """Return the class, dtype and bits of the result of a call, or its error."""
    try:
        output = attention(*arguments, **options)
    except Exception as error:
        return type(error), str(error)
    return type(output), str(np.asarray(output).dtype), np.asarray(output).tobytes()


@pytest.fixture(autouse=True)
def no_calls():
    """Forget the calls of other tests."""
    forget()


def described(monkeypatch, module="attention"):
    """Return a list that grows with each call that is described."""
    calls = []
    module = sys.modules[f"polyattn._api.{module}"]
    monkeypatch.setattr(module, "describe", lambda *a, **k: calls.append(a) or describe(*a, **k))
    return calls


def options_of(x):
    """Return options of calls, with arrays like `x`."""
    like = (lambda array: array) if x is X else torch.from_numpy
    ids, lengths = np.asarray([[0, 0, 1, 1], [0, 1, 1, 2]]), np.asarray([3, 4])
    documents = masks.causal() & masks.segments(like(ids))
    slopes = like(np.arange(4, dtype=np.float32))
    return (
        {},
        {"window": (2, 0), "layout": "...LHD"},
        {"query_offset": 1, "is_causal": True, "kernel": "dense", "backend": "numpy"},
        {"mask": masks.segments(ids)},
        {"mask": masks.causal() & masks.dense(like(SEEN.T.copy()))},
        {"key_lengths": like(lengths), "is_causal": True},
        {"score_mod": scores.softcap(3.0) >> scores.alibi(slopes)},
        {"dropout": (0.5, 3), "mask": documents, "key_lengths": 3},
        {"similarity": scores.cosine()},
    )


@pytest.mark.parametrize("x", LIBRARIES)
def test_a_repeated_call_is_described_once(x, monkeypatch):
    calls = described(monkeypatch)
    for once, equal in zip(options_of(x), options_of(x), strict=True):
        forget()
        want = np.asarray(attention(x, x, x, **once))
        forget()
        calls.clear()
        for options in (once, once, equal):
            np.testing.assert_array_equal(np.asarray(attention(x, x, x, **options)), want)
        assert len(calls) == 1


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_partial_call_is_described_once_and_apart_from_a_whole_one(dtype, monkeypatch):
    calls, options = described(monkeypatch, "partial"), options_of(X)[-2]
    want = attention(X, X, X, **options)
    partials = [attention_partial(X, X, X, dtype=dtype, **options) for _ in range(3)]
    assert len(calls) == 1
    for partial in partials:
        np.testing.assert_array_equal(partial.output, want)
        np.testing.assert_array_equal(partial.logsumexp, partials[0].logsumexp)


@pytest.mark.parametrize("x", LIBRARIES)
def test_each_array_of_a_repeated_call_is_its_own(x, monkeypatch):
    calls, like = described(monkeypatch), (np.copy if x is X else torch.tensor)
    arrays = {"mask": SEEN, "bias": BIAS, "sinks": SINKS, "query_offset": OFFSETS}
    first = {"is_causal": True} | {name: like(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        attention(x, x, x, **first)
        options = first | {name: like(~array if name == "mask" else array + 1)}
        again = np.asarray(attention(x + 1, x, x, **options))
        assert len(calls) == 1
        forget()
        np.testing.assert_array_equal(again, np.asarray(attention(x + 1, x, x, **options)))
        forget()
        calls.clear()


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")  # of NumPy 2.5
def test_an_array_of_an_expression_that_changes_in_place_is_seen():
    ids, slopes = np.zeros((2, 4), "i8"), np.ones(4, "f4")
    options = {"mask": masks.segments(ids), "score_mod": scores.alibi(slopes)}
    attention(X, X, X, **options)
    ids[:, 2:], slopes[1:] = 1, 2
    again = attention(X, X, X, **options)
    forget()
    fresh = {"mask": masks.segments(ids.copy()), "score_mod": scores.alibi(slopes.copy())}
    np.testing.assert_array_equal(again, attention(X, X, X, **fresh))
    slopes.dtype = "i4"
    with pytest.raises(TypeError, match="slopes"):
        attention(X, X, X, **options)
    slopes.dtype, ids.shape = "f4", (8, 1)
    with pytest.raises(ValueError, match="ids"):
        attention(X, X, X, **options)


@pytest.mark.parametrize(
    "other", [{"dropout": (0.5, 4)}, {"score_mod": scores.temperature(3.0)}], ids=["seed", "class"]
)
def test_a_call_that_looks_like_an_earlier_one_is_its_own(other):
    attention(X, X, X, dropout=(0.5, 3))
    attention(X, X, X, score_mod=scores.softcap(3.0))
    got = attention(X, X, X, **other)
    forget()
    np.testing.assert_array_equal(got, attention(X, X, X, **other))


def test_other_seeds_and_lengths_are_checked_in_a_repeated_call():
    attention(X, X, X, dropout=(0.5, 3), key_lengths=np.asarray([3, 4]))
    with pytest.raises(ValueError, match="seed"):
        attention(X, X, X, dropout=(0.5, -1), key_lengths=np.asarray([3, 4]))
    with pytest.raises(ValueError, match="key_lengths"):
        attention(X, X, X, dropout=(0.5, 3), key_lengths=np.asarray([3, 5]))


CHANGES = {
    "dtype": ((X.astype("f8"),) * 3, {}),
    "byte order": ((X.astype(">f4"),) * 3, {}),
    "a list": ((X.tolist(), X, X), {}),
    "lengths": ((X, X[:, :, :3], X[:, :, :3]), {}),
    "rank": ((X[0, 0],) * 3, {}),
    "class": ((np.ma.masked_array(X),) * 3, {}),
    "True for 1": ((X,) * 3, {"scale": True}),
    "a shape of a mask": ((X,) * 3, {"mask": SEEN[:3]}),
    "an array for a number": ((X,) * 3, {"mask": masks.prefix(np.asarray([2, 1]))}),
    "a function": ((X,) * 3, {"mask": masks.prefix(1) | (lambda b, h, i, j: j < 2)}),
    "a bias backwards in memory": ((X,) * 3, {"bias": BIAS[..., ::-1].copy()[..., ::-1]}),
    "a bias by columns": ((X,) * 3, {"bias": np.asfortranarray(BIAS)}),
    "a bias of another size": ((X,) * 3, {"bias": BIAS.astype("f8")}),
    "a list for a mask": ((X,) * 3, {"mask": SEEN.tolist()}),
    "a list for sinks": ((X,) * 3, {"sinks": SINKS.tolist()}),
    "a list for offsets": ((X,) * 3, {"query_offset": OFFSETS.tolist(), "is_causal": True}),
    "offsets in another byte order": (
        (X,) * 3,
        {"query_offset": OFFSETS.astype(">i4"), "is_causal": True},
    ),
    "dropout": ((X,) * 3, {"dropout": (0.5, 3)}),
}
if torch:
    CHANGES |= {
        "library": ((T,) * 3, {}),
        "nested": ((torch.nested.nested_tensor([T[0], T[1]], layout=torch.jagged),) * 3, {}),
        "meta": ((T.to("meta"), T, T), {}),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_a_call_is_seen(change):
    arguments, options = CHANGES[change]
    want = outcome(arguments, options)
    forget()
    ids, prefix = masks.segments(np.zeros(4, int)), masks.prefix(1)
    for known in (
        {}, {"is_causal": True}, {"window": (1, 0)}, {"scale": 1}, {"mask": SEEN}, {"mask": ids},
        {"mask": prefix}, {"bias": BIAS}, {"sinks": SINKS},
        {"query_offset": OFFSETS, "is_causal": True},
    ):  # fmt: skip
        attention(X, X, X, **known)
    if torch:
        attention(T, T, T)
    for _ in range(2):  # the second call may be a repeated one
        assert outcome(arguments, options) == want


@needs_torch
def test_a_tensor_that_requires_grad_is_another_call():
    options = {"softcap": 3.0, "kernel": "tiled"}
    attention(T, T, T, **options)
    leaf = T.clone().requires_grad_()
    assert call_key((leaf, T, T), {}) != call_key((T, T, T), {})
    attention(leaf, T, T, **options).sum().backward()
    assert leaf.grad is not None


def test_the_choice_of_a_backend_is_seen(monkeypatch):
    attention(X, X, X)
    with polyattn.use_backend("torch:cuda"), pytest.raises(polyattn.BackendError):
        attention(X, X, X)
    monkeypatch.setenv("POLYATTN_BACKEND", "torch:cuda")
    with pytest.raises(polyattn.BackendError):
        attention(X, X, X)


@needs_torch
def test_what_torch_transforms_has_no_key():
    seen = []

    def function(x):
        seen.append(call_key((x, x, x), {}))
        return attention(x, x, x)

    attention(T[0], T[0], T[0])
    got = torch.func.vmap(function)(T)
    assert seen == [None]
    torch.testing.assert_close(got, attention(T, T, T))
