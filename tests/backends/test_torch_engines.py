"""torch's engines without their hardware: quirks on invented devices, operators as stand-ins.

A stand-in computes on the CPU what the operator's documentation says, and refuses what it refuses.
"""

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import polyattn
from polyattn import attention, attention_partial, explain
from polyattn._dispatch import cache
from polyattn.plugin import Operands, Span
from polyattn_torch import (
    attn_mask,
    device_info,
    engine_report,
    engines,
    flex,
    route,
    sdpa,
    selftest,
    workarounds,
)
from polyattn_torch.backend import TorchBackend
from polyattn_torch.device_info import DeviceInfo, describe_device
from polyattn_torch.flex import Flex
from polyattn_torch.quirks import QUIRKS, Workaround
from polyattn_torch.sdpa import Sdpa
from polyattn_torch.workarounds import EngineInputs

RNG = torch.Generator().manual_seed(0)
CPU = DeviceInfo("cpu", (2, 13))
HOPPER = DeviceInfo("cuda", (2, 12), (9, 20, 0), (9, 0))
AMPERE = DeviceInfo("cuda", (2, 12), (9, 20, 0), (8, 0))
BLACKWELL = DeviceInfo("cuda", (2, 12), (9, 20, 0), (10, 0))
MPS = DeviceInfo("mps", (2, 13))


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=RNG).to(dtype)


Q, K, V = randn(2, 4, 6, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 5)
MASK = torch.rand(2, 1, 6, 9, generator=RNG) > 0.4
MASK[:, :, 2] = False
BIAS = torch.where(torch.rand(4, 6, 9, generator=RNG) > 0.3, randn(4, 6, 9), -torch.inf)


def close(one, other, **tolerance):
    torch.testing.assert_close(one, other, **tolerance)


def problem(
    query=(2, 4, 64, 16), key=None, value=None, *, dtype="bfloat16", requires_grad=False, **options
):
    key = key or query
    shapes = {name: tuple(x.shape) for name, x in options.items() if isinstance(x, torch.Tensor)}
    decided = explain(
        query, key, value or key, dtype=dtype, library="torch", device="cuda:0", **options | shapes
    )
    return decided.problem._replace(requires_grad=requires_grad)


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


@pytest.mark.parametrize(
    ("device", "prefers"),
    [
        (HOPPER, True),
        (BLACKWELL, True),
        (AMPERE, False),
        (HOPPER._replace(cudnn=(9, 15, 0)), False),
        (HOPPER._replace(cudnn=(9, 15, 1)), True),
        (HOPPER._replace(cudnn=None), False),
        (HOPPER._replace(capability=(12, 0)), False),
    ],
)
def test_cudnn_comes_first_on_hopper_and_blackwell(device, prefers):
    assert device.prefers_cudnn is prefers


# ---- the table of quirks ----

LONG = (1, 1, 2**16, 16)
HALF_BIAS = problem(bias=(64, 64))._replace(bias_dtype="float32")
MASKED = problem(mask=(64, 64))
GROUPED = problem(key=(2, 2, 64, 16))
CAUSAL = problem(is_causal=True)
ODD = (2, 4, 65, 16)

# By upstream and workaround: where the row holds, and where next to that it does not.
ROWS = {
    ("pytorch#191612", Workaround.REFUSE): (
        [(HALF_BIAS, HOPPER), (HALF_BIAS, MPS), (HALF_BIAS._replace(bias_dtype="float64"), HOPPER)],
        [
            (HALF_BIAS, CPU),
            (HALF_BIAS._replace(bias_dtype="bfloat16"), HOPPER),
            (HALF_BIAS._replace(dtype="float32", bias_dtype="float64"), HOPPER),
            (MASKED, HOPPER),
        ],
    ),
    ("pytorch#196678", Workaround.AVOID_CUDNN): (
        [
            (problem(mask=(64, 64), requires_grad=True), HOPPER),
            (problem(bias=(64, 64), requires_grad=True), BLACKWELL),
            (problem(window=(3, 0), requires_grad=True), HOPPER._replace(torch=(2, 11))),
            (MASKED._replace(transforms=frozenset({"grad"})), HOPPER),
        ],
        [
            (MASKED, HOPPER),
            (problem(mask=(64, 64), requires_grad=True), AMPERE),
            (problem(mask=(64, 64), requires_grad=True), HOPPER._replace(torch=(2, 10))),
            (problem(mask=(64, 64), requires_grad=True, dtype="float32"), HOPPER),
            (problem((2, 4, 128, 16), mask=(128, 128), requires_grad=True), HOPPER),
            (problem(is_causal=True, requires_grad=True), HOPPER),
        ],
    ),
    ("cudnn-frontend#262, #943", Workaround.CLEAR_EMPTY_ROWS): (
        [
            (MASKED, HOPPER),
            (problem(bias=(64, 64)), HOPPER),
            (problem(is_causal=True, query_offset=-3), BLACKWELL),
            (problem(window=(0, 0), query_offset=3), HOPPER),
        ],
        [
            (MASKED, HOPPER._replace(cudnn=(9, 25, 0))),
            (MASKED, AMPERE),
            (problem(mask=(64, 64), dtype="float32"), HOPPER),
            (problem(window=(3, 0)), HOPPER),
            (CAUSAL, HOPPER),
        ],
    ),
    ("pytorch#193893", Workaround.REPEAT_HEADS): (
        [(GROUPED, BLACKWELL)],
        [
            (GROUPED, HOPPER),
            (problem(), BLACKWELL),
            (GROUPED, BLACKWELL._replace(cudnn=(9, 26, 0))),
            (problem(key=(2, 2, 64, 16), dtype="float32"), BLACKWELL),
            (problem((2, 16, 64, 16), (2, 8, 64, 16)), BLACKWELL),
        ],
    ),
    ("pytorch#191937", Workaround.CONTIGUOUS): (
        [(problem(ODD, mask=(65, 65)), AMPERE), (problem(ODD, window=(1, 1)), HOPPER)],
        [(problem(ODD), AMPERE), (MASKED, AMPERE), (problem(ODD, mask=(65, 65)), CPU)],
    ),
    ("pytorch#162588", Workaround.REFUSE): (
        [(problem(LONG, mask=(2**16, 2**16)), AMPERE)],
        [
            (problem(LONG), AMPERE),
            (problem(LONG, mask=(2**16, 2**16)), HOPPER),
            (problem((1, 1, 2**15, 16), mask=(2**15, 2**15)), AMPERE),
        ],
    ),
    ("pytorch#174861", Workaround.REFUSE): (
        [(problem(), MPS._replace(torch=(2, 10)))],
        [(problem(), MPS._replace(torch=(2, 11))), (problem(), HOPPER._replace(torch=(2, 10)))],
    ),
    ("pytorch#195910", Workaround.EXPLICIT_MASK): (
        [
            (CAUSAL, MPS._replace(torch=(2, 12))),
            (problem(is_causal=True, dtype="float16"), MPS._replace(torch=(2, 11))),
        ],
        [
            (CAUSAL, MPS),
            (CAUSAL, HOPPER),
            (problem(), MPS._replace(torch=(2, 12))),
            (problem(is_causal=True, dtype="float32"), MPS._replace(torch=(2, 12))),
            (problem((2, 4, 1, 16), is_causal=True), MPS._replace(torch=(2, 12))),
        ],
    ),
    ("pytorch#176767", Workaround.PAD): (
        [(problem(value=(2, 4, 64, 8)), MPS)],
        [(problem(), MPS), (problem(value=(2, 4, 64, 8)), HOPPER)],
    ),
    ("pytorch#181133", Workaround.CONTIGUOUS): ([(problem(), MPS)], [(problem(), HOPPER)]),
    ("pytorch#184180", Workaround.EXPAND_MASK): (
        [(MASKED, MPS), (CAUSAL, MPS._replace(torch=(2, 12)))],
        [(problem(), MPS), (CAUSAL, MPS), (MASKED, HOPPER)],
    ),
    ("no report; a precaution", Workaround.BIAS): (
        [(MASKED, MPS)],
        [(problem(), MPS), (MASKED, HOPPER)],
    ),
    ("pytorch#184122", Workaround.REFUSE): (
        [(problem(scale=0.5), MPS)],
        [(problem(), MPS), (problem(scale=0.5), HOPPER)],
    ),
    ("pytorch#179352", Workaround.REFUSE): (
        [(problem((2, 4, 2**15, 16)), MPS)],
        [(problem((1, 4, 2**15, 16)), MPS), (problem((2, 4, 2**15, 16)), HOPPER)],
    ),
    ("pytorch#149261", Workaround.REFUSE): (
        [(problem((1, 9, 2**14, 16), dtype="float32"), MPS), (problem((1, 9, 2**14, 16)), MPS)],
        [
            (problem((1, 4, 2**14, 16), dtype="float32"), MPS),
            (problem((1, 8, 2**14, 16)), MPS),
            (problem((1, 9, 2**14, 16), dtype="float32"), HOPPER),
        ],
    ),
    ("pytorch#193487, #195163", Workaround.REFUSE): (
        [(problem(key=(2, 4, 2**15 - 1, 16)), MPS)],
        [
            (problem(key=(2, 4, 2**15 - 2, 16)), MPS),
            (problem((2, 4, 8, 16), (2, 4, 2**15, 16)), MPS),
            (problem((2, 4, 64, 16), (2, 4, 0, 16)), MPS),
            (problem(key=(2, 4, 2**15, 16)), HOPPER),
        ],
    ),
    ("pytorch#149132", Workaround.REPEAT_HEADS): (
        [(GROUPED, MPS)],
        [(problem(), MPS), (GROUPED, HOPPER)],
    ),
    ("seen in torch 2.13", Workaround.CLEAR_EMPTY_ROWS): (
        [
            (problem(mask=(64, 64), logsumexp=True), CPU),
            (problem(bias=(64, 64), logsumexp=True), AMPERE),
            (problem(is_causal=True, query_offset=-1, logsumexp=True), CPU),
        ],
        [
            (MASKED, CPU),
            (problem(is_causal=True, logsumexp=True), CPU),
            (problem(window=(2, 0), logsumexp=True), CPU),
            (problem(mask=(64, 64), logsumexp=True), MPS),
        ],
    ),
    ("seen in torch 2.13", Workaround.EXPLICIT_MASK): (
        [
            (problem(is_causal=True, scale=0.0), CPU),
            (problem(is_causal=True, scale=-0.4, dtype="float32"), CPU),
            (problem(is_causal=True, scale=-0.4, logsumexp=True, requires_grad=True), CPU),
        ],
        [
            (problem(is_causal=True, scale=0.4), CPU),
            (problem(scale=0.0), CPU),
            (problem(window=(3, 0), scale=0.0), CPU),
            (problem(is_causal=True, scale=0.0), HOPPER),
        ],
    ),
    ("read in torch 2.13", Workaround.REFUSE): (
        [(problem(scale=0.0), AMPERE), (problem(is_causal=True, scale=-0.4), HOPPER)],
        [(problem(scale=0.4), AMPERE), (problem(is_causal=True, scale=0.0), CPU)],
    ),
    ("seen in torch 2.13", Workaround.REFUSE): (
        [
            (problem((2, 4, 5, 16), (2, 4, 0, 16), bias=(5, 0), requires_grad=True), CPU),
            (problem((2, 4, 0, 16), bias=(0, 0), requires_grad=True), AMPERE),
            (problem((0, 4, 5, 16), bias=(5, 5))._replace(transforms={"grad"}), CPU),
        ],
        [
            (problem((2, 4, 0, 16), bias=(0, 0)), CPU),
            (problem((2, 4, 0, 16), requires_grad=True), CPU),
            (problem(bias=(64, 64), requires_grad=True), CPU),
        ],
    ),
    ("seen in torch 2.13", Workaround.PAD): (
        [
            (problem(value=(2, 4, 64, 8), dtype="float32"), CPU),
            (problem(value=(2, 4, 64, 24), dtype="float64"), CPU),
            (problem(value=(2, 4, 64, 8), dtype="float32", logsumexp=True), CPU),
        ],
        [
            (problem(value=(2, 4, 64, 8)), CPU),
            (problem(dtype="float32"), CPU),
            (problem(value=(2, 4, 64, 8), dtype="float32"), AMPERE),
            (problem(value=(2, 4, 64, 0), dtype="float32"), CPU),
            (problem(value=(2, 4, 64, 8), dtype="float32")._replace(transforms={"vmap"}), CPU),
        ],
    ),
}


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda q: f"{q.upstream}-{q.workaround.name}")
def test_a_quirk_holds_where_it_should_and_not_next_to_it(quirk):
    holds, does_not = ROWS[quirk.upstream, quirk.workaround]
    for met, device in holds:
        assert quirk.predicate(met, device), (met, device)
    for other, device in does_not:
        assert not quirk.predicate(other, device), (other, device)


def test_each_quirk_has_one_row_of_tests():
    assert sorted(ROWS, key=str) == sorted(((q.upstream, q.workaround) for q in QUIRKS), key=str)


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


def test_a_quirk_refused_names_its_upstream(on):
    on(HOPPER)
    assert Sdpa().reasons_against(HALF_BIAS) == [
        "it reads the bits of a bias of another dtype as 16-bit numbers (pytorch#191612)"
    ]
    on(MPS)
    assert Sdpa().reasons_against(problem(scale=0.5)) == [
        "it uses the scale of an earlier call on MPS (pytorch#184122)"
    ]
    assert Sdpa().reasons_against(problem()) == []


# ---- the workarounds, on the CPU in another's place ----


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
        options["bias"][:, 4] = -torch.inf
    seen = on(HOPPER)
    agrees(q, k, k, **options, tolerance=COARSE)
    mask = seen[0]["attn_mask"]
    rows = mask if mask.dtype == torch.bool else mask != -torch.inf
    assert rows.any(-1).all()
    assert not attention(q, k, k, **options)[:, :, 2 if "mask" in options else 4].any()


# ---- operators that are not there ----


def test_an_operator_that_is_absent_or_takes_others_is_none():
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert engines.operator(name, "query", "scale") is not None
    assert engines.operator(name, "query", "no_such_argument") is None
    assert engines.operator("_no_such_operator", "query") is None


@pytest.mark.parametrize("name", ["_cpu", "_flash", "_flash_backward", "_cudnn", "_efficient"])
def test_this_torch_has_all_operators(name):
    assert getattr(engines, name) is not None


@pytest.mark.parametrize(
    ("name", "engine"),
    [("_cpu", "FLASH_CPU"), ("_flash", "FLASH"), ("_cudnn", "CUDNN"), ("_efficient", "EFFICIENT")],
)
def test_an_engine_whose_operator_is_absent_is_not_called(on, monkeypatch, name, engine):
    asked = problem(logsumexp=True, dtype="float32" if engine == "FLASH_CPU" else "bfloat16")
    assert getattr(engines, engine).reason_against(asked, HOPPER) is None
    monkeypatch.setattr(engines, name, None)
    assert "does not have it" in getattr(engines, engine).reason_against(asked, HOPPER)


@pytest.mark.without_native
def test_without_engines_the_logsumexp_is_left_to_the_array_api_kernels(on, monkeypatch):
    on(CPU)
    assert explain(Q, K, V, logsumexp=True).chosen.kernel == "sdpa"
    monkeypatch.setattr(engines, "_cpu", None)
    on(CPU)
    explanation = explain(Q, K, V, logsumexp=True)
    assert explanation.chosen.kernel == "dense"
    assert "(flash: this release of torch does not have it" in str(explanation)


def test_without_flash_a_band_is_made_a_mask(on, monkeypatch):
    banded = problem(window=(3, 0))
    on(HOPPER)
    assert route.route_of(banded).engine is engines.FLASH
    monkeypatch.setattr(engines, "_flash", None)
    on(HOPPER)
    assert route.route_of(banded).engine is None
    assert route.route_of(banded).banded
    assert Sdpa().reasons_against(banded) == []


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
        ((Q[:, :, :0], K, V), "no empty arrays"),
        ((Q, K[:, :, :0], V[:, :, :0]), "no empty arrays"),
        ((Q[..., :0], K[..., :0], V), "no empty arrays"),
        ((Q, K, V[..., :0]), "no empty arrays"),
        ((Q[:0], K[:0], V[:0]), "no empty arrays"),
        ((Q.clone().requires_grad_(), K, V), "no derivative"),
        ((Q.half(), K.half(), V.half()), "off by 5e-5"),
        ((Q.bfloat16(), K.bfloat16(), V.bfloat16()), "off by 5e-5"),
    ],
)
def test_logsumexp_is_left_alone_where_torch_has_none(arrays, reason):
    with pytest.raises(polyattn.UnsupportedError, match=reason):
        attention_partial(*arrays, kernel="sdpa")
    assert attention_partial(*arrays).logsumexp.shape == arrays[0].shape[:-1]


def test_logsumexp_under_a_transform_is_differentiated():
    def total(q):
        return attention_partial(q, K[0], V[0]).logsumexp.sum()

    with pytest.raises(polyattn.UnsupportedError, match="no derivative"):
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


@pytest.mark.parametrize("lengths", [(6, 9), (6, 6), (9, 6), (1, 6)])
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


def test_flash_is_given_aligned_vectors_in_rows(cuda):
    called = cuda(AMPERE)
    q, k = (x.bfloat16().mT.contiguous().mT for x in (Q, K))
    v = torch.nn.functional.pad(k, (1, 0))[..., 1:]
    found = attention(q, k, v, window=(2, 1), kernel="sdpa")
    close(found, attention(q, k, v, window=(2, 1), kernel="dense"), **COARSE)
    assert called == ["flash"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float32"}, "float16 and bfloat16 only"),
        ({"query": (2, 4, 64, 264)}, "up to 256"),
        ({"mask": (64, 64)}, "no mask"),
        ({"query_offset": (2,), "is_causal": True}, "cannot express this band"),
        ({"window": (2, 0), "query_offset": 70}, "cannot express this band"),
        ({"query": (2, 4, 0, 16)}, "no empty"),
        ({"query": (2, 4, 9, 16), "key": (2, 4, 5, 16), "window": (1, None), "query_offset": 0},
         "cannot express this band"),
    ],
)  # fmt: skip
def test_flash_says_what_it_cannot(options, reason):
    assert reason in engines.FLASH.reason_against(problem(**options), HOPPER)
    assert engines.FLASH.reason_against(problem(window=(3, 0)), HOPPER) is None


def test_flash_needs_its_hardware_and_a_derivative(monkeypatch):
    banded = problem(window=(3, 0))
    assert "8.0" in engines.FLASH.reason_against(banded, AMPERE._replace(capability=(7, 5)))
    assert "8.0" in engines.FLASH.reason_against(banded, DeviceInfo("cuda", (2, 13)))
    mapped = banded._replace(transforms={"vmap"})
    assert "torch.func" in engines.FLASH.reason_against(mapped, AMPERE)
    differentiated = banded._replace(requires_grad=True)
    assert engines.FLASH.reason_against(differentiated, AMPERE) is None
    monkeypatch.setattr(engines, "_flash_backward", None)
    assert engines.FLASH.reason_against(banded, AMPERE) is None
    assert "does not have it" in engines.FLASH.reason_against(differentiated, AMPERE)


CUDA_LOGSUMEXP = {
    "plain": {},
    "mask": {"mask": MASK},
    "mask of one axis": {"mask": MASK[0, 0, 0]},
    "bias": {"bias": BIAS},
    "offset per item": {"is_causal": True, "query_offset": torch.tensor([-2, 4])},
}


@pytest.mark.parametrize(
    ("device", "dtype", "size", "engine"),
    [
        (HOPPER, torch.bfloat16, 8, "cudnn"),
        (HOPPER, torch.float16, 12, "efficient"),
        (HOPPER, torch.float32, 8, "efficient"),
        (AMPERE, torch.bfloat16, 6, "efficient"),
        (AMPERE, torch.float32, 7, "efficient"),
        (BLACKWELL, torch.bfloat16, 8, "cudnn"),
    ],
)
@pytest.mark.parametrize("case", CUDA_LOGSUMEXP)
def test_logsumexp_on_cuda(cuda, case, device, dtype, size, engine):
    called = cuda(device)
    q, k, v = (
        randn(2, heads, length, size).to(dtype) for heads, length in ((4, 6), (2, 9), (2, 9))
    )
    options = CUDA_LOGSUMEXP[case]
    if "bias" in options:
        options = {"bias": options["bias"].to(dtype)}
    tolerance = COARSE if dtype.itemsize == 2 else {}
    found = attention_partial(q, k, v, kernel="sdpa", **options)
    expected = attention_partial(q, k, v, kernel="dense", **options)
    close(found.output, expected.output, **tolerance)
    close(found.logsumexp, expected.logsumexp)
    plain_half = case == "plain" and dtype.itemsize == 2 and engine != "cudnn"
    assert called == ["flash" if plain_half else engine]


def test_the_efficient_engine_is_given_aligned_arrays(cuda):
    called = cuda(AMPERE)
    q = randn(2 * 4 * 6 * 8 + 1)[1:].reshape(2, 4, 6, 8)
    found = attention_partial(q, q, q, kernel="sdpa")
    close(found.logsumexp, attention_partial(q, q, q, kernel="dense").logsumexp)
    assert called == ["efficient"]


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


def test_cudnn_is_given_aligned_arrays(cuda):
    called = cuda(HOPPER)
    q = randn(2, 4, 6, 9).bfloat16()[..., 1:]
    k = randn(2 * 2 * 9 * 8 + 1).bfloat16()[1:].reshape(2, 2, 9, 8)
    found = attention_partial(q, k, k, kernel="sdpa")
    close(found.logsumexp, attention_partial(q, k, k, kernel="dense").logsumexp)
    assert called == ["cudnn"]


def test_logsumexp_of_square_causal_scores_on_cuda(cuda):
    for device, dtype, engine in (
        (HOPPER, torch.bfloat16, "cudnn"),
        (AMPERE, torch.bfloat16, "flash"),
        (AMPERE, torch.float32, "efficient"),
    ):
        called = cuda(device)
        called.clear()
        q, k = randn(2, 4, 6, 8).to(dtype), randn(2, 2, 6, 8).to(dtype)
        found = attention_partial(q, k, k, is_causal=True, kernel="sdpa")
        expected = attention_partial(q, k, k, is_causal=True, kernel="dense")
        close(found.logsumexp, expected.logsumexp)
        assert called == [engine]


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        ({"dtype": "float64"}, HOPPER, "efficient: it does not take float64"),
        ({"requires_grad": True}, HOPPER, "no derivative"),
        ({}, MPS, "no engine of torch gives the logsumexp here"),
        ({}, DeviceInfo("hip", (2, 13)), "no engine of torch gives the logsumexp here"),
        ({}, DeviceInfo("cuda", (2, 13)), "efficient: no such device is available"),
        ({"query": (2, 4, 0, 16)}, HOPPER, "cudnn: it takes no empty arrays"),
    ],
)
def test_logsumexp_is_refused_where_no_engine_has_it(on, options, device, reason):
    on(device)
    asked = problem(logsumexp=True, **options)
    assert reason in "".join(Sdpa().reasons_against(asked))


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        ({"query": (2, 4, 64, 136)}, HOPPER, "up to 128 numbers, in multiples of 8"),
        ({"value": (2, 4, 64, 12)}, HOPPER, "up to 128 numbers, in multiples of 8"),
        ({"key": (2, 4, 1, 16)}, HOPPER, "no single key"),
        ({"dtype": "float32"}, HOPPER, "float16 and bfloat16 only"),
        ({}, AMPERE, "does not prefer"),
        ({"requires_grad": True}, HOPPER, "inference"),
    ],
)
def test_cudnn_says_what_it_cannot(options, device, reason):
    assert reason in engines.CUDNN.reason_against(problem(**options), device)


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
    differentiated = problem(mask=(64, 64), requires_grad=True)
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


def chosen(*arrays, **options):
    return explain(*arrays, **options).chosen


@pytest.mark.without_native
def test_explain_names_the_engine():
    assert chosen(Q, K, K).remark == "torch's engine: flash"
    assert "torch's engine: flash" in str(explain(Q, K, K))
    half = [x.bfloat16() for x in (Q, K, V)]
    assert chosen(*half).remark == "torch's engine: math, which holds all scores"
    assert chosen(Q, K, V).remark == ("torch's engine: flash; vectors padded to one size")
    by_name = "torch's engine: flash, called by name"
    assert chosen(Q, K, K, logsumexp=True).remark == by_name


def test_the_remark_follows_what_sdpa_would_be_given(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch, "_fused_sdp_choice", lambda *args, **options: asked.append((args, options)) or 0
    )
    explain(Q, K, K, mask=MASK, scale=0.3)
    explain(Q.clone().requires_grad_(), K, K, bias=BIAS)
    explain(Q, Q, Q, is_causal=True)
    masked, biased, causal = asked
    assert masked[0][0].shape == (1, 4, 6, 8)
    assert masked[0][1].shape == (1, 2, 9, 8)
    assert masked[0][3].dtype == torch.bool
    assert masked[1] == {"scale": 0.3, "enable_gqa": True}
    assert biased[0][3].dtype == torch.float32
    assert biased[0][0].requires_grad
    assert causal[0][3] is None
    assert causal[0][5] is True
    assert causal[1]["enable_gqa"] is False


@pytest.mark.without_native
def test_a_remark_never_raises_and_never_computes(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    assert chosen(Q, K, K).remark is not None
    shape = (1, 1, 2**40, 64)  # which no memory holds
    assert explain(shape, shape, shape, library="torch").chosen.remark is None
    assert Sdpa().remark(problem()) is None or torch.cuda.is_available()
    monkeypatch.setattr(torch, "_fused_sdp_choice", refuse)
    assert chosen(Q, K, K).remark is None


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


# ---- flex ----


def test_flex_runs_by_itself_on_cuda_where_it_is_worth_compiling(monkeypatch):
    monkeypatch.setattr(flex, "HAS_TRITON", True)

    def rule(b, h, i, j):
        return i >= j

    def status(shape, device="cuda:0", **options):
        found = explain(shape, shape, shape, library="torch", device=device, **options)
        return next(c.status for c in found.candidates if c.kernel == "flex")

    many, few = (2, 16, 1024, 64), (2, 16, 64, 64)
    assert status(many, score_mod=lambda s, b, h, i, j: s) == "chosen"
    assert status((2, 4, 2**14, 64), mask=rule) == "chosen"
    assert status(few, mask=rule) == "on request"
    assert status(many, softcap=2.0) == "on request"
    assert status(many, device="cpu", mask=rule) == "on request"
    decode = explain(
        (64, 64, 1, 64), (64, 64, 2**13, 64), (64, 64, 2**13, 64), score_mod=lambda s, *_: s,
        library="torch", device="cuda:0",
    )  # fmt: skip
    assert "flex" not in decode.chosen.kernel


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float64"}, "no float64 on CUDA"),
        ({"query": (2, 4, 64, 8)}, "vectors of 16"),
        ({"value": (2, 4, 64, 8)}, "vectors of 16"),
    ],
)
def test_flex_says_what_it_cannot_on_cuda(monkeypatch, options, reason):
    monkeypatch.setattr(flex, "HAS_TRITON", True)
    assert reason in "".join(Flex().reasons_against(problem(**options)))
    assert Flex().reasons_against(problem(logsumexp=True)) == []


def test_flex_needs_its_compiler_and_its_logsumexp(monkeypatch):
    monkeypatch.setattr(flex, "HAS_TRITON", False)
    assert "Triton" in "".join(Flex().reasons_against(problem()))
    monkeypatch.setattr(flex, "HAS_TRITON", True)
    monkeypatch.setattr(flex, "AuxRequest", None)
    assert "no logsumexp" in "".join(Flex().reasons_against(problem(logsumexp=True)))
    assert Flex().reasons_against(problem()) == []
    told = explain((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), library="torch", logsumexp=True)
    (refused,) = (c for c in told.candidates if c.kernel == "flex")
    assert refused.reasons == ("it computes logsumexp on cuda only, and this call is on cpu",)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("batch", [(2,), (1, 2)])
def test_flex_returns_the_logsumexp(monkeypatch, batch):
    # Uncompiled, which alone has one on the CPU.
    monkeypatch.setattr(flex, "_compiled", lambda problem, codes: flex._call)
    q, k, v = (x.reshape(*batch, *x.shape[1:]) for x in (Q, K, V))
    asked = explain(q, k, v, mask=MASK[0, 0], logsumexp=True).problem
    operands = Operands(query=q, key=k, value=v, mask=MASK[0, 0])
    output, logsumexp = Flex()(asked, operands, polyattn._dispatch.registry.loaded("torch"))
    expected = attention_partial(q, k, v, mask=MASK[0, 0], kernel="dense")
    close(output, expected.output)
    close(logsumexp, expected.logsumexp)
    assert (logsumexp[..., 2] == -torch.inf).all()


# ---- the self-test ----


class Broken(Sdpa):
    """Sdpa on a device that does `spoil` to what it returns."""

    def __init__(self, spoil):
        self.spoil = spoil

    def __call__(self, problem, operands, backend):
        output, logsumexp = super().__call__(problem, operands, backend)
        return self.spoil(problem, output), logsumexp


def leak(asked, output):
    return output + (0.02 if asked.is_causal else 0)


def collapse(asked, output):
    return output * torch.nan if asked.mask and asked.dtype == "float16" else output


def crash(asked, output):
    raise RuntimeError("no kernel image")


def test_the_cpu_passes_the_self_test_whatever_autocast_says():
    assert selftest.try_out("cpu", Sdpa()) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert selftest.try_out("cpu", Sdpa()) is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (leak, "off by 0.02 in causal float16"),
        (collapse, "off by nan in a mask"),
        (crash, "failed in causal float16: no kernel image"),
        (lambda p, x: x.flip(1) if p.key_heads == 2 else x, "in grouped heads"),
        (lambda p, x: x.flip(0) if p.dtype == "float32" else x, "in a mask in float32"),
    ],
)
def test_a_device_that_is_wrong_fails_the_self_test(spoil, said):
    assert said in selftest.try_out("cpu", Broken(spoil))


def test_the_self_test_sees_one_key_too_many(monkeypatch):
    genuine = F.scaled_dot_product_attention

    def leaking(query, key, value, *, is_causal, **options):
        if not is_causal:
            return genuine(query, key, value, is_causal=False, **options)
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(diagonal=1)
        return genuine(query, key, value, **options | {"attn_mask": seen})

    monkeypatch.setattr(F, "scaled_dot_product_attention", leaking)
    assert "in causal float16" in selftest.try_out("cpu", Sdpa())


def test_a_device_that_fails_its_self_test_is_refused(on, monkeypatch):
    tried = []

    def try_out(device, kernel):
        tried.append(device)
        return "its self-test on cpu is off by 1"

    monkeypatch.setattr(selftest, "try_out", try_out)
    monkeypatch.setattr(sdpa, "TESTED", frozenset({"cpu"}))
    selftest._self_test.cache_clear()
    on(CPU)
    try:
        for options in ({}, {"is_causal": True}, {"mask": MASK}):
            explanation = explain(Q, K, V, **options)
            assert explanation.chosen.kernel != "sdpa"
            assert "its self-test on cpu is off by 1" in str(explanation)
        assert tried == ["cpu"]
    finally:
        selftest._self_test.cache_clear()
    assert "mps" in selftest.TESTED
    assert selftest.self_test("no such device", Sdpa()) is None


COMPILED = """
import torch
from polyattn import attention, attention_partial
from polyattn_torch import sdpa, selftest
q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8)
mask = torch.rand(6, 9) > 0.4
mask[2] = False
def logsumexp(q, k, kernel="sdpa"):
    return attention_partial(q, k, k, kernel=kernel, mask=mask).logsumexp
compiled = torch.compile(logsumexp, fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(q, k), logsumexp(q, k, "dense"))
sdpa.TESTED = frozenset({"cpu"})
compiled = torch.compile(
    lambda q: attention(q, q, q, kernel="sdpa"), fullgraph=True, backend="eager"
)
torch.testing.assert_close(compiled(q), attention(q, q, q, kernel="dense"))
assert selftest._self_test.cache_info().misses == 1
"""


@pytest.mark.slow
def test_the_logsumexp_compiles_and_the_self_test_runs_as_a_call_is_compiled(run_python):
    run_python(COMPILED)


# ---- the hardware ----


def test_hardware_that_is_not_here_is_not_known():
    backend = TorchBackend()
    assert backend.hardware("cpu") == {}
    assert backend.hardware("mps:0") == {} or torch.backends.mps.is_available()
    assert backend.hardware("cuda:99") == {}
    assert isinstance(backend.engines(), dict)


def test_hardware_is_described_as_torch_knows_it(monkeypatch):
    properties = types.SimpleNamespace(name="H200", total_memory=2**37, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    known = {"name": "H200", "memory": 2**37, "compute_capability": "9.0"}
    assert TorchBackend().hardware("cuda:1") == known
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "compute_capability" not in TorchBackend().hardware("cuda:1")


def test_engines_have_versions(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92001)
    assert TorchBackend().engines() == {"cuda": "13.0", "cudnn": "9.20.1"}
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert TorchBackend().engines() == {"rocm": "6.4"}

    def broken():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    assert TorchBackend().engines() == {}


class Foreign:
    """An array of another library, of which DLPack is all that is known."""

    def __init__(self, tensor):
        self.tensor, self.dtype = tensor, types.SimpleNamespace(name="float32")

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_arrays_of_other_libraries_are_placed_without_a_copy():
    backend, tensor = TorchBackend(), randn(3, 4)
    for device in (None, "cpu"):
        assert backend.place(Foreign(tensor), device).data_ptr() == tensor.data_ptr()
        assert backend.place(tensor, device) is tensor
    array = np.ones((2, 3), np.float32)
    assert backend.place(array, "cpu").data_ptr() == array.ctypes.data
    assert backend.place(tensor, "meta").device.type == "meta"
