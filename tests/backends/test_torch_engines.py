"""torch's engines without their hardware: invented devices, and stand-ins for the operators.

A stand-in computes on the CPU what the operator's documentation says, and refuses what it refuses.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch_devices import ABSENT, AMPERE, BLACKWELL, CPU, HOPPER, MPS, problem

import polyattn
from polyattn import attention, attention_partial, explain
from polyattn._dispatch import cache
from polyattn.plugin import Operands, Span
from polyattn_torch import attn_mask, device_info, engine_report, engines, route, sdpa, workarounds
from polyattn_torch.device_info import DeviceInfo, describe_device
from polyattn_torch.sdpa import Sdpa
from polyattn_torch.workarounds import EngineInputs

RNG = torch.Generator().manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=RNG).to(dtype)


Q, K, V = randn(2, 4, 6, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 5)
MASK = torch.rand(2, 1, 6, 9, generator=RNG) > 0.4
MASK[:, :, 2] = False
BIAS = torch.where(torch.rand(1, 4, 6, 9, generator=RNG) > 0.3, randn(1, 4, 6, 9), -torch.inf)


def close(one, other, **tolerance):
    torch.testing.assert_close(one, other, **tolerance)


@pytest.fixture
def on(monkeypatch):
    """Return a function that makes the CPU pass for a device, and what F is then called with."""
    seen = []
    genuine = F.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        seen.append({"query": query, "key": key, "value": value, **options})
        return genuine(query, key, value, **options)

    def forget():
        route._cached_route.cache_clear()
        cache.forget()

    def pass_for(device):
        forget()
        for module in (route, sdpa):
            monkeypatch.setattr(module, "describe_device", lambda _: device)
        monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
        return seen

    forget()
    yield pass_for
    monkeypatch.undo()
    forget()


# ---- what is known of a device ----


def test_a_device_that_is_absent_is_described():
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert describe_device("cpu") == DeviceInfo("cpu", (major, minor))
    assert describe_device("mps:0").kind == "mps"
    if not torch.cuda.is_available():
        assert describe_device("cuda:0") == DeviceInfo("cuda", (major, minor))


def test_a_cuda_device_is_described_by_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92001)
    found = device_info._describe_device.__wrapped__("cuda:1")
    assert (found.kind, found.cudnn, found.capability) == ("cuda", (9, 20, 1), (9, 0))
    assert found.prefers_cudnn
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert device_info._describe_device.__wrapped__("cuda:1")[2:] == (None, None)
    assert device_info._describe_device.__wrapped__("cuda:1").kind == "hip"


# ---- the workarounds, on the CPU in another's place ----


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
def test_a_long_sum_is_cut_on_mps(kernel, monkeypatch):
    query, key = torch.rand(2, 6, 5), torch.rand(2, 23, 5)
    options = {"window": (20, 20), "kernel": kernel}
    expected = attention(query, key, key, **options)
    summed, genuine = [], torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: summed.append(a.shape[-1]) or genuine(a, b))
    monkeypatch.setattr(workarounds, "MPS_INNER_LENGTH", 8)
    attention(query, key, key, **options)
    assert max(summed) == 23
    summed.clear()
    monkeypatch.setattr(workarounds, "LONG_SUMS_WRONG", {"cpu"})
    torch.testing.assert_close(attention(query, key, key, **options), expected)
    assert max(summed) < 8
    assert sum(summed) == 5 + 23


def agrees(q, k, v, *, tolerance=None, **options):
    expected = attention(q, k, v, kernel="dense", **options)
    close(attention(q, k, v, kernel="sdpa", **options), expected, **tolerance or {})


COARSE = {"rtol": 2e-2, "atol": 2e-2}
SQUARE = (Q, K[:, :, :6], V[:, :, :6])


def test_the_plain_call_needs_no_workaround(on):
    seen = on(HOPPER)
    for device in (HOPPER, CPU):
        on(device)
        agrees(Q, K, K)
        agrees(Q, K[:, :, :6], K[:, :, :6], is_causal=True)
    for call, is_causal in zip(seen, (False, True) * 2, strict=True):
        assert call["query"] is Q
        assert call["key"].shape[1] == 2
        assert call["enable_gqa"]
        assert call.get("attn_mask") is None
        assert call.get("is_causal", False) is is_causal


def test_on_mps_heads_are_repeated_and_sizes_padded_and_views_copied(on):
    seen = on(MPS)
    q = randn(2, 6, 4, 8).transpose(1, 2)
    agrees(q, K, V)
    (call,) = seen
    assert call["query"].is_contiguous()
    assert call["key"].shape == (2, 4, 9, 8)
    assert call["value"].shape == (2, 4, 9, 8)
    assert not call["enable_gqa"]


@pytest.mark.parametrize("value", [V, randn(2, 2, 9, 12)])
def test_sizes_are_padded_on_the_cpu_too(on, value):
    seen = on(CPU)
    agrees(Q, K, value)
    assert len({seen[0][name].shape[-1] for name in ("query", "key", "value")}) == 1
    q, k, v = (x.double().requires_grad_() for x in (Q, K, value))
    expected = torch.autograd.grad(attention(q, k, v, kernel="dense").sum(), (q, k, v))
    close(torch.autograd.grad(attention(q, k, v, kernel="sdpa").sum(), (q, k, v)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_mps_a_mask_is_whole_and_in_the_querys_dtype(on, dtype):
    seen = on(MPS)
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    agrees(q, k, v, mask=MASK, tolerance=COARSE)
    agrees(q, k, v, bias=BIAS.to(dtype), tolerance=COARSE)
    for call in seen:
        assert call["attn_mask"].dtype == dtype
        assert call["attn_mask"].shape == (2, 4, 6, 9)
        assert call["attn_mask"].is_contiguous()


def test_on_mps_a_mask_stands_in_for_is_causal_before_2_13(on):
    seen = on(MPS._replace(torch=(2, 12)))
    q, k, v = (x.half() for x in SQUARE)
    agrees(q, k, v, is_causal=True, tolerance=COARSE)
    agrees(*SQUARE, is_causal=True)
    on(MPS)
    agrees(q, k, v, is_causal=True, tolerance=COARSE)
    assert [call["is_causal"] for call in seen] == [False, True, True]
    assert [call["attn_mask"] is None for call in seen] == [False, True, True]


def test_few_groups_are_repeated_on_blackwell(on):
    seen = on(BLACKWELL)
    q, k = Q.bfloat16(), K.bfloat16()
    agrees(q, k, k, tolerance=COARSE)
    on(HOPPER)
    agrees(q, k, k, tolerance=COARSE)
    assert [call["key"].shape[1] for call in seen] == [4, 2]
    assert [call["enable_gqa"] for call in seen] == [False, True]


def test_expanded_keys_are_copied_for_the_efficient_engine(on):
    seen = on(AMPERE)
    k = randn(1, 4, 33, 8).expand(2, -1, -1, -1)
    agrees(randn(2, 4, 6, 8), k, k, mask=torch.ones(6, 33, dtype=torch.bool))
    agrees(randn(2, 4, 6, 8), k, k)
    assert [call["key"].is_contiguous() for call in seen] == [True, False]


@pytest.mark.parametrize("options", [{"mask": MASK}, {"bias": BIAS}])
def test_rows_without_keys_see_all_and_are_cleared_for_cudnn(on, options, monkeypatch):
    q, k = Q.bfloat16(), K.bfloat16()
    options = {name: x if x.dtype == torch.bool else x.bfloat16() for name, x in options.items()}
    if "bias" in options:
        options["bias"][..., 4, :] = -torch.inf
    seen = on(HOPPER)
    agrees(q, k, k, **options, tolerance=COARSE)
    mask = seen[0]["attn_mask"]
    rows = mask if mask.dtype == torch.bool else mask != -torch.inf
    assert rows.any(-1).all()
    assert not attention(q, k, k, **options)[:, :, 2 if "mask" in options else 4].any()


# ---- operators ----


def test_an_operator_with_other_arguments_is_none():
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert engines.operator(name, "query", "scale") is not None
    assert engines.operator(name, "query", "no_such_argument") is None
    assert engines.operator("_no_such_operator", "query") is None


@pytest.mark.parametrize(
    ("engine", "operator"),
    [("FLASH_CPU", "_cpu"), ("FLASH", "_flash"), ("CUDNN", "_cudnn"), ("EFFICIENT", "_efficient")],
)
def test_an_engine_without_its_operator_is_refused(monkeypatch, engine, operator):
    asked = problem(logsumexp=True, dtype="float32" if engine == "FLASH_CPU" else "bfloat16")
    assert getattr(engines, engine).reason_against(asked, HOPPER) is None  # this torch has it
    monkeypatch.setattr(engines, operator, None)
    assert "does not have it" in getattr(engines, engine).reason_against(asked, HOPPER)


def test_without_engines_the_logsumexp_is_left_to_the_array_api_kernels(on, monkeypatch):
    on(CPU)
    assert explain(Q, K, V, logsumexp=True).chosen.kernel == "sdpa"
    monkeypatch.setattr(engines, "_cpu", None)
    on(CPU)
    explanation = explain(Q, K, V, logsumexp=True)
    assert explanation.chosen.kernel == "dense"
    assert "(flash: this release of torch does not have it" in str(explanation)


def test_without_flash_a_band_is_made_a_mask(on, monkeypatch):
    banded = problem(key=(2, 2, 64, 16), window=(3, 0))
    on(BLACKWELL)
    chosen = route.route_of(banded)
    # The quirks concern other engines: no heads are repeated.
    assert (chosen.engine, chosen.banded, chosen.workarounds) == (engines.FLASH, False, set())
    monkeypatch.setattr(engines, "_flash", None)
    on(HOPPER)
    assert route.route_of(banded).engine is None
    assert route.route_of(banded).banded
    assert Sdpa().reasons_against(banded) == []


class Refusal(NamedTuple):
    """A call that an engine does not support on a device, and its reason."""

    engine: Any
    options: dict
    reason: str
    device: DeviceInfo = HOPPER


BAND = {"window": (3, 0)}
REFUSALS = {
    "flash float32": Refusal(engines.FLASH, {"dtype": "float32"}, "float16 and bfloat16 only"),
    "flash head of 264": Refusal(engines.FLASH, {"query": (2, 4, 64, 264)}, "up to 256"),
    "flash mask": Refusal(engines.FLASH, {"mask": (64, 64)}, "causal and window only"),
    "flash no rows": Refusal(engines.FLASH, {"query": (2, 4, 0, 16)}, "empty arrays"),
    "flash offset an item": Refusal(
        engines.FLASH, {"query_offset": (2,), "is_causal": True}, "cannot express this band"
    ),
    "flash no key in the band": Refusal(
        engines.FLASH, BAND | {"query_offset": 70}, "cannot express this band"
    ),
    "flash window before the last rows": Refusal(
        engines.FLASH,
        {"query": (2, 4, 9, 16), "key": (2, 4, 5, 16), "window": (1, None), "query_offset": 0},
        "cannot express this band",
    ),
    "flash Turing": Refusal(engines.FLASH, BAND, "8.0", AMPERE._replace(capability=(7, 5))),
    "flash absent": Refusal(engines.FLASH, BAND, "8.0", ABSENT),
    "flash vmap": Refusal(engines.FLASH, BAND | {"facts": {"transforms": {"vmap"}}}, "torch.func"),
    "cudnn head of 136": Refusal(engines.CUDNN, {"query": (2, 4, 64, 136)}, "up to 128 numbers"),
    "cudnn value of 12": Refusal(engines.CUDNN, {"value": (2, 4, 64, 12)}, "multiples of 8"),
    "cudnn one key": Refusal(engines.CUDNN, {"key": (2, 4, 1, 16)}, "S = 1"),
    "cudnn float32": Refusal(engines.CUDNN, {"dtype": "float32"}, "float16 and bfloat16 only"),
    "cudnn Ampere": Refusal(engines.CUDNN, {}, "does not prefer", AMPERE),
    "cudnn gradient": Refusal(engines.CUDNN, {"facts": {"requires_grad": True}}, "inference"),
    "efficient float64": Refusal(engines.EFFICIENT, {"dtype": "float64"}, "not support float64"),
    "efficient absent": Refusal(engines.EFFICIENT, {}, "no such device is available", ABSENT),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_engine_says_what_it_does_not_support(name):
    refusal = REFUSALS[name]
    asked = problem(**refusal.options)
    assert refusal.reason in refusal.engine.reason_against(asked, refusal.device)


def test_flash_needs_its_derivative_where_one_is_asked_for(monkeypatch):
    banded = problem(window=(3, 0))
    differentiated = banded._replace(requires_grad=True)
    assert engines.FLASH.reason_against(differentiated, AMPERE) is None
    monkeypatch.setattr(engines, "_flash_backward", None)
    assert engines.FLASH.reason_against(banded, AMPERE) is None
    assert "does not have it" in engines.FLASH.reason_against(differentiated, AMPERE)


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        (HOPPER, {"dtype": "float64"}, "efficient: it does not support float64"),
        (HOPPER, {"facts": {"requires_grad": True}}, "not differentiable"),
        (MPS, {}, "no engine of torch returns the logsumexp here"),
    ],
)
def test_sdpa_lists_why_no_engine_returns_the_logsumexp(on, device, options, reason):
    on(device)
    asked = problem(logsumexp=True, **options)
    assert reason in "".join(Sdpa().reasons_against(asked))


# ---- logsumexp on the CPU ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_are_padded_for_the_logsumexp_too(dtype):
    options = {"bias": BIAS.to(dtype), "mask": MASK}
    for value in (V, K, randn(2, 2, 9, 12)):
        arrays = [x.to(dtype) for x in (Q, K, value)]
        found = attention_partial(*arrays, kernel="sdpa", **options)
        expected = attention_partial(*arrays, kernel="dense", **options)
        close(found.output, expected.output)
        close(found.logsumexp, expected.logsumexp)


def test_logsumexp_reads_vectors_whatever_their_stride():
    q, k, v = (x.mT.contiguous().mT for x in (Q, K, K))
    found = attention_partial(q, k, v, kernel="sdpa")
    expected = attention_partial(q, k, v, kernel="dense")
    close(found.output, expected.output)
    close(found.logsumexp, expected.logsumexp)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ((Q[:, :, :0], K, V), "support empty arrays"),
        ((Q, K, V[..., :0]), "support empty arrays"),
        ((Q.clone().requires_grad_(), K, V), "not differentiable"),
        ((Q.half(), K.half(), V.half()), "off by 5e-5"),
    ],
)
def test_logsumexp_is_left_to_other_kernels_where_torch_has_none(arrays, reason):
    with pytest.raises(polyattn.UnsupportedError, match=reason):
        attention_partial(*arrays, kernel="sdpa")
    assert attention_partial(*arrays).logsumexp.shape == arrays[0].shape[:-1]


def test_logsumexp_under_a_transform_is_differentiated():
    def total(q):
        return attention_partial(q, K[0], V[0]).logsumexp.sum()

    with pytest.raises(polyattn.UnsupportedError, match="not differentiable"):
        torch.func.grad(lambda q: attention_partial(q, K, V, kernel="sdpa").logsumexp.sum())(Q)
    assert torch.func.grad(total)(Q[0]).any()


# ---- CUDA's operators, by stand-ins on the CPU ----


def textbook(query, key, value, scale, seen=None, bias=None):
    """Return output and logsumexp of arrays (B, H, L, D), in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = scale * query.double() @ key.mT
    scores = scores if bias is None else scores + bias.double()
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    logsumexp = scores.logsumexp(-1)
    weights = torch.exp(scores - logsumexp.nan_to_num(neginf=0)[..., None])
    return (weights @ value).to(query.dtype), logsumexp.float()


def flash(
    query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, debug, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    """FlashAttention: (B, L, H, D); bands count from the last row and key; +inf without keys."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rows, keys, size = q.shape[2], k.shape[2], q.shape[3]
    assert (max_q, max_k, cum_q, cum_k, dropout_p, debug) == (rows, keys, None, None, 0, False)
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k.shape[3] == v.shape[3] == size <= 256
    assert size % 8 == 0
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert not any(step % 8 for step in (*x.stride()[:-1], x.storage_offset()))
    left = window_size_left if window_size_left >= 0 else rows + keys
    right = window_size_right if window_size_right >= 0 else rows + keys
    assert not is_causal or (window_size_left, window_size_right) == (-1, 0)
    position = torch.arange(rows)[:, None] + keys - rows
    column = torch.arange(keys)
    seen = (column >= position - left) & (column <= position + right)
    output, logsumexp = textbook(q, k, v, scale, seen)
    logsumexp = torch.where(logsumexp == -torch.inf, torch.inf, logsumexp)
    return output.transpose(1, 2), logsumexp, None, None, None


def cudnn(query, key, value, bias, compute, dropout_p, is_causal, debug, *, scale):
    """Run cuDNN: 16-bit vectors of up to 128 by 8, at 16 bytes; NaN without keys."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert (compute, dropout_p, debug) == (True, 0, False)
    assert not (is_causal and bias is not None)
    for x in (query, key, value):
        assert x.shape[-1] % 8 == 0
        assert x.shape[-1] <= 128
        assert x.stride(-1) == 1
        assert not any(step % 8 for step in (*x.stride()[:-1], x.storage_offset()))
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.ndim == 4
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    output, logsumexp = textbook(query, key, value, scale, seen, bias)
    dead = logsumexp == -torch.inf
    output = output.masked_fill(dead[..., None], torch.nan)
    return output, logsumexp.masked_fill(dead, torch.nan)[..., None], *[None] * 7


def efficient(query, key, value, bias, compute, dropout_p, is_causal, *, scale):
    """Run the memory-efficient engine: no groups, aligned rows, a logsumexp by 32."""
    step = 4 if query.dtype == torch.float32 else 8
    assert dropout_p == 0
    assert not (is_causal and bias is not None)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    for x in (query, key, value):
        assert x.shape[-1] % step == 0
        assert x.is_contiguous()
        assert x.storage_offset() % step == 0
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(-1) == 1
        assert not any(stride % 16 for stride in bias.stride()[:-1])
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    output, logsumexp = textbook(query, key, value, scale, seen.tril() if is_causal else None, bias)
    rows = -(-query.shape[2] // 32) * 32
    return output, F.pad(logsumexp, (0, rows - query.shape[2]), value=torch.inf), None, None


@pytest.fixture
def cuda(on, monkeypatch):
    """Return a function that makes the CPU pass for a CUDA device, and the operators called."""
    called = []

    def stand_in(operator):
        def call(*arrays, **options):
            called.append(operator.__name__)
            return operator(*arrays, **options)

        return call

    def pass_for(device):
        for operator in (flash, cudnn, efficient):
            monkeypatch.setattr(engines, f"_{operator.__name__}", stand_in(operator))
        on(device)
        return called

    return pass_for


BANDS = {
    "causal to the last": {"is_causal": True},
    "causal from the first": {"is_causal": True, "query_offset": 0},
    "causal in a cache": {"is_causal": True, "query_offset": 2},
    "rows without keys": {"is_causal": True, "query_offset": -2},
    "window": {"window": (2, 1)},
    "window to the left": {"window": (2, 0)},
    "causal window": {"is_causal": True, "window": (3, None)},
    "window to the left alone": {"window": (1, None)},
    "window to the right alone": {"window": (None, 2)},
    "window from the first": {"window": (2, 1), "query_offset": 0},
    "window of one": {"window": (0, 0), "scale": 0.4},
}


@pytest.mark.parametrize("lengths", [(6, 9), (9, 6), (1, 6)])
@pytest.mark.parametrize("case", BANDS)
def test_a_band_goes_to_flash_attention(cuda, case, lengths):
    called = cuda(AMPERE)
    q, k = randn(2, 4, lengths[0], 12).bfloat16(), randn(2, 2, lengths[1], 12).bfloat16()
    v = randn(2, 2, lengths[1], 20).bfloat16()
    found = attention_partial(q, k, v, kernel="sdpa", **BANDS[case])
    expected = attention_partial(q, k, v, kernel="dense", **BANDS[case])
    close(found.output, expected.output, **COARSE)
    close(found.logsumexp, expected.logsumexp)
    close(attention(q, k, v, kernel="sdpa", **BANDS[case]), expected.output, **COARSE)
    if lengths == (6, 9):
        assert called == ["flash"] * 2


STRIDED = randn(2, 4, 6, 9)[..., 1:]
MISALIGNED = randn(2 * 2 * 9 * 8 + 1)[1:].reshape(2, 2, 9, 8)


@pytest.mark.parametrize(
    ("engine", "device", "dtype", "options"),
    [
        ("flash", AMPERE, torch.bfloat16, {"window": (2, 1)}),
        ("cudnn", HOPPER, torch.bfloat16, {}),
        ("efficient", AMPERE, torch.float32, {}),
    ],
)
def test_an_engine_is_given_aligned_contiguous_vectors(cuda, engine, device, dtype, options):
    called = cuda(device)
    q, k = STRIDED.to(dtype), MISALIGNED.to(dtype)
    q, k = (x.mT.contiguous().mT for x in (q, k)) if engine == "flash" else (q, k)
    found = attention_partial(q, k, k, kernel="sdpa", **options)
    close(found.logsumexp, attention_partial(q, k, k, kernel="dense", **options).logsumexp)
    assert called == [engine]


CUDA_LOGSUMEXP = {
    "plain": {},
    "mask": {"mask": MASK},
    "mask of one axis": {"mask": MASK[0, 0, 0]},
    "bias": {"bias": BIAS},
    "offset per item": {"is_causal": True, "query_offset": torch.tensor([-2, 4])},
    "square causal": {"is_causal": True},
}


@pytest.mark.parametrize(
    ("device", "dtype", "size", "engine"),
    [
        (HOPPER, torch.bfloat16, 8, "cudnn"),
        (HOPPER, torch.float16, 12, "efficient"),
        (AMPERE, torch.bfloat16, 6, "efficient"),
        (AMPERE, torch.float32, 7, "efficient"),
    ],
)
@pytest.mark.parametrize("case", CUDA_LOGSUMEXP)
def test_logsumexp_on_cuda(cuda, case, device, dtype, size, engine):
    called, options = cuda(device), CUDA_LOGSUMEXP[case]
    keys = 6 if case == "square causal" else 9
    q, k, v = (
        randn(2, heads, length, size).to(dtype) for heads, length in ((4, 6), (2, keys), (2, keys))
    )
    if "bias" in options:
        options = {"bias": options["bias"].to(dtype)}
    found = attention_partial(q, k, v, kernel="sdpa", **options)
    expected = attention_partial(q, k, v, kernel="dense", **options)
    close(found.output, expected.output, **(COARSE if dtype.itemsize == 2 else {}))
    close(found.logsumexp, expected.logsumexp)
    by_flash = case in ("plain", "square causal") and dtype.itemsize == 2 and engine != "cudnn"
    assert called == ["flash" if by_flash else engine]


@pytest.mark.parametrize("is_plain", [True, False])
def test_torch_is_given_aligned_arrays_on_cuda(monkeypatch, is_plain):
    class OnCuda(torch.Tensor):
        is_cuda = True

    given = []
    engine = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *x, **o: given.append(x) or engine(*x, **o)
    )
    q = randn(2 * 4 * 6 * 8 + 1)[1:].reshape(2, 4, 6, 8).as_subclass(OnCuda)
    k = randn(2, 4, 6, 9)[..., 1:]
    options = {} if is_plain else {"mask": MASK[..., :6]}
    found = attention(q, k, k, kernel="sdpa", **options)
    close(found.as_subclass(torch.Tensor), attention(q, k, k, kernel="dense", **options))
    assert [(x.storage_offset(), x.stride(-2)) for x in given[0]] == [(0, 8)] * 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_aligns_arrays(dynamic):
    program = torch.compile(engines.aligned, fullgraph=True, backend="eager", dynamic=dynamic)
    for x in randn(2, 4, 6, 9)[..., 1:], randn(2, 6, 4, 8).transpose(1, 2):
        found = program(x)
        assert found.stride(-1) == 1
        assert found.stride(-2) % 8 == 0
        assert (found == x).all()


def test_arrays_whose_copy_is_no_better_stay_where_they_are():
    x = randn(2, 4, 6, 9)
    assert engines.aligned(x) is x
    assert engines.aligned(x.flatten()[9:].reshape(-1, 9)).storage_offset() == 0


def test_a_gradient_that_cudnn_would_spoil_is_the_efficient_engines(cuda):
    called = cuda(HOPPER)
    q, k, v = (randn(1, heads, 64, 8).bfloat16().requires_grad_() for heads in (4, 2, 2))
    mask = torch.rand(64, 64, generator=RNG) > 0.5
    mask[7] = False
    output = attention(q, k, v, mask=mask, kernel="sdpa")
    close(output, attention(q, k, v, mask=mask, kernel="dense"), **COARSE)
    assert called == ["efficient"]
    for gradient in torch.autograd.grad(output.float().sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_a_gradient_that_no_engine_computes_is_refused(on, monkeypatch):
    on(HOPPER)
    differentiated = problem(mask=(64, 64), facts={"requires_grad": True})
    assert Sdpa().reasons_against(differentiated) == []
    monkeypatch.setattr(engines, "_efficient", None)
    on(HOPPER)
    (reason,) = Sdpa().reasons_against(differentiated)
    assert "no engine of torch can be trusted here (efficient: this release" in reason
    assert Sdpa().reasons_against(problem(mask=(64, 64))) == []


# What a stand-in cannot show: that the operators take these arguments, and give these shapes.
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (engines.FLASH, {"window": (3, 0)}),
        (engines.FLASH, {"is_causal": True}),
        (engines.CUDNN, {}),
        (engines.CUDNN, {"mask": (6, 9)}),
        (engines.EFFICIENT, {}),
        (engines.EFFICIENT, {"mask": (6, 9)}),
    ],
)
def test_the_genuine_operators_take_what_they_are_given(engine, options, requires_grad):
    asked = problem((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16), logsumexp=True, **options)
    asked = asked._replace(requires_grad=requires_grad)
    q, k = (
        torch.empty(2, heads, length, 16, device="meta", dtype=torch.bfloat16)
        for heads, length in ((4, 6), (2, 9))
    )
    q.requires_grad_(requires_grad)
    mask = torch.empty(1, 1, 6, 9, device="meta", dtype=torch.bool) if "mask" in options else None
    output, logsumexp = engine.call(asked, EngineInputs(q, k, k, mask))
    assert output.shape == (2, 4, 6, 16)
    assert output.dtype == torch.bfloat16
    assert output.requires_grad is requires_grad
    assert logsumexp.shape == (2, 4, 6)
    assert logsumexp.dtype == torch.float32


# ---- what is remarked ----


def remark(*arrays, **options):
    return explain(*arrays, **options).chosen.remark


def test_explain_names_the_engine():
    assert remark(Q, K, K) == "torch's engine: flash"
    half = [x.bfloat16() for x in (Q, K, V)]
    assert remark(*half) == "torch's engine: math, which holds all scores"
    assert remark(Q, K, V) == "torch's engine: flash; vectors padded to one size"
    assert remark(Q, K, K, logsumexp=True) == "torch's engine: flash, called by name"


def test_the_remark_follows_what_sdpa_would_be_given(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch, "_fused_sdp_choice", lambda *args, **options: asked.append((args, options)) or 0
    )
    explain(Q, K, K, mask=MASK, scale=0.3)
    explain(Q.clone().requires_grad_(), K, K, bias=BIAS)
    explain(Q, Q, Q, is_causal=True)
    (masked, of_masked), (biased, _), (causal, of_causal) = asked
    assert (masked[0].shape, masked[1].shape) == ((1, 4, 6, 8), (1, 2, 9, 8))
    assert masked[3].dtype == torch.bool
    assert of_masked == {"scale": 0.3, "enable_gqa": True}
    assert (biased[3].dtype, biased[0].requires_grad) == (torch.float32, True)
    assert (causal[3], causal[5], of_causal["enable_gqa"]) == (None, True, False)


def test_a_remark_never_raises_and_never_computes(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    assert remark(Q, K, K) is not None
    shape = (1, 1, 2**40, 64)  # which no memory holds
    assert remark(shape, shape, shape, library="torch") is None
    monkeypatch.setattr(torch, "_fused_sdp_choice", refuse)
    assert remark(Q, K, K) is None


def test_on_cuda_float32_says_its_precision(monkeypatch):
    monkeypatch.setattr(engine_report, "_choice", lambda problem, route: "cudnn")
    said = Sdpa().remark(problem(dtype="float32"))
    assert said == "torch's engine: cudnn; float32 matmul precision: highest"


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_one_column_for_all_keys_is_expanded_in_memory_for_cuda(name):
    column = {"mask": torch.ones(6, 1, dtype=torch.bool), "bias": torch.ones(6, 1)}[name]
    there = problem((2, 4, 6, 8), (2, 2, 9, 8), dtype="float32", **{name: column})
    there = there._replace(device="cuda:0")
    for lengths in ((6, 9), (None, None)):
        some = there._replace(query_length=lengths[0], key_length=lengths[1])
        x, keys = Operands(Q, K, K, **{name: column}), Span(0, lengths[1])
        made = attn_mask.attn_mask(some, x, keys, banded=False)
        assert made.shape[-2:] == (6, 9)
        assert made.is_contiguous()
