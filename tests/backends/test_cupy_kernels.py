"""CuPy's kernel without a GPU, forward and backward: the suite's cases, and what none of them has.

All of it runs; `cublas_host` computes for cuBLAS and the device.
"""

import arrays
import cublas_host
import numpy as np
import pytest
from cupy_checks import agree, gradients_agree

from polyattn import (
    Gradients,
    Partial,
    attention,
    attention_backward,
    attention_partial,
    explain,
)
from polyattn._dispatch import registry
from polyattn._dispatch.errors import UnsupportedError
from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.cases import check_case
from polyattn.conformance.checks.gradients import check_backward
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn_cupy.fused_kernel import Fused

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def cublas(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return its cuBLAS."""
    return cublas_host.put_in_place(monkeypatch)


def randn(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(dtype)


def draw(length, keys, groups=2, dtype="float16", size=16, value_size=24):
    shapes = (2, 4, length, size), (2, groups, keys, size), (2, groups, keys, value_size)
    return arrays.draw(*shapes, dtype=dtype)


# ---- the suite's cases -------------------------------------------------------------------------


ROUNDED_IN_BETWEEN = {n: case for n, case in BACKWARD_CASES.items() if not case.rounded_once}


def runs(catalogue):
    """Yield cases and whether tiles are small; slow is one without a feature of its own."""
    seen = set()
    for place, case in enumerate(taken_from(catalogue)):
        news = {*case.features, case.dtype} - seen
        seen |= news
        marks = () if news else pytest.mark.slow
        yield pytest.param(case, bool(place % 2), marks=marks, id=f"{case}-{bool(place % 2)}")


def taken_from(catalogue):
    """Return the cases that the kernel takes."""
    taken = [
        case
        for case in catalogue.values()
        if case.features <= Fused.features and case.poison is None
    ]
    return [case for case in taken if case.dtype in cublas_host.DTYPES]


def subject(small_tiles=False):
    target, (here,) = Target("host", "numpy"), registry.loaded("host").kernels
    return target, KernelVariant(here, small_tiles)


@pytest.mark.parametrize(("case", "small_tiles"), list(runs(ESSENTIAL)))
def test_the_suites_cases(case, small_tiles, cublas):
    outcome = check_case(*subject(small_tiles), case)
    assert bool(cublas.calls) == (outcome.output is not None)


@pytest.mark.parametrize(("case", "small_tiles"), list(runs(ROUNDED_IN_BETWEEN)))
def test_the_suites_cases_of_gradients(case, small_tiles, cublas):
    gradients = check_backward(*subject(small_tiles), case)
    assert bool(cublas.calls) == (gradients is not None)


def test_some_case_needs_each_declared_feature():
    promises.check_declarations(*subject(), CASES)


# ---- what no case has --------------------------------------------------------------------------


VIEWS = {
    "not aligned": lambda x: x[..., 1:9],
    "backwards": lambda x: x[:, ::-1, :, ::-2],
    "length before heads": lambda x: x.swapaxes(1, 2),
    "one row for all": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
    "one number for all": lambda x: np.broadcast_to(x[..., :1], x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_arrays(view):
    q, k, v, output, along = (
        VIEWS[view]((randn(2, 16, 16, 16) / 3).astype("float16")) for _ in range(5)
    )
    groups = q.shape[1] // 4
    agree("fused", q, k[:, :groups], v[:, :groups])
    logsumexp = 3 + randn(*q.shape[:3], 3)[..., 1]
    arguments = q, k, v, Partial(output, logsumexp), along
    got = attention_backward(*arguments, backend="host", kernel="fused")
    expected = attention_backward(*arguments, backend="numpy")
    for one, other in zip(got[:3], expected[:3], strict=True):
        size = max(1, np.abs(other).max())
        np.testing.assert_allclose(one / size, other / size, atol=6e-3)


@pytest.mark.parametrize(("threads", "dtype"), [(2, "float16"), (8, "float32"), (8, "bfloat16")])
def test_the_threads_of_a_block_share_a_row(threads, dtype, cublas):
    cublas.threads = threads
    qkv = draw(5, 37, dtype=dtype, size=8, value_size=6)
    mask = RNG.random((5, 37)) > 0.4
    mask[2] = False
    agree("fused", *qkv, mask=mask, window=(30, 1), sinks=RNG.random(4), softcap=2.0)
    gradients_agree("fused", *qkv, mask=mask, softcap=2.0)


def test_long_rows_of_float16_keep_their_digits():
    q = np.zeros((1, 1, 1, 8), "float16")
    k, v = np.zeros((1, 1, 120_000, 8), "float16"), np.full((1, 1, 120_000, 8), 1.5, "float16")
    # By less than one spacing of float16, where weights of two digits would be off by two.
    np.testing.assert_allclose(attention(q, k, v, backend="host"), 1.5, rtol=8e-4)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_gradients_of_float16_of_any_size(size):
    """Their sums are of float32 numbers, so no weight and no gradient is lost in float16."""
    q, k, v = draw(3, 2000)
    output, logsumexp = attention_partial(q, k, v, backend="host", kernel="fused")
    along = randn(*output.shape) * np.float32(size)
    arguments = q, k, v, Partial(output, logsumexp), along
    mine = attention_backward(*arguments, into=Gradients(), backend="host", kernel="fused")
    expected = attention_backward(*arguments, into=Gradients(), backend="numpy")
    for one, other in zip(mine[:3], expected[:3], strict=True):
        np.testing.assert_allclose(one / size, other / size, rtol=1e-3, atol=1e-6)


# ---- what it refuses ---------------------------------------------------------------------------

FEW = (1, 4, 16), (1, 6, 16), (1, 6, 16)
EMPTY = (1, 4, 16), (1, 0, 16), (1, 0, 16)


def facts(**options):
    return {"library": "numpy", "device": "cpu", "dtype": "float16", "backend": "host"} | options


@pytest.mark.parametrize(
    ("reason", "shapes", "options"),
    [("empty", EMPTY, {}), ("a scale other than 0", FEW, {"scale": 0.0})],
)
def test_refusals(reason, shapes, options):
    (candidate,) = explain(*shapes, kernel="fused", **facts(**options)).candidates
    assert reason in " ".join(candidate.reasons)


def test_a_gradient_beside_a_bias_is_refused():
    query, key, value = (np.zeros(shape, "float16") for shape in FEW)
    given = query, key, value, attention_partial(query, key, value), query
    with pytest.raises(UnsupportedError, match="it computes bias, and has no gradient"):
        attention_backward(*given, bias=np.zeros((4, 6), "float16"), backend="host", kernel="fused")


def test_nan_beyond_a_length_has_no_effect():
    q, k, v = (randn(2, 2, n, 8, dtype="float16") for n in (3, 6, 6))
    spoilt, lengths = [x.copy() for x in (k, v)], np.array([4, 2])
    for x in spoilt:
        x[0, :, 4:], x[1, :, 2:] = np.nan, np.inf
    options = {"key_lengths": lengths, "is_causal": True}
    output = attention(q, *spoilt, backend="host", kernel="fused", **options)
    expected = attention(q, k, v, kernel="dense", **options)
    assert np.allclose(output, expected, rtol=0, atol=4e-3)
