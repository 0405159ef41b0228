"""Random calls under torch.compile with lengths and sizes that change, whatever the strides are."""

import random
import re

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from polyattn import attention, attention_partial, masks, scores
from polyattn_torch import device_info
from polyattn_torch.device_info import DeviceInfo

pytestmark = [
    pytest.mark.slow,
    # torch imports what it deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
OPTIONS = [{"mask": masks.causal() | masks.prefix(2)}, {}, {"is_causal": True}, {"window": (2, 1)}]


def draw(shape, order, step):
    """Return an array whose axes lie in memory in an order, and the last of them in steps."""
    stored = [shape[axis] for axis in order]
    stored[-1] *= step
    array = torch.randn(stored, dtype=torch.float64)[..., ::step]
    return array.permute([order.index(axis) for axis in range(4)])


def results(function, arrays, has_gradients):
    """Return the output of a function, and its gradients."""
    arrays = [array.detach().requires_grad_(has_gradients) for array in arrays]
    output = function(*arrays)
    return [output, *(torch.autograd.grad(output.square().sum(), arrays) if has_gradients else ())]


# The array-API kernels, above all tiles of unknown lengths, take many seconds to compile.
@pytest.mark.parametrize(
    ("backend", "kernel", "seed"),
    [("aot_eager", "sdpa", seed) for seed in range(12)]
    + [("inductor", "sdpa", seed) for seed in range(12, 14)]
    + [("aot_eager", "dense", 14), ("aot_eager", "tiled", 15)],
)
def test_a_compiled_call_reads_any_memory(backend, kernel, seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    options = rng.choice(OPTIONS)
    is_partial = kernel == "sdpa" and rng.random() < 0.3
    heads, key_heads = rng.choice([(2, 2), (4, 2)])
    orders = [rng.choice([(0, 1, 2, 3), (0, 1, 3, 2), (0, 2, 1, 3), (3, 2, 0, 1)]) for _ in "qkv"]
    steps = [rng.choice([1, 1, 2]) for _ in "qkv"]

    def call(query, key, value):
        if is_partial:
            return attention_partial(query, key, value, kernel=kernel, **options).output
        return attention(query, key, value, kernel=kernel, **options)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for _ in range(2):
        rows, keys = rng.sample(range(3, 12), 2)
        size, value_size = rng.sample(range(2, 10), 2)
        shapes = (
            (2, heads, rows, size), (2, key_heads, keys, size), (2, key_heads, keys, value_size)
        )  # fmt: skip
        arrays = list(map(draw, shapes, orders, steps))
        plain = [array.contiguous() for array in arrays]
        # The engine's logsumexp has no derivative.
        found, expected = (
            results(function, given, not is_partial)
            for function, given in ((compiled, arrays), (call, plain))
        )
        torch.testing.assert_close(found, expected)


def test_a_choice_for_a_gpu_can_be_traced(monkeypatch):
    """Its quirks ask for versions, as those of a CPU do not."""
    hopper = DeviceInfo("cuda", (2, 11), (9, 19, 0), (9, 0))
    monkeypatch.setattr(device_info, "_describe_device", lambda device: hopper)
    x = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)

    def call(x):
        return attention(x, x, x, mask=torch.ones(8, dtype=torch.bool))

    torch.compiler.reset()
    found = torch.compile(call, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, call(x))


#: Calls with a number that changes, which the caller uses in arithmetic too.
NUMBERS = {
    "scale": lambda x, s: attention(x * s, x, x, scale=s + 0.1),
    "softcap of a chain": lambda x, s: attention(x * s, x, x, score_mod=scores.softcap(s + 0.1)),
    "temperature": lambda x, s: attention(x * s, x, x, score_mod=scores.temperature(s + 0.1)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_is_not_an_old_one(name):
    """After the second value, torch holds the number as a symbol."""
    call, x = NUMBERS[name], torch.randn(1, 2, 6, 8)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True)
    for number in (0.25, 0.5, 0.75):
        torch.testing.assert_close(compiled(x, number), call(x, number))


def test_a_rate_of_dropout_that_changes_is_not_an_old_one():
    """Each rate is a program of its own: to compile the hash of dropout takes a minute."""
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, s: attention(x * s, x, x, dropout=(s / 4, 3)), fullgraph=True, backend=counter
    )
    for number in (0.25, 0.5, 0.75):
        compiled(torch.ones(1, 2, 6, 8), number)
    assert counter.frame_count == 3


TABLE = torch.arange(8.0).reshape(4, 2)
#: Options of a number, as a function of a scalar of NumPy.
SCALARS = {
    "scale": (np.float64, lambda n: {"scale": n}),
    "softcap": (np.float64, lambda n: {"softcap": n}),
    "an integer for a scale": (np.int64, lambda n: {"scale": n}),
    "rate": (np.float64, lambda n: {"dropout": (n / 8, 3)}),
    "seed": (np.int64, lambda n: {"dropout": (0.5, n)}),
    "window": (np.int64, lambda n: {"window": (n, 0)}),
    "offset": (np.int32, lambda n: {"query_offset": n, "is_causal": True}),
    "lengths": (np.uint8, lambda n: {"key_lengths": n}),
    "temperature": (np.float64, lambda n: {"score_mod": lambda: scores.temperature(n)}),
    "distance": (np.int64, lambda n: {"similarity": lambda: scores.distance(n)}),
    "largest distance": (
        np.int64, lambda n: {"score_mod": lambda: scores.relative_bias(TABLE, max_distance=n)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_of_numpy_is_a_number_in_a_program(name):
    (kind, options), x = SCALARS[name], torch.randn(1, 2, 6, 8)
    torch.compiler.reset()

    def call(x, given):
        return attention(x, x, x, **{n: v() if callable(v) else v for n, v in given.items()})

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for number in (2, 1) if name == "distance" else (2, 3):
        given = options(kind(number))
        torch.testing.assert_close(compiled(x, given), call(x, given))


def test_a_call_that_no_kernel_takes_says_why_in_a_program():
    rule, x = scores.alibi(torch.ones(2)), torch.ones(1, 2, 6, 8)
    compiled = torch.compile(
        lambda x: attention(x, x, x, score_mod=rule, kernel="sdpa"), fullgraph=True
    )
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="does not compute score_expression"):
        compiled(x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": np.float32(2)}, "scale is a NumPy scalar of dtype float32"),
        (
            {"is_causal": np.bool_(1)},
            "dtype bool, which torch.compile does not read: pass a scalar of Python",
        ),
        ({"window": (np.int32(2), 0)}, "an end of window is a NumPy scalar of dtype int32"),
        ({"softcap": torch.tensor(2.0)}, "softcap must be a number; got () float32"),
        ({"dropout": (torch.tensor(0.5), 3)}, "dropout rate must be a number; got () float32"),
        ({"dropout": (0.5, torch.ones(2))}, "must be one integer; got (0.5, (2,) float32)"),
    ],
)
def test_what_a_program_does_not_read_is_refused_by_name(options, words):
    compiled = torch.compile(lambda x: attention(x, x, x, **options), fullgraph=True)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(words)):
        compiled(torch.ones(1, 2, 6, 8))
