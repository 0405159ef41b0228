"""PyTorch: how its kernels are called, compile without a break, and mind its own modes."""

import asyncio
import contextlib
import threading

import array_api_compat.torch
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from far_device import DEVICE, far, near, ran, reading
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn
from polyattn import attention, attention_partial, explain, masks, scores, use_backend
from polyattn._base.arrays import is_one_of
from polyattn._core.tiles.dropout import philox
from polyattn_torch.backend import TorchBackend

RNG = torch.Generator().manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=RNG).to(dtype)


Q, K, V = randn(2, 4, 6, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 5)


def close(one, other, **tolerance):
    torch.testing.assert_close(one, other, **tolerance)


# ---- sdpa ----


@pytest.mark.without_native
def test_sdpa_is_causal_only_where_it_means_the_same(monkeypatch):
    seen = []
    genuine = F.scaled_dot_product_attention

    def recorded(*args, **options):
        seen.append((options["is_causal"], options["attn_mask"] is None))
        return genuine(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    attention(Q, K[:, :, :6], V[:, :, :6], is_causal=True)
    attention(Q, K, V, is_causal=True)
    attention(Q[:, :, :1], K, V, is_causal=True, window=(20, 0))  # a band that hides nothing
    assert seen == [(True, True), (False, False), (False, True)]


def test_sdpa_keeps_a_float32_bias_of_16_bit_scores_exact():
    q, k, v = (x.bfloat16() for x in (Q, K, V))
    bias = 300 + randn(6, 9)  # bfloat16 would round it to multiples of 2
    close(
        attention(q, k, v, bias=bias, kernel="sdpa"), attention(q, k, v, bias=bias, kernel="dense")
    )


@pytest.mark.without_native
def test_a_mask_too_large_to_make_goes_to_tiled():
    shape = (1, 1, 16384, 64)
    explanation = explain(shape, shape, shape, window=(100, 0), library="torch")
    assert explanation.chosen.kernel == "tiled"
    assert "268,435,456 elements" in str(explanation)
    assert explain(shape, shape, shape, is_causal=True, library="torch").chosen.kernel == "sdpa"


@pytest.mark.without_native
def test_a_bias_that_is_trained_is_not_made_as_large_as_the_scores():
    x, bias = torch.ones(1, 16, 2048, 4), torch.ones(1, 1, 1, 2048)
    options = {"bias": bias, "is_causal": True}
    assert explain(x, x, x, **options).chosen.kernel == "sdpa"
    bias.requires_grad_()
    assert explain(x, x, x, **options).chosen.kernel == "tiled"


@pytest.mark.without_native
def test_a_mask_function_too_large_to_tabulate_goes_to_tiled():
    shape = (2, 4, 4096, 64)
    rule = {"mask": lambda b, h, i, j: i >= j}
    assert explain(shape, shape, shape, library="torch", **rule).chosen.kernel == "tiled"
    shape = (8, 1, 4096, 64)
    by_item = {"is_causal": True, "query_offset": (8,)}
    assert explain(shape, shape, shape, library="torch", **by_item).chosen.kernel == "tiled"
    shape = (1, 1, 4096, 64)
    assert explain(shape, shape, shape, library="torch", **rule).chosen.kernel == "sdpa"


# ---- flex ----


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_flex_explains_a_mask_function_that_returns_numbers():
    with pytest.raises(Exception, match="must return a bool array"):
        attention(Q, K, V, kernel="flex", mask=lambda b, h, i, j: i + j)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda s: None, "score_mod must return an array; got None"),
        (lambda s: [1.0], "score_mod must return an array; got .1.0"),
        (lambda s: 1.0, "score_mod must return an array; got 1.0"),
        (lambda s: s > 0, "score_mod must return real numbers"),
    ],
)
def test_flex_explains_a_score_function_that_returns_something_else(returned, message):
    with pytest.raises(Exception, match=message):
        attention(Q, K, V, kernel="flex", score_mod=lambda s, b, h, i, j: returned(s))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flex_keeps_scores_exact_whatever_a_score_function_returns(dtype):
    x, added = Q.bfloat16(), (300 + torch.arange(6) / 3).to(dtype)
    found, expected = (
        attention(x, x, x, kernel=kernel, score_mod=lambda s, b, h, i, j: s + added[j])
        for kernel in ("flex", "dense")
    )
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_flex_waits_to_be_asked():
    flex = next(c for c in explain(Q, K, V, softcap=1.0).candidates if c.kernel == "flex")
    assert flex.status == "on request"
    assert explain(Q, K, V, softcap=1.0, kernel="flex").chosen.kernel == "flex"


@pytest.mark.parametrize(
    ("arrays", "options", "reason"),
    [
        ((Q.double(), K.double(), V.double()), {}, "no float64 on the CPU"),
        ((Q.clone().requires_grad_(), K, V), {}, "no gradient on the CPU"),
        ((Q[:, :, :0], K, V), {}, "empty arrays"),
        ((Q.numpy(), K.numpy(), V.numpy()), {"mask": lambda b, h, i, j: i > j}, "another library"),
        ((Q, K, V), {"sinks": torch.zeros(4)}, "does not compute sinks"),
    ],
)
def test_flex_says_what_it_cannot(arrays, options, reason):
    with pytest.raises(polyattn.UnsupportedError, match=reason):
        attention(*arrays, backend="torch", kernel="flex", **options)


# ---- torch.compile ----


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager", **options)


COMPILED = {
    "sdpa": {"is_causal": True},
    "dense": {"is_causal": True, "softcap": 2.0, "window": (3, 0)},
    "tiled": {"kernel": "tiled", "is_causal": True},
    "functions": {
        "mask": lambda b, h, i, j: (i + j) % 3 != 0,
        "score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j),
    },
    "named": {"backend": "torch:cpu"},
    "list": {"backend": "numpy,torch:cuda,torch"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_attention_compiles_without_a_break(case, dynamic):
    options = COMPILED[case]
    function = compiled(lambda q: attention(q, q, q, **options), dynamic=dynamic)
    for length in (4, 6, 7):
        q = randn(2, 3, length, 8)
        close(function(q), attention(q, q, q, **options))


IDS = [0, 0, 1, 1, 1, 2, 2]
TABLE = np.linspace(-1, 1, 49, dtype=np.float32).reshape(7, 7)
#: Calls with what torch.compile holds as symbols or traces, and the arguments of each call.
SYMBOLS = {
    "ids of a list": (lambda q: attention(q, q, q, mask=masks.segments(IDS)), [()]),
    "positions and parents of NumPy": (
        lambda q: attention(
            q, q, q, mask=masks.positions(np.array(IDS), IDS) & masks.tree(np.array(IDS) - 1)
        ),
        [()],
    ),
    "a compiled mask": (lambda q: attention(q, q, q, mask=TABULATED), [()]),
    "a mask that grows": (
        lambda q, mask: attention(q, q, q, mask=mask),
        [(TABLE[:1] > 0,), (TABLE > 0,), (TABLE[None, None] > 0,)],
    ),
    "offsets": (
        lambda q, offset: attention(q, q, q, is_causal=True, query_offset=offset),
        [(np.array([1]),), (np.array([1, 2]),)],
    ),
    "a length": (lambda q, n: attention(q, q, q, mask=masks.prefix(n)), [(3,), (4,), (5,)]),
    "a start of dropout": (
        lambda q, n: attention(q, q, q, dropout=(0.3, 5, (0, n, 1, q.shape[2]))),
        [(3,), (4,), (5,)],
    ),
    "a bias of NumPy": (lambda q: attention(q, q, q, bias=TABLE), [()]),
    "offsets of NumPy": (
        lambda q: attention(q, q, q, is_causal=True, query_offset=np.array([1, 2])),
        [()],
    ),
}
TABULATED = masks.compile(lambda b, h, i, j: (i >= j) | (b == 1), 7, 7, batch=2, heads=2, tile=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMBOLS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_call_takes_symbols(name, dynamic):
    call, arguments = SYMBOLS[name]
    function, q = compiled(call, dynamic=dynamic), randn(2, 2, 7, 4)
    for given in arguments:
        # Tensors, so that their lengths are symbols.
        given = [torch.asarray(x) if isinstance(x, np.ndarray) else x for x in given]
        close(function(q, *given), call(q, *given))


def test_a_symbol_is_one_of_some_lengths():
    def found(x):
        return x + is_one_of(7, None, 1, x.shape[0]) + 2 * is_one_of(5, None, 1, x.shape[0])

    assert compiled(found, dynamic=True)(torch.zeros(7))[0] == 1


@pytest.mark.slow
def test_a_growing_cache_is_compiled_once():
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    step = torch.compile(
        lambda q, k, v: attention(q, k, v, is_causal=True), fullgraph=True, backend=counter
    )
    for length in range(5, 25):
        k = randn(1, 4, length, 8)
        close(step(k[:, :, -1:], k, k), attention(k[:, :, -1:], k, k))
    assert counter.frame_count <= 2  # one for the first length, one for all


@pytest.mark.slow
def test_partial_and_merge_compile():
    def halves(q, k, v):
        return polyattn.merge(
            attention_partial(q, k[:, :, :4], v[:, :, :4]),
            attention_partial(q, k[:, :, 4:], v[:, :, 4:]),
        ).output

    close(compiled(halves)(Q, K, V), attention(Q, K, V))


@pytest.mark.slow
def test_a_context_around_a_compiled_call_takes_effect():
    def which(q):
        names = polyattn._dispatch.request.request(None).names
        return attention(q, q, q) + (1 if names == ("array-api",) else 0)

    function = compiled(which)
    plain = attention(Q, Q, Q)
    close(function(Q), plain)
    with use_backend("array-api"):
        close(function(Q), plain + 1)
    with use_backend("torch"):
        close(function(Q), plain)
    close(function(Q), plain)


@pytest.mark.slow
def test_a_context_of_another_thread_does_not_reach_a_compiled_call():
    function = compiled(lambda q: attention(q, q, q))
    entered, done = threading.Event(), threading.Event()

    def elsewhere():
        with use_backend("numpy"):  # which a compiled call would have to refuse
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    entered.wait(60)
    try:
        close(function(Q), attention(Q, Q, Q))
    finally:
        done.set()
        thread.join()


def test_a_compiled_call_takes_the_context_of_its_task():
    """Two tasks of one thread, whose blocks overlap, call one program by turns."""
    function = compiled(lambda q: q + len(polyattn._dispatch.request.request(None).names))

    async def task(*names):
        with use_backend(*names):
            found = []
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(int(function(torch.zeros(()))))
            return found

    async def both():
        return await asyncio.gather(task("torch"), task("torch", "numpy"))

    assert asyncio.run(both()) == [[1, 1, 1], [2, 2, 2]]
    assert int(function(torch.zeros(()))) == 0


def test_nothing_leaves_torch_inside_a_compiled_call():
    with pytest.raises(Exception, match="no array can be converted"):
        compiled(lambda q: attention(q, q, q, backend="numpy"))(Q)


FIRST_CALL = """
import torch, polyattn
q = torch.ones(1, 2, 4, 8)
f = lambda q: polyattn.attention(q, q, q, softcap=2.0)
f = torch.compile(f, fullgraph=True, backend="eager")
assert torch.equal(f(q), q)
"""


WITH_PARAMETER = """
import torch, polyattn
q, sinks = torch.ones(1, 2, 4, 8), torch.nn.Parameter(torch.full((2,), -torch.inf))
f = lambda q: polyattn.attention(q, q, q, sinks=sinks)
f = torch.compile(f, fullgraph=True, backend="eager")
assert torch.equal(f(q), q)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [FIRST_CALL, WITH_PARAMETER], ids=["tensors", "a parameter"])
def test_the_first_call_of_all_may_be_a_compiled_one(program, run_python):
    run_python(program)


# ---- torch's own modes ----


@pytest.mark.parametrize("kernel", ["sdpa", "dense", "tiled"])
def test_autocast_does_not_reach_a_kernel(kernel):
    """It casts tensors before the call, not arrays of NumPy that come to torch."""
    options = {"backend": "torch", "kernel": kernel}
    arrays = [x.numpy() for x in (Q, K, V)]
    expected = attention(*arrays, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(*arrays, **options)
    np.testing.assert_array_equal(output, expected, strict=True)


@pytest.mark.parametrize("kernel", ["sdpa", "dense", "tiled"])
def test_vmap(kernel):
    mapped = torch.func.vmap(lambda q, k, v: attention(q, k, v, is_causal=True, kernel=kernel))
    close(mapped(Q, K, V), attention(Q, K, V, is_causal=True))


def test_rows_that_see_nothing_have_gradients_of_zero():
    q, k, v, sinks = (x.clone().requires_grad_() for x in (Q, K, V, torch.zeros(4)))
    for kernel in ("dense", "tiled"):
        for options in ({"sinks": sinks}, {"window": (0, 0), "query_offset": 50}):
            output = attention(q, k[:, :, :0], v[:, :, :0], kernel=kernel, **options)
            output = output.sum() + attention(q, k, v, kernel=kernel, **options).sum()
            for gradient in torch.autograd.grad(output, (q, k, v)):
                assert gradient.isfinite().all()
        nothing = attention(q, k[:, :, :0], v[:, :, :0], kernel=kernel)
        assert not torch.autograd.grad(nothing.sum(), q)[0].any()


@pytest.mark.without_native
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_forward_derivative_and_a_batch_of_calls_get_kernels_that_have_them():
    def call(q):
        return attention(q, q, q, is_causal=True)

    value, tangent = torch.func.jvp(call, (Q,), (torch.ones_like(Q),))
    close(value, call(Q))
    step = 1e-3
    double = Q.double()
    close(
        tangent.double(),
        (call(double + step) - call(double - step)) / (2 * step),
        rtol=1e-3,
        atol=1e-4,
    )
    close(torch.func.vmap(call)(Q), call(Q))
    assert explain(Q, Q, Q).chosen.kernel == "sdpa"


def test_shapes_without_data():
    q = torch.empty(2, 3, 4, 8, device="meta")
    for options in ({}, {"softcap": 1.0, "is_causal": True}, {"kernel": "tiled"}):
        assert attention(q, q, q, **options).shape == q.shape


@pytest.mark.parametrize("where", ["NumPy", "the CPU", "the device"])
@pytest.mark.parametrize("kernel", ["sdpa", "tiled"])
def test_a_named_device_computes_and_the_result_goes_back(where, kernel):
    to = {"NumPy": torch.Tensor.numpy, "the CPU": torch.clone, "the device": far}[where]
    query, key, value = map(to, (Q, K, V))
    options = {"is_causal": True, "mask": masks.padding([5, 8]), "query_offset": [1, 3]}
    ran.clear()
    with reading() if where != "the device" else contextlib.nullcontext():
        output = attention(query, key, value, backend="torch:far", kernel=kernel, **options)
    assert "bmm.out" in ran
    assert type(output) is type(query)
    assert str(getattr(output, "device", "")) == str(getattr(query, "device", ""))
    output = near(output) if where == "the device" else torch.asarray(output)
    close(output, attention(Q, K, V, kernel="dense", **options))


def test_a_call_on_a_device_is_left_by_results_only():
    query = far(Q)
    assert explain(query, query, query).chosen.kernel == "sdpa"
    with pytest.raises(RuntimeError, match="the host reads from far:0"):
        attention(query, query, query, backend="numpy")
    with reading():
        output = attention(query, query, query, backend="numpy")
    assert str(output.device) == DEVICE


@pytest.mark.without_native
def test_devices_are_named_as_torch_names_them():
    row = next(info for info in polyattn.list_backends() if info.name == "torch")
    assert row.devices[0] == "cpu"
    assert row.versions["torch"].startswith(torch.__version__.partition("+")[0])
    assert row.kernels[:3] == ("paged", "sdpa", "flex")


def test_bits_of_numpy_memory_are_not_written():
    x = np.ones((2, 5, 8), np.float32)
    x.flags.writeable = False
    attention(x, x, x, backend="torch")
    assert (x == 1).all()


# ---- work ----


class Operations(TorchDispatchMode):
    """The names of the operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_word_of_dropout_is_one_product():
    words = tuple(torch.arange(3) + n for n in range(4))
    with Operations() as found:
        philox(array_api_compat.torch, words, (1, 2))
    assert found.names.count("mul") == 2 * 10  # two in each round
    assert len(found.names) <= 12 * 10


def test_a_sigmoid_is_one_operation():
    with Operations() as found:
        attention(Q, K, V, normalizer=scores.sigmoid())
    assert found.names.count("sigmoid") == 1
    assert "exp" not in found.names


def test_lengths_need_no_range_but_that_of_the_keys():
    options = {"key_lengths": torch.tensor([3]), "kernel": "sdpa"}
    attention(Q, K, V, **options)  # to plan takes ranges too
    with Operations() as found:
        attention(Q, K, V, **options)
    assert found.names.count("arange") == 2  # one to fill with 0 what is beyond them


def test_blocks_of_rows_fit_the_caches_of_the_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    backend, query = TorchBackend(), torch.zeros(2, 600, 4)
    blocks = backend.row_blocks(query, query)
    assert sum(block.length for block in blocks) == 600
    assert {block.length * 2 * 600 <= backend.block for block in blocks} == {True}
    assert backend.block == 3 * 2**15
    assert len(backend.row_blocks(query.to("meta"), query.to("meta"))) == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("similarity", [scores.cosine(), scores.distance()])
def test_what_is_traced_holds_for_other_numbers(similarity):
    def call(query, key, value):
        return attention(query, key, value, similarity=similarity)

    rng = np.random.default_rng(0)
    arrays = [torch.from_numpy(rng.standard_normal((1, 2, 5, 32), np.float32)) for _ in range(3)]
    others = [arrays[0] + 1000, arrays[0] + 1000, arrays[2]]  # near to one another
    others[1][..., 2, :] = 0
    graph = make_fx(call, tracing_mode="real")(*arrays)
    for traced in (graph, torch.jit.trace(call, arrays, check_trace=False)):
        torch.testing.assert_close(traced(*others), call(*others))


LENGTHS = torch.tensor([2, 5])
TRACED = {
    "causal": {"is_causal": True, "softcap": 2.0},
    "expression": {"mask": masks.causal() | masks.prefix(2)},
    "window": {"window": (1, 0), "sinks": torch.ones(4)},
    "array": {"mask": torch.eye(6, 9, dtype=torch.bool)},
    "function": {"mask": lambda b, h, i, j: i >= j},
    "lengths": {"score_mod": scores.alibi(4)},
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("kernel", [None, "dense", "tiled"])
def test_a_masked_call_is_traced_without_a_look_at_numbers(name, kernel):
    def call(query, key, value, lengths):
        given = {"mask": masks.padding(lengths)} if name == "lengths" else {}
        return attention(query, key, value, kernel=kernel, **TRACED[name], **given)

    arrays = Q, K, V, LENGTHS
    others = Q + 1, K, V.clone(), LENGTHS + 3
    if kernel is not None:  # torch's own engine lets it through
        others[2][..., 5, :] = torch.inf  # no look at the example says that all is finite
    graph = make_fx(call, tracing_mode="real")(*arrays)
    close(graph(*others), call(*others), equal_nan=True)
    if kernel != "tiled":  # whose tiles are of one length
        traced = torch.jit.trace(call, arrays, check_trace=False)
        close(traced(*others), call(*others), equal_nan=True)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tiles_are_not_traced_for_lengths_that_may_change():
    with pytest.raises(polyattn.UnsupportedError, match="its tiles need lengths that are known"):
        torch.jit.trace(lambda q: attention(q, K, V, is_causal=True, kernel="tiled"), Q)
