"""The gradients of CuPy's fused kernel without a GPU, on stand-ins that read the same memory."""

import ml_dtypes
import numpy as np
import pytest
from test_cupy_fused_host import DTYPES, put_in_place
from test_cupy_host import of_gradients

from polyattn import (
    Gradients,
    Partial,
    attention_backward,
    attention_partial,
    attention_vjp,
    merge,
)
from polyattn._dispatch import registry
from polyattn._dispatch.errors import UnsupportedError
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks.gradients import check_backward
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn_cupy import fused
from polyattn_cupy.fused import Fused

RNG = np.random.default_rng(0)


@pytest.fixture
def on_host(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return what cuBLAS was asked."""
    return put_in_place(monkeypatch)


def randn(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(dtype)


def draw(length, keys, groups=2, dtype="float32", size=5, value_size=6):
    shapes = (2, 4, length, size), (2, groups, keys, size), (2, groups, keys, value_size)
    return [randn(*shape, dtype=dtype) for shape in shapes]


def agree(*arrays, logsumexp=True, **options):
    """Compare the gradients with those of the formula in float64, and return them."""
    dtype = arrays[0].dtype
    real = "float64" if dtype == "float64" else "float32"
    wide = [x.astype("float64") for x in arrays]
    formula = attention_partial(*wide, kernel="dense", **options)
    along = randn(*formula.output.shape, dtype=dtype)
    rows = randn(*formula.logsumexp.shape, dtype=real) if logsumexp else None
    partial = Partial(formula.output.astype(dtype), formula.logsumexp.astype(real))
    mine = attention_backward(
        *arrays, partial, along, logsumexp_gradient=rows, into=Gradients(), backend="host",
        kernel="fused", **options,
    )  # fmt: skip
    expected = attention_backward(
        *wide, formula, along.astype("float64"), kernel="dense", **options,
        logsumexp_gradient=None if rows is None else rows.astype("float64"),
    )  # fmt: skip
    eps = float(ml_dtypes.finfo(dtype).eps)
    for name, one, other in zip(Gradients._fields, mine, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is None:
            continue
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (real, other.shape), name
        # The gradient of the scale is a sum over all scores, of which most cancel out.
        terms = wide[0] * mine.query if name == "scale" else None
        size = np.abs(other).max(initial=0) if terms is None else np.abs(terms).sum()
        atol = (8 if dtype.itemsize == 2 else 32) * eps * max(1, size)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=name)
    return mine


@pytest.mark.parametrize(("turn", "name"), list(enumerate(of_gradients(Fused.features))))
def test_it_keeps_to_the_conformance_cases(turn, name, on_host):
    case, target = BACKWARD_CASES[name], Target("host", "numpy")
    variant = KernelVariant(registry.loaded("host").kernels[0], small_tiles=turn % 2 == 0)
    found = check_backward(target, variant, case)
    refused = 0 in (*case.score_shape, case.D, case.E) or "bias" in case.features
    assert (found is None) == (refused or dict(case.options).get("scale") == 0)
    assert bool(on_host.calls) == (found is not None)


MASK = RNG.random((2, 1, 9, 21)) > 0.4
MASK[1, 0, 3] = False
SINKS = RNG.standard_normal(4)
OPTIONS = {
    "plain": (9, 21, {}),
    "scale": (9, 21, {"scale": -0.7}),
    "softcap": (9, 21, {"softcap": 1.5}),
    "sinks": (9, 21, {"sinks": SINKS}),
    "sinks, one of them absent": (9, 21, {"sinks": np.array([0, -np.inf, 2.0, 1.0])}),
    "causal": (9, 21, {"is_causal": True}),
    "causal, more queries": (21, 9, {"is_causal": True, "sinks": SINKS}),
    "rows before the keys": (9, 21, {"is_causal": True, "query_offset": -4, "softcap": 2.0}),
    "offsets": (9, 21, {"is_causal": True, "query_offset": np.array([3, -4])}),
    "window": (9, 21, {"window": (6, 3)}),
    "one query": (1, 21, {"is_causal": True}),
    "one key": (9, 1, {}),
    "mask of keys": (9, 21, {"mask": RNG.random((2, 1, 1, 21)) > 0.3}),
    "mask": (9, 21, {"mask": MASK, "sinks": SINKS}),
    "everything": (9, 21, {"mask": MASK, "sinks": SINKS, "softcap": 2.0, "window": (9, 1)}),
}


RUNS = [(name, "float32", tile) for name in OPTIONS for tile in (Fused.tile, 100)]
RUNS += [(name, dtype, 100) for name in ("plain", "everything") for dtype in DTYPES]


@pytest.mark.parametrize(("name", "dtype", "tile"), RUNS)
@pytest.mark.usefixtures("on_host")
def test_gradients_are_those_of_the_formula(name, dtype, tile, monkeypatch):
    monkeypatch.setattr(Fused, "tile", tile)
    length, keys, options = OPTIONS[name]
    for groups in (2, 4):
        agree(*draw(length, keys, groups, dtype), logsumexp=groups == 2, **options)


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_threads_of_a_block_share_a_row(threads, dtype, on_host):
    on_host.threads = threads
    agree(*draw(5, 37, dtype=dtype), mask=RNG.random((5, 37)) > 0.4, softcap=2.0)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((9, 5), (13, 5), (13, 4)),
        ((2, 1, 4, 9, 5), (1, 3, 2, 13, 5), (3, 2, 13, 4)),
        ((4, 9, 5), (5, 2, 13, 5), (2, 13, 4)),
        ((2, 3, 4, 9, 5), (4, 13, 5), (1, 1, 4, 13, 4)),
    ],
)
@pytest.mark.usefixtures("on_host")
def test_gradients_have_the_shapes_of_their_arguments(query, key, value):
    mine = agree(*(randn(*shape) for shape in (query, key, value)), is_causal=True, softcap=3.0)
    assert [x.shape for x in mine[:3]] == [query, key, value]


@pytest.mark.usefixtures("on_host")
def test_heads_after_length():
    q, k, v = (x.swapaxes(1, 2) for x in draw(9, 13))
    mine = agree(q, k, v, layout="...LHD", is_causal=True)
    assert [x.shape for x in mine[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.usefixtures("on_host")
def test_shares_of_the_keys_add_up():
    """Each part of the keys is given with the logsumexp of all."""
    q, k, v = draw(9, 40)
    halves = [(k[:, :, :17], v[:, :, :17]), (k[:, :, 17:], v[:, :, 17:])]
    whole = merge(*(attention_partial(q, *half, backend="host") for half in halves))
    along = randn(*whole.output.shape)
    one, other = (
        attention_backward(q, *half, whole, along, backend="host", kernel="fused")
        for half in halves
    )
    _, pullback = attention_vjp(*(x.astype("float64") for x in (q, k, v)))
    expected = pullback(along.astype("float64"))
    np.testing.assert_allclose(one.query + other.query, expected.query, atol=1e-5)
    both = np.concatenate([one.value, other.value], axis=-2)
    np.testing.assert_allclose(both, expected.value, atol=1e-5)


@pytest.mark.usefixtures("on_host")
def test_a_row_without_keys_has_gradients_of_0():
    mine = agree(*draw(9, 21), mask=MASK, sinks=np.full(4, -np.inf))
    assert not mine.query[1, :, 3].any()


@pytest.mark.usefixtures("on_host")
def test_what_is_no_number_stays_in_its_row():
    q, k, v = draw(6, 20, 4)
    q[0, 1, 2] = np.nan
    output, pullback = attention_vjp(q, k, v, backend="host", kernel="fused")
    found = pullback(np.ones_like(output))
    hit = np.zeros((2, 4), bool)
    hit[0, 1] = True
    for name in ("key", "value"):
        gone = np.isnan(getattr(found, name))
        np.testing.assert_array_equal(gone.any((2, 3)), hit)
    gone = np.isnan(found.query).any(-1)
    assert gone[0, 1].tolist() == [False, False, True, False, False, False]
    assert gone.sum() == 1


@pytest.mark.parametrize("size", [1e-12, 1e12])
@pytest.mark.usefixtures("on_host")
def test_gradients_of_float16_of_any_size(size):
    """Their sums are of float32 numbers, so no weight and no gradient is lost in float16."""
    q, k, v = draw(3, 2000, dtype="float16")
    output, logsumexp = attention_partial(q, k, v, backend="host", kernel="fused")
    along = randn(*output.shape) * np.float32(size)
    arguments = q, k, v, Partial(output, logsumexp), along
    mine = attention_backward(*arguments, into=Gradients(), backend="host", kernel="fused")
    expected = attention_backward(*arguments, into=Gradients(), backend="numpy")
    for one, other in zip(mine[:3], expected[:3], strict=True):
        np.testing.assert_allclose(one / size, other / size, rtol=1e-3, atol=1e-6)


# ---- what the host asks for --------------------------------------------------------------------


def test_the_products_of_a_block(on_host):
    agree(*draw(9, 21))
    # m, n, k, matrices: cuBLAS has columns where rows are here.
    assert on_host.calls == [
        (21, 18, 5, 4),  # scores
        (21, 18, 6, 4),  # gradients of the weights
        (6, 21, 18, 4),  # of the values
        (5, 21, 18, 4),  # of the keys
        (5, 18, 21, 4),  # of the queries
    ]


def test_a_band_skips_keys(on_host):
    arrays = [randn(1, 2, 1024, 8) for _ in range(3)]
    agree(*arrays, is_causal=True)
    assert [call[0] for call in on_host.calls[::5]] == [512, 1024]


def test_memory_is_for_one_block(on_host, monkeypatch):
    sizes = []
    genuine = fused.cupy.empty
    monkeypatch.setattr(
        fused.cupy, "empty", lambda shape, dtype: sizes.append(shape) or genuine(shape, dtype)
    )
    monkeypatch.setattr(Fused, "tile", 400)
    agree(*draw(32, 50, 4), logsumexp=False)
    flat = [size for size in sizes if isinstance(size, int)]
    assert len(flat) == 2
    assert sum(flat) <= 2 * 56 * 4
    assert len(on_host.calls) > 5


# ---- what it refuses ---------------------------------------------------------------------------


@pytest.mark.usefixtures("on_host")
def test_refusals():
    q, k, v = draw(4, 6)
    partial = attention_partial(q, k, v)
    for options, reason in (
        ({"bias": randn(4, 6)}, "it computes no gradient of a bias"),
        ({"scale": 0.0}, "it takes no scale of 0"),
        ({"dropout": (0.5, 1)}, "it does not compute dropout"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            attention_backward(
                q, k, v, partial, partial.output, backend="host", kernel="fused", **options
            )
