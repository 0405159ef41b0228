"""The checks that others use, by their rules as published, and ours.

KernelBench (423217d): `src/kernelbench/eval.py`, `get_tolerance_for_precision` and
`run_and_check_correctness`; `KernelBench/level1/97_ScaledDotProductAttention.py`. FlashInfer-Bench
(40e6ca7): `bench/evaluators/default.py`, `bench/utils.py: compute_error_stats`,
`bench/config.py: BenchmarkConfig`. torch 2.13: `torch/testing/_internal/
common_methods_invocations.py`, the OpInfo of `scaled_dot_product_attention`.
"""

import functools
import inspect
import warnings

import ml_dtypes
import numpy as np

from polyattn import attention, attention_vjp
from polyattn.conformance import CASES, ESSENTIAL
from polyattn.conformance.functions.check import DIFFERS, RAISES, has_gradients
from polyattn.conformance.functions.report import planned
from pool.functions import converters, to_torch


def calls(function, shape, rng, *, uniform=False, options=True):
    """Yield the calls of a test: plain, and with each option that the function has."""
    B, H, G, L, S, D = shape  # noqa: N806
    draw = rng.random if uniform else rng.standard_normal
    q, k, v = draw((B, H, L, D)), draw((B, G, S, D)), draw((B, G, S, D))
    mask = rng.random((B, H, L, S)) < 0.7
    mask[..., 0] = True
    every = {
        "is_causal": True,
        "window": (S // 8, 0),
        "mask": mask,
        "attn_mask": mask,
        "bias": rng.standard_normal((1, H, L, S)),
        "softcap": 5.0,
        "scale": 0.2,
        "sinks": rng.standard_normal(H),
        "query_offset": 0,
        "key_lengths": rng.integers(1, S + 1, B),
    }
    taken = inspect.signature(function).parameters.keys() if options else set()
    yield (q, k, v), {}
    yield from (((q, k, v), {name: x}) for name, x in every.items() if name in taken)
    if "block_table" in taken and S % 16 == 0:
        table = rng.permutation(B * S // 16).reshape(B, -1)
        pools = [np.empty((B * S // 16, G, 16, D)) for _ in range(2)]
        for pool, x in zip(pools, (k, v), strict=True):
            pool[table] = np.moveaxis(x.reshape(B, G, -1, 16, D), 2, 1)
        yield (q, *pools), {"block_table": table, "key_lengths": every["key_lengths"]}


@functools.cache
def exact(call):
    """Return our output of a call in float64, and the function that pulls a gradient back."""
    options = {("mask" if name == "attn_mask" else name): x for name, x in call.options.items()}
    wide = [x.astype("float64") for x in call.arrays]
    return attention_vjp(*wide, **options) if call.backward else (attention(*wide, **options), None)


class Call:
    """A call of a dtype; equal calls of a rule have one exact result."""

    def __init__(self, arrays, options, dtype, backward):
        self.arrays = [x.astype(dtype) for x in arrays]
        self.options, self.backward = options, backward
        q, _, v = arrays
        lengths = str(options.get("key_lengths"))
        self.key = q.shape, v.shape, q.flat[0], v.flat[-1], lengths, *options, str(dtype), backward

    def __eq__(self, other):
        return self.key == other.key

    def __hash__(self):
        return hash(self.key)


def is_found(function, call, dtype, agrees, *, backward=True):
    """Return whether the output of a call, or a gradient, does not agree with ours in float64."""
    to, back = converters(function)
    on_torch = to is to_torch
    call = Call(*call, dtype, backward and on_torch)
    floats = {n: x for n, x in call.options.items() if getattr(x, "dtype", "") == "float64"}
    given = call.options | {name: x.astype(dtype) for name, x in floats.items()}
    inputs = [to(x) for x in call.arrays]
    if call.backward:
        inputs = [x.requires_grad_() for x in inputs]
    returned = function(*inputs, **given)
    output = returned[0] if isinstance(returned, tuple) else returned
    right, pullback = exact(call)
    if output.shape != right.shape or not agrees(back(output), right):
        return True
    if not call.backward:
        return False
    along = np.random.default_rng(5).standard_normal(right.shape)
    output.backward(to(along.astype(dtype)))
    pairs = zip([x.grad for x in inputs], pullback(along)[:3], strict=True)
    return not all(agrees(back(x), y) for x, y in pairs)


def close(atol, rtol):
    """Return a comparison as that of `numpy.allclose`."""

    def agrees(x, exact):
        wide = x.astype("float64")
        return bool(np.all(np.abs(wide - exact) <= atol + rtol * np.abs(exact)))

    return agrees


def allclose_of_one_shape(function):
    """One shape, random normal inputs, `allclose` with 1e-2."""
    some = calls(function, (2, 4, 4, 128, 128, 64), np.random.default_rng(0))
    return any(is_found(function, call, "float32", close(1e-2, 1e-2)) for call in some)


def ten_random_shapes(function):
    """Ten random shapes, `torch.testing.assert_close`."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        B, G, times, S, D = (int(rng.integers(1, n)) for n in (4, 4, 3, 200, 129))  # noqa: N806
        shape = B, G * times, G, int(rng.integers(1, S + 1)), S, D
        some = calls(function, shape, rng)
        if any(is_found(function, call, "float32", close(1e-5, 1.3e-6)) for call in some):
            return True
    return False


def kernelbench(function, dtype, tolerance):
    """Five uniform inputs of one shape, without options; one of the 1,024 heads."""
    rng = np.random.default_rng(42)
    for _ in range(5):
        (call,) = calls(function, (1, 1, 1, 512, 512, 1024), rng, uniform=True, options=False)
        if is_found(function, call, dtype, close(tolerance, tolerance), backward=False):
            return True
    return False


def not_both(x, exact):
    """Agree if each element is finite and is off by at most 1e-2, or by a share of 1e-2."""
    x, exact = x.astype("float32"), exact.astype("float32")
    error = np.abs(x - exact)
    wrong = (error > 1e-2) & (error / (np.abs(exact) + 1e-8) > 1e-2)
    return bool(np.isfinite(x).all() and not wrong.any())


def flashinfer_bench(function):
    """Decoding of 512 and of 2,048 keys, and 512 causal rows, in bfloat16."""
    rng, taken = np.random.default_rng(2), inspect.signature(function).parameters
    for S in (512, 2048):  # noqa: N806
        for call in calls(function, (2, 4, 1, 1, S, 128), rng):
            serves = call[1].keys() >= {"key_lengths"} or "key_lengths" not in taken
            plain = call[1].keys() <= {"key_lengths", "block_table"}
            if (
                serves
                and plain
                and is_found(function, call, ml_dtypes.bfloat16, not_both, backward=False)
            ):
                return True
    if "is_causal" in taken:
        for call in calls(function, (1, 4, 1, 512, 512, 128), rng):
            if "is_causal" in call[1] and is_found(
                function, call, ml_dtypes.bfloat16, not_both, backward=False
            ):
                return True
    return False


def op_info(function):
    """The samples of torch: 3 rows of 6 keys, uniform in ±9, and its tolerance of float32."""
    rng = np.random.default_rng(3)
    for heads in (1, 4):
        for (q, k, v), options in calls(function, (4, heads, heads, 3, 6, 8), rng, uniform=True):
            if options.keys() <= {"is_causal", "attn_mask", "mask", "bias"}:
                call = [18 * x - 9 for x in (q, k, v)], options
                if is_found(function, call, "float32", close(5e-5, 5e-6)):
                    return True
    return False


def ours(cases):
    """Return the check by a form of the suite, which ends at the first case that differs."""

    def check(function):
        to, back = converters(function)
        plan = planned(cases.values(), has_gradients(to))
        found = (check_of(function, case, to, back) for case, _, check_of in plan)
        return any(finding.status in (DIFFERS, RAISES) for finding in found)

    return check


#: The checks by name.
RULES = {
    "allclose 1e-2, one shape": allclose_of_one_shape,
    "KernelBench, 16 bits": lambda f: kernelbench(f, "float16", 1e-2),
    "KernelBench, float32": lambda f: kernelbench(f, "float32", 1e-4),
    "FlashInfer-Bench": flashinfer_bench,
    "torch OpInfo": op_info,
    "ten random shapes": ten_random_shapes,
    "check --quick": ours(ESSENTIAL),
    "check": ours(CASES),
}


def finds(rule, function):
    """Return whether a check finds a function; what raises is found."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return RULES[rule](function)
    except Exception:
        return True
