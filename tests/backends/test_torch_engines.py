"""torch's engines without their hardware: invented devices, and stand-ins for the operators.

A stand-in computes on the CPU what the operator's documentation says, and refuses what it refuses.
"""

import pytest
import torch
import torch.nn.functional as F
from arrays import close, draw, to_torch
from torch_devices import ABSENT, AMPERE, BLACKWELL, CPU, HOPPER, MPS, OLD_MPS, problem

import polyattn
from polyattn import attention, attention_partial, explain
from polyattn._dispatch import cache
from polyattn.plugin import Operands, Span
from polyattn_torch import attn_mask, device_info, engine_report, engines, route, sdpa, workarounds
from polyattn_torch.sdpa import Sdpa
from polyattn_torch.workarounds import EngineInputs

Q, K, V, WIDE = draw((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 5), (2, 2, 9, 12), to=to_torch)
MASK = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(0)) > 0.4
MASK[:, :, 2] = False
BIAS = torch.where(
    Q[:1, :, :, :1] > K[0, 0, :, 0] - 1, Q[:1, :, :, 1:2] * V[0, 0, :, 0], -torch.inf
)
#: Of numbers of 16 bits.
COARSE = 3


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


def test_a_long_sum_is_cut_on_mps(monkeypatch):
    query, key = torch.rand(2, 6, 5), torch.rand(2, 23, 5)
    options = {"window": (20, 20), "kernel": "dense"}
    expected = attention(query, key, key, **options)
    summed, genuine = [], torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: summed.append(a.shape[-1]) or genuine(a, b))
    monkeypatch.setattr(workarounds, "MPS_INNER_LENGTH", 8)
    attention(query, key, key, **options)
    assert max(summed) == 23
    summed.clear()
    monkeypatch.setattr(workarounds, "LONG_SUMS_WRONG", {"cpu"})
    close(attention(query, key, key, **options), expected)
    assert max(summed) < 8
    assert sum(summed) == 5 + 23


def agrees(q, k, v, **options):
    found, expected = (attention(q, k, v, kernel=name, **options) for name in ("sdpa", "dense"))
    close(found, expected, COARSE if q.dtype.itemsize == 2 else 40)


EXPANDED = draw((1, 4, 33, 8), to=to_torch)[0].expand(2, -1, -1, -1)
PLAIN = {"heads": 2, "enable_gqa": True, "is_causal": False, "attn_mask": None}
CAUSAL, WHOLE = {"is_causal": True}, (2, 4, 6, 9)
#: A device, a call there (query, key, value, options), and what torch's function gets of it.
CALLS = {
    "plain": (CPU, (Q, K, K, {}), PLAIN | {"copies": False}),
    "causal": (CPU, (Q, K[:, :, :6], K[:, :, :6], CAUSAL), PLAIN | CAUSAL | {"copies": False}),
    "sizes": (CPU, (Q, K, V, {}), {"sizes": {8}, "heads": 2}),
    "heads on MPS": (
        MPS, (Q.mT.contiguous().mT, K, V, {}),
        {"sizes": {8}, "heads": 4, "enable_gqa": False, "is_contiguous": (True, True)},
    ),
    "mask on MPS": (MPS, (Q, K, V, {"mask": MASK}), {"attn_mask": (torch.float32, WHOLE)}),
    "bias on MPS": (
        MPS, (Q.bfloat16(), K.bfloat16(), V.bfloat16(), {"bias": BIAS.bfloat16()}),
        {"attn_mask": (torch.bfloat16, WHOLE)},
    ),
    "causal in 16 bits before torch 2.13 on MPS": (
        OLD_MPS, (Q.half(), Q.half(), Q.half(), CAUSAL),
        {"is_causal": False, "attn_mask": (torch.float16, (2, 4, 6, 6))},
    ),
    "causal before torch 2.13 on MPS": (OLD_MPS, (Q, Q, Q, CAUSAL), CAUSAL),
    "groups on Blackwell": (
        BLACKWELL, (Q.bfloat16(), K.bfloat16(), K.bfloat16(), {}), {"heads": 4, "enable_gqa": False}
    ),
    "groups on Hopper": (HOPPER, (Q.bfloat16(), K.bfloat16(), K.bfloat16(), {}), PLAIN),
    "rows without keys on Hopper": (
        HOPPER, (Q.bfloat16(), K.bfloat16(), K.bfloat16(), {"mask": MASK}), {"sees_all": True}
    ),
    "expanded keys and a mask": (
        AMPERE, (Q, EXPANDED, EXPANDED, {"mask": torch.ones(6, 33, dtype=torch.bool)}),
        {"is_contiguous": (True, True)},
    ),
    "expanded keys": (AMPERE, (Q, EXPANDED, EXPANDED, {}), {"is_contiguous": (True, False)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_torch_gets_what_is_right_on_a_device(on, name):
    device, (q, k, v, options), wanted = CALLS[name]
    seen = on(device)
    agrees(q, k, v, **options)
    (call,) = seen
    query, key, value, mask = (call.get(x) for x in ("query", "key", "value", "attn_mask"))
    given = call | {
        "heads": key.shape[1],
        "sizes": {x.shape[-1] for x in (query, key, value)},
        "copies": query is not q,
        "is_contiguous": (query.is_contiguous(), key.is_contiguous()),
        "attn_mask": None if mask is None else (mask.dtype, mask.shape),
        "sees_all": mask is not None and bool(mask.any(-1).all()),
    }
    assert {x: given.get(x, False) for x in wanted} == wanted
    assert device != MPS or mask is None or mask.is_contiguous()


# ---- operators ----


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


BAND, BEFORE = {"window": (3, 0)}, {"query": (2, 4, 9, 16), "key": (2, 4, 5, 16), "query_offset": 0}
TURING = AMPERE._replace(capability=(7, 5))
#: An engine, a call that it does not support on a device, and its reason.
REFUSALS = {
    "flash float32": ("FLASH", {"dtype": "float32"}, HOPPER, "float16 and bfloat16 only"),
    "flash mask": ("FLASH", {"mask": (64, 64)}, HOPPER, "causal and window only"),
    "flash offset an item": (
        "FLASH", {"query_offset": (2,), "is_causal": True}, HOPPER, "cannot express this band"
    ),
    "flash window before the last rows": (
        "FLASH", BEFORE | {"window": (1, None)}, HOPPER, "cannot express this band"
    ),
    "flash Turing": ("FLASH", BAND, TURING, "8.0"),
    "flash vmap": ("FLASH", BAND | {"facts": {"transforms": {"vmap"}}}, HOPPER, "torch.func"),
    "cudnn head of 136": ("CUDNN", {"query": (2, 4, 64, 136)}, HOPPER, "up to 128 numbers"),
    "cudnn value of 12": ("CUDNN", {"value": (2, 4, 64, 12)}, HOPPER, "multiples of 8"),
    "cudnn one key": ("CUDNN", {"key": (2, 4, 1, 16)}, HOPPER, "S = 1"),
    "cudnn float32": ("CUDNN", {"dtype": "float32"}, HOPPER, "float16 and bfloat16 only"),
    "cudnn Ampere": ("CUDNN", {}, AMPERE, "does not prefer"),
    "cudnn gradient": ("CUDNN", {"facts": {"requires_grad": True}}, HOPPER, "inference"),
    "efficient float64": ("EFFICIENT", {"dtype": "float64"}, HOPPER, "not support float64"),
    "efficient absent": ("EFFICIENT", {}, ABSENT, "no such device is available"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_an_engine_says_what_it_does_not_support(name):
    engine, options, device, reason = REFUSALS[name]
    assert reason in getattr(engines, engine).reason_against(problem(**options), device)


TRAINED = {"facts": {"requires_grad": True}}


@pytest.mark.parametrize(
    ("device", "options", "without", "reason"),
    [
        (HOPPER, {"logsumexp": True, "dtype": "float64"}, None, "it does not support float64"),
        (HOPPER, {"logsumexp": True} | TRAINED, None, "not differentiable"),
        (MPS, {"logsumexp": True}, None, "no engine of torch returns the logsumexp here"),
        (CPU, {"logsumexp": True, "dtype": "float16"}, None, "off by 5e-5"),
        (CPU, {"logsumexp": True, "value": (2, 4, 64, 0)}, None, "support empty arrays"),
        (HOPPER, {"logsumexp": True}, "_cudnn", None),
        (AMPERE, {"window": (3, 0)} | TRAINED, "_flash_backward", None),
        (HOPPER, {"mask": (64, 64)} | TRAINED, "_efficient", "no engine of torch can be trusted"),
        (HOPPER, {"mask": (64, 64)} | TRAINED, None, None),
        (HOPPER, {"mask": (64, 64)}, "_efficient", None),
    ],
)
def test_sdpa_lists_why_no_engine_computes_a_call(
    on, monkeypatch, device, options, without, reason
):
    on(device)
    if without:
        monkeypatch.setattr(engines, without, None)
    reasons = "".join(Sdpa().reasons_against(problem(**options)))
    assert reason in reasons if reason else not reasons


def test_logsumexp_under_a_transform_is_differentiated():
    with pytest.raises(polyattn.UnsupportedError, match="not differentiable"):
        torch.func.grad(lambda q: attention_partial(q, K, V, kernel="sdpa").logsumexp.sum())(Q)
    assert torch.func.grad(lambda q: attention_partial(q, K[0], V[0]).logsumexp.sum())(Q[0]).any()


# ---- CUDA's operators, by stand-ins on the CPU ----


def textbook(query, key, value, scale, seen, bias=None):
    """Return output and logsumexp of arrays (B, H, L, D), in float64, with their gradients."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = scale * query.double() @ key.mT + (0 if bias is None else bias.double())
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return (weights @ value).to(query.dtype), scores.logsumexp(-1).float()


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
    seen = seen.tril() if is_causal else seen
    output, logsumexp = textbook(query, key, value, scale, seen, bias)
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
    "rows without keys": {"is_causal": True, "query_offset": -2},
    "window": {"window": (2, 1)},
    "causal window": {"is_causal": True, "window": (3, None)},
    "window to the left alone": {"window": (1, None)},
    "window to the right alone": {"window": (None, 2)},
    "window of one": {"window": (0, 0), "scale": 0.4},
}


@pytest.mark.parametrize("lengths", [(6, 9), (9, 6)])
@pytest.mark.parametrize("case", BANDS)
def test_a_band_goes_to_flash_attention(cuda, case, lengths):
    called = cuda(AMPERE)
    rows, keys = lengths
    shapes = (2, 4, rows, 12), (2, 2, keys, 12), (2, 2, keys, 20)
    q, k, v = draw(*shapes, to=to_torch, dtype="bfloat16")
    found = attention_partial(q, k, v, kernel="sdpa", **BANDS[case])
    expected = attention_partial(q, k, v, kernel="dense", **BANDS[case])
    close(found.output, expected.output, COARSE)
    close(found.logsumexp, expected.logsumexp)
    close(attention(q, k, v, kernel="sdpa", **BANDS[case]), expected.output, COARSE)
    if lengths == (6, 9):
        assert called == ["flash"] * 2


ONE_MORE, MANY = draw((2, 4, 6, 9), (2 * 4 * 9 * 8 + 1), to=to_torch)
STRIDED, MISALIGNED = ONE_MORE[..., 1:], MANY[1 : 2 * 2 * 9 * 8 + 1].reshape(2, 2, 9, 8)


PER_ITEM = {"is_causal": True, "query_offset": torch.tensor([-2, 4])}
#: An engine that returns the logsumexp, its device, dtype and size of vectors, and a call.
BY_NAME = {
    "plain": ("cudnn", HOPPER, "bfloat16", 8, {}),
    "bias": ("cudnn", HOPPER, "bfloat16", 8, {"bias": BIAS}),
    "plain in 16 bits": ("flash", HOPPER, "float16", 12, {}),
    "mask in 16 bits": ("efficient", HOPPER, "float16", 12, {"mask": MASK}),
    "mask of one axis": ("efficient", AMPERE, "float32", 7, {"mask": MASK[0, 0, 0]}),
    "offset per item": ("efficient", AMPERE, "float32", 7, PER_ITEM),
    "causal, square, by cudnn": ("cudnn", HOPPER, "bfloat16", 8, {"is_causal": True}),
    "causal, square": ("efficient", AMPERE, "float32", 7, {"is_causal": True}),
    "not aligned for flash": ("flash", AMPERE, "bfloat16", 0, {"window": (2, 1)}),
    "not aligned for cudnn": ("cudnn", HOPPER, "bfloat16", 0, {}),
    "not aligned": ("efficient", AMPERE, "float32", 0, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_logsumexp_on_cuda(cuda, name):
    engine, device, dtype, size, options = BY_NAME[name]
    called = cuda(device)
    if size:
        keys = (2, 2, 6 if "square" in name else 9, size)
        q, k, v = draw((2, 4, 6, size), keys, keys, to=to_torch, dtype=dtype)
    else:
        q, k = (x.to(getattr(torch, dtype)) for x in (STRIDED, MISALIGNED))
        v = k = k.mT.contiguous().mT if engine == "flash" else k
    options = {n: x.to(q.dtype) if n == "bias" else x for n, x in options.items()}
    found = attention_partial(q, k, v, kernel="sdpa", **options)
    expected = attention_partial(q, k, v, kernel="dense", **options)
    close(found.output, expected.output, COARSE if q.dtype.itemsize == 2 else 40)
    close(found.logsumexp, expected.logsumexp)
    assert called == [engine]


def test_torch_is_given_aligned_arrays_on_cuda(monkeypatch):
    class OnCuda(torch.Tensor):
        is_cuda = True

    given = []
    engine = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *x, **o: given.append(x) or engine(*x, **o)
    )
    q = MANY[1 : 2 * 4 * 6 * 8 + 1].reshape(2, 4, 6, 8).as_subclass(OnCuda)
    agrees(q, STRIDED, STRIDED, mask=MASK[..., :6])
    assert [(x.storage_offset(), x.stride(-2)) for x in given[0]] == [(0, 8)] * 3


def test_arrays_whose_copy_is_no_better_stay_where_they_are():
    assert engines.aligned(ONE_MORE) is ONE_MORE
    assert engines.aligned(ONE_MORE.flatten()[9:].reshape(-1, 9)).storage_offset() == 0


def test_a_gradient_that_cudnn_would_spoil_is_the_efficient_engines(cuda):
    called = cuda(HOPPER)
    shapes = (1, 4, 64, 8), (1, 2, 64, 8), (1, 2, 64, 8)
    q, k, v = (x.requires_grad_() for x in draw(*shapes, to=to_torch, dtype="bfloat16"))
    mask = k.detach()[0, 0, :, 0] > v.detach()[0, 0, :, :1]
    mask[7] = False
    output = attention(q, k, v, mask=mask, kernel="sdpa")
    close(output, attention(q, k, v, mask=mask, kernel="dense"), COARSE)
    assert called == ["efficient"]
    for gradient in torch.autograd.grad(output.float().sum(), (q, k, v)):
        assert gradient.isfinite().all()


# What a stand-in cannot show: that the operators take these arguments, and give these shapes.
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (engines.FLASH, {"window": (3, 0)}),
        (engines.CUDNN, {"mask": (6, 9)}),
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


def test_one_column_for_all_keys_is_expanded_in_memory_for_cuda():
    column = torch.ones(6, 1, dtype=torch.bool)
    there = problem((2, 4, 6, 8), (2, 2, 9, 8), dtype="float32", mask=column)
    for rows, length in ((6, 9), (None, None)):
        some = there._replace(device="cuda:0", query_length=rows, key_length=length)
        x, keys = Operands(Q, K, K, mask=column), Span(0, length)
        made = attn_mask.attn_mask(some, x, keys, banded=False)
        assert made.shape[-2:] == (6, 9)
        assert made.is_contiguous()
