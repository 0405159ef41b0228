"""The compiled kernel on tensors of torch: derivatives, programs, and what it leaves."""

import functools
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from arrays import close
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import polyattn
from polyattn import attention, masks, scores
from polyattn._base import arrays as arrays_module
from polyattn._dispatch import cache
from polyattn.dialects import flash_attn
from polyattn_native import call as call_module
from polyattn_native import kernel as kernel_module
from polyattn_native import library, on_torch
from polyattn_native.ready import Ready

# torch's own compiler and forward mode import what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
KERNEL = on_torch.NativeOnTorch()


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


def arrays(dtype=torch.float32, heads=4, rows=33, keys=40, *, trained=False):
    shapes = (2, heads, rows, 24), (2, 2, keys, 24), (2, 2, keys, 20)
    return [torch.randn(shape, dtype=dtype, requires_grad=trained) for shape in shapes]


@pytest.fixture
def compiled():
    """Return a function that compiles another, and the operators of its programs, with operands."""

    def compiled(function, then="eager"):
        def backend(graph, inputs):
            compiled.programs.append({str(node.target): node.args for node in graph.graph.nodes})
            return torch._dynamo.lookup_backend(then)(graph, inputs)

        return torch.compile(function, fullgraph=True, backend=backend)

    compiled.programs = []
    torch.compiler.reset()
    return compiled


# ---- derivatives ----


def test_second_derivatives():
    def call(*x):
        return attention(*x, softcap=1.5, is_causal=True, kernel=KERNEL)

    shapes = (1, 2, 3), (1, 3, 3), (1, 3, 2)
    x = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


def test_functions_of_torch_func_agree_with_the_formula():
    q, k, v = arrays(torch.float64)

    def derivatives(kernel):
        def loss(q):
            return attention(q, k, v, is_causal=True, kernel=kernel).square().sum()

        first = torch.func.grad(loss)
        return first(q), torch.func.grad(lambda q: first(q).square().sum())(q)

    torch.testing.assert_close(derivatives(KERNEL), derivatives("dense"))


def test_what_it_does_not_follow_is_refused_by_name_and_runs_in_another_kernel():
    q, k, v = arrays(heads=2)

    def push(kernel):
        return torch.func.jvp(lambda q: attention(q, k, v, kernel=kernel), (q,), (q,))[1]

    def mapped(kernel):
        return torch.func.vmap(lambda *x: attention(*x, kernel=kernel))(q, k, v)

    for run, name in ((push, "forward derivatives"), (mapped, r"torch\.func\.vmap")):
        close(run(None), run("dense"))
        with pytest.raises(polyattn.UnsupportedError, match=f"does not support {name}"):
            run(KERNEL)


def test_gradients_in_batches_agree_with_those_one_by_one():
    q, k, v = arrays(trained=True)
    output = attention(q, k, v, kernel=KERNEL)
    given = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, q, given, is_grads_batched=True, retain_graph=True)[0]
    one = [torch.autograd.grad(output, q, x, retain_graph=True)[0] for x in given]
    torch.testing.assert_close(batched, torch.stack(one))


def test_numpy_warns_of_no_number_that_torch_would_not_warn_of(monkeypatch):
    monkeypatch.setattr(call_module, "MADE", 100)
    q, k, v = arrays()
    many = torch.linspace(0, 1, 4, dtype=torch.float64) * torch.finfo(torch.float64).min
    for options in (
        {"bias": many[:, None, None].expand(1, 4, 33, 40)},
        {"bias": many[:, None, None].expand(1, 4, 1, 40)},
        {"sinks": many},
        {"score_mod": scores.alibi(torch.full((4,), torch.inf))},
    ):
        for one in (q, q * torch.nan, q * torch.inf):
            pullback = polyattn.attention_vjp(one, k, v, kernel=KERNEL, **options)[1]
            pullback(torch.full((*one.shape[:-1], v.shape[-1]), torch.inf))


# ---- memory ----


def test_results_have_the_axes_in_memory_of_their_operands():
    x = [torch.randn(2, 9, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    output = attention(*x, kernel="native")
    gradients = torch.autograd.grad(output.sum(), x)
    for one in (output, *gradients):
        assert one.stride() == x[0].stride()


def test_short_packed_sequences_are_one_call(caplog):
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


def test_tensors_are_read_where_they_lie(monkeypatch):
    calls, real = [], Ready.run

    def run(ready, kernel, *addresses, x):
        calls.append([*addresses[:4]])
        return real(ready, kernel, *addresses, x=x)

    monkeypatch.setattr(Ready, "run", run)
    x = torch.randn(2, 33, 4, 24).bfloat16().transpose(1, 2)
    for _ in range(2):
        output = attention(x, x, x, kernel=KERNEL)
    assert calls == [[x.data_ptr()] * 3 + [output.data_ptr()]]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], 2)[:, :, ::2],
        lambda x: x[:1].expand(2, -1, -1, -1),
        lambda x: x[:, :, :1].expand_as(x),
        lambda x: x[..., :1].expand_as(x),
        lambda x: torch._neg_view(x),
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["columns first", "rows apart", "item", "row", "column", "neg", "parameter"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides_are_read_twice(change, dtype):
    tensors = [change(x) for x in arrays(dtype)]
    plain = [x.resolve_neg().detach().double() for x in tensors]
    wanted = attention(*plain, is_causal=True, kernel="dense")
    with torch.no_grad():
        for _ in range(2):  # the second call is found by its strides
            close(attention(*tensors, is_causal=True, kernel=KERNEL), wanted)


# ---- what records ----


def flops(counter):
    """The FLOPs of each operator, by item, head, row and key of `arrays`."""
    return {str(o): n // (2 * 4 * 33 * 40) for o, n in counter.get_flop_counts()["Global"].items()}


CHECKPOINTED = {
    "segments": {"mask": masks.segments(torch.arange(33) // 9, torch.arange(40) // 9)},
    "dropout": {"dropout": (0.3, 11), "window": (5, 3), "softcap": 2.0},
    "table": {"score_mod": scores.relative_bias(torch.ones(8, 4), max_distance=16)},
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpoint_whose_policy_names_the_operator_calls_it_once(name, times):
    def call(*x):
        return attention(*x, **CHECKPOINTED[name], kernel=KERNEL)

    x = arrays(trained=True)
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


def test_flops_are_counted_by_a_counter_from_before_the_kernel_was_loaded():
    counter = FlopCounterMode(display=False)
    for name in ("attend", "output", "differentiate"):
        del counter.flop_registry[getattr(torch.ops.polyattn_native, name)]
    with counter:
        attention(*arrays(), kernel=KERNEL)
    assert flops(counter) == {"polyattn_native.output": 2 * (24 + 20)}


def test_flops_of_pages_are_those_of_all_their_keys():
    query, *pools = [torch.randn(n, 4, 33 if n == 2 else 8, 24) for n in (2, 9, 9)]
    paged = {"block_table": torch.randint(9, (2, 5)), "key_lengths": torch.tensor([40, 17])}
    with FlopCounterMode(display=False) as counter:
        found = attention(query, *pools, **paged, kernel=KERNEL)
    assert flops(counter) == {"polyattn_native.output": 2 * (24 + 24)}
    assert torch.equal(found, attention(query, *pools, **paged, kernel=KERNEL))


def test_numbers_of_an_operator_are_on_the_cpu_whatever_the_default_device():
    x, rule = arrays(), scores.temperature(2.5)
    wanted = attention(*x, score_mod=rule, kernel=KERNEL)
    with torch.device("meta"), FlopCounterMode(display=False):
        assert torch.equal(attention(*x, score_mod=rule, kernel=KERNEL), wanted)


def test_same_bits_hold_where_a_mode_sees_operators():
    x = arrays()
    with polyattn.same_bits():
        wanted = attention(*x, is_causal=True)
        cache.forget()
        with FlopCounterMode(display=False):
            assert torch.equal(attention(*x, is_causal=True), wanted)
            with pytest.raises(polyattn.UnsupportedError, match="expressions without strings"):
                attention(*x, mask=Named("left"))


def test_operators_return_the_gradients_of_scale_and_softcap(compiled):
    def numbers(*x):
        output, pullback = polyattn.attention_vjp(*x, softcap=2.0, kernel=KERNEL)
        gradients = pullback(output)
        return gradients.scale, gradients.softcap

    x = arrays()
    wanted = numbers(*x)
    with FlopCounterMode(display=False):
        assert numbers(*x) == wanted
    assert compiled(numbers, "aot_eager")(*x) == wanted


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_model_of_jit_trace_has_neither_numbers_nor_lengths_of_the_example():
    def call(*x):
        return attention(*x, window=(9, 0), softcap=2.0)

    traced = torch.jit.trace(call, tuple(arrays()), check_trace=False)
    others = arrays(rows=7, keys=11)
    torch.testing.assert_close(traced(*others), call(*others))


def test_tensors_without_numbers_are_refused():
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(2, 3, 4)
        assert attention(x, x, x).shape == (2, 3, 4)
        with pytest.raises(polyattn.UnsupportedError, match="it needs real tensors"):
            attention(x, x, x, kernel=KERNEL)
    meta = torch.ones(2, 3, 4, device="meta")
    with pytest.raises(polyattn.UnsupportedError, match="runs on cpu only"):
        attention(meta, meta, meta, kernel=KERNEL)


# ---- programs ----


def test_a_program_calls_the_kernel_of_its_version(compiled):
    """So that no program on disk outlives the version."""
    seen = torch.arange(2 * 33 * 40).view(2, 1, 33, 40) % 7 % 2 == 0
    given = {
        "is_causal": True, "query_offset": torch.tensor([3, 9]), "window": (50, None), "scale": 0.3,
        "mask": masks.dense(seen) | masks.prefix(torch.tensor([2, 5])),
        "score_mod": scores.temperature(2.5) >> scores.alibi(torch.linspace(0.1, 1, 4)),
        "bias": torch.linspace(-1, 1, 33 * 40).view(33, 40).bfloat16(),
        "dropout": (0.3, 2**63 + 5, torch.tensor([1, 2, 3, 4])),
    }  # fmt: skip
    x = arrays(trained=True)
    found = compiled(lambda *x: attention(*x, **given, kernel=KERNEL), "aot_eager")(*x)
    wanted = attention(*x, **given, kernel="dense")
    along = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(one, x, along) for one in (found, wanted)))
    code = compiled.programs[0]["polyattn_native.attend"][3]
    assert json.loads(code)[0] == library.VERSION


def test_a_program_of_all_options_has_any_lengths_and_all_gradients(compiled):
    bias, sinks, table = torch.randn(1, 4, 1, 1), torch.randn(4), torch.randn(8, 4)
    trained = [one.requires_grad_() for one in (bias, sinks, table)]

    def loss(q, k, v, kernel):
        lengths, ids = torch.tensor([7, 19]), torch.arange(q.shape[-2]) // 9
        part = polyattn.attention_partial(
            q, k, v, bias=bias, sinks=sinks, softcap=3.0, dropout=(0.2, q.shape[-2]),
            is_causal=True, mask=masks.segments(ids) & (masks.window(5, 0) | masks.prefix(lengths)),
            score_mod=scores.relative_bias(table, max_distance=16), kernel=kernel,
        )  # fmt: skip
        return part.output.square().sum() + part.logsumexp.square().sum()

    program = compiled(loss, "aot_eager")
    for rows in (21, 33, 50):
        x = arrays(rows=rows, keys=rows, trained=True)
        one, other = program(*x, KERNEL), loss(*x, "dense")
        torch.testing.assert_close(one, other)
        x += trained
        of_one, of_other = (torch.autograd.grad(y, x) for y in (one, other))
        torch.testing.assert_close(of_one, of_other, rtol=1e-3, atol=1e-4)
    assert len(compiled.programs) == 2
    assert all("polyattn_native.attend" in targets for targets in compiled.programs)


@pytest.mark.slow
def test_a_first_call_of_a_process_may_be_in_a_program():
    code = (
        "import torch; from polyattn import attention, masks; x = torch.ones(1, 2, 4, 8);"
        " f = lambda x: attention(x, x, x, mask=masks.window(2, 0) | masks.prefix(1));"
        " torch.compile(f, fullgraph=True, backend='eager')(x)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_that_change_compile_once_more_only(compiled, monkeypatch):
    planned = []

    class Noting(kernel_module.NativeCall):
        def __init__(self, *given, **more):
            planned.append(self)
            super().__init__(*given, **more)

    def call(q, k, v, n, kernel):
        mask = masks.causal() & (masks.window(n, n + 1) | masks.prefix(n))
        return attention(
            q, k, v, window=(n, 0), query_offset=n, score_mod=scores.temperature(n / 4), mask=mask,
            key_lengths=n + 2, dropout=(0.2, n), kernel=kernel,
        )  # fmt: skip

    monkeypatch.setattr(kernel_module, "NativeCall", Noting)
    program, x = compiled(call), arrays()
    for n in (5, 9, 31):
        torch.testing.assert_close(program(*x, n, KERNEL), call(*x, n, "dense"))
    assert (len(compiled.programs), len(planned)) == (2, 3)  # a program for all other numbers
    assert all("polyattn_native.output" in targets for targets in compiled.programs)


def test_a_program_changes_nothing_that_is_known_of_classes_logs_nothing_and_reads_no_variables(
    compiled, monkeypatch, caplog
):
    monkeypatch.setattr(arrays_module, "_libraries", {})
    program, x = compiled(attention), arrays()
    with caplog.at_level(logging.DEBUG, "polyattn"):
        program(*x)
    assert not [record for record in caplog.records if record.name == "polyattn"]
    assert arrays_module._libraries == {}
    attention(*x)
    monkeypatch.setenv("A_VARIABLE_OF_ANOTHER_PROGRAM", "1")
    program(*x)
    assert len(compiled.programs) == 1


@dataclass(frozen=True, eq=False, repr=False)
class Named(masks.Mask):
    name: ClassVar[str] = "named"
    side: int | str

    def seen(self, at):
        return at.column <= at.row if self.side in (1, "left") else at.column >= at.row


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ({"mask": Named(1)}, True),
        ({"mask": Named("left")}, False),
        ({"mask": masks.prefix(2**70)}, False),
        ({"is_causal": True, "query_offset": 2**63}, False),
        ({"window": (2**70, 2)}, False),
    ],
    ids=str,
)
def test_an_operator_leaves_what_a_code_cannot_have_to_another_kernel(given, runs, compiled):
    x = arrays()
    wanted = attention(*x, **given, kernel="dense")
    with FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(attention(*x, **given, kernel=KERNEL), wanted)
    assert ("polyattn_native.output" in flops(counter)) == runs
    if isinstance(given.get("mask"), Named) and not runs:
        program = compiled(lambda *x: attention(*x, **given))
        torch.testing.assert_close(program(*x), wanted)
        assert "polyattn_native.output" not in compiled.programs[0]


def test_a_program_knows_the_strides_of_what_an_operator_returns():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    checked = set()

    class Compare(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if "polyattn_native" in str(node.target):
                checked.add(str(node.target).split(".")[1])
                results, told = (
                    x if isinstance(x, list | tuple) else [x] for x in (result, node.meta["val"])
                )
                for one, other in zip(results, told, strict=True):
                    assert one.stride() == other.stride()
            return result

    def compiler(graph, _):
        return make_boxed_func(Compare(graph).run)

    def loss(query, key, value, turned, **options):
        # The second call has rows first, and keys that all items share.
        first = attention(query, key, value, is_causal=True, **options)
        second = attention(*turned, is_causal=True, **options)
        return first.sum() + second.square().sum()

    x, turned = arrays(trained=True), [y.transpose(1, 2).contiguous() for y in arrays()]
    turned = [turned[0], turned[1][:1].clone(), turned[2][:1].clone()]
    turned = [y.transpose(1, 2).requires_grad_() for y in turned]
    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    program = torch.compile(loss, fullgraph=True, backend=backend)
    found = torch.autograd.grad(program(*x, turned), x + turned)
    expected = torch.autograd.grad(loss(*x, turned, kernel="dense"), x + turned)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(program(*x, turned), loss(*x, turned, kernel="dense"))
    assert checked == {"attend", "differentiate", "output"}


def test_an_exported_program_needs_no_kernel_of_another_distribution():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v)

    x = tuple(arrays())
    program = torch.export.export(Model(), x)
    assert "polyattn_native" not in str(program.graph)
    torch.testing.assert_close(program.module()(*x), attention(*x))


# ---- when it runs unasked ----


def chosen(*x, **given):
    return polyattn.explain(*x, **given).chosen.kernel


def test_it_runs_unasked_where_it_takes_less_time(monkeypatch):
    row, long = torch.ones(1, 8, 1, 64), torch.ones(1, 8, 256, 64)
    few, some = long[:, :, :32], long[:, :, :160].clone().requires_grad_()
    narrow, trained = long[..., :24], few.clone().requires_grad_()
    short, tokens = torch.ones(2, 2, 9, 16), torch.ones(2, 8, 1, 16)
    lengths = {"key_lengths": torch.tensor([4, 9])}
    for has_tiles, query, key, options, kernel in (
        (False, long, long, {}, "native"),
        (False, long.bfloat16(), long.bfloat16(), {}, "native"),
        (False, row, long[:, :2], {}, "native"),
        (False, row.half(), long.half(), {}, "native"),
        (False, row[..., :24], narrow, {}, "sdpa"),
        (False, few, few, {}, "native"),
        (False, few.bfloat16(), few.bfloat16(), {}, "sdpa"),
        (False, trained, few, {}, "sdpa"),
        (False, trained, few, {"softcap": 2.0}, "native"),
        (False, some, some, {}, "native"),
        (False, some, some, {"bias": torch.zeros(160, 160)}, "sdpa"),
        (False, short[:, :, :1], short, lengths, "sdpa"),
        (False, tokens, short, lengths, "native"),
        (False, tokens, short, lengths | {"is_causal": True}, "native"),
        (True, long.bfloat16(), long.bfloat16(), {}, "sdpa"),
    ):
        monkeypatch.setattr(on_torch, "_HAS_TILES", has_tiles)
        cache.forget()
        assert chosen(query, key, key, **options) == kernel, (query.shape, key.shape, options)
