"""The table of torch's bugs, on invented devices, and its shortcuts."""

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch_devices import AMPERE, BLACKWELL, CPU, HOPPER, MPS, problem

from polyattn_torch import autograd
from polyattn_torch.quirks import QUIRKS, SHORTCUTS, Workaround
from polyattn_torch.sdpa import Sdpa


class Cases(NamedTuple):
    """Problems on devices where a quirk holds, and next to these, where it does not."""

    holds: list[Any]
    but_not: list[Any]


def on(device, *options, **more):
    """Return a problem on a device, by the options that it has beside a plain call's."""
    return problem(**{name: x for given in (*options, more) for name, x in given.items()}), device


BIAS, MASK, CAUSAL = {"bias": (64, 64)}, {"mask": (64, 64)}, {"is_causal": True}
FLOAT32_BIAS = BIAS | {"facts": {"bias_dtype": "float32"}}
GROUPED, FLOAT32 = {"key": (2, 2, 64, 16)}, {"dtype": "float32"}
TRAINED, UNDER_GRAD = {"facts": {"requires_grad": True}}, {"facts": {"transforms": {"grad"}}}
NARROW = {"value": (2, 4, 64, 8)}
LSE = {"logsumexp": True}


def square(length, batch=2, heads=4, **options):
    """Return options of as many rows as keys; a mask or bias of that shape where it is True."""
    made = {name: (length, length) if x is True else x for name, x in options.items()}
    return {"query": (batch, heads, length, 16)} | made


def keys(length, rows=64):
    return {"query": (2, 4, rows, 16), "key": (2, 4, length, 16)}


CASES = {
    ("pytorch#191612", Workaround.REFUSE): Cases(
        holds=[on(HOPPER, FLOAT32_BIAS), on(MPS, FLOAT32_BIAS)],
        but_not=[
            on(CPU, FLOAT32_BIAS), on(HOPPER, BIAS), on(HOPPER, FLOAT32_BIAS, FLOAT32),
            on(HOPPER, MASK),
        ],
    ),
    ("pytorch#196678", Workaround.AVOID_CUDNN): Cases(
        holds=[
            on(HOPPER, MASK, TRAINED), on(BLACKWELL, BIAS, TRAINED), on(HOPPER, MASK, UNDER_GRAD),
            on(HOPPER._replace(torch=(2, 11)), TRAINED, window=(3, 0)),
        ],
        but_not=[
            on(HOPPER, MASK), on(AMPERE, MASK, TRAINED), on(HOPPER, MASK, TRAINED, FLOAT32),
            on(HOPPER._replace(torch=(2, 10)), MASK, TRAINED), on(HOPPER, CAUSAL, TRAINED),
            on(HOPPER, square(128, mask=True), TRAINED),
        ],
    ),
    ("cudnn-frontend#262, #943", Workaround.CLEAR_EMPTY_ROWS): Cases(
        holds=[
            on(HOPPER, MASK), on(HOPPER, BIAS), on(BLACKWELL, CAUSAL, query_offset=-3),
            on(HOPPER, window=(0, 0), query_offset=3),
        ],
        but_not=[
            on(HOPPER._replace(cudnn=(9, 25, 0)), MASK), on(AMPERE, MASK),
            on(HOPPER, MASK, FLOAT32), on(HOPPER, window=(3, 0)), on(HOPPER, CAUSAL),
        ],
    ),
    ("pytorch#193893", Workaround.REPEAT_HEADS): Cases(
        holds=[on(BLACKWELL, GROUPED)],
        but_not=[
            on(HOPPER, GROUPED), on(BLACKWELL), on(BLACKWELL, GROUPED, FLOAT32),
            on(BLACKWELL._replace(cudnn=(9, 26, 0)), GROUPED),
            on(BLACKWELL, query=(2, 16, 64, 16), key=(2, 8, 64, 16)),
        ],
    ),
    ("pytorch#191937", Workaround.CONTIGUOUS): Cases(
        holds=[on(AMPERE, square(65, mask=True)), on(HOPPER, square(65), window=(1, 1))],
        but_not=[on(AMPERE, square(65)), on(AMPERE, MASK), on(CPU, square(65, mask=True))],
    ),
    ("pytorch#162588", Workaround.REFUSE): Cases(
        holds=[on(AMPERE, square(2**16, 1, 1, mask=True))],
        but_not=[
            on(AMPERE, square(2**16, 1, 1)), on(HOPPER, square(2**16, 1, 1, mask=True)),
            on(AMPERE, square(2**15, 1, 1, mask=True)),
        ],
    ),
    ("pytorch#174861", Workaround.REFUSE): Cases(
        holds=[on(MPS._replace(torch=(2, 10)))],
        but_not=[on(MPS._replace(torch=(2, 11))), on(HOPPER._replace(torch=(2, 10)))],
    ),
    ("pytorch#195910", Workaround.EXPLICIT_MASK): Cases(
        holds=[on(MPS._replace(torch=(2, 12)), CAUSAL)],
        but_not=[
            on(MPS, CAUSAL), on(HOPPER, CAUSAL), on(MPS._replace(torch=(2, 12))),
            on(MPS._replace(torch=(2, 12)), CAUSAL, FLOAT32),
            on(MPS._replace(torch=(2, 12)), square(1), CAUSAL),
        ],
    ),
    ("pytorch#176767", Workaround.PAD): Cases(
        holds=[on(MPS, NARROW)], but_not=[on(MPS), on(HOPPER, NARROW)]
    ),
    ("pytorch#181133", Workaround.CONTIGUOUS): Cases(holds=[on(MPS)], but_not=[on(HOPPER)]),
    ("pytorch#184180", Workaround.EXPAND_MASK): Cases(
        holds=[on(MPS, MASK), on(MPS._replace(torch=(2, 12)), CAUSAL)],
        but_not=[on(MPS), on(MPS, CAUSAL), on(HOPPER, MASK)],
    ),
    ("no report; a precaution", Workaround.BIAS): Cases(
        holds=[on(MPS, MASK)], but_not=[on(MPS), on(HOPPER, MASK)]
    ),
    ("pytorch#184122", Workaround.REFUSE): Cases(
        holds=[on(MPS, scale=0.5)], but_not=[on(MPS), on(HOPPER, scale=0.5)]
    ),
    ("pytorch#179352", Workaround.REFUSE): Cases(
        holds=[on(MPS, square(2**15))],
        but_not=[on(MPS, square(2**15, batch=1)), on(HOPPER, square(2**15))],
    ),
    ("pytorch#149261", Workaround.REFUSE): Cases(
        holds=[on(MPS, square(2**14, 1, 9)), on(MPS, square(2**14, 1, 5), FLOAT32)],
        but_not=[
            on(MPS, square(2**14, 1, 8)), on(MPS, square(2**14, 1, 4), FLOAT32),
            on(HOPPER, square(2**14, 1, 9), FLOAT32),
        ],
    ),
    ("pytorch#193487, #195163", Workaround.REFUSE): Cases(
        holds=[on(MPS, keys(2**15 - 1))],
        but_not=[
            on(MPS, keys(2**15 - 2)), on(MPS, keys(2**15, rows=8)), on(HOPPER, keys(2**15))
        ],
    ),
    ("pytorch#149132", Workaround.REPEAT_HEADS): Cases(
        holds=[on(MPS, GROUPED)], but_not=[on(MPS), on(HOPPER, GROUPED)]
    ),
    ("seen in torch 2.13", Workaround.CLEAR_EMPTY_ROWS): Cases(
        holds=[
            on(CPU, MASK, LSE), on(AMPERE, BIAS, LSE), on(CPU, CAUSAL, LSE, query_offset=-1)
        ],
        but_not=[
            on(CPU, MASK), on(CPU, CAUSAL, LSE), on(CPU, LSE, window=(2, 0)), on(MPS, MASK, LSE)
        ],
    ),
    ("seen in torch 2.13", Workaround.EXPLICIT_MASK): Cases(
        holds=[on(CPU, CAUSAL, scale=0.0), on(CPU, CAUSAL, scale=-0.4)],
        but_not=[
            on(CPU, CAUSAL, scale=0.4), on(CPU, scale=0.0), on(CPU, window=(3, 0), scale=0.0),
            on(HOPPER, CAUSAL, scale=0.0),
        ],
    ),
    ("read in torch 2.13", Workaround.REFUSE): Cases(
        holds=[on(AMPERE, scale=0.0), on(HOPPER, CAUSAL, scale=-0.4)],
        but_not=[on(AMPERE, scale=0.4), on(CPU, CAUSAL, scale=0.0)],
    ),
    ("seen in torch 2.13", Workaround.REFUSE): Cases(
        holds=[
            on(CPU, keys(0, rows=5), TRAINED, bias=(5, 0)),
            on(AMPERE, square(0, bias=True), TRAINED),
            on(CPU, square(5, batch=0, bias=True), UNDER_GRAD),
        ],
        but_not=[
            on(CPU, square(0, bias=True)), on(CPU, square(0), TRAINED), on(CPU, BIAS, TRAINED)
        ],
    ),
    ("seen in torch 2.13", Workaround.PAD): Cases(
        holds=[on(CPU, NARROW, FLOAT32), on(CPU, NARROW, dtype="float64")],
        but_not=[
            on(CPU, NARROW), on(CPU, FLOAT32), on(AMPERE, NARROW, FLOAT32),
            on(CPU, FLOAT32, value=(2, 4, 64, 0)),
            on(CPU, NARROW, FLOAT32, facts={"transforms": {"vmap"}}),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda q: f"{q.upstream}-{q.workaround.name}")
def test_a_quirk_holds_where_it_should_and_not_next_to_it(quirk):
    cases = CASES[quirk.upstream, quirk.workaround]
    for met, device in cases.holds:
        assert quirk.predicate(met, device), (met, device)
    for other, device in cases.but_not:
        assert not quirk.predicate(other, device), (other, device)


def test_each_quirk_has_its_cases():
    assert sorted(CASES, key=str) == sorted(((q.upstream, q.workaround) for q in QUIRKS), key=str)


def test_a_refusal_names_its_upstream(monkeypatch):
    monkeypatch.setattr("polyattn_torch.sdpa.describe_device", lambda _: HOPPER)
    assert Sdpa().reasons_against(problem(**FLOAT32_BIAS)) == [
        "it reads the bits of a bias of another dtype as 16-bit numbers (pytorch#191612)"
    ]


# ---- shortcuts ----


class _Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_torch_autograd_function_apply(monkeypatch):
    """It still reads the signature, and without that the result and its gradients are the same."""
    x, read = torch.ones(3, requires_grad=True), []
    genuine = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda f, **o: read.append(f) or genuine(f, **o))
    _Doubled.apply(x)
    assert _Doubled.forward in read
    read.clear()
    output = autograd.apply_function(_Doubled, x)
    assert not read
    assert torch.autograd.grad(output.sum(), x)[0].tolist() == [2, 2, 2]
    mapped = torch.func.vmap(lambda x: autograd.apply_function(_Doubled, x))(x.detach())
    assert mapped.tolist() == [2, 2, 2]


def test_torch_compiler_assume_constant_result(run_python):
    """Our mark is torch's, and does not import the compiler."""
    run_python(
        "import sys, torch\n"
        "from polyattn_torch.device_info import constant_when_traced\n"
        "@constant_when_traced\n"
        "def ours(): return 1\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "def theirs(): return 1\n"
        "torch.compiler.assume_constant_result(theirs)\n"
        "assert vars(ours) == vars(theirs)\n"
    )


def test_each_shortcut_has_a_test_of_its_name():
    for shortcut in SHORTCUTS:
        assert callable(globals()["test_" + shortcut.avoided.replace(".", "_").lower()])
