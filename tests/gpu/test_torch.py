"""torch on CUDA: the suite, the ways round its quirks, compiled programs, graphs and caches."""

import contextlib
from functools import partial

import pytest
import torch

from polyattn import attention, attention_partial, explain, nn
from polyattn._dispatch import registry
from polyattn.conformance.suite import BackendSuite

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

pytestmark = [
    # torch's compiler imports what torch deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    # A thread of autograd has none at its first product.
    pytest.mark.filterwarnings(
        "ignore:Attempting to run cuBLAS, but there was no current:UserWarning"
    ),
]

CUDA = "cuda:0"
CAPABILITY = torch.cuda.get_device_capability(CUDA)
RNG = torch.Generator().manual_seed(0)
HALF = [torch.float16, torch.bfloat16]
needs_flash = pytest.mark.skipif(CAPABILITY < (8, 0), reason="flash needs compute capability 8.0")


class TestTorchCuda(BackendSuite):
    backend = "torch:cuda"


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=RNG).to(CUDA, dtype)


def exact(q, k, v, **options):
    """Return the formula's output and logsumexp in float64, on the host."""
    options = {
        name: x.cpu().double() if name == "bias" else x.cpu() if hasattr(x, "cpu") else x
        for name, x in options.items()
    }
    arrays = (x.detach().cpu().double() for x in (q, k, v))
    return attention_partial(*arrays, kernel="dense", **options)


def agree(found, expected, dtype):
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-3}[dtype]
    torch.testing.assert_close(
        found.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance
    )


def gradients_agree(function, exactly, arrays):
    """Compare gradients of a sum with those of a function of float64, as shares of the largest."""
    found = torch.autograd.grad(function(*arrays).float().sum(), arrays)
    doubles = [x.detach().double().requires_grad_() for x in arrays]
    expected = torch.autograd.grad(exactly(*doubles).sum(), doubles)
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max()
        agree(one / scale, (other / scale).cpu(), torch.bfloat16)


@contextlib.contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- bands and logsumexp ----

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal from the first": {"is_causal": True, "query_offset": 0},
    "rows without keys": {"is_causal": True, "query_offset": -40},
    "window": {"window": (30, 5)},
    "window to the left": {"window": (30, None)},
    "causal window": {"is_causal": True, "window": (17, None)},
    "scale": {"scale": 0.2, "is_causal": True},
    "mask": {"mask": torch.rand(2, 1, 130, 195, generator=RNG) > 0.4},
    "rows masked": {"mask": (torch.arange(130) % 3 > 0)[:, None].expand(130, 195)},
    "bias": {"bias": torch.randn(1, 8, 130, 195, generator=RNG)},
}


def on_device(options, dtype):
    there = {name: x.to(CUDA) if hasattr(x, "to") else x for name, x in options.items()}
    return {name: x.to(dtype) if name == "bias" else x for name, x in there.items()}


@needs_flash
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (30, 5)}])
def test_a_band_has_a_gradient_and_no_mask(options):
    q, k, v = (randn(1, 4, n, 64, dtype=torch.bfloat16) for n in (2048, 4096, 4096))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, kernel="sdpa", **options)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2048 * 4096
    call = partial(attention, query_offset=0, **options)
    short = [x[:, :, :96].clone().requires_grad_() for x in (q, k, v)]
    gradients_agree(partial(call, kernel="sdpa"), partial(call, kernel="dense"), short)


# ---- quirks ----


def test_a_float32_bias_of_16_bit_scores_is_kept_exact():
    q, k = (randn(2, 8, n, 64, dtype=torch.bfloat16) for n in (64, 96))
    bias = 300 + randn(64, 96)
    found = explain(q, k, k, bias=bias)
    assert found.chosen.kernel != "sdpa"
    assert "pytorch#191612" in str(found)
    agree(attention(q, k, k, bias=bias), exact(q, k, k, bias=bias).output, torch.bfloat16)


@pytest.mark.parametrize("keys", [64, 192, 128, 100])
def test_a_gradient_under_a_mask_is_finite(keys):
    shapes = (8, 96), (2, keys), (2, keys)
    arrays = [(3 * randn(2, *x, 64, dtype=torch.bfloat16)).requires_grad_() for x in shapes]
    bias = randn(96, keys, dtype=torch.bfloat16) - 200  # logsumexp below −88.7
    mask = torch.rand(96, keys, generator=RNG).to(CUDA) > 0.5
    mask[5] = False
    for options, exact_options in (
        ({"bias": bias}, {"bias": bias.double()}),
        ({"mask": mask}, {"mask": mask}),
    ):
        call = partial(attention, kernel="sdpa", **options)
        gradients_agree(call, partial(attention, kernel="dense", **exact_options), arrays)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", [33, 65, 64])
def test_expanded_keys_under_a_mask(keys, dtype):
    q = randn(2, 8, 50, 64, dtype=dtype)
    k, v = (randn(1, 1, keys, 64, dtype=dtype).expand(2, 8, -1, -1) for _ in "kv")
    mask = torch.rand(50, keys, generator=RNG).to(CUDA) > 0.3
    agree(attention(q, k, v, mask=mask, kernel="sdpa"), exact(q, k, v, mask=mask).output, dtype)


# ---- no hidden waiting, and what is said ----


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("case", OPTIONS)
def test_nothing_waits_for_the_device(case):
    options = on_device(OPTIONS[case], torch.bfloat16)
    q, k = (randn(2, h, n, 64, dtype=torch.bfloat16) for h, n in ((8, 130), (2, 195)))
    for call in (attention, attention_partial):
        call(q, k, k, kernel="sdpa", **options)  # a first call may load a library
        with no_waiting():
            call(q, k, k, kernel="sdpa", **options)


def test_explain_names_the_engine():
    q = randn(2, 8, 128, 64, dtype=torch.bfloat16)
    remark = explain(q, q, q).chosen.remark
    assert remark.startswith("torch's engine: ")
    assert "math" not in remark.partition(";")[0]
    single = q.float()
    assert "float32 matmul precision" in explain(single, single, single).chosen.remark
    mask = torch.ones(128, 128, dtype=torch.bool, device=CUDA)
    assert explain(q, q, q, mask=mask).chosen.remark.startswith("torch's engine: ")
    assert explain(q, q, q, logsumexp=True).chosen.remark.endswith("called by name")


def test_tensors_on_the_device_are_placed_without_a_copy():
    backend, tensor = registry.loaded("torch"), randn(4, 8)

    class Foreign:
        dtype = None

        def __dlpack__(self, **options):
            return tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return tensor.__dlpack_device__()

    assert backend.place(Foreign(), CUDA).data_ptr() == tensor.data_ptr()
    assert backend.place(tensor, CUDA) is tensor
    assert str(backend.place(tensor.cpu().numpy(), CUDA).device) == CUDA


# ---- programs ----

PROGRAMS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (64, 0)},
    "softcap": {"softcap": 20.0},
    "lengths": {"key_lengths": torch.tensor([300])},
    "one column": {"mask": torch.arange(512)[:, None] > 3},
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_compiled_program_has_no_break_and_the_same_result(case):
    options = on_device(PROGRAMS[case], torch.bfloat16)
    query, key, value = (randn(1, heads, 512, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))

    def call(query, key, value):
        return attention(query * 2, key, value, **options)

    torch.compiler.reset()
    found = torch.compile(call, fullgraph=True)(query, key, value)
    agree(found, exact(query * 2, key, value, **options).output, torch.bfloat16)


def test_a_compiled_program_has_gradients():
    arrays = [randn(1, 4, 128, 64, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]

    def squares(query, key, value):
        return attention(query * 2, key, value, is_causal=True).float().square()

    torch.compiler.reset()
    gradients_agree(torch.compile(squares, fullgraph=True), squares, arrays)


@pytest.mark.parametrize("case", [name for name in PROGRAMS if name != "softcap"])
def test_a_graph_of_a_call_can_be_replayed(case):
    options = on_device(PROGRAMS[case], torch.bfloat16)
    query, key, value = (randn(1, 8, 512, 64, dtype=torch.bfloat16) for _ in "qkv")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention(query, key, value, **options)  # what a first call loads is loaded
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(query, key, value, **options)
    query.copy_(-2 * query)
    graph.replay()
    agree(found, exact(query, key, value, **options).output, torch.bfloat16)


@pytest.mark.parametrize("kind", ["KVCache", "PagedCache", "QuantizedCache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_over_a_cache_does_what_it_does_at_once(kind, dtype):
    tokens = randn(3, 40, 256, dtype=dtype)
    layer = nn.MultiHeadAttention.init(256, 8, key_heads=2, like=tokens)
    whole = layer(tokens, is_causal=True)
    if kind == "PagedCache":
        cache = nn.PagedCache.init(2, 32, 2048, items=3, like=tokens, page=256)
    else:
        cache = layer.cache(64, like=tokens, batch=(3,), kind=getattr(nn, kind))
    outputs = []
    for start, stop in ((0, 37), (37, 38), (38, 39), (39, 40)):
        output, cache = layer(tokens[:, start:stop], cache=cache, is_causal=True)
        outputs.append(output)
    size = float(whole.abs().max())
    tolerance = 1e-2 if kind == "QuantizedCache" or dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=tolerance * size)
