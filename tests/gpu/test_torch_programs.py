"""Programs of torch on CUDA: compiled, captured as a graph, and layers over caches."""

import pytest
import torch

from polyattn import attention, nn

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

# torch imports what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
CUDA = "cuda:0"
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (64, 0)},
    "softcap": {"softcap": 20.0},
    "lengths": {"key_lengths": torch.tensor([300])},
    "one column": {"mask": torch.arange(512)[:, None] > 3},
}


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(CUDA, dtype)


def options_of(case):
    return {n: x.to(CUDA) if hasattr(x, "to") else x for n, x in OPTIONS[case].items()}


def close(found, query, key, value, options):
    expected = attention(query.double(), key.double(), value.double(), kernel="dense", **options)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", OPTIONS)
def test_a_compiled_program_has_no_break_and_the_same_result(case):
    options = options_of(case)
    query, key, value = randn(1, 8, 512, 64), randn(1, 2, 512, 64), randn(1, 2, 512, 64)

    def call(query, key, value):
        return attention(query * 2, key, value, **options)

    torch.compiler.reset()
    found = torch.compile(call, fullgraph=True)(query, key, value)
    close(found, query * 2, key, value, options)


def test_a_compiled_program_has_gradients():
    arrays = [randn(1, 4, 128, 64).requires_grad_() for _ in "qkv"]

    def loss(query, key, value):
        return attention(query * 2, key, value, is_causal=True).float().square().sum()

    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*arrays), arrays)
    doubles = [x.detach().double().requires_grad_() for x in arrays]
    expected = torch.autograd.grad(loss(*doubles), doubles)
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one / scale, other / scale, check_dtype=False, rtol=0, atol=2e-2)


@pytest.mark.parametrize("case", [name for name in OPTIONS if name != "softcap"])
def test_a_graph_of_a_call_can_be_replayed(case):
    options = options_of(case)
    query, key, value = (randn(1, 8, 512, 64) for _ in "qkv")
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
    close(found, query, key, value, options)


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
