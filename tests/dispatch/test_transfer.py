"""Arrays move to a backend that is named, and results back, or the call is refused."""

import sys

import ml_dtypes
import numpy as np
import pytest
from arrays import close, draw
from optional import array_api_strict, da, jax, jnp, torch

import polyattn
from polyattn import attention, attention_partial, masks
from polyattn._dispatch import registry

(X,) = draw((2, 4, 5, 8))


def reference(**options):
    return attention(X, X, X, backend="array-api", **options)


@pytest.mark.parametrize(
    "make", [np.asarray, torch.from_numpy, jnp.asarray, array_api_strict.asarray]
)
def test_the_result_comes_back_to_the_callers_library(make):
    x = make(X)
    for backend in ("numpy", "torch"):
        output, logsumexp = attention_partial(x, x, x, is_causal=True, backend=backend)
        assert type(output) is type(logsumexp) is type(x)
        close(output, reference(is_causal=True))


def test_the_result_comes_back_to_the_callers_device():
    elsewhere = array_api_strict.Device("device1")
    x = array_api_strict.asarray(X, device=elsewhere)
    for result in attention_partial(x, x, x, backend="numpy"):
        assert result.device == elsewhere


def test_callbacks_get_arrays_of_the_callers_library():
    (table,), seen = draw((5, 5)), set()

    def score_mod(score, b, h, i, j):
        seen.add(type(score))
        return score + table[i, j]

    def mask(b, h, i, j):
        seen.add(type(i))
        return (i + j) % 3 != 0

    for given in (mask, masks.rule(mask) | masks.prefix(1)):
        options = {"score_mod": score_mod, "mask": given}
        close(attention(X, X, X, backend="torch", **options), reference(**options))
    assert seen == {np.ndarray}


def test_arrays_of_several_libraries_move_to_a_named_backend():
    tensor, strict = torch.from_numpy(X), array_api_strict.asarray(X)
    output = attention(X, tensor, strict, backend="torch")
    assert isinstance(output, np.ndarray)
    close(output, reference())
    assert isinstance(attention(tensor, X, strict, backend="torch"), torch.Tensor)


def test_bfloat16_is_converted():
    x = X.astype(ml_dtypes.bfloat16)
    output = attention(x, x, x, backend="torch")
    assert output.dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(X).bfloat16()
    assert attention(tensor, tensor, tensor, backend="numpy").dtype == torch.bfloat16
    x = jnp.asarray(x)
    assert attention(x, x, x, backend="numpy").dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "view",
    [
        X[..., ::-1],
        np.broadcast_to(X[:1], X.shape),
        X.astype(">f4"),
        np.zeros(X.shape, [("a", "f4"), ("b", "i2")])["a"],
    ],
)
def test_views_of_every_kind_are_converted(view):
    read_only = view.view()
    read_only.flags.writeable = False
    for x in (view, read_only):
        close(attention(x, x, x, backend="torch"), attention(x, x, x))


def test_views_of_torch_are_converted():
    tensor = torch.complex(TENSOR, TENSOR).conj().imag
    assert tensor.is_neg()
    close(attention(tensor, tensor, tensor, backend="numpy"), -reference())


TENSOR = torch.from_numpy(X)


def under(transform):
    """Return what calls attention inside a transformation of tensors."""
    return lambda: transform(lambda x: attention(x, x, x, backend="numpy"))(TENSOR)


STAYING = {
    "a graph of gradients": (
        lambda: attention(*[TENSOR.clone().requires_grad_()] * 3, backend="numpy"),
        r"requires grad.*query.detach\(\)",
    ),
    "a traced array": (
        lambda: jax.jit(lambda x: attention(x, x, x, backend="numpy"))(X),
        "traced, transformed, lazy",
    ),
    "a lazy array": (
        lambda: attention(*[da.from_array(X)] * 3, backend="torch"),
        "traced, transformed, lazy",
    ),
    "a tensor without values": (
        lambda: attention(*[TENSOR.to("meta")] * 3, backend="torch:cpu"),
        "device meta",
    ),
    "a tensor under vmap": (under(torch.func.vmap), "transformed"),
    "a tensor under jvp": (under(lambda f: lambda x: torch.func.jvp(f, (x,), (x,))), "transformed"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", STAYING)
def test_what_would_be_lost_does_not_leave_its_library(name):
    call, message = STAYING[name]
    with pytest.raises(polyattn.UnsupportedError, match=message):
        call()


def test_a_graph_of_gradients_stays_where_its_library_computes():
    tensor = TENSOR.clone().requires_grad_()
    for backend in ("torch:cpu", "array-api"):
        assert attention(tensor, tensor, tensor, backend=backend).requires_grad


def test_a_dtype_that_is_lost_on_the_way_is_refused(monkeypatch):
    genuine = type(registry.usable("numpy")[0]).place

    def place(self, array, device):
        placed = genuine(self, array, device)
        return placed.astype(np.float32) if placed.dtype == np.float64 else placed

    monkeypatch.setattr(type(registry.usable("numpy")[0]), "place", place)
    x = torch.ones((2, 3, 4), dtype=torch.float64)
    with pytest.raises(polyattn.UnsupportedError, match="numpy makes float32 of float64"):
        attention(x, x, x, backend="numpy")
    assert attention(*[x.float()] * 3, bias=x[0, :, :3], backend="numpy").dtype == torch.float32


def test_a_gradient_in_the_closure_of_a_function_is_not_lost():
    tensor = torch.from_numpy(X)
    slope = torch.ones(4, requires_grad=True)
    rule = {"score_mod": lambda s, b, h, i, j: s * slope[h]}
    assert attention(tensor, tensor, tensor, **rule).requires_grad
    with pytest.raises(polyattn.UnsupportedError, match="the result of the function requires grad"):
        attention(tensor, tensor, tensor, backend="numpy", **rule)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    tensor = torch.from_numpy(X).bfloat16()
    with pytest.raises(ImportError, match="pip install ml_dtypes"):
        attention(tensor, tensor, tensor, backend="numpy")


def test_array_api_and_auto_move_no_array():
    with pytest.raises(polyattn.UnsupportedError, match="does not move them"):
        attention(X, X, X, backend="array-api:cuda")
    with pytest.raises(polyattn.UnsupportedError, match="does not move them; they are on numpy"):
        attention(X, TENSOR, X, backend="array-api")
    with pytest.raises(TypeError, match="array of numpy"):
        attention(X, TENSOR, X, backend="auto")


@pytest.mark.needs("dask", "ndonnx")
@pytest.mark.parametrize("backend", ["dask", "onnx"])
def test_arrays_of_any_library_go_to_those_that_are_lazy(backend):
    options = {"mask": lambda b, h, i, j: i >= j, "score_mod": lambda s, b, h, i, j: s * 2.0}
    for x, given in ((X, options), (TENSOR, options), (X, {})):
        output = attention(x, x, x, backend=backend, **given)
        assert type(output) is type(x)
        close(output, reference(**given))
