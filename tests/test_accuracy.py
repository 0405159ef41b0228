"""Every case, on every kernel and library, is as accurate as the textbook formula promises.

And the promise has teeth: each classic way to get attention wrong is refused.
"""

import math
from dataclasses import replace

import array_api_strict
import numpy as np
import pytest
import torch
from cases import CASES, LIBRARIES, NUMPY, TORCH
from oracle import oracle
from tolerance import accumulation_dtype, assert_accurate, check, exact, output_yardstick

from polyattn import attention, attention_partial


@pytest.fixture(autouse=True)
def strictest():
    """The strict library at its strictest: no shape may depend on the values of an array."""
    with array_api_strict.ArrayAPIStrictFlags(
        api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False
    ):
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of calls with small arrays: threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(monkeypatch):
    """`run(function, case, kernel, library)`, where the kernel "tiles" is "tiled" with small tiles.

    Its own tiles would hold the whole of nearly every case, and no edge of a tile be seen.
    """

    def run(function, case, kernel, library, **more):
        if kernel == "tiles":
            kernel = "tiled"
            monkeypatch.setattr(
                "polyattn.kernels.tiled.TILE", math.prod(case.score_shape) // 12 + 1
            )
            monkeypatch.setattr("polyattn.kernels.tiled.SMALLEST", 1)
        return library.call(function, case, kernel=kernel, **more)

    return run


KERNELS = ("dense", "tiled", "tiles")


def runs():
    """Each case on each kernel and library.

    A default kernel may be a library's own, which promises nothing under poison; and some
    processors' bfloat16 products take subnormals for zero.
    """
    for case in CASES.values():
        for library in LIBRARIES:
            if case.dtype in library.dtypes:
                for kernel in KERNELS:
                    yield pytest.param(case, kernel, library, id=f"{case.name}-{kernel}-{library}")
        flushed = case.values == "subnormal" and case.dtype == "bfloat16"
        if case.poison is None and not flushed:
            for library in (NUMPY, TORCH):
                yield pytest.param(case, None, library, id=f"{case.name}-default-{library}")


@pytest.mark.parametrize(("case", "kernel", "library"), list(runs()))
def test_accuracy(case, kernel, library, run):
    """The textbook's own accuracy; and from our kernels, for 16-bit inputs, that of float32."""
    output = library.back(run(attention, case, kernel, library))
    partial = run(attention_partial, case, kernel, library)
    logsumexp = library.back(partial.logsumexp)
    dtype = case.dtype if kernel is None else accumulation_dtype(case.dtype)

    assert output.dtype == case.dtype
    assert logsumexp.dtype == accumulation_dtype(case.dtype)
    assert_accurate(output, case, dtype=dtype)
    assert_accurate(library.back(partial.output), case, logsumexp, dtype=dtype)


def test_small_tiles_are_small(run):
    """The kernel "tiles" crosses the edges of many tiles, along both axes."""
    seen = []

    def mask(b, h, i, j):
        seen.append((i.shape[-2], j.shape[-1]))
        return i >= 0

    run(attention, CASES["plain"], "tiles", NUMPY, mask=mask)
    assert len(seen) > 8
    assert all(rows < 11 and keys < 11 for rows, keys in seen)


# The yardstick itself


def test_the_oracle_by_hand():
    """Two keys of weight 1 and 3; then a sink of weight 4 beside them."""
    q, k, v = np.ones((1, 1)), np.array([[0.0], [math.log(3)]]), np.array([[0.0], [4.0]])
    assert oracle(q, k, v, scale=1.0)[:2] == (3.0, pytest.approx(math.log(4)))
    assert oracle(q, k, v, scale=1.0, sinks=[math.log(4)])[:2] == (
        pytest.approx(1.5),
        pytest.approx(math.log(8)),
    )


@pytest.mark.parametrize(
    "name", ["plain", "offset 0, L < S", "mask array", "bias", "scale", "grouped heads"]
)
def test_the_oracle_agrees_with_torch(name):
    case = replace(CASES[name], dtype="float64")
    (q, k, v), options = case.arguments()
    added = options.get("mask", options.get("bias"))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.asarray, (q, k, v)),
        attn_mask=None if added is None else torch.asarray(added),
        is_causal=options.get("is_causal", False),
        scale=options.get("scale"),
        enable_gqa=True,
    )
    assert_accurate(theirs.numpy(), case)


def test_poison_does_not_move_the_oracle():
    for case in CASES.values():
        if case.poison is not None:
            arrays, options = case.arguments(poisoned=False)
            clean, poisoned = oracle(*arrays, **options).output, exact(case).output
            assert np.array_equal(poisoned, np.where(np.isnan(poisoned), np.nan, clean), True)


def with_options(**changed):
    return lambda q, k, v, options: oracle(q, k, v, **options | changed)


def softcap_after_bias(q, k, v, options):
    options = dict(options)
    c, bias = options.pop("softcap"), options.pop("bias").astype(float)
    return oracle(
        q, k, v, **options, score_mod=lambda s, b, h, i, j: c * np.tanh((s + bias[b, h, i, j]) / c)
    )


def heads_tiled(q, k, v, options):
    """Query head h reads head h % G: right where every group has one head, wrong elsewhere."""
    times = q.shape[-3] // k.shape[-3]
    return oracle(q, np.concatenate([k] * times, -3), np.concatenate([v] * times, -3), **options)


def score_mod_after_bias(q, k, v, options):
    options = dict(options)
    mod, bias = options.pop("score_mod"), options.pop("bias").astype(float)
    return oracle(
        q, k, v, **options, score_mod=lambda s, b, h, i, j: mod(s + bias[b, h, i, j], b, h, i, j)
    )


def score_mod_before_softcap(q, k, v, options):
    options = dict(options)
    mod, c = options.pop("score_mod"), options.pop("softcap")
    return oracle(q, k, v, **options, score_mod=lambda *args: c * np.tanh(mod(*args) / c))


def one_key_dropped(q, k, v, options):
    """The last key left out, as at the edge of a tile."""
    offset = k.shape[-2] - q.shape[-2]
    return oracle(q, k[..., :-1, :], v[..., :-1, :], query_offset=offset, **options)


MISTAKES = {
    "scale of the wrong sign": ("plain", with_options(scale=-1 / math.sqrt(8))),
    "no scale": ("plain", with_options(scale=1.0)),
    "softcap after bias": ("bias × softcap", softcap_after_bias),
    "score_mod after bias": ("bias × score_mod", score_mod_after_bias),
    "score_mod before softcap": ("softcap × score_mod", score_mod_before_softcap),
    "< for <=": ("causal", with_options(query_offset=-1)),
    "top-left for bottom-right": ("causal × L < S", with_options(query_offset=0)),
    "one offset for all items": ("causal × offset array", with_options(query_offset=2)),
    "head order tiled": ("grouped heads", heads_tiled),
    "window off by one, left": ("window", with_options(window=(2, 2))),
    "window off by one, right": ("window", with_options(window=(3, 3))),
    "window ignored": ("long window", with_options(window=None)),
    "mask ignored": ("padding mask", with_options(mask=None)),
    "bias ignored": ("bias", with_options(bias=None)),
    "sink dropped": ("sinks", with_options(sinks=None)),
    "one key dropped": ("plain", one_key_dropped),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name, dtype):
    of, mistake = MISTAKES[name]
    case = replace(CASES[of], dtype=dtype)
    (q, k, v), options = case.arguments()
    wrong = mistake(q, k, v, options)
    with pytest.raises(AssertionError, match="output"):
        assert_accurate(wrong.output.astype(q.dtype), case)
    with pytest.raises(AssertionError, match="logsumexp"):
        assert_accurate(exact(case).output.astype(q.dtype), case, wrong.logsumexp)


def test_what_must_be_exact_is_exact():
    """No limit excuses a number where there is none, or a leak into an empty row."""
    case = CASES["nan seen by later rows"]
    right = exact(case).output
    for wrong in (np.nan_to_num(right), np.full_like(right, np.nan), right[..., :1]):
        with pytest.raises(AssertionError, match="nan seen by later rows: output"):
            assert_accurate(wrong, case)
    case = CASES["mask hides some rows"]
    assert_accurate(exact(case).output.astype("float32"), case)
    with pytest.raises(AssertionError, match=r"must be 0\.0"):
        assert_accurate(exact(case).output + 1e-30, case)


def test_a_failure_says_what_and_how_much():
    yard = output_yardstick(CASES["plain"], "float32")
    wrong = yard.exact.copy()
    wrong[1, 0, 2, 3] += 10 * yard.limit[1, 0, 2, 3] * yard.unit[1, 0, 2, 3]
    with pytest.raises(AssertionError, match=r"plain\[1, 0, 2, 3\] is .* limit .* textbook"):
        check(wrong, yard, "plain")
