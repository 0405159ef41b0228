"""The compiled kernel on tensors of torch: results, derivatives, programs, and what it leaves."""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import polyattn
from polyattn import attention, masks, scores
from polyattn._base import arrays as arrays_module
from polyattn._dispatch import cache, registry
from polyattn.dialects import flash_attn

torch = pytest.importorskip("torch")
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
on_torch = pytest.importorskip("polyattn_native.on_torch")
kernel_module = pytest.importorskip("polyattn_native.kernel")
library_module = pytest.importorskip("polyattn_native.library")
NativeCall, Ready = kernel_module.NativeCall, kernel_module.Ready

# torch's own compiler and forward mode import what torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
KERNEL = on_torch.NativeOnTorch()
LIMITS = {
    torch.float32: 3e-5,
    torch.float64: 1e-12,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(5)


@pytest.fixture
def tiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of the kernel `tiled` that are called."""
    registry.load("torch")
    backend = registry.loaded("torch")
    calls: list[str] = []

    class Noting:
        def __call__(self, *given: Any) -> Any:
            calls.append("call")
            return tiled(*given)

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(tiled, name)

    tiled = backend.tiled
    monkeypatch.setattr(backend, "tiled", Noting())
    return calls


def arrays(
    dtype: Any = None, heads: int = 4, rows: int = 33, keys: int = 40, *, trained: bool = False
) -> Any:
    shapes = (2, heads, rows, 24), (2, 2, keys, 24), (2, 2, keys, 20)
    return [torch.randn(s, dtype=dtype or torch.float32, requires_grad=trained) for s in shapes]


def exact(x: Any) -> Any:
    """Return a tensor, or what holds tensors, in float64."""
    if isinstance(x, torch.Tensor):
        return x.detach().double() if x.dtype.is_floating_point else x
    return x


def options() -> dict[str, dict[str, Any]]:
    seen = torch.rand(2, 1, 33, 40) < 0.5
    table = torch.randn(8, 4)
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "window and scale": {"window": (5, 3), "scale": 0.3},
        "offsets": {"is_causal": True, "query_offset": torch.tensor([3, 9])},
        "mask": {"mask": seen},
        "expanded mask": {"mask": seen[:, :, :1].expand(2, 4, 33, 40)},
        "padding": {"mask": masks.padding(torch.tensor([7, 30]))},
        "segments": {"mask": masks.segments(torch.arange(33) // 9, torch.arange(40) // 9)},
        "made mask": {"mask": masks.dense(seen) | masks.prefix(torch.tensor([2, 5]))},
        "ranges": {"mask": masks.causal() & (masks.window(6, 0) | masks.prefix(2))},
        "bias": {"bias": torch.randn(1, 4, 33, 40)},
        "bias in bfloat16": {"bias": torch.randn(33, 40).bfloat16()},
        "sinks": {"sinks": torch.randn(4)},
        "softcap": {"softcap": 2.0},
        "dropout": {"dropout": (0.3, 11)},
        "seed": {"dropout": (0.3, torch.tensor(11))},
        "starts": {"dropout": (0.3, 2**63 + 5, torch.tensor([1, 2, 3, 4]))},
        "temperature": {"score_mod": scores.temperature(2.5) >> scores.alibi(4)},
        "alibi": {"score_mod": scores.alibi(torch.rand(4))},
        "table": {"score_mod": scores.relative_bias(table, max_distance=16)},
    }


@pytest.mark.parametrize("name", options())
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_results_and_gradients_equal_those_in_float64(name: str, dtype: Any) -> None:
    given = options()[name]
    tensors = arrays(dtype, trained=True)
    found = attention(*tensors, **given, kernel=KERNEL)
    wide = [exact(x).requires_grad_() for x in tensors]
    wanted = attention(*wide, **{n: exact(x) for n, x in given.items()}, kernel="dense")
    near = LIMITS[dtype] * (1 + wanted.abs().max())
    assert found.dtype == dtype
    assert (found - wanted).abs().max() <= near
    gradient = torch.randn_like(found)
    of_found = torch.autograd.grad(found, tensors, gradient)
    of_wanted = torch.autograd.grad(wanted, wide, gradient.double())
    for one, other in zip(of_found, of_wanted, strict=True):
        assert one.dtype == dtype
        assert (one - other).abs().max() <= 4 * LIMITS[dtype] * (1 + other.abs().max())


def test_gradients_of_bias_sinks_and_tables_are_there() -> None:
    q, k, v = arrays(torch.float64, trained=True)
    bias = torch.randn(33, 40, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    table = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)

    def gradients(kernel: Any) -> Any:
        score_mod = scores.relative_bias(table, max_distance=16)
        y = attention(q, k, v, bias=bias, sinks=sinks, score_mod=score_mod, kernel=kernel)
        return torch.autograd.grad(y.square().sum(), (q, k, v, bias, sinks, table))

    torch.testing.assert_close(gradients(KERNEL), gradients("dense"))


@pytest.mark.parametrize("given", [{}, {"softcap": 1.5, "is_causal": True}], ids=str)
def test_derivatives_of_any_order(given: dict[str, Any]) -> None:
    def call(*x: Any) -> Any:
        return attention(*x, **given, kernel=KERNEL)

    x = [
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((1, 2, 3), (1, 3, 3), (1, 3, 2))
    ]
    assert torch.autograd.gradcheck(call, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


def test_gradients_leave_nothing_to_tiles(tiled_calls: list[str]) -> None:
    q, k, v = arrays(trained=True)
    bias = torch.zeros(33, 40, requires_grad=True)
    attention(q, k, v, bias=bias, is_causal=True, kernel=KERNEL).sum().backward()
    plain = [x.detach() for x in (q, k, v)]
    torch.func.grad(lambda q: attention(q, *plain[1:], kernel=KERNEL).sum())(plain[0])
    assert tiled_calls == []


def test_functions_of_torch_func_agree_with_the_formula() -> None:
    q, k, v = arrays(torch.float64)

    def derivatives(kernel: Any) -> Any:
        def loss(q: Any) -> Any:
            return attention(q, k, v, is_causal=True, kernel=kernel).square().sum()

        first = torch.func.grad(loss)
        return first(q), torch.func.grad(lambda q: first(q).square().sum())(q)

    torch.testing.assert_close(derivatives(KERNEL), derivatives("dense"))


def test_forward_derivatives_are_refused_by_name_and_run_in_another_kernel() -> None:
    q, k, v = arrays(torch.float64)

    def call(kernel: Any) -> Any:
        return torch.func.jvp(lambda q: attention(q, k, v, kernel=kernel), (q,), (q,))[1]

    torch.testing.assert_close(call(None), call("dense"))
    with pytest.raises(polyattn.UnsupportedError, match="does not support forward derivatives"):
        call(KERNEL)


def test_vmap_is_refused_by_name_and_runs_in_another_kernel() -> None:
    q, k, v = arrays(heads=2)
    wanted = attention(q, k, v)
    torch.testing.assert_close(torch.func.vmap(attention)(q, k, v), wanted)
    with pytest.raises(polyattn.UnsupportedError, match=r"does not support torch\.func\.vmap"):
        torch.func.vmap(lambda *x: attention(*x, kernel=KERNEL))(q, k, v)


def test_gradients_in_batches_agree_with_those_one_by_one() -> None:
    q, k, v = arrays(trained=True)
    output = attention(q, k, v, kernel=KERNEL)
    given = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, q, given, is_grads_batched=True, retain_graph=True)[0]
    one = [torch.autograd.grad(output, q, x, retain_graph=True)[0] for x in given]
    torch.testing.assert_close(batched, torch.stack(one))


@pytest.mark.parametrize("more", [{}, {"is_causal": True}], ids=str)
def test_one_token_by_lengths_is_left_to_the_engine_if_few_rows_read_a_head(more: Any) -> None:
    x, lengths = torch.randn(2, 8, 9, 16), torch.tensor([4, 9])
    for heads, kernel in ((2, "sdpa"), (8, "native")):
        given = x[:, :heads, :1], x[:, :2], x[:, :2]
        assert polyattn.explain(*given, key_lengths=lengths, **more).chosen.kernel == kernel
        got = attention(*given, key_lengths=lengths, **more)
        expected = attention(*given, key_lengths=lengths, kernel="dense", **more)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("keys", "size", "kernel"), [(512, 64, "native"), (512, 72, "sdpa"), (9, 64, "sdpa")]
)
def test_one_token_of_each_head_runs_where_it_takes_less_time(
    keys: int, size: int, kernel: str
) -> None:
    query, key = torch.randn(1, 4, 1, size), torch.randn(1, 4, keys, size)
    assert polyattn.explain(query, key, key).chosen.kernel == kernel
    torch.testing.assert_close(
        attention(query, key, key), attention(query, key, key, kernel="dense")
    )


# ---- memory ----


def test_a_call_with_gradients_is_kept_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem of its node is the same object in each call."""
    runs: list[Any] = []
    real = Ready.run
    monkeypatch.setattr(Ready, "run", lambda *x, **more: runs.append(0) or real(*x, **more))
    x = torch.randn(3, 1, 4, 20, 16, requires_grad=True)
    for _ in range(3):
        attention(*x, kernel="native").sum().backward()
    assert len(runs) == 2


@pytest.mark.parametrize("is_swapped", [False, True])
def test_results_have_the_axes_in_memory_of_their_operands(is_swapped: bool) -> None:
    x = [torch.randn(2, 9, 4, 16).transpose(1, 2) for _ in range(3)]
    x = [one if is_swapped else one.contiguous() for one in x]
    output = attention(*[one.requires_grad_() for one in x], kernel="native")
    gradients = torch.autograd.grad(output.sum(), x)
    for one in (output, *gradients):
        assert one.stride() == x[0].stride()


def test_short_packed_sequences_are_one_call(caplog: pytest.LogCaptureFixture) -> None:
    """Equal to a call for each, with the gradients."""
    sizes, x = [5, 40, 1, 21], torch.randn(3, 67, 4, 16, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([0, *sizes]).cumsum(0)
    cache.forget()
    with caplog.at_level(logging.DEBUG, "polyattn"):
        output = flash_attn.flash_attn_varlen_func(*x, ends, ends, 40, 40, causal=True)
    (plan,) = caplog.messages
    assert "query (67, 4, 16)" in plan
    assert ": torch native" in plan
    split = [one.split(sizes) for one in x.unbind()]
    parts = [attention(*one, is_causal=True, layout="...LHD") for one in zip(*split, strict=True)]
    given, whole = torch.randn_like(output), torch.cat(parts)
    torch.testing.assert_close(output, whole)
    found, wanted = (torch.autograd.grad(y, x, given)[0] for y in (output, whole))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_tensors_are_read_where_they_lie(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(ready: Any, kernel: Any, *pointers: int, x: Any) -> None:
        calls.append([ctypes.c_void_p.from_address(at).value for at in pointers[:4]])
        real(ready, kernel, *pointers, x=x)

    real = Ready.run
    monkeypatch.setattr(Ready, "run", run)
    x = torch.randn(2, 33, 4, 24).to(dtype).transpose(1, 2)
    for _ in range(2):
        output = attention(x, x, x, kernel=KERNEL)
    assert calls == [[x.data_ptr()] * 3 + [output.data_ptr()]]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], 2)[:, :, ::2],
        lambda x: x[:1].expand(2, -1, -1, -1),
        lambda x: x[:, :, :1].expand_as(x),
        lambda x: x[..., :1].expand_as(x),
        lambda x: torch._neg_view(x),
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["heads last", "columns first", "rows apart", "item", "row", "column", "neg", "parameter"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides_are_read_twice(change: Any, dtype: Any) -> None:
    tensors = [change(x) for x in arrays(dtype)]
    wanted = attention(*[exact(x.resolve_neg()) for x in tensors], is_causal=True, kernel="dense")
    with torch.no_grad():
        for _ in range(2):  # the second call is found by its strides
            found = attention(*tensors, is_causal=True, kernel=KERNEL)
            assert (found - wanted).abs().max() <= LIMITS[dtype] * (1 + wanted.abs().max())


def test_numbers_at_odd_addresses_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn_native import call

    x = torch.randn(2, 5, 4)
    odd = torch.frombuffer(bytearray(1 + x.nbytes), dtype=x.dtype, offset=1).view(x.shape)
    odd.copy_(x)
    wanted, addresses, describe = attention(x, x, x, kernel=KERNEL), [], call.describe

    def describe_and_look(to: Any, array: Any, *more: Any) -> None:
        describe(to, array, *more)
        addresses.append(to.data % 4)

    monkeypatch.setattr(call, "describe", describe_and_look)
    for _ in range(2):  # a call of the kind is ready to run
        assert torch.equal(attention(odd, odd, odd, kernel=KERNEL), wanted)
    assert addresses == [0] * 8


# ---- what records or compiles ----


def test_what_records_operations_sees_them() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = arrays()
    traced = make_fx(lambda q, k, v: attention(q, k, v, kernel=KERNEL))(q, k, v)
    torch.testing.assert_close(traced(k.repeat(1, 2, 1, 1)[:, :, :33], k, v),
                               attention(k.repeat(1, 2, 1, 1)[:, :, :33], k, v))  # fmt: skip


def flops(counter: Any) -> dict[str, int]:
    """The FLOPs of each operator, by item, head, row and key of `arrays`."""
    return {str(o): n // (2 * 4 * 33 * 40) for o, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "name", ["plain", "causal", "window and scale", "segments", "softcap", "dropout", "table"]
)
def test_a_checkpoint_whose_policy_names_the_operator_calls_it_once(name: str, times: int) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def call(*x: Any) -> Any:
        return attention(*x, **given, kernel=KERNEL)

    given, x = options()[name], arrays(trained=True)
    wanted = call(*x)
    along = torch.randn_like(wanted)
    saved = [torch.ops.polyattn_native.attend.default] if times == 1 else []
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    with FlopCounterMode(display=False) as counter:
        found = checkpoint(call, *x, use_reentrant=False, context_fn=contexts)
        of_found = torch.autograd.grad(found, x, along)
    for one, other in zip(of_found, torch.autograd.grad(wanted, x, along), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found, wanted)
    # A product of two vectors has a multiplication and an addition for each of their numbers.
    assert flops(counter) == {
        "polyattn_native.attend": times * 2 * (24 + 20),
        "polyattn_native.differentiate": 2 * (3 * 24 + 2 * 20),
    }


def test_flops_are_counted_by_a_counter_from_before_the_kernel_was_loaded() -> None:
    counter = FlopCounterMode(display=False)
    for name in ("attend", "output", "differentiate"):
        del counter.flop_registry[getattr(torch.ops.polyattn_native, name)]
    with counter:
        attention(*arrays(), kernel=KERNEL)
    assert flops(counter) == {"polyattn_native.output": 2 * (24 + 20)}


def test_flops_of_pages_are_those_of_all_their_keys() -> None:
    query, *pools = [torch.randn(n, 4, 33 if n == 2 else 8, 24) for n in (2, 9, 9)]
    paged = {"block_table": torch.randint(9, (2, 5)), "key_lengths": torch.tensor([40, 17])}
    with FlopCounterMode(display=False) as counter:
        found = attention(query, *pools, **paged, kernel=KERNEL)
    assert flops(counter) == {"polyattn_native.output": 2 * (24 + 24)}
    assert torch.equal(found, attention(query, *pools, **paged, kernel=KERNEL))


def test_numbers_of_an_operator_are_on_the_cpu_whatever_the_default_device() -> None:
    x, rule = arrays(), scores.temperature(2.5)
    wanted = attention(*x, score_mod=rule, kernel=KERNEL)
    with torch.device("meta"), FlopCounterMode(display=False):
        assert torch.equal(attention(*x, score_mod=rule, kernel=KERNEL), wanted)


def test_same_bits_hold_where_a_mode_sees_operators() -> None:
    x = arrays()
    with polyattn.same_bits():
        wanted = attention(*x, is_causal=True)
        cache.forget()
        with FlopCounterMode(display=False):
            assert torch.equal(attention(*x, is_causal=True), wanted)
            with pytest.raises(polyattn.UnsupportedError, match="expressions without strings"):
                attention(*x, mask=Named("left"))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["mode", "program"])
def test_operators_return_the_gradients_of_scale_and_softcap(is_compiled: bool) -> None:
    def numbers(*x: Any) -> Any:
        output, pullback = polyattn.attention_vjp(*x, softcap=2.0, kernel=KERNEL)
        gradients = pullback(output)
        return gradients.scale, gradients.softcap

    x = arrays()
    wanted = numbers(*x)
    torch.compiler.reset()
    if is_compiled:
        found = torch.compile(numbers, fullgraph=True, backend="aot_eager")(*x)
    else:
        with FlopCounterMode(display=False):
            found = numbers(*x)
    assert found == wanted


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_model_of_jit_trace_has_neither_numbers_nor_lengths_of_the_example() -> None:
    q, k, v = arrays()
    others = arrays(rows=7, keys=11)
    for options in ({}, {"is_causal": True}, {"window": (9, 2), "softcap": 2.0}):

        def call(q: Any, k: Any, v: Any, given: Any = options) -> Any:
            return attention(q, k, v, **given)

        traced = torch.jit.trace(call, (q, k, v), check_trace=False)
        torch.testing.assert_close(traced(*others), call(*others))


def test_numpy_warns_of_no_number_that_torch_would_not_warn_of() -> None:
    q, k, v = arrays()
    many = torch.linspace(0, 1, 4, dtype=torch.float64) * torch.finfo(torch.float64).min
    options: Any
    for options in (
        {"bias": many[:, None, None].expand(1, 4, 33, 40)},
        {"bias": many[:, None, None].expand(1, 4, 1, 2**18), "key": torch.ones(1, 2, 2**18, 24)},
        {"sinks": many},
        {"score_mod": scores.alibi(torch.full((4,), torch.inf))},
    ):
        key = options.pop("key", k)
        value = v if key is k else key
        for one in (q, q * torch.nan, q * torch.inf):
            pullback = polyattn.attention_vjp(one, key, value, kernel=KERNEL, **options)[1]
            pullback(torch.full((*one.shape[:-1], value.shape[-1]), torch.inf))


def test_tensors_without_numbers_are_refused() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(2, 3, 4)
        assert attention(x, x, x).shape == (2, 3, 4)
        with pytest.raises(polyattn.UnsupportedError, match="it needs real tensors"):
            attention(x, x, x, kernel=KERNEL)
    meta = torch.ones(2, 3, 4, device="meta")
    with pytest.raises(polyattn.UnsupportedError, match="runs on cpu only"):
        attention(meta, meta, meta, kernel=KERNEL)


@pytest.mark.parametrize("name", options())
def test_a_program_of_torch_compile_calls_the_kernel(name: str) -> None:
    given = options()[name]
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: attention(*x, **given, kernel=KERNEL), fullgraph=True, backend="aot_eager"
    )
    x = arrays(trained=True)
    found, wanted = compiled(*x), attention(*x, **given, kernel="dense")
    torch.testing.assert_close(found, wanted)
    along = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(y, x, along) for y in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_a_program_names_the_version_so_that_none_on_disk_outlives_it() -> None:
    codes: list[str] = []

    def note(graph: Any, inputs: Any) -> Any:
        codes.extend(node.args[3] for node in graph.graph.nodes if "native" in str(node.target))
        return graph

    x = torch.randn(1, 2, 9, 16)
    torch.compile(lambda x: attention(x, x, x, kernel=KERNEL), backend=note)(x)
    assert [json.loads(code)[0] for code in codes] == [library_module.VERSION]


def test_a_program_of_all_options_has_any_lengths_and_all_gradients() -> None:
    names = []

    def backend(graph: Any, inputs: Any) -> Any:
        names.append({str(node.target) for node in graph.graph.nodes})
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    bias, sinks, table = torch.randn(1, 4, 1, 1), torch.randn(4), torch.randn(8, 4)
    trained = [one.requires_grad_() for one in (bias, sinks, table)]

    def loss(q: Any, k: Any, v: Any, kernel: Any) -> Any:
        lengths, ids = torch.tensor([7, 19]), torch.arange(q.shape[-2]) // 9
        part = polyattn.attention_partial(
            q, k, v, bias=bias, sinks=sinks, softcap=3.0, dropout=(0.2, q.shape[-2]),
            is_causal=True, mask=masks.segments(ids) & (masks.window(5, 0) | masks.prefix(lengths)),
            score_mod=scores.relative_bias(table, max_distance=16), kernel=kernel,
        )  # fmt: skip
        return part.output.square().sum() + part.logsumexp.square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for rows in (21, 33, 40, 50):
        x = arrays(rows=rows, keys=rows, trained=True)
        one, other = compiled(*x, KERNEL), loss(*x, "dense")
        torch.testing.assert_close(one, other)
        x += trained
        of_one, of_other = (torch.autograd.grad(y, x) for y in (one, other))
        torch.testing.assert_close(of_one, of_other, rtol=1e-3, atol=1e-4)
    assert len(names) == 2
    assert all("polyattn_native.attend" in targets for targets in names)


def test_numbers_that_change_compile_once_more_only() -> None:
    programs = []

    def backend(graph: Any, _: Any) -> Any:
        programs.append(graph)
        return graph.forward

    def call(q: Any, k: Any, v: Any, t: float, seed: int, kernel: Any) -> Any:
        given = {"score_mod": scores.temperature(t), "dropout": (0.2, seed)}
        return attention(q, k, v, **given, kernel=kernel)

    torch.compiler.reset()
    compiled, x = torch.compile(call, fullgraph=True, backend=backend), arrays()
    for n in range(5, 9):
        torch.testing.assert_close(compiled(*x, n / 4, n, KERNEL), call(*x, n / 4, n, "dense"))
    assert len(programs) == 2


def test_a_first_call_of_a_process_may_be_in_a_program() -> None:
    code = (
        "import torch; from polyattn import attention, masks; x = torch.ones(1, 2, 4, 8);"
        " f = lambda x: attention(x, x, x, mask=masks.window(2, 0) | masks.prefix(1));"
        " torch.compile(f, fullgraph=True, backend='eager')(x)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lengths_that_change_compile_once_more_only() -> None:
    programs = []

    def backend(graph: Any, _: Any) -> Any:
        programs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: attention(*x, is_causal=True, kernel=KERNEL), fullgraph=True, backend=backend
    )
    for rows in range(20, 26):
        compiled(*arrays(rows=rows, keys=rows + 9))
    assert len(programs) == 2
    assert all("polyattn_native.output" in targets for targets in programs)


@pytest.mark.parametrize(
    "given",
    [
        lambda n: {"window": (n, 0)},
        lambda n: {"mask": masks.causal() & (masks.window(n, n + 1) | masks.prefix(2))},
        lambda n: {"mask": masks.prefix(n)},
        lambda n: {"is_causal": True, "query_offset": n},
        lambda n: {"is_causal": True, "key_lengths": n},
    ],
    ids=["window", "streaming", "prefix", "offset", "key_lengths"],
)
def test_integers_that_change_compile_once_more_only(given: Any) -> None:
    programs = []

    def backend(graph: Any, _: Any) -> Any:
        programs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    def call(q: Any, k: Any, v: Any, n: int, kernel: Any) -> Any:
        return attention(q, k, v, **given(n), kernel=kernel)

    torch.compiler.reset()
    compiled, x = torch.compile(call, fullgraph=True, backend=backend), arrays()
    for n in (5, 9, 31):
        torch.testing.assert_close(compiled(*x, n, KERNEL), call(*x, n, "dense"))
    assert len(programs) == 2
    assert all("polyattn_native.output" in targets for targets in programs)


def test_lengths_of_a_program_that_change_are_not_planned_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    class Noting(NativeCall):
        def __init__(self, *given: Any, **more: Any) -> None:
            made.append(self)
            super().__init__(*given, **more)

    monkeypatch.setattr(kernel_module, "NativeCall", Noting)
    torch.compiler.reset()
    step = torch.compile(
        lambda q, k, v, n: attention(
            q, k, v, is_causal=True, key_lengths=n, dropout=(0.1, n), kernel=KERNEL
        ),
        fullgraph=True,
        backend="eager",
    )
    q, k, v = arrays(rows=1)
    for n in range(5, 11):
        wanted = attention(q, k, v, is_causal=True, key_lengths=n, dropout=(0.1, n), kernel="dense")
        torch.testing.assert_close(step(q, k, v, n), wanted)
    assert len(made) == 2  # of the program for one number, and of that for all


def test_a_program_neither_changes_what_is_known_of_classes_nor_reads_all_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = []

    def backend(graph: Any, _: Any) -> Any:
        programs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(arrays_module, "_libraries", {})
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend=backend)
    x = arrays()
    compiled(*x)
    assert arrays_module._libraries == {}
    attention(*x)
    monkeypatch.setenv("A_VARIABLE_OF_ANOTHER_PROGRAM", "1")
    compiled(*x)
    assert len(programs) == 1


def of_a_function(reach: int) -> Any:
    @dataclass(frozen=True, eq=False, repr=False)
    class Near(masks.Mask):
        name: ClassVar[str] = "near"
        side: int

        def seen(self, at: Any) -> Any:
            return (at.column - at.row) * self.side <= reach

    return Near


@dataclass(frozen=True, eq=False, repr=False)
class Named(masks.Mask):
    name: ClassVar[str] = "named"
    side: int | str

    def seen(self, at: Any) -> Any:
        return at.column <= at.row if self.side in (1, "left") else at.column >= at.row


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ({"mask": Named(1)}, True),
        ({"mask": Named("left")}, False),
        ({"mask": of_a_function(1)(1)}, False),
        ({"mask": of_a_function(2)(1) & masks.prefix(5)}, False),
        ({"mask": masks.prefix(2**70)}, False),
        ({"is_causal": True, "query_offset": -(2**63)}, True),
        ({"is_causal": True, "query_offset": 2**63}, False),
        ({"window": (2**70, 2)}, False),
    ],
    ids=str,
)
def test_a_program_leaves_what_a_code_cannot_have_to_another_kernel(
    given: dict[str, Any], runs: bool
) -> None:
    targets: set[str] = set()

    def backend(graph: Any, _: Any) -> Any:
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    x = arrays()
    found = torch.compile(lambda *x: attention(*x, **given), fullgraph=True, backend=backend)(*x)
    wanted = attention(*x, **given, kernel="dense")
    torch.testing.assert_close(found, wanted)
    assert ("polyattn_native.output" in targets) == runs
    with FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(attention(*x, **given, kernel=KERNEL), wanted)
    assert ("polyattn_native.output" in flops(counter)) == runs


@pytest.mark.parametrize("layout", ["heads first", "rows first", "keys of all items"])
def test_a_program_knows_the_strides_of_what_an_operator_returns(layout: str) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    checked: list[str] = []

    class Compare(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            result = super().run_node(node)
            if "polyattn_native" in str(node.target):
                told = node.meta["val"]
                pairs = (
                    zip(result, told, strict=True)
                    if isinstance(told, (list, tuple))
                    else [(result, told)]
                )
                assert all(one.stride() == other.stride() for one, other in pairs)
                checked.append(str(node.target))
            return result

    def compiler(graph: Any, _: Any) -> Any:
        return make_boxed_func(Compare(graph).run)

    x = arrays(trained=True)
    if layout == "rows first":
        x = [
            one.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in x
        ]
    if layout == "keys of all items":
        x = [x[0], *(one.detach()[:1].clone().requires_grad_() for one in x[1:])]
    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    program = torch.compile(
        lambda *x: attention(*x, is_causal=True), fullgraph=True, backend=backend
    )
    program(*x).sum().backward()
    found = [one.grad.clone() for one in x]
    with torch.no_grad():
        torch.testing.assert_close(program(*x), attention(*x, is_causal=True, kernel="dense"))
    expected = torch.autograd.grad(attention(*x, is_causal=True, kernel="dense").sum(), x)
    torch.testing.assert_close(found, list(expected))
    assert {name.split(".")[1] for name in checked} == {"attend", "differentiate", "output"}


def test_an_exported_program_needs_no_kernel_of_another_distribution() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v)

    x = tuple(arrays())
    program = torch.export.export(Model(), x)
    assert "polyattn_native" not in str(program.graph)
    torch.testing.assert_close(program.module()(*x), attention(*x))


# ---- when it runs unasked ----


def chosen(*x: Any, **given: Any) -> str:
    return next(
        str(c.kernel) for c in polyattn.explain(*x, **given).candidates if c.status == "chosen"
    )


def test_it_runs_unasked_where_it_takes_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    if "native" not in [one.kernel for one in polyattn.explain(*arrays()).candidates]:
        pytest.skip("POLYATTN_NATIVE=0")
    monkeypatch.setattr(on_torch, "_HAS_TILES", False)
    cache.forget()
    row = torch.ones(1, 8, 1, 64)
    long = torch.ones(1, 8, 256, 64)
    assert chosen(long, long, long) == "native"
    assert chosen(long.bfloat16(), long.bfloat16(), long.bfloat16()) == "native"
    assert chosen(row, long[:, :2], long[:, :2]) == "native"
    assert chosen(row.half(), long.half(), long.half()) == "native"
    assert chosen(row, long, long) == "native"
    narrow = long[..., :24]
    assert chosen(row[..., :24], narrow, narrow) == "sdpa"
    few = long[:, :, :32]
    assert chosen(few, few, few) == "native"
    assert chosen(few.bfloat16(), few.bfloat16(), few.bfloat16()) == "sdpa"
    trained = few.clone().requires_grad_()
    assert chosen(trained, few, few) == "sdpa"
    assert chosen(trained, few, few, softcap=2.0) == "native"
    some = long[:, :, :160].clone().requires_grad_()
    assert chosen(some, some, some) == "native"
    assert chosen(some, some, some, bias=torch.zeros(160, 160)) == "sdpa"
    monkeypatch.setattr(on_torch, "_HAS_TILES", True)
    cache.forget()
    assert chosen(long.bfloat16(), long.bfloat16(), long.bfloat16()) == "sdpa"


@pytest.mark.slow
def test_a_program_has_gradients_from_an_output_that_is_not_rounded() -> None:
    x = [y.detach().half().requires_grad_() for y in arrays(rows=9, keys=11)]
    wide = [y.detach().double().requires_grad_() for y in x]

    def loss(*x: Any) -> Any:
        return attention(*x, kernel=KERNEL).sum(dtype=torch.float64)

    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*x), x)
    for one, wanted in zip(found, torch.autograd.grad(loss(*wide), wide), strict=True):
        assert (one - wanted).abs().max() <= 1e-3 * wanted.abs().max()
