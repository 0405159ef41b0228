"""torch.compile: programs without a break that compute what a call does, for what changes too."""

import asyncio
import random
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental import symbolic_shapes

import polyattn
from polyattn import attention, attention_partial, masks, scores, use_backend
from polyattn._base.arrays import is_one_of
from polyattn._kernels.tiled import Tiled
from polyattn_torch import device_info
from polyattn_torch.device_info import DeviceInfo

pytestmark = [
    # torch imports what it deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    # array-api-compat looks namespaces up in a cache, which torch.compile looks through.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
RNG = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=RNG)


def compiled(function, backend="eager", **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


# ---- what a program computes ----


class Program(NamedTuple):
    """A call with options of ids (L,), of the lengths of two items, and of what is given."""

    options: Callable[..., dict]
    given: tuple = ((),)  # for each call what `options` gets beside ids and lengths
    rows: tuple[int, ...] = (7,)  # for each call the number of rows and keys
    dynamic: tuple = (None, True)


def table(b, h, i, j):
    return (i // 3 + j // 3) % 2 == 0


SMALL_TILES = Tiled()
SMALL_TILES.tile = 2**8  # 16 rows and keys, of 7 and 40
SLOPES, NUMBERS = torch.rand(4, generator=RNG), np.linspace(-1, 1, 49, dtype="f4").reshape(7, 7)
TABULATED = masks.compile(lambda b, h, i, j: (i >= j) | (b == 1), 7, 7, batch=2, heads=4, tile=4)
MIXED = masks.segments(torch.arange(40) // 7) & ~masks.causal()
TABLE_OF_40 = masks.compile(table, 40, like=SLOPES, tile=16)
INSIDE = {"rows": (40, 25, 30), "dynamic": (None,)}  # the third with a length that is a symbol
OUTSIDE = {"rows": (40,), "dynamic": (None, True)}
PROGRAMS = {
    "sdpa": Program(lambda *_: {"is_causal": True}, rows=(4, 6, 7)),
    "dense": Program(lambda *_: {"softcap": 2.0, "window": (3, 0)}, rows=(4, 6, 7)),
    "tiled": Program(lambda *_: {"kernel": "tiled", "is_causal": True}, rows=(4, 6, 7)),
    "functions": Program(
        lambda *_: {"mask": table, "score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)}
    ),
    "backends": Program(lambda *_: {"backend": "numpy,torch:cuda,torch:cpu"}),
    # symbols, and arrays of the host
    "ids of a list": Program(lambda *_: {"mask": masks.segments([0, 0, 1, 1, 1, 2, 2])}),
    "positions of NumPy": Program(
        lambda *_: {
            "mask": masks.positions(np.arange(7), [*range(7)]) & masks.tree(np.arange(7) - 1)
        }
    ),
    "bias and offsets of NumPy": Program(
        lambda *_: {"bias": NUMBERS, "is_causal": True, "query_offset": np.array([1, 2])}
    ),
    "a mask that grows": Program(
        lambda ids, lengths, mask: {"mask": mask},
        given=((NUMBERS[:1] > 0,), (NUMBERS > 0,), (NUMBERS[None, None] > 0,)),
    ),
    "offsets": Program(
        lambda ids, lengths, offset: {"is_causal": True, "query_offset": offset},
        given=((np.array([1]),), (np.array([1, 2]),)),
    ),
    "a length": Program(
        lambda ids, lengths, n: {"mask": masks.prefix(n)}, given=((3,), (4,), (5,))
    ),
    "a start of dropout": Program(
        lambda ids, lengths, n: {"dropout": (0.3, 5, (0, n, 1, ids.shape[0]))},
        given=((3,), (4,), (5,)),
    ),
    # values made inside
    "patterns": Program(
        lambda *_: {"mask": masks.causal() & masks.window(5, 2) | masks.prefix(2)}, **INSIDE
    ),
    "packed": Program(lambda ids, _: {"mask": masks.segments(ids) & masks.causal()}, **INSIDE),
    "packed in tiles": Program(
        lambda ids, _: {"mask": masks.segments(ids) & masks.causal(), "kernel": SMALL_TILES},
        rows=(40,),
    ),
    "padding in tiles": Program(
        lambda _, n: {"mask": masks.causal() | masks.prefix(n), "kernel": SMALL_TILES}, rows=(40,)
    ),
    # torch's compiler does not know ~ of a value.
    "not packed": Program(
        lambda ids, _: {"mask": masks.causal() & masks.segments(ids).__invert__()}, **INSIDE
    ),
    "an array": Program(
        lambda ids, n: {"mask": masks.dense(ids[:, None] >= ids) & masks.padding(n)}, **INSIDE
    ),
    "a function": Program(lambda _, n: {"mask": masks.rule(table) & masks.padding(9, n)}, **INSIDE),
    "scores": Program(
        lambda *_: {"score_mod": scores.temperature(2.0) >> scores.softcap(3.0) >> scores.alibi(4)},
        **INSIDE,
    ),
    "cosine": Program(
        lambda _, n: {"similarity": scores.cosine(), "scale": 3.0, "dropout": (0.3, n[0])}, **INSIDE
    ),
    "norm": Program(
        lambda ids, _: {"scale": scores.by_norm(2.0), "mask": masks.segments(ids)}, **INSIDE
    ),
    "sparsemax": Program(lambda *_: {"normalizer": scores.sparsemax()}, **INSIDE),
    # values made outside
    "a compiled mask": Program(lambda *_: {"mask": TABULATED}),
    "not packed in tiles": Program(lambda *_: {"mask": MIXED, "kernel": SMALL_TILES}, **OUTSIDE),
    "a table in tiles": Program(lambda *_: {"mask": TABLE_OF_40, "kernel": SMALL_TILES}, **OUTSIDE),
    "slopes": Program(lambda *_: {"score_mod": OF_SLOPES, "kernel": SMALL_TILES}, **OUTSIDE),
    "a distance": Program(
        lambda ids, lengths, n: {"score_mod": scores.relative_bias(TABLE, max_distance=n)},
        given=((32,), (64,), (96,)),
    ),
    "additive": Program(
        lambda *_: {"similarity": ADDITIVE, "kernel": SMALL_TILES}, rows=(40,), dynamic=(None,)
    ),
}
TABLE = randn(8, 4)
OF_SLOPES = scores.alibi(SLOPES) >> scores.relative_bias(TABLE)
ADDITIVE = scores.additive(randn(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dynamic"), [(name, way) for name, row in PROGRAMS.items() for way in row.dynamic]
)
def test_a_program_computes_what_a_call_does(name, dynamic):
    program = PROGRAMS[name]

    def call(q, ids, lengths, *given):
        return attention(q, q, q, **program.options(ids, lengths, *given))

    function = compiled(call, dynamic=dynamic)
    for rows in program.rows:
        for given in program.given:
            # Tensors, so that their lengths are symbols.
            given = [torch.asarray(x) if isinstance(x, np.ndarray) else x for x in given]
            x = randn(2, 4, rows, 8), torch.arange(rows) // 7, torch.tensor([3, 6]), *given
            torch.testing.assert_close(function(*x), call(*x))


def test_a_symbol_is_one_of_some_lengths():
    def found(x):
        return x + is_one_of(7, None, 1, x.shape[0]) + 2 * is_one_of(5, None, 1, x.shape[0])

    assert compiled(found, dynamic=True)(torch.zeros(7))[0] == 1


CHOSEN = torch.tensor([True, False, True, True])
OF_CHOSEN = {
    "plain": lambda keep: {},
    "causal": lambda keep: {"is_causal": True},
    "a mask": lambda keep: {"mask": torch.ones(4, 1, 5, 5).tril(1)[keep] > 0},
    "key lengths": lambda keep: {"key_lengths": torch.tensor([5, 4, 3, 2])[keep]},
    "dense": lambda keep: {"softcap": 2.0, "window": (2, 1)},
}
# A symbol that depends on data is known by its hint.
has_hints = pytest.mark.skipif(
    not hasattr(symbolic_shapes, "optimization_hint"), reason="an older torch"
)
captures_parts = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)


@has_hints
@captures_parts
@pytest.mark.parametrize("name", OF_CHOSEN)
def test_a_length_that_depends_on_data_is_not_compared(name):
    def items(query, keep):
        part = query[keep]
        return attention(part, part, part, **OF_CHOSEN[name](keep))

    query, program = randn(4, 2, 5, 8), compiled(items, "aot_eager")
    for keep in (CHOSEN, ~CHOSEN):  # three items, and one
        found, expected = (
            results(lambda q, f=f, keep=keep: f(q, keep), [query], True) for f in (program, items)
        )
        torch.testing.assert_close(found, expected)


@has_hints
@captures_parts
def test_rows_and_keys_that_depend_on_data_are_not_compared():
    def tokens(query, keep, seen):
        key = query[:, :, seen]
        return attention(query[:, :, keep], key, key, is_causal=True, softcap=2.0)

    query, seen = randn(1, 2, 4, 8), torch.tensor([True, True, False, True])
    program = compiled(tokens, "aot_eager")
    for keep in (CHOSEN, ~CHOSEN):
        found, expected = (f(query, keep, seen) for f in (program, tokens))
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_a_growing_cache_is_compiled_once():
    counter = CompileCounter()
    step = compiled(lambda q, k, v: attention(q, k, v, is_causal=True), counter)
    for length in range(5, 25):
        k = randn(1, 4, length, 8)
        torch.testing.assert_close(step(k[:, :, -1:], k, k), attention(k[:, :, -1:], k, k))
    assert counter.frame_count <= 2  # one for the first length, one for all


# ---- the backend of a program ----


@pytest.mark.slow
def test_a_context_around_a_compiled_call_takes_effect():
    def which(q):
        names = polyattn._dispatch.request.request(None).names
        return attention(q, q, q) + (1 if names == ("array-api",) else 0)

    function, q = compiled(which), randn(2, 4, 6, 8)
    plain = attention(q, q, q)
    for name, added in ("torch", 0), ("array-api", 1), ("torch", 0):
        with use_backend(name):
            torch.testing.assert_close(function(q), plain + added)
        torch.testing.assert_close(function(q), plain)


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
        compiled(lambda q: attention(q, q, q, backend="numpy"))(randn(2, 4, 6, 8))


FIRST_CALL = """
import torch, polyattn
q, sinks = torch.ones(1, 2, 4, 8), {sinks}
f = lambda q: polyattn.attention(q, q, q, softcap=2.0, sinks=sinks)
f = torch.compile(f, fullgraph=True, backend="eager")
assert torch.equal(f(q), q)  # which loads what `polyattn.attention` is
assert torch.equal(f(q[:, :, :3]), q[:, :, :3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("sinks", ["None", "torch.nn.Parameter(torch.full((2,), -torch.inf))"])
def test_the_first_call_of_all_may_be_a_compiled_one(sinks, run_python):
    run_python(FIRST_CALL.format(sinks=sinks))


# ---- memory ----

OPTIONS = [{"mask": masks.causal() | masks.prefix(2)}, {}, {"is_causal": True}, {"window": (2, 1)}]


def draw(shape, order, step):
    """Return an array whose axes are stored in an order, the last of them with a stride."""
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
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kernel", "seed"),
    [("aot_eager", "sdpa", seed) for seed in range(8)]
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

    program = compiled(call, backend, dynamic=True)
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
            for function, given in ((program, arrays), (call, plain))
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_blocks_may_have_an_open_size():
    x, table = torch.rand(1, 2, 6, 8), torch.tensor([[0, 1], [1, 2], [0, 2]])

    def call(x, keys):
        return attention(x, x, x, mask=masks.blocks(table, (2, keys)))

    program = compiled(call, "inductor", dynamic=True)
    for keys in (2, 3):
        torch.testing.assert_close(program(x, keys), call(x, keys))


@pytest.mark.slow
def test_a_choice_for_a_gpu_can_be_traced(monkeypatch):
    """Its quirks ask for versions, as those of a CPU do not."""
    hopper = DeviceInfo("cuda", (2, 11), (9, 19, 0), (9, 0))
    monkeypatch.setattr(device_info, "_describe_device", lambda device: hopper)
    x = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)

    def call(x):
        return attention(x, x, x, mask=torch.ones(8, dtype=torch.bool))

    torch.testing.assert_close(compiled(call)(x), call(x))


# ---- numbers ----

#: Calls with a number that changes, which the caller uses in arithmetic too.
CHANGES = {
    "scale": lambda x, s: attention(x * s, x, x, scale=s + 0.1),
    "softcap of a chain": lambda x, s: attention(x * s, x, x, score_mod=scores.softcap(s + 0.1)),
    "temperature": lambda x, s: attention(x * s, x, x, score_mod=scores.temperature(s + 0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_number_that_changes_is_not_an_old_one(name):
    """After the second value, torch holds the number as a symbol."""
    call, x = CHANGES[name], torch.randn(1, 2, 6, 8)
    program = compiled(call, "inductor")
    for number in (0.25, 0.5, 0.75):
        torch.testing.assert_close(program(x, number), call(x, number))


@pytest.mark.slow
def test_a_rate_of_dropout_that_changes_is_not_an_old_one():
    """Each rate is a program of its own: to compile the hash of dropout takes a minute."""
    counter = CompileCounter()
    program = compiled(lambda x, s: attention(x * s, x, x, dropout=(s / 4, 3)), counter)
    for number in (0.25, 0.5, 0.75):
        program(torch.ones(1, 2, 6, 8), number)
    assert counter.frame_count == 3


DISTANCES = torch.arange(8.0).reshape(4, 2)
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
        np.int64, lambda n: {"score_mod": lambda: scores.relative_bias(DISTANCES, max_distance=n)},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_of_numpy_is_a_number_in_a_program(name):
    (kind, options), x = SCALARS[name], torch.randn(1, 2, 6, 8)

    def call(x, given):
        return attention(x, x, x, **{n: v() if callable(v) else v for n, v in given.items()})

    program = compiled(call)
    for number in (2, 1) if name == "distance" else (2, 3):
        given = options(kind(number))
        torch.testing.assert_close(program(x, given), call(x, given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score_mod": scores.alibi(torch.ones(2)), "kernel": "sdpa"},
         "does not compute score_expression"),
        ({"scale": np.float32(2)}, "scale is a NumPy scalar of dtype float32"),
        ({"is_causal": np.bool_(1)},
         "dtype bool, which torch.compile does not read: pass a scalar of Python"),
        ({"window": (np.int32(2), 0)}, "an end of window is a NumPy scalar of dtype int32"),
        ({"softcap": torch.tensor(2.0)}, "softcap must be a number; got () float32"),
        ({"dropout": (0.5, torch.ones(2))}, "must be one integer; got (0.5, (2,) float32)"),
    ],
)  # fmt: skip
def test_a_program_refuses_what_a_call_refuses_with_the_reason(options, words):
    program = compiled(lambda x: attention(x, x, x, **options))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(words)):
        program(torch.ones(1, 2, 6, 8))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, y: attention(x, x, x, mask=masks.segments(y[0, 0, :, 0]), kernel="sdpa",
                                scale=scores.by_norm()), "sdpa  refused  it does not compute"),
        (lambda x, y: attention(x, y, y[..., 1:, :]), "one length S; got 7 and 6: query (None,"),
        (lambda x, y: scores.temperature(x[0, 0, 0, 0]), "range of float32; got () float32"),
        (lambda x, y: scores.distance(y[0, 0, 0, 0]), "must be 1 or 2; got () int64"),
    ],
)  # fmt: skip
def test_a_program_with_open_lengths_refuses_with_the_reason(call, words):
    program = compiled(call, dynamic=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(words)):
        program(torch.ones(3, 2, 7, 8), torch.ones(3, 2, 7, 8, dtype=torch.int64))
