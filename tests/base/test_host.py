"""Numbers of the host, sequences and NumPy arrays, beside arrays of another library."""

import copy
import pickle

import numpy as np
import pytest
from arrays import FAR, TORCH, Library, close, draw
from optional import da, jax, jnp, torch

from polyattn import attention, explain, masks, scores

(X,) = draw((2, 4, 6, 8))
LENGTHS, IDS = [3, 5], [[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2]]
SLOPES = [0.5, 0.25, 0.125, 0.0625]
TABLE = np.linspace(-1, 1, 32).reshape(8, 4)

OPTIONS = {
    "lengths": lambda: {"mask": masks.padding(LENGTHS) & masks.causal()},
    "queries": lambda: {"mask": masks.padding(query_lengths=np.array(LENGTHS, dtype=np.uint8))},
    "prefix": lambda: {"mask": masks.causal() | masks.prefix(LENGTHS)},
    "ids": lambda: {"mask": masks.segments(IDS) & masks.dilated(2)},
    "ids of both": lambda: {"mask": masks.segments(range(6), np.array(IDS))},
    "dense": lambda: {"mask": masks.dense([[True, False] * 3]) & masks.causal()},
    "mask": lambda: {"mask": np.broadcast_to(np.arange(6) > 1, (6, 6))},
    "mask of lists": lambda: {"mask": np.tri(6, dtype=bool).tolist()},
    "bias": lambda: {"bias": np.linspace(0, 1, 36).reshape(6, 6)[:, ::-1]},
    "bias beyond float32": lambda: {"bias": np.where(np.tri(6) > 0, 0, np.finfo(float).min)},
    "sinks": lambda: {"sinks": SLOPES},
    "query_offset": lambda: {"query_offset": [0, 2], "is_causal": True},
    "alibi": lambda: {"score_mod": scores.softcap(5.0) >> scores.alibi(SLOPES)},
    "relative_bias": lambda: {"score_mod": scores.relative_bias(TABLE.tolist())},
    "additive": lambda: {"similarity": scores.additive(np.linspace(-1, 1, 8))},
}
DASK = Library("dask", da.from_array, np.asarray)
FLOAT64 = Library("float64", lambda x: torch.asarray(x, dtype=torch.float64), np.asarray)


@pytest.mark.parametrize(
    ("name", "library"),
    [*((name, FAR) for name in OPTIONS), ("bias beyond float32", TORCH)]
    + [(name, DASK) for name in ("lengths", "ids of both", "sinks", "query_offset")]
    + [(name, FLOAT64) for name in ("bias", "alibi")],
    ids=str,
)
def test_numbers_go_where_the_query_is(library, name):
    x = library.to(X)
    expected = attention(X, X, X, **OPTIONS[name]())
    options = OPTIONS[name]()
    for _ in range(2):  # the second call finds what the first has placed
        output = attention(x, x, x, **options)
        assert type(output) is type(x)
        assert output.dtype == x.dtype
        close(library.back(output).astype("float32"), expected)


@pytest.mark.slow
def test_under_jit():
    options = OPTIONS["lengths"]() | OPTIONS["bias"]()
    call = jax.jit(lambda x: attention(x, x, x, **options))
    close(call(jnp.asarray(X)), attention(X, X, X, **options))


@pytest.mark.slow
def test_compiled_by_torch():
    outside = OPTIONS["dense"]()["mask"]

    def call(x):
        return attention(x, x, x, mask=masks.padding(LENGTHS) & outside)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    close(compiled(torch.asarray(X)), call(X))


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_compiled_before_a_first_tensor(run_python):
    run_python("""
import torch
from polyattn import masks
def call(x): return x + len(repr(type(masks.padding([3, 5]))))
torch.compile(call, fullgraph=True, backend="eager")(torch.ones(2))
""")


def test_the_expression_keeps_what_was_placed(monkeypatch):
    mask, x = masks.padding(LENGTHS), torch.asarray(X)
    attention(x, x, x, mask=(both := mask & masks.causal()))
    ((_, copies),) = both.__dict__["_placed"].values()
    ((_, own),) = mask.__dict__["_placed"].values()
    assert own[0][1] is copies[0][1]  # one copy of an array, however deep its expression is
    monkeypatch.setattr("polyattn._base.host.numbers_like", None)
    attention(x, x, x, mask=mask | masks.prefix(1))  # in other company too
    assert mask == masks.padding(LENGTHS)
    assert "_placed" in mask.__dict__
    for one in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert one == mask
        assert "_placed" not in one.__dict__


def test_what_was_placed_in_inference_mode_is_kept_for_training():
    rule, x = scores.alibi(np.ones(X.shape[-3])), torch.asarray(X)
    with torch.inference_mode():
        attention(x, x, x, score_mod=rule)
    ((kept, _),) = rule.__dict__["_placed"].values()
    attention(*[x.clone().requires_grad_() for _ in range(3)], score_mod=rule).sum().backward()
    assert [one for one, _ in rule.__dict__["_placed"].values()] == [kept]


@pytest.mark.parametrize("xp", [torch, jnp], ids=["torch", "jax"])
def test_an_array_that_is_written_to_is_placed_again(xp):
    lengths, x = np.array([1, 2], "int32"), xp.asarray(X)  # which is copied
    mask = masks.padding(lengths) & masks.causal()
    attention(x, x, x, mask=mask)
    lengths[:] = LENGTHS
    expected = attention(X, X, X, mask=masks.padding(LENGTHS), is_causal=True)
    close(attention(x, x, x, mask=mask), expected)


def test_arrays_with_strides_are_kept_until_they_are_written_to(monkeypatch):
    lengths, x = np.array(LENGTHS)[::-1], torch.asarray(X)
    mask = masks.padding(lengths)
    expected = attention(x, x, x, mask=mask)
    with monkeypatch.context() as patch:
        patch.setattr("polyattn._base.host.numbers_like", None)
        close(attention(x, x, x, mask=mask), expected)
    lengths[0] = 1
    close(attention(x, x, x, mask=mask), attention(X, X, X, mask=masks.padding([1, 3])))


def test_a_backend_still_moves_all():
    x = torch.asarray(X)
    for name, options in OPTIONS.items():
        output = attention(x, x, x, backend="numpy", **options())
        assert isinstance(output, torch.Tensor), name
        close(output, attention(X, X, X, **options()))
    y, large = torch.ones((1, 300, 8)), np.ones((300, 300), np.float32)
    assert attention(y, y, y, bias=large, backend="numpy").shape == y.shape


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_large_arrays_are_placed_by_the_caller(name):
    y = torch.ones((1, 300, 8))
    large = np.ones((300, 300), bool if name == "mask" else np.float32)
    with pytest.raises(TypeError, match=rf"torch.asarray\({name}, device='cpu'\)") as error:
        attention(y, y, y, **{name: large})
    assert "backend" not in str(error.value)
    with pytest.raises(TypeError, match=r"pass torch.asarray\(query, device='cpu'\)"):
        attention(X, torch.asarray(X), torch.asarray(X))
    with pytest.raises(TypeError, match=r"pass jax.numpy.asarray\(key\)"):
        attention(jnp.asarray(X), X, X)


def test_numbers_that_the_library_cannot_hold():
    with pytest.raises(ValueError, match="query_offset holds 1099511627776, which int32 cannot"):
        attention(*[jnp.asarray(X)] * 3, query_offset=np.array([2**40, 0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.padding([3, 5.5]), "key_lengths must be"),
        (lambda: masks.segments([[0, 1], [0]]), "query_ids must hold rows of one length"),
        (lambda: masks.dense([1, 0]), "masks.dense takes a bool array"),
        (lambda: attention(X, X, X, sinks=["a"]), "sinks must hold numbers"),
        (lambda: attention(X, X, X, sinks=[1, 2, 3, 4]), "sinks must be a float array"),
        (lambda: attention(X, X, X, query_offset=[0.5, 1]), "query_offset must be an integer or"),
        (lambda: masks.prefix([[torch.ones(1)]]), "lengths must hold numbers"),
    ],
)
def test_sequences_that_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")
def test_a_traced_array_is_refused_by_its_dtype():
    @torch.compile(fullgraph=True, backend="eager")
    def call(x, lengths):
        return attention(x, x, x, key_lengths=lengths)

    with pytest.raises(Exception, match=r"key_lengths must be an integer.* got .2, 1. .*float32"):
        call(torch.asarray(X), torch.zeros(2, 1))


def test_explain_takes_them_too():
    mask = masks.segments(IDS)
    for given, options in ((torch.asarray(X), {"sinks": SLOPES}), (X.shape, {"library": "torch"})):
        explained = explain(given, given, given, mask=mask, **options)
        assert "torch" in str(explained)
        assert "int64" in repr(explained.call.mask)


def test_as_functions_and_compiled():
    i = torch.arange(6)
    mask = masks.segments(range(0, 12, 2)) | masks.padding([2])
    assert mask(i * 0, i * 0, i[:, None], i).shape == (6, 6)
    s = torch.zeros(6)
    assert scores.alibi(SLOPES)(s, i * 0, i * 0, i, i).shape == (6,)
    x = torch.asarray(X)
    compiled = masks.compile(masks.segments(IDS), 6, like=x, batch=2)
    close(attention(x, x, x, mask=compiled), attention(X, X, X, mask=masks.segments(IDS)))
