"""torch.compile: programs without a break that compute what a call does, for what changes too."""

import asyncio
import re

import numpy as np
import pytest
import torch
from arrays import close, draw, tiles_of, to_torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental import symbolic_shapes

import polyattn
from polyattn import attention, masks, scores, use_backend
from polyattn._base.arrays import is_one_of
from polyattn_torch import device_info
from polyattn_torch.device_info import DeviceInfo
from polyattn_torch.engines import aligned

pytestmark = [
    # torch imports what it deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    # array-api-compat looks namespaces up in a cache, which torch.compile looks through.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def randn(*shape):
    return draw(shape, to=to_torch)[0]


def compiled(function, backend="eager", **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


# ---- what a program computes ----


def table(b, h, i, j):
    return (i // 3 + j // 3) % 2 == 0


SMALL_TILES = tiles_of(2**8)  # 16 rows and keys, of 40
NUMBERS, SLOPES, OF_DISTANCE = (
    np.linspace(-1, 1, 49, dtype="f4").reshape(7, 7),
    randn(4),
    randn(8, 4),
)
TABLE_OF_40 = masks.compile(table, 40, like=SLOPES, tile=16)
TABULATED = masks.compile(lambda b, h, i, j: (i >= j) | (b == 1), 7, 7, batch=2, heads=4, tile=4)
OF_SLOPES, ADDITIVE = (
    scores.alibi(SLOPES) >> scores.relative_bias(OF_DISTANCE),
    scores.additive(SLOPES),
)
#: Functions of ids (L,), the lengths of two items and a value that return the options of calls, and
#: for each run the length of its arrays and its value.
PROGRAMS = {
    "kernels": (
        lambda *_: [
            {"is_causal": True},
            {"softcap": 2.0, "window": (3, 0)},
            {"kernel": "tiled", "is_causal": True},
            {"mask": table, "score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)},
            {"backend": "numpy,torch:cuda,torch:cpu"},
        ],
        [(4, None), (6, None), (7, None)],
    ),
    "arrays of the host": (
        lambda *_: [
            {"mask": masks.segments([0, 0, 1, 1, 1, 2, 2])},
            {"mask": masks.positions(np.arange(7), [*range(7)]) & masks.tree(np.arange(7) - 1)},
            {"bias": NUMBERS, "is_causal": True, "query_offset": np.array([1, 2])},
            {"mask": TABULATED},
        ],
        [(7, None)],
    ),
    "a mask that grows": (
        lambda ids, lengths, mask: [{"mask": mask}],
        [(7, NUMBERS[:1] > 0), (7, NUMBERS > 0), (7, NUMBERS[None, None] > 0)],
    ),
    "offsets": (
        lambda ids, lengths, offset: [{"is_causal": True, "query_offset": offset}],
        [(7, np.array([1])), (7, np.array([1, 2]))],
    ),
    "a number": (
        lambda ids, lengths, n: [
            {"mask": masks.prefix(n)},
            {"score_mod": scores.relative_bias(OF_DISTANCE, max_distance=8 * n)},
            {"dropout": (0.3, 5, (0, n, 1, ids.shape[0]))},
        ],
        [(7, 3), (7, 4), (7, 5)],
    ),
    "values made inside": (  # the third time with a length that is a symbol
        lambda ids, n, _: [
            {"mask": masks.causal() & masks.window(5, 2) | masks.prefix(2)},
            # torch's compiler does not know ~ of a value.
            {"mask": masks.causal() & masks.segments(ids).__invert__()},
            {"mask": masks.dense(ids[:, None] >= ids) & masks.padding(n)},
            {"mask": masks.rule(table) & masks.padding(9, n)},
            {"score_mod": scores.temperature(2.0) >> scores.softcap(3.0) >> scores.alibi(4)},
            {"similarity": scores.cosine(), "scale": 3.0, "dropout": (0.3, n[0])},
            {"scale": scores.by_norm(2.0), "mask": masks.segments(ids)},
            {"normalizer": scores.sparsemax()},
        ],
        [(40, None), (25, None), (30, None)],
    ),
    "tiles": (
        lambda ids, n, _: [
            {"kernel": SMALL_TILES, "mask": masks.segments(ids) & masks.causal()},
            {"kernel": SMALL_TILES, "mask": masks.causal() | masks.prefix(n)},
            {"kernel": SMALL_TILES, "mask": TABLE_OF_40},
            {"kernel": SMALL_TILES, "score_mod": OF_SLOPES},
            {"kernel": SMALL_TILES, "similarity": ADDITIVE},
        ],
        [(40, None)],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_what_a_call_does(name):
    options, runs = PROGRAMS[name]

    def call(q, ids, lengths, given):
        return [attention(q, q, q, **one) for one in options(ids, lengths, given)]

    function = compiled(call)
    for rows, given in runs:
        # A tensor, so that its lengths are symbols.
        given = to_torch(given) if isinstance(given, np.ndarray) else given
        x = randn(2, 4, rows, 4), torch.arange(rows) // 7, torch.tensor([3, 6]), given
        close(function(*x), call(*x))


@pytest.mark.slow
def test_a_large_mask_of_a_batch_that_a_program_leaves_open(monkeypatch):
    monkeypatch.setattr("polyattn._core.tiles.visibility.LARGEST_MADE", 8)
    run = compiled(attention)
    for items in (2, 3):
        q, ids = torch.zeros(items, 1, 4, 2), torch.arange(4).expand(items, 4).contiguous()
        close(run(q, q, q + 1, mask=masks.segments(ids)), q + 1)


def test_a_symbol_is_one_of_some_lengths_and_vectors_of_any_stride_are_aligned():
    def found(x, strided):
        sum_of = is_one_of(7, None, 1, x.shape[0]) + 2 * is_one_of(5, None, 1, x.shape[0])
        return x + sum_of, aligned(strided)

    strided = torch.arange(18.0).reshape(2, 9)[:, 1:]
    found, copy = compiled(found, dynamic=True)(torch.zeros(7), strided)
    assert found[0] == 1
    assert copy.stride() == (8, 1)
    assert (copy == strided).all()


CHOSEN = torch.tensor([True, False, True, True])


# A symbol that depends on data is known by its hint.
@pytest.mark.skipif(not hasattr(symbolic_shapes, "optimization_hint"), reason="an older torch")
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.slow
def test_a_length_that_depends_on_data_is_not_compared():
    def items(query, keep):
        part = query[keep]
        of_lengths = attention(part, part, part, key_lengths=torch.tensor([5, 4, 3, 2])[keep])
        return attention(part, part, part) + of_lengths

    query, program = randn(4, 2, 5, 8), compiled(items, "aot_eager")
    for keep in (CHOSEN, ~CHOSEN):  # three items, and one
        found, expected = (
            results(lambda q, f=f, keep=keep: f(q, keep), [query]) for f in (program, items)
        )
        close(found, expected)


@pytest.mark.slow
def test_a_growing_cache_is_compiled_once():
    counter = CompileCounter()
    step = compiled(lambda q, k, v: attention(q, k, v, is_causal=True), counter)
    for length in range(5, 25):
        k = randn(1, 4, length, 8)
        close(step(k[:, :, -1:], k, k), attention(k[:, :, -1:], k, k))
    assert counter.frame_count <= 2  # one for the first length, one for all


# ---- the backend of a program ----


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


FIRST_CALL = """
import torch, polyattn
q, sinks = torch.ones(1, 2, 4, 8), torch.nn.Parameter(torch.full((2,), -torch.inf))
f = lambda q: polyattn.attention(q, q, q, softcap=2.0, sinks=sinks)
f = torch.compile(f, fullgraph=True, backend="eager")
assert torch.equal(f(q), q)  # which loads what `polyattn.attention` is
assert torch.equal(f(q[:, :, :3]), q[:, :, :3])
"""


@pytest.mark.slow
def test_the_first_call_of_all_may_be_a_compiled_one(run_python):
    run_python(FIRST_CALL)


# ---- memory ----


def results(function, arrays):
    """Return the output of a function, and its gradients."""
    arrays = [array.detach().requires_grad_() for array in arrays]
    output = function(*arrays)
    return [output, *torch.autograd.grad(output.square().sum(), arrays)]


@pytest.mark.slow
def test_a_compiled_call_reads_any_memory():
    def call(query, key, value):
        return attention(query, key, value, kernel="sdpa", mask=masks.causal() | masks.prefix(2))

    program = compiled(call, "aot_eager", dynamic=True)
    for rows, keys, size, value_size in ((5, 9, 4, 7), (8, 3, 6, 2)):
        shapes = (2, rows, 4, size), (2, keys, value_size, 2), (2, 2, keys, 2 * size)
        query, value, key = draw(*shapes, to=to_torch, dtype="float64")
        arrays = query.transpose(1, 2), key[..., ::2], value.permute(0, 3, 1, 2)
        plain = [array.contiguous() for array in arrays]
        found, expected = results(program, arrays), results(call, plain)
        close(found, expected)


@pytest.mark.slow
def test_blocks_may_have_an_open_size():
    x, table = torch.rand(1, 2, 6, 8), torch.tensor([[0, 1], [1, 2], [0, 2]])

    def call(x, keys):
        return attention(x, x, x, mask=masks.blocks(table, (2, keys)))

    program = compiled(call, "inductor", dynamic=True)
    for keys in (2, 3):
        close(program(x, keys), call(x, keys))


@pytest.mark.slow
def test_a_choice_for_a_gpu_can_be_traced(monkeypatch):
    """Its quirks ask for versions, as those of a CPU do not."""
    hopper = DeviceInfo("cuda", (2, 11), (9, 19, 0), (9, 0))
    monkeypatch.setattr(device_info, "_describe_device", lambda device: hopper)
    x = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)

    def call(x):
        return attention(x, x, x, mask=torch.ones(8, dtype=torch.bool))

    close(compiled(call)(x), call(x))


# ---- numbers ----


@pytest.mark.slow
def test_a_number_that_changes_is_not_an_old_one():
    """After the second value, torch holds as a symbol what the caller computes with too."""

    def call(x, s):
        rules = {"scale": s + 0.1}, {"score_mod": scores.softcap(s) >> scores.temperature(s + 0.1)}
        return [attention(x * s, x, x, **rule) for rule in rules]

    program, x = compiled(call, "inductor"), randn(1, 2, 6, 8)
    for number in (0.25, 0.5, 0.75):
        close(program(x, number), call(x, number))


@pytest.mark.slow
def test_a_rate_of_dropout_that_changes_is_not_an_old_one():
    """Each rate is a program of its own: to compile the hash of dropout takes a minute."""
    counter = CompileCounter()
    program = compiled(lambda x, s: attention(x * s, x, x, dropout=(s / 4, 3)), counter)
    for number in (0.25, 0.5, 0.75):
        program(torch.ones(1, 2, 6, 8), number)
    assert counter.frame_count == 3


DISTANCES = torch.arange(8.0).reshape(4, 2)
#: Options, each a function of a scalar of NumPy, which a program gets.
SCALARS = {
    "scale": np.float64,
    "softcap": np.float64,
    "dropout": lambda n: (np.float64(n / 8), np.int64(n)),
    "window": lambda n: (np.int64(n), 0),
    "query_offset": np.int32,
    "key_lengths": np.uint8,
    "score_mod": lambda n: lambda: scores.relative_bias(DISTANCES, max_distance=np.int64(n)),
}


@pytest.mark.slow
def test_a_scalar_of_numpy_is_a_number_in_a_program():
    def call(x, given):
        return attention(x, x, x, **{n: v() if callable(v) else v for n, v in given.items()})

    program, x = compiled(call), randn(1, 2, 6, 8)
    for number in (2, 3):
        given = {option: of(number) for option, of in SCALARS.items()}
        close(program(x, given), call(x, given))


def refused(words, call, *, is_dear=True):
    return pytest.param(call, words, marks=[pytest.mark.slow] if is_dear else [])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        refused("one length S; got 7 and 6: query (None,",
                lambda x, y: attention(x, x, x[..., 1:, :]), is_dear=False),
        refused("range of float32; got () float32",
                lambda x, y: scores.temperature(x[0, 0, 0, 0]), is_dear=False),
        refused("sdpa  refused  it does not compute",
                lambda x, y: attention(x, x, x, mask=masks.segments(y[0, 0, :, 0]), kernel="sdpa",
                                       scale=scores.by_norm())),
        refused("no array can be converted", lambda x, y: attention(x, x, x, backend="numpy")),
        refused("scale is a NumPy scalar of dtype float32",
                lambda x, y: attention(x, x, x, scale=np.float32(2))),
        refused("dtype bool, which torch.compile does not read: pass a scalar of Python",
                lambda x, y: attention(x, x, x, is_causal=np.bool_(1))),
    ],
)  # fmt: skip
def test_a_program_with_open_lengths_refuses_with_the_reason(call, words):
    program = compiled(call, dynamic=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(words)):
        program(torch.ones(3, 2, 7, 8), torch.ones(3, 2, 7, 8, dtype=torch.int64))
