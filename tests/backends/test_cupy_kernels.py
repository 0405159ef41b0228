"""CuPy's kernels without a GPU, forward and backward: the suite's cases, and what none of them has.

All of a kernel runs, on stand-ins that read the same memory.
"""

import math
from dataclasses import replace

import cublas_host
import cudnn_host
import numpy as np
import pytest
from cupy_checks import agree, gradients_agree, shares_add_up

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
from polyattn_cupy.cudnn import Cudnn
from polyattn_cupy.fused import Fused

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
# that the stand-ins are for would cut a long call, and the stand-ins do not.
MOST_SCORES = 20_000


def runs():
    """Yield a kernel, a case and whether tiles are small: a case of each feature and corner."""
    for kernel in (Fused, Cudnn):
        dtypes = ("float32",) if kernel is Cudnn else DTYPES["fused"]
        taken = [case for case in taken_by(kernel, ESSENTIAL) if case.dtype in dtypes]
        for place, case in enumerate(taken):
            long = math.prod(case.score_shape) > MOST_SCORES
            marks = [pytest.mark.slow] if long else []
            # One program of cuDNN serves both dtypes.
            yield pytest.param(kernel.name, case, place % 2, marks=marks)


def gradient_runs():
    """Yield kernels and cases of gradients, with small tiles and another dtype by turns."""
    for kernel in (Fused, Cudnn):
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


def may_refuse(kernel, case, *never):
    """Return whether a kernel is not for a case, of which it has all features."""
    scale = dict(case.options).get("scale")
    scale = scale if isinstance(scale, float | int) else 1
    if 0 in (*case.score_shape, case.D, case.value_size) or case.features & {*never}:
        return True
    return scale <= 0 if kernel == "cudnn" else scale == 0


def subject(kernel, small_tiles=False):
    target, (here,) = Target("host", "numpy"), registry.loaded("host").kernels
    return target, KernelVariant(here, kernel == "fused" and bool(small_tiles))


@pytest.mark.parametrize(("kernel", "case", "turn"), list(runs()), ids=str)
def test_it_keeps_to_the_suites_cases(kernel, case, turn, ran):
    case = case_for(kernel, case, turn)
    outcome = check_case(*subject(kernel, turn), case)
    assert ran() == (outcome.output is not None)
    assert ran() or may_refuse(kernel, case, *["softcap"] * (kernel == "cudnn"))


@pytest.mark.parametrize(("kernel", "case", "turn"), list(gradient_runs()), ids=str)
def test_it_keeps_to_the_suites_cases_of_gradients(kernel, case, turn, ran):
    case = case_for(kernel, case, turn)
    found = check_backward(*subject(kernel, turn), case)
    assert ran() == (found is not None)
    assert ran() or may_refuse(kernel, case, "bias", *["softcap"] * (kernel == "cudnn"))


@pytest.mark.parametrize("kernel", ["fused", pytest.param("cudnn", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("ran")
def test_what_it_declares_is_needed_by_some_case(kernel):
    promises.check_declarations(*subject(kernel), CASES)


# ---- what no case has --------------------------------------------------------------------------

BIAS = RNG.standard_normal((4, 9, 40)).astype("float32")
MASK = RNG.random((2, 1, 9, 40)) > 0.4
MASK[1, 0, 3] = False
SINKS = RNG.standard_normal(4)
IDS = np.sort(RNG.integers(0, 4, (2, 40)), axis=-1)
GRADIENTS = {
    "tall, from the first": (40, 9, {"is_causal": True, "query_offset": 0}),
    "tall window": (40, 9, {"window": (3, 2)}),
    "one key": (9, 1, {}),
    "mask and causal": (9, 40, {"mask": MASK, "is_causal": True}),
    "key lengths": (9, 40, {"key_lengths": np.array([30, 0])}),
    "key lengths, causal": (9, 40, {"key_lengths": np.array([30, 5]), "is_causal": True}),
    "key lengths, dilated": (9, 40, {"key_lengths": np.array([30, 5]), "mask": masks.dilated(2)}),
    "documents and a prefix": (9, 40, {"mask": masks.segments(IDS[:, 31:], IDS) | masks.prefix(3)}),
    "a function": (9, 40, {"mask": lambda b, h, i, j: (i + j + h) % 3 > 0}),
}
GRADIENTS_OF = {
    "fused": {
        "everything": (9, 40, {"mask": MASK, "sinks": SINKS, "softcap": 2.0, "window": (9, 1)}),
    },
    "cudnn": {"tiles of keys that are full": (9, 128, {"mask": RNG.random((9, 128)) > 0.4})},
}


@pytest.mark.parametrize(
    ("kernel", "name", "dtype"),
    [
        (kernel, name, dtype)
        for kernel, own in GRADIENTS_OF.items()
        for name, dtype in {
            **{name: DTYPES[kernel][turn % 2] for turn, name in enumerate(GRADIENTS)},
            **dict.fromkeys(own, DTYPES[kernel][-1]),
        }.items()
    ],
)
@pytest.mark.usefixtures("ran")
def test_gradients_with_that_of_the_logsumexp(kernel, name, dtype, monkeypatch):
    monkeypatch.setattr(Fused, "tile", 100)
    length, keys, options = (GRADIENTS | GRADIENTS_OF[kernel])[name]
    found = gradients_agree(kernel, *draw(length, keys, dtype=dtype), **options)
    if "mask" in name:
        assert not found.query[1, :, 3].any(), "a row without keys"


@both_kernels
@pytest.mark.usefixtures("ran")
def test_shares_of_the_keys_add_up(kernel):
    shares_add_up(kernel, *draw(9, 40))


VIEWS = [
    lambda x: x[..., 1:9],
    lambda x: x[..., ::-2],
    lambda x: x[:, :, ::-1],
    lambda x: x[:, ::-1],
    lambda x: x.swapaxes(-1, -2),
    lambda x: x.swapaxes(1, 2),
    lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    lambda x: np.broadcast_to(x[:, :1], x.shape),
    lambda x: np.broadcast_to(x[:1], x.shape),
    lambda x: np.broadcast_to(x[..., :1], x.shape),
]


@pytest.mark.parametrize("view", VIEWS)
@both_kernels
@pytest.mark.usefixtures("ran")
def test_views_of_every_kind(kernel, view):
    q, k, v, output, along = (view((randn(2, 16, 16, 16) / 3).astype("float16")) for _ in range(5))
    groups = q.shape[1] // 4
    agree(kernel, q, k, v)
    agree(kernel, q, k[:, :groups], v[:, :groups])
    logsumexp = 3 + randn(*q.shape[:3], 3)[..., 1]
    arguments = q, k, v, Partial(output, logsumexp), along
    got = attention_backward(*arguments, backend="host", kernel=kernel)
    expected = attention_backward(*arguments, backend="numpy")
    for one, other in zip(got[:3], expected[:3], strict=True):
        size = max(1, np.abs(other).max())
        np.testing.assert_allclose(one / size, other / size, atol=6e-3)


# ---- of cuDNN ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kernel", ["cudnn"])
@pytest.mark.usefixtures("ran")
def test_no_score_is_so_low_that_a_masked_key_is_seen(kernel, dtype):
    q, k, v = np.ones((1, 1, 3, 8), dtype), np.zeros((1, 1, 40, 8), dtype), randn(1, 1, 40, 8)
    k[..., :20, 0] = -60_000
    mask = np.arange(40) < 20  # the low ones take part, the high ones do not
    _, logsumexp = agree(kernel, q, k, v.astype(dtype), mask=mask, scale=8.0)
    assert (logsumexp < -400_000).all()


@pytest.mark.parametrize("kernel", ["cudnn"])
@pytest.mark.usefixtures("ran")
def test_a_bias_that_only_almost_hides(kernel):
    bias = np.where(RNG.random((3, 40)) > 0.5, np.finfo("float32").min, 0).astype("float32")
    arrays = (randn(1, 1, n, 8, dtype="float16") for n in (3, 40, 40))
    agree(kernel, *arrays, bias=bias)


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
    agree("fused", *arrays, mask=mask, window=(30, 1), sinks=randn(4), softcap=2.0)
    gradients_agree("fused", *arrays, mask=mask, softcap=2.0)


@pytest.mark.parametrize("threads", [1, 8])
def test_what_is_no_number_stays_in_its_row(threads, cublas):
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


@pytest.mark.parametrize("shape", [(1,), (2, 1), ()])
@pytest.mark.usefixtures("cublas")
def test_offsets_that_broadcast(shape):
    arrays = (randn(2, 3, 2, length, 8) for length in (4, 9, 9))
    agree("fused", *arrays, is_causal=True, query_offset=np.array(RNG.integers(-3, 9, shape)))


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

SHAPES = (2, 8, 100, 64), (2, 2, 300, 64), (2, 2, 300, 64)
FEW = (1, 4, 16), (1, 6, 16), (1, 6, 16)
EMPTY = (1, 4, 16), (1, 0, 16), (1, 0, 16)
LARGE = (8192, 16), (8200, 16), (8200, 16)
TOO_LARGE = LARGE, {"is_causal": True, "query_offset": 3}
BY_ROW = masks.dilated(2)
REFUSED = {
    "cudnn": [
        ("it supports float16 and bfloat16 only", SHAPES, {"dtype": "float32"}),
        ("must be a multiple of 8; got (12, 12)", ((1, 4, 12),) * 3, {}),
        ("must be a multiple of 8; got (16, 12)", (*FEW[:2], (1, 6, 12)), {}),
        ("empty", EMPTY, {}),
        ("a scale above 0; got -1.0", SHAPES, {"scale": -1.0}),
        ("a scale above 0; got 0.0", SHAPES, {"scale": 0.0}),
        ("it caps scores only", SHAPES, {"softcap": 2.0, "is_causal": True}),
        ("caps scores only", SHAPES, {"softcap": 2.0, "mask": (100, 300)}),
        ("its tanh is too inexact", SHAPES, {"softcap": 2.0, "logsumexp": True}),
        ("sinks", SHAPES, {"sinks": (8,)}),
        ("dropout", SHAPES, {"dropout": (0.5, 1)}),
        ("score_mod", SHAPES, {"score_mod": lambda s, *_: s}),
    ],
    "fused": [
        ("it does not support empty arrays", EMPTY, {}),
        ("it takes no scale of 0", FEW, {"scale": 0.0}),
    ],
}
MADE = "it would need a mask of 67,174,400 elements, above 67,108,864"
ON_REQUEST = {
    "cudnn": [
        (MADE, *TOO_LARGE),
        (MADE, LARGE, {"mask": BY_ROW}),
    ],
    "fused": [(MADE, LARGE, {"mask": BY_ROW})],
}
GRADIENTS_REFUSED = {
    "cudnn": [
        ("sizes up to 256; got (264, 264)", ((1, 4, 264), (1, 6, 264), (1, 6, 264)), {}),
        ("sizes up to 256; got (16, 264)", (*FEW[:2], (1, 6, 264)), {}),
        ("no gradients of one query with one key", ((1, 1, 16),) * 3, {}),
        ("it computes softcap, and has no gradient", FEW, {"softcap": 2.0}),
        ("it computes bias, and has no gradient", FEW, {"bias": np.zeros((4, 6), "float16")}),
    ],
    "fused": [
        ("it computes bias, and has no gradient", FEW, {"bias": np.zeros((4, 6), "float16")})
    ],
}


def of_both(table):
    return [(kernel, *row) for kernel, found in table.items() for row in found]


@pytest.mark.parametrize(("kernel", "reason", "shapes", "options"), of_both(REFUSED))
@pytest.mark.usefixtures("ran")
def test_refusals(kernel, reason, shapes, options):
    facts = {"library": "numpy", "device": "cpu", "dtype": "float16"} | options
    (candidate,) = explain(*shapes, backend="host", kernel=kernel, **facts).candidates
    assert reason in " ".join(candidate.reasons)


@pytest.mark.parametrize(("kernel", "reason", "shapes", "options"), of_both(ON_REQUEST))
@pytest.mark.usefixtures("ran")
def test_what_they_make_is_of_any_size_if_they_are_named(kernel, reason, shapes, options):
    facts = {"library": "numpy", "device": "cpu", "dtype": "float16", "backend": "host"} | options
    (named,) = explain(*shapes, kernel=kernel, **facts).candidates
    assert (named.status, named.reasons, named.on_request) == ("chosen", (), reason)
    (unnamed,) = (c for c in explain(*shapes, **facts).candidates if c.kernel == kernel)
    assert (unnamed.status, unnamed.on_request) == ("on request", reason)


@pytest.mark.parametrize(("kernel", "reason", "shapes", "options"), of_both(GRADIENTS_REFUSED))
@pytest.mark.usefixtures("ran")
def test_refusals_of_gradients(kernel, reason, shapes, options):
    query, key, value = (np.zeros(shape, "float16") for shape in shapes)
    partial = attention_partial(query, key, value)
    with pytest.raises(UnsupportedError) as raised:
        attention_backward(
            query, key, value, partial, partial.output, backend="host", kernel=kernel, **options
        )
    assert reason in str(raised.value)


@pytest.mark.parametrize("kernel", ["cudnn"])
def test_what_it_refuses_the_tiles_compute(kernel, ran):
    arrays = [randn(1, 2, 5, 12, dtype="float16") for _ in range(3)]
    output, pullback = attention_vjp(*arrays, backend="host", softcap=2.0)
    assert pullback(output).query.shape == (1, 2, 5, 12)
    assert not ran()


@pytest.mark.parametrize("kernel", ["cudnn", "fused"])
def test_nan_beyond_a_length_has_no_effect(kernel, ran):
    q, k, v = (randn(2, 2, n, 8, dtype="float16") for n in (3, 6, 6))
    spoilt, lengths = [x.copy() for x in (k, v)], np.array([4, 2])
    for x in spoilt:
        x[0, :, 4:], x[1, :, 2:] = np.nan, np.inf
    options = {"key_lengths": lengths, "is_causal": True}
    found = attention(q, *spoilt, backend="host", kernel=kernel, **options)
    expected = attention(q, k, v, kernel="dense", **options)
    assert np.allclose(found, expected, rtol=0, atol=4e-3)
