"""CuPy's kernels without a GPU, forward and backward: the suite's cases, and what none of them has.

All of a kernel runs; `cublas_host` and `cudnn_host` compute for the libraries that it calls.
"""

import math
from dataclasses import replace

import cublas_host
import cudnn_host
import numpy as np
import pytest
from cupy_checks import agree, gradients_agree

from polyattn import (
    Gradients,
    Partial,
    attention,
    attention_backward,
    attention_partial,
    attention_vjp,
    explain,
    masks,
)
from polyattn._dispatch import registry
from polyattn._dispatch.errors import UnsupportedError
from polyattn.conformance.cases.catalogue import CASES, ESSENTIAL
from polyattn.conformance.cases.gradient_cases import BACKWARD_CASES
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.cases import check_case
from polyattn.conformance.checks.gradients import check_backward
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn_cupy.cudnn_kernel import CupyCudnn
from polyattn_cupy.fused_kernel import Fused

RNG = np.random.default_rng(0)
HALVES = ("float16", "bfloat16")
DTYPES = {"fused": cublas_host.DTYPES, "cudnn": HALVES}


@pytest.fixture
def ran(request, monkeypatch):
    """Let the kernel of a test run on the host, as the backend `host`; return whether it ran."""
    if request.getfixturevalue("kernel") == "fused":
        cublas = cublas_host.put_in_place(monkeypatch)
        yield lambda: bool(cublas.calls)
    else:
        cudnn_host.put_in_place(monkeypatch)
        yield lambda: any(handle.log for handle in cudnn_host.HANDLES)
        cudnn_host.forget()


@pytest.fixture
def cublas(monkeypatch):
    """Let `fused` run on the host; return its cuBLAS."""
    return cublas_host.put_in_place(monkeypatch)


both_kernels = pytest.mark.parametrize("kernel", ["fused", "cudnn"])


def randn(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(dtype)


def draw(length, keys, groups=2, dtype="float16", size=16, value_size=24):
    shapes = (2, 4, length, size), (2, groups, keys, size), (2, groups, keys, value_size)
    return [randn(*shape, dtype=dtype) for shape in shapes]


# ---- the suite's cases -------------------------------------------------------------------------

# The exact result of so many scores takes a second, and lengths show little here: the libraries
# would cut a long call, and the host does not.
MOST_SCORES = 20_000


def runs():
    """Yield a kernel, a case and whether tiles are small: a case of each feature and corner."""
    for kernel in (Fused, CupyCudnn):
        dtypes = ("float32",) if kernel is CupyCudnn else DTYPES["fused"]
        taken = [case for case in taken_by(kernel, ESSENTIAL) if case.dtype in dtypes]
        for place, case in enumerate(taken):
            long = math.prod(case.score_shape) > MOST_SCORES
            marks = [pytest.mark.slow] if long else []
            # One program of cuDNN serves both dtypes.
            yield pytest.param(kernel.name, case, place % 2, marks=marks)


def gradient_runs():
    """Yield kernels and cases of gradients, with small tiles and another dtype by turns."""
    for kernel in (Fused, CupyCudnn):
        taken = [case for case in taken_by(kernel, BACKWARD_CASES) if not case.rounded_once]
        # Of cases that differ in their dtype one: the kernels compute all in float32.
        taken = {case.name.removesuffix(f", {case.dtype}"): case for case in taken}.values()
        yield from ((kernel.name, case, turn % 2) for turn, case in enumerate(taken))


def taken_by(kernel, catalogue):
    """Return the cases that a kernel takes."""
    return [
        case
        for case in catalogue.values()
        if case.features <= kernel.features and case.poison is None
    ]


def case_for(kernel, case, turn):
    """Return a case as a kernel takes it: cuDNN numbers of 16 bits, eight of them in a vector."""
    if kernel == "fused":
        return case
    sizes = {
        n: None if size is None else -(-size // 8) * 8
        for n, size in zip("DE", (case.D, case.E), strict=True)
    }
    return replace(case, dtype=HALVES[turn], **sizes)


def subject(kernel, small_tiles=False):
    target, (here,) = Target("host", "numpy"), registry.loaded("host").kernels
    return target, KernelVariant(here, kernel == "fused" and bool(small_tiles))


@pytest.mark.parametrize(("kernel", "case", "turn"), list(runs()), ids=str)
def test_the_suites_cases(kernel, case, turn, ran):
    case = case_for(kernel, case, turn)
    outcome = check_case(*subject(kernel, turn), case)
    assert ran() == (outcome.output is not None)


@pytest.mark.parametrize(("kernel", "case", "turn"), list(gradient_runs()), ids=str)
def test_the_suites_cases_of_gradients(kernel, case, turn, ran):
    case = case_for(kernel, case, turn)
    found = check_backward(*subject(kernel, turn), case)
    assert ran() == (found is not None)


@pytest.mark.parametrize("kernel", ["fused", pytest.param("cudnn", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("ran")
def test_some_case_needs_each_declared_feature(kernel):
    promises.check_declarations(*subject(kernel), CASES)


# ---- what no case has --------------------------------------------------------------------------


VIEWS = {
    "not aligned": lambda x: x[..., 1:9],
    "backwards": lambda x: x[:, ::-1, :, ::-2],
    "transposed": lambda x: x.swapaxes(-1, -2),
    "length before heads": lambda x: x.swapaxes(1, 2),
    "one row for all": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
    "one number for all": lambda x: np.broadcast_to(x[..., :1], x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@both_kernels
@pytest.mark.usefixtures("ran")
def test_strided_arrays(kernel, view):
    q, k, v, output, along = (
        VIEWS[view]((randn(2, 16, 16, 16) / 3).astype("float16")) for _ in range(5)
    )
    groups = q.shape[1] // 4
    agree(kernel, q, k[:, :groups], v[:, :groups])
    logsumexp = 3 + randn(*q.shape[:3], 3)[..., 1]
    arguments = q, k, v, Partial(output, logsumexp), along
    got = attention_backward(*arguments, backend="host", kernel=kernel)
    expected = attention_backward(*arguments, backend="numpy")
    for one, other in zip(got[:3], expected[:3], strict=True):
        size = max(1, np.abs(other).max())
        np.testing.assert_allclose(one / size, other / size, atol=6e-3)


# ---- of cuDNN ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["cudnn"])
@pytest.mark.usefixtures("ran")
def test_no_score_is_so_low_that_a_masked_key_is_seen(kernel):
    q, k, v = np.ones((1, 1, 3, 8), "float16"), np.zeros((1, 1, 40, 8), "float16"), randn(40, 8)
    k[..., :20, 0] = -60_000
    mask = np.arange(40) < 20  # the low ones take part, the high ones do not
    value = v[None, None].astype("float16")
    _, logsumexp = agree(kernel, q, k, value, mask=mask, scale=8.0)
    assert (logsumexp < -400_000).all()


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e5])
@pytest.mark.parametrize("kernel", ["cudnn"])
@pytest.mark.usefixtures("ran")
def test_a_gradient_of_the_logsumexp_of_any_size(kernel, size):
    """All weights are equal, and query and key small enough for a result within float16."""
    q, k, v = (np.full_like(x, 2.0**-9) for x in draw(3, 8))
    partial = attention_partial(q, k, v, backend="host", kernel=kernel)
    gradient = np.full(partial.logsumexp.shape, np.float32(size / 3))
    mine = attention_backward(
        *(q, k, v, partial, np.zeros_like(partial.output)), logsumexp_gradient=gradient,
        into=Gradients(), backend="host", kernel=kernel,
    )  # fmt: skip
    expected = size / 3 * 0.25 * 2.0**-9
    np.testing.assert_allclose(mine.query, expected, rtol=2e-3, atol=2.0**-24)


# ---- of the fused kernel -----------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "dtype"), [(2, "float16"), (8, "float32"), (8, "bfloat16")])
def test_the_threads_of_a_block_share_a_row(threads, dtype, cublas):
    cublas.threads = threads
    arrays = draw(5, 37, dtype=dtype, size=8, value_size=6)
    mask = RNG.random((5, 37)) > 0.4
    mask[2] = False
    agree("fused", *arrays, mask=mask, window=(30, 1), sinks=RNG.random(4), softcap=2.0)
    gradients_agree("fused", *arrays, mask=mask, softcap=2.0)


@pytest.mark.parametrize("threads", [1, 8])
def test_nan_stays_in_its_row(threads, cublas):
    cublas.threads = threads
    q, k, v = draw(6, 20, 4, "float32")
    q[0, 1, 2], q[0, 1, 4] = np.nan, np.inf
    mine = agree("fused", q, k, v)
    assert np.isnan(mine.output).any(-1).sum() == 2
    bias = np.where(RNG.random((6, 20)) > 0.5, 0, -np.inf)
    bias[2], bias[2, ::8] = 0, -np.inf  # the first thread sees none of them
    assert np.isnan(agree("fused", q, k, v, bias=bias).logsumexp[0, 1, 2])
    bias[2] = bias[3] = -np.inf
    agree("fused", q, k, v, bias=bias)  # NaN that is masked everywhere is absent
    q[0, 1, 4] = 1
    output, pullback = attention_vjp(q, k, v, backend="host", kernel="fused")
    found, hit = pullback(np.ones_like(output)), np.zeros((2, 4), bool)
    hit[0, 1] = True
    for gradient in (found.key, found.value):
        np.testing.assert_array_equal(np.isnan(gradient).any((2, 3)), hit)
    assert np.argwhere(np.isnan(found.query).any(-1)).tolist() == [[0, 1, 2]]


@pytest.mark.usefixtures("cublas")
def test_long_rows_of_float16_keep_their_digits():
    q = np.zeros((1, 1, 1, 8), "float16")
    k, v = np.zeros((1, 1, 120_000, 8), "float16"), np.full((1, 1, 120_000, 8), 1.5, "float16")
    # By less than one spacing of float16, where weights of two digits would be off by two.
    np.testing.assert_allclose(attention(q, k, v, backend="host"), 1.5, rtol=8e-4)


@pytest.mark.parametrize("size", [1e-12, 1e12])
@pytest.mark.usefixtures("cublas")
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


# ---- what they refuse --------------------------------------------------------------------------

FEW = (1, 4, 16), (1, 6, 16), (1, 6, 16)
EMPTY = (1, 4, 16), (1, 0, 16), (1, 0, 16)
LARGE = (8192, 16), (8200, 16), (8200, 16)
WIDE = (1, 4, 264), (1, 6, 264), (1, 6, 264)
BIAS = np.zeros((4, 6), "float16")
REFUSED = [
    ("cudnn", "it supports float16 and bfloat16 only", FEW, {"dtype": "float32"}),
    ("cudnn", "must be a multiple of 8; got (12, 12)", ((1, 4, 12),) * 3, {}),
    ("cudnn", "must be a multiple of 8; got (16, 12)", (*FEW[:2], (1, 6, 12)), {}),
    ("cudnn", "empty", EMPTY, {}),
    ("cudnn", "a scale above 0; got 0.0", FEW, {"scale": 0.0}),
    ("cudnn", "softcap only without masks", FEW, {"softcap": 2.0, "is_causal": True}),
    ("cudnn", "its tanh is too inexact", FEW, {"softcap": 2.0, "logsumexp": True}),
    ("fused", "empty", EMPTY, {}),
    ("fused", "a scale other than 0", FEW, {"scale": 0.0}),
]
MADE = "it would need a mask of 67,174,400 elements, above 67,108,864"
ON_REQUEST = [
    ("cudnn", {"is_causal": True, "query_offset": 3}),
    ("cudnn", {"mask": masks.dilated(2)}),
    ("fused", {"mask": masks.dilated(2)}),
]
GRADIENTS_REFUSED = [
    ("cudnn", "sizes up to 256; got (264, 264)", WIDE, {}),
    ("cudnn", "more than one query or more than one key", ((1, 1, 16),) * 3, {}),
    ("cudnn", "it computes softcap, and has no gradient", FEW, {"softcap": 2.0}),
    ("cudnn", "it computes bias, and has no gradient", FEW, {"bias": BIAS}),
    ("fused", "it computes bias, and has no gradient", FEW, {"bias": BIAS}),
]


def facts(**options):
    return {"library": "numpy", "device": "cpu", "dtype": "float16", "backend": "host"} | options


@pytest.mark.parametrize(("kernel", "reason", "shapes", "options"), REFUSED)
@pytest.mark.usefixtures("ran")
def test_refusals(kernel, reason, shapes, options):
    (candidate,) = explain(*shapes, kernel=kernel, **facts(**options)).candidates
    assert reason in " ".join(candidate.reasons)


@pytest.mark.parametrize(("kernel", "options"), ON_REQUEST)
@pytest.mark.usefixtures("ran")
def test_a_large_mask_is_made_only_if_the_kernel_is_named(kernel, options):
    (named,) = explain(*LARGE, kernel=kernel, **facts(**options)).candidates
    assert (named.status, named.reasons, named.on_request) == ("chosen", (), MADE)
    (unnamed,) = (c for c in explain(*LARGE, **facts(**options)).candidates if c.kernel == kernel)
    assert (unnamed.status, unnamed.on_request) == ("on request", MADE)


@pytest.mark.parametrize(("kernel", "reason", "shapes", "options"), GRADIENTS_REFUSED)
@pytest.mark.usefixtures("ran")
def test_refusals_of_gradients(kernel, reason, shapes, options):
    query, key, value = (np.zeros(shape, "float16") for shape in shapes)
    given = query, key, value, attention_partial(query, key, value), query
    with pytest.raises(UnsupportedError) as raised:
        attention_backward(*given, backend="host", kernel=kernel, **options)
    assert reason in str(raised.value)


@both_kernels
@pytest.mark.usefixtures("ran")
def test_nan_beyond_a_length_has_no_effect(kernel):
    q, k, v = (randn(2, 2, n, 8, dtype="float16") for n in (3, 6, 6))
    spoilt, lengths = [x.copy() for x in (k, v)], np.array([4, 2])
    for x in spoilt:
        x[0, :, 4:], x[1, :, 2:] = np.nan, np.inf
    options = {"key_lengths": lengths, "is_causal": True}
    found = attention(q, *spoilt, backend="host", kernel=kernel, **options)
    expected = attention(q, k, v, kernel="dense", **options)
    assert np.allclose(found, expected, rtol=0, atol=4e-3)
