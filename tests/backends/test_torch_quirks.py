"""The table of torch's bugs, on invented devices, and its shortcuts."""

import inspect
from fnmatch import fnmatch

import pytest
import torch
from torch_devices import AMPERE, BLACKWELL, CPU, HOPPER, MPS, OLD_MPS, problem

from polyattn._base.tracing import constant_when_traced
from polyattn_torch import autograd
from polyattn_torch.quirks import QUIRKS, SHORTCUTS, Workaround
from polyattn_torch.sdpa import Sdpa

DEVICES = {
    "cpu": CPU,
    "ampere": AMPERE,
    "capability12": HOPPER._replace(capability=(12, 0)),
    "cudnn9.15.0": HOPPER._replace(cudnn=(9, 15, 0)),  # before torch prefers it
    "hopper": HOPPER,
    "hopper-torch2.10": HOPPER._replace(torch=(2, 10)),
    "hopper-cudnn9.15.1": HOPPER._replace(cudnn=(9, 15, 1)),
    "hopper-cudnn9.25": HOPPER._replace(cudnn=(9, 25, 0)),
    "blackwell": BLACKWELL,
    "blackwell-cudnn9.26": BLACKWELL._replace(cudnn=(9, 26, 0)),
    "mps-torch2.10": MPS._replace(torch=(2, 10)),
    "mps-torch2.12": OLD_MPS,
    "mps": MPS,
}
MASK, BIAS, CAUSAL, FLOAT32 = (
    {"mask": (64, 64)}, {"bias": (64, 64)}, {"is_causal": True}, {"dtype": "float32"}
)  # fmt: skip
TRAINED, UNDER_GRAD = {"requires_grad": True}, {"transforms": {"grad"}}
NARROW, LOGSUMEXP = {"value": (2, 4, 64, 8)}, {"logsumexp": True}


def square(length, batch=2, heads=4):
    return {"query": (batch, heads, length, 16)}


def keys(length, rows=64):
    return {"query": (2, 4, rows, 16), "key": (2, 4, length, 16)}


#: What a call in bfloat16 of (2, 4, 64, 16) has beside its arrays.
PROBLEMS = {
    "plain": {},
    "float32": FLOAT32,
    "mask": MASK,
    "mask-float32": MASK | FLOAT32,
    "mask-trained": MASK | {"facts": TRAINED},
    "mask-trained-float32": MASK | FLOAT32 | {"facts": TRAINED},
    "mask-under-grad": MASK | {"facts": UNDER_GRAD},
    "mask-trained-S128": square(128) | {"mask": (128, 128), "facts": TRAINED},
    "mask-S65": square(65) | {"mask": (65, 65)},
    "mask-of-2^32": square(2**16, 1, 1) | {"mask": (2**16, 2**16)},
    "mask-of-2^32-float32": square(2**16, 1, 1) | FLOAT32 | {"mask": (2**16, 2**16)},
    "mask-of-2^30": square(2**15, 1, 1) | {"mask": (2**15, 2**15)},
    "mask-logsumexp": MASK | LOGSUMEXP,
    "bias": BIAS,
    "bias-wide": BIAS | {"facts": {"bias_dtype": "float32"}},
    "bias-wide-float32": BIAS | FLOAT32 | {"facts": {"bias_dtype": "float64"}},
    "bias-trained": BIAS | {"facts": TRAINED},
    "causal": CAUSAL,
    "causal-float32": CAUSAL | FLOAT32,
    "causal-trained": CAUSAL | {"facts": TRAINED},
    "causal-L1": CAUSAL | square(1),
    "causal-logsumexp": CAUSAL | LOGSUMEXP,
    "causal-empty-rows": CAUSAL | {"query_offset": -3},
    "causal-empty-rows-logsumexp": CAUSAL | {"query_offset": -3} | LOGSUMEXP,
    "causal-scale0": CAUSAL | {"scale": 0.0},
    "window": {"window": (3, 0)},
    "window-S65": square(65) | {"window": (1, 1)},
    "window-empty-rows": {"window": (0, 0), "query_offset": 3},
    "window-trained": {"window": (3, 0), "facts": TRAINED},
    "scale": {"scale": 0.5},
    "scale-below-0": {"scale": -0.5},
    "grouped": {"key": (2, 2, 64, 16)},
    "grouped-float32": {"key": (2, 2, 64, 16)} | FLOAT32,
    "grouped-8": {"query": (2, 16, 64, 16), "key": (2, 8, 64, 16)},
    "narrow": NARROW,
    "narrow-float32": NARROW | FLOAT32,
    "narrow-float32-vmap": NARROW | FLOAT32 | {"facts": {"transforms": {"vmap"}}},
    "values-of-0-float32": FLOAT32 | {"value": (2, 4, 64, 0)},
    "2^31-scores": square(2**14, 1, 8),
    "2^31-scores-float32": square(2**14, 1, 8) | FLOAT32,
    "2^33-scores": square(2**15),
    "keys-32766": keys(2**15 - 2),
    "keys-32767": keys(2**15 - 1),
    "keys-32767-L8": keys(2**15 - 1, rows=8),
    "no-keys-bias-trained": keys(0, rows=5) | {"bias": (5, 0), "facts": TRAINED},
    "no-keys-bias": keys(0, rows=5) | {"bias": (5, 0)},
    "no-rows-bias-trained": square(0) | {"bias": (0, 0), "facts": TRAINED},
    "no-items-bias-under-grad": square(5, batch=0) | {"bias": (5, 5), "facts": UNDER_GRAD},
    "no-keys-trained": keys(0, rows=5) | {"facts": TRAINED},
}
WITHOUT_CUDNN = "ampere capability12 cudnn9.15.0"
CUDA = f"{WITHOUT_CUDNN} hopper* blackwell*"
MASKED = "mask* bias* window* causal-empty-rows* no-*bias*"
#: Where each quirk holds, and nowhere else in the two tables: on these devices, for these
#: problems. A word is a pattern, and one with ! leaves out.
HOLDS = {
    ("pytorch#191612", Workaround.REFUSE): [(f"{CUDA} mps*", "bias-wide")],
    ("pytorch#196678", Workaround.AVOID_CUDNN): [
        ("hopper* !*torch2.10 blackwell*", "*-trained !causal* !no-* mask-under-grad")
    ],
    ("cudnn-frontend#262, #943", Workaround.CLEAR_EMPTY_ROWS): [
        ("hopper* blackwell !*9.25", "mask* bias* *-empty-rows* no-*bias* !*float32")
    ],
    ("pytorch#193893", Workaround.REPEAT_HEADS): [("blackwell", "grouped")],
    ("pytorch#191937", Workaround.CONTIGUOUS): [(CUDA, "*-S65")],
    ("pytorch#162588", Workaround.REFUSE): [
        (WITHOUT_CUDNN, "mask-of-2^32*"), ("hopper* blackwell*", "mask-of-2^32-float32")
    ],
    ("pytorch#174861", Workaround.REFUSE): [("mps-torch2.10", "*")],
    ("pytorch#195910", Workaround.EXPLICIT_MASK): [
        ("mps-*", "causal causal-trained causal-logsumexp causal-scale0")
    ],
    ("pytorch#176767", Workaround.PAD): [("mps*", "narrow* values-of-0*")],
    ("pytorch#181133", Workaround.CONTIGUOUS): [("mps*", "*")],
    ("pytorch#184180", Workaround.EXPAND_MASK): [
        ("mps", MASKED), ("mps-*", f"{MASKED} causal causal-trained causal-logsumexp causal-scale0")
    ],
    ("pytorch#184122", Workaround.REFUSE): [("mps*", "*scale*")],
    ("pytorch#149132", Workaround.REPEAT_HEADS): [("mps*", "grouped*")],
    ("pytorch#179352", Workaround.REFUSE): [("mps*", "2^33-scores")],
    ("pytorch#149261", Workaround.REFUSE): [
        ("mps*", "2^31-scores-float32 2^33-scores mask-of-2^32*")
    ],
    ("pytorch#193487, #195163", Workaround.REFUSE): [
        ("mps*", "keys-32767 2^33-scores mask-of-2^3*")
    ],
    ("seen in torch 2.13", Workaround.CLEAR_EMPTY_ROWS): [
        (f"cpu {CUDA}", "mask-logsumexp causal-empty-rows-logsumexp")
    ],
    ("seen in torch 2.13", Workaround.EXPLICIT_MASK): [("cpu", "causal-scale0")],
    ("read in torch 2.13", Workaround.REFUSE): [(f"{CUDA} mps*", "causal-scale0 scale-below-0")],
    ("seen in torch 2.13", Workaround.REFUSE): [("*", "no-*bias-*")],
    ("seen in torch 2.13", Workaround.PAD): [("cpu", "narrow-float32")],
}  # fmt: skip
HOLDS["no report; a precaution", Workaround.BIAS] = HOLDS["pytorch#184180", Workaround.EXPAND_MASK]


def matching(words, names):
    """Return the names that some word matches, and no word with !."""
    words = words.split()
    out = [word[1:] for word in words if word.startswith("!")]
    return {
        name
        for name in names
        if any(fnmatch(name, word) for word in words)
        and not any(fnmatch(name, word) for word in out)
    }


@pytest.fixture(scope="module")
def problems():
    return {name: problem(**options) for name, options in PROBLEMS.items()}


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda q: f"{q.upstream}-{q.workaround.name}")
def test_a_quirk_holds_on_its_devices_for_its_problems(quirk, problems):
    holds = {
        (device, name)
        for devices, names in HOLDS[quirk.upstream, quirk.workaround]
        for device in matching(devices, DEVICES)
        for name in matching(names, PROBLEMS)
    }
    assert holds == {
        (device, name)
        for device, info in DEVICES.items()
        for name, asked in problems.items()
        if quirk.predicate(asked, info)
    }


def test_each_quirk_has_a_row():
    assert sorted(HOLDS, key=str) == sorted(((q.upstream, q.workaround) for q in QUIRKS), key=str)


def test_a_refusal_names_its_upstream(monkeypatch):
    monkeypatch.setattr("polyattn_torch.sdpa.describe_device", lambda _: HOPPER)
    assert Sdpa().reasons_against(problem(**PROBLEMS["bias-wide"])) == [
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


def test_torch_compiler_assume_constant_result():
    """Our mark is torch's, which imports the compiler."""
    ours, theirs = (lambda: 1), (lambda: 1)
    constant_when_traced(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


def test_each_shortcut_has_a_test_of_its_name():
    for shortcut in SHORTCUTS:
        assert callable(globals()["test_" + shortcut.avoided.replace(".", "_").lower()])
