"""The product x · w + bias: right, and a row of it has the same bits in every product."""

import numpy as np
import pytest
import torch
from arrays import close
from optional import jnp

import polyattn
from polyattn import nn
from polyattn_native.product import product

#: Rows, inner size and columns: about the edges of tiles, panels, folds and parts of the rows.
SIZES = [
    (1, 255, 64), (2, 256, 63), (5, 511, 130), (7, 513, 31), (513, 300, 5), (1025, 3, 33),
    (0, 4, 5), (4, 0, 5), (4, 5, 0),
]  # fmt: skip
#: How x and weights lie in memory.
LAID_OUT = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "every other": lambda a: np.repeat(np.repeat(a, 2, 0), 2, 1)[::2, ::2],
    "backwards": lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
}


def some(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def same(found, expected):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_it_is_right_and_each_part_has_its_bits(isa, rows, inner, columns, dtype):
    x, w, bias = some(rows, inner), some(inner, columns, seed=1), some(columns, seed=2)
    x, w, bias = (one.astype(dtype) for one in (x, w, bias))
    whole = product(x, w, bias, 1)
    wide = [one.astype(np.longdouble) for one in (x, w, bias)]
    size = np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(wide[2])
    error = np.abs(whole - (wide[0] @ wide[1] + wide[2]))
    assert whole.dtype == dtype
    assert (error <= 16 * np.finfo(dtype).eps * size).all()
    for how in LAID_OUT.values():
        same(product(how(x), how(w), np.repeat(bias, 3)[::3], 2), whole)
    for start in range(0, rows, max(1, rows // 5)):
        for stop in {start + 1, min(start + 7, rows), rows}:
            same(product(x[start:stop], w, bias, 2), whole[start:stop])
            same(product(x[start:stop], w[:, start % 3 :], bias[start % 3 :], 3),
                 whole[start:stop, start % 3 :])  # fmt: skip
    same(product(x, w, None, 2) + bias, whole)


def test_many_columns_and_threads_change_no_bit():
    w = some(700, 3000).astype(np.float32)
    x = some(600, 700).astype(np.float32)
    whole = product(x, w, None, 2)
    for rows in (1, 2, 300):
        same(product(x[-rows:], w, None, 2), whole[-rows:])
        same(product(x[-rows:], np.asfortranarray(w), None, 1), whole[-rows:])


def test_its_error_is_at_most_that_of_blas(isa):
    x, w = ((some(*shape) + 1).astype(np.float32) for shape in ((40, 4096), (4096, 40)))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    errors = [np.square(found - exact).mean() ** 0.5 for found in (product(x, w, None, 1), x @ w)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0])
def test_what_is_not_finite_stays_in_its_row_and_column(value):
    x, w = some(5, 70).astype(np.float32), some(70, 67).astype(np.float32)
    x[2, 3] = value
    w[:, 66] = 0
    found = product(x, w, None, 1)
    same(found[[0, 1, 3, 4]], product(x[[0, 1, 3, 4]], w, None, 1))
    assert np.isfinite(found[2, :66]).all() == np.isfinite(value)
    same(product(x[:1] * 0, w * 0, np.full(67, -0.0, np.float32), 1) + 0, np.zeros((1, 67)))


# ---- in maps -----------------------------------------------------------------------------------


@pytest.fixture
def block():
    with polyattn.same_bits():
        yield


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.float64, False)])
def test_gradients_are_torchs_and_rows_have_their_bits(dtype, bias):
    x = torch.from_numpy(some(3, 11, 20)).to(dtype).requires_grad_()
    layer = nn.Linear.init(20, 7, like=torch.zeros(1, dtype=dtype), bias=bias)
    weight = layer.weight.requires_grad_()
    offset = torch.linspace(0, 1, 7, dtype=dtype).requires_grad_() if bias else None
    given = [x, weight, offset] if bias else [x, weight]
    cotangent = torch.from_numpy(some(3, 11, 7, seed=5)).to(dtype)
    y = nn.Linear(weight, offset)(x)
    found = torch.autograd.grad(y, given, cotangent)
    y_of_torch = torch.nn.functional.linear(x, weight.mT, offset)
    expected = torch.autograd.grad(y_of_torch, given, cotangent)
    close(found, expected, 60)
    assert found[0].dtype == dtype
    part = x[1:2, 4:5].detach().requires_grad_()
    one = nn.Linear(weight, offset)(part)
    same(one.detach(), y[1:2, 4:5].detach())
    (of_part,) = torch.autograd.grad(one, [part], cotangent[1:2, 4:5])
    same(of_part, found[0][1:2, 4:5])


@pytest.mark.usefixtures("block")
def test_any_axes_come_first():
    layer = nn.Linear.init(20, 7, like=np.zeros(1))
    of_torch = nn.Linear(*map(torch.from_numpy, (layer.weight, layer.bias)))
    for shape in ((20,), (0, 20), (2, 3, 4, 20), (2, 0, 20)):
        x = some(*shape)
        found = layer(x)
        assert found.shape == (*shape[:-1], 7)
        same(found, layer(x.reshape(-1, 20)).reshape(found.shape))
        same(of_torch(torch.from_numpy(x)), found)
    swapped = np.swapaxes(some(3, 2, 20), 0, 1)
    same(layer(swapped), layer(np.ascontiguousarray(swapped)))


REFUSED = {
    "float16 of numpy cpu": lambda: np.zeros(1, np.float16),
    "bfloat16 of torch cpu": lambda: torch.zeros(1, dtype=torch.bfloat16),
    "float32 of torch meta": lambda: torch.zeros(1, device="meta"),
    "float32 of jax": lambda: jnp.zeros(1),
}


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("said", REFUSED)
def test_what_it_does_not_compute_is_refused_by_name(said):
    layer = nn.Linear.init(4, 3, like=REFUSED[said]())
    with pytest.raises(NotImplementedError, match=f"needs polyattn-native, .*{said}"):
        layer(layer.weight.mT)


@pytest.mark.usefixtures("block")
def test_transforms_and_programs_of_torch_are_refused():
    layer = nn.Linear.init(4, 3, like=torch.zeros(1))
    for run in (
        torch.func.vmap(layer),
        torch.compile(layer, backend="eager"),
        torch.func.grad(lambda x: layer(x).sum()),
    ):
        with pytest.raises(NotImplementedError, match=r"outside of torch\.compile and torch\.func"):
            run(torch.ones(2, 4))
