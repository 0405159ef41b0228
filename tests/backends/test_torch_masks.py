"""PyTorch with masks and scores as values: its kernels, its compiler, its gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from polyattn import attention, explain, masks, scores
from polyattn._core.call.describe import describe
from polyattn._core.call.layout import heads_first
from polyattn._core.call.problem import examine
from polyattn._kernels.tiled import Tiled
from polyattn.plugin import Span
from polyattn_torch.attn_mask import attn_mask, made_mask
from polyattn_torch.backend import TorchBackend

pytestmark = pytest.mark.slow

TORCH = TorchBackend()
RNG = torch.Generator().manual_seed(0)


# array-api-compat looks namespaces up in a cache, which torch.compile says that it looks through.
LRU = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
TORCH_JIT = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def randn(*shape):
    return torch.randn(*shape, generator=RNG)


def ids_of(length, count, *batch):
    found = torch.randint(0, count, (*batch, length), generator=RNG)
    return found.sort(dim=-1).values


def close(one, other, **tolerance):
    torch.testing.assert_close(one, other, **tolerance)


def both(q, k, v, kernel, **options):
    """Compare a kernel with the formula."""
    output = attention(q, k, v, kernel=kernel, **options)
    close(output, attention(q, k, v, kernel="dense", **options))
    return output


def described(q, k, v, **options):
    """Return the problem and the operands as a kernel is given them."""
    call, operands = describe(q, k, v, **options)
    return examine(call), heads_first(call, operands)


def blocks_of(b, h, i, j):
    return (i // 100 + j // 100) % 2 == 0


def by_head(b, h, i, j):
    return j - i < 100 * h


# Tiles of 128 end within both lengths.
L, S = 200, 300
Q, K, V = randn(2, 4, L, 16), randn(2, 2, S, 16), randn(2, 2, S, 16)
ROWS, KEYS = ids_of(L, 3, 2), ids_of(S, 3, 2)
LENGTHS = torch.tensor([130, 299])

MASKS = {
    "packed": masks.segments(ROWS, KEYS),
    "packed, causal": masks.segments(ROWS[0], KEYS[0]) & masks.causal(),
    "positions": masks.positions(ROWS * 9, KEYS * 9 - 2, masks.window(9, 0) & masks.dilated(2)),
    "tree": masks.tree((torch.arange(L) - 1 - torch.arange(L) % 3).clamp(-1)),
    "padding": masks.padding(LENGTHS, torch.tensor([0, 140])),
    "padding of keys": masks.padding(LENGTHS),
    "prefix": masks.causal() | masks.prefix(LENGTHS),
    "sparse": masks.window(20, 20) & masks.dilated(4) | masks.global_tokens(0, 7),
    "all but an array": ~masks.dense(torch.rand(2, 1, L, S, generator=RNG) > 0.5),
    "one axis": masks.dense(torch.arange(S) < 140) | masks.prefix(2),
    "a function": masks.rule(blocks_of) & masks.causal(),
    "a function of heads": masks.rule(by_head) & masks.padding(LENGTHS),
    "a table": masks.compile(blocks_of, L, S, like=Q) & masks.padding(LENGTHS),
    "a table of heads": masks.compile(by_head, L, S, like=Q, heads=4, tile=50),
    "nothing": masks.prefix(0) | masks.prefix(0),
}


# ---- sdpa ----


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_is_counted_as_it_is_made(case):
    problem, operands = described(Q, K, V, mask=MASKS[case])
    made = attn_mask(problem, operands, Span(0, S), banded=False)
    counted = made_mask(problem, Span(0, S), banded=False)
    if "mask_mod" in problem.features:  # what a function depends on is not known beforehand
        assert counted == 2 * 4 * L * S >= made.numel()
    else:
        assert counted == made.numel()


def test_the_offset_of_each_item_is_counted_too():
    options = {"mask": masks.segments(ROWS[0], KEYS[0]) & masks.causal()}
    problem, _ = described(Q, K, V, query_offset=LENGTHS, **options)
    assert made_mask(problem, Span(0, S), banded=True) == 2 * L * S
    assert made_mask(problem, Span(0, S), banded=False) == L * S


def test_a_padding_mask_stays_as_small_as_its_lengths(monkeypatch):
    seen = []
    genuine = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **options: seen.append(options["attn_mask"]) or genuine(*args, **options),
    )
    attention(Q, K, V, mask=masks.padding(LENGTHS))
    assert seen[0].shape == (2, 1, 1, max(LENGTHS))


def test_a_mask_value_too_large_to_make_goes_to_tiled():
    shape, lengths = (8, 2, 2**14, 64), torch.tensor([5] * 8)

    def chosen(mask):
        return explain(shape, shape, shape, mask=mask, library="torch")

    assert chosen(masks.padding(lengths)).chosen.kernel == "sdpa"
    assert chosen(masks.padding(lengths, lengths)).chosen.kernel == "tiled"
    refused = str(chosen(masks.segments(torch.zeros(2**14, dtype=torch.int64))))
    assert "a mask of 268,435,456 elements" in refused


def test_a_mask_that_is_large_is_made_where_the_kernel_is_named(monkeypatch):
    monkeypatch.setattr("polyattn._core.tiles.visibility.LARGEST_MADE", L * S - 1)
    options = {"mask": masks.segments(ROWS[0], KEYS[0])}
    left = explain(Q, K, V, **options)
    assert left.chosen.kernel != "sdpa"
    (status,) = (c.status for c in left.candidates if c.kernel == "sdpa")
    assert status == "on request"
    named = explain(Q, K, V, kernel="sdpa", **options).chosen
    assert (named.kernel, named.reasons) == ("sdpa", ())
    assert f"it would need a mask of {L * S:,} elements" in named.on_request
    found = attention(Q, K, V, kernel="sdpa", **options)
    close(found, attention(Q, K, V, kernel="dense", **options))


# ---- torch.compile ----


def inside(ids, lengths):
    return {
        "positions": {"mask": masks.causal() & masks.window(5, 2) | masks.prefix(2)},
        "packed": {"mask": masks.segments(ids) & masks.causal()},
        "padding": {"mask": masks.causal() | masks.prefix(lengths)},
        # torch's compiler knows no ~ of a value.
        "not packed": {"mask": masks.causal() & masks.segments(ids).__invert__()},
        "sparse": {"mask": masks.window(9, 9) & masks.dilated(2) | masks.global_tokens(0, 1)},
        "an array": {"mask": masks.dense(ids[:, None] >= ids) & masks.padding(lengths)},
        "a function": {"mask": masks.rule(blocks_of) & masks.padding(9, lengths)},
        "scores": {"score_mod": scores.temperature(2.0) >> scores.softcap(3.0) >> scores.alibi(4)},
        "cosine": {"similarity": scores.cosine(), "scale": 3.0, "dropout": (0.3, lengths[0])},
        "norm": {"scale": scores.by_norm(2.0), "mask": masks.segments(ids)},
        "sparsemax": {"normalizer": scores.sparsemax()},
    }


SMALL_TILES = Tiled()
SMALL_TILES.tile = 2**10  # 32 rows and keys
IDS, SLOPES = torch.arange(40) // 7, torch.rand(4, generator=RNG)
OUTSIDE = {
    "not packed": {"mask": masks.segments(IDS) & ~masks.causal()},
    "a table": {"mask": masks.compile(blocks_of, 40, like=Q, tile=16)},
    "slopes": {"score_mod": scores.alibi(SLOPES)},
    "a table of numbers": {"score_mod": scores.relative_bias(randn(8, 4))},
    "additive": {"similarity": scores.additive(randn(16))},
}


def compiled(function, dynamic=None):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)


@LRU
@pytest.mark.parametrize("case", inside(IDS, LENGTHS))
def test_values_made_inside_a_compiled_function(case):
    lengths = torch.tensor([3, 9])

    def call(q, ids, lengths):
        return attention(q, q, q, **inside(ids, lengths)[case])

    function = compiled(call)
    for length in (40, 25, 30):  # the third one with a length that is a symbol
        given = (Q[:, :, :length], IDS[:length], lengths)
        close(function(*given), call(*given))


@pytest.mark.parametrize("case", ["positions", "packed", "padding"])
def test_tiled_is_compiled_with_values_made_inside(case):
    def call(q, ids, lengths):
        return attention(q, q, q, kernel=SMALL_TILES, **inside(ids, lengths)[case])

    given = (Q[:, :, :40], IDS, torch.tensor([3, 9]))
    close(compiled(call)(*given), call(*given))


@pytest.mark.parametrize(
    ("case", "dynamic"),
    [*((case, None) for case in OUTSIDE), ("not packed", True), ("a table", True)],
)
def test_values_made_outside_of_a_compiled_function(case, dynamic):
    def call(q):
        return attention(q, q, q, kernel=SMALL_TILES, **OUTSIDE[case])

    close(compiled(call, dynamic)(Q[:, :, :40]), call(Q[:, :, :40]))


# ---- torch.func and autograd ----


@pytest.mark.parametrize("kernel", [None, "tiled", "dense"])
def test_func_maps_and_differentiates_calls_with_mask_values(kernel):
    k, v = (x[:, :, :9].repeat(1, 2, 1, 1) for x in (K, V))
    q, lengths = Q[:, :, :9], torch.tensor([3, 8])

    def call(q, k, v, lengths):
        mask = masks.padding(lengths) & masks.segments(IDS[:9])
        return attention(q, k, v, mask=mask, kernel=kernel)

    close(torch.func.vmap(call)(q, k, v, lengths), call(q, k, v, lengths))
    gradient = torch.func.grad(lambda q: call(q, k, v, lengths).square().sum())(q)
    leaf = q.clone().requires_grad_()
    mask = masks.padding(lengths) & masks.segments(IDS[:9])
    attention(leaf, k, v, mask=mask, kernel="dense").square().sum().backward()
    close(gradient, leaf.grad)


CARRIED = {
    "slopes": ((4,), lambda x: {"score_mod": scores.softcap(2.0) >> scores.alibi(x)}),
    "table": ((8, 4), lambda x: {"score_mod": scores.relative_bias(x)}),
    "weight": ((3,), lambda x: {"similarity": scores.additive(x)}),
}


@pytest.mark.parametrize("kernel", [None, "tiled", "dense"])
@pytest.mark.parametrize("case", CARRIED)
def test_gradients_reach_what_a_score_value_carries(case, kernel):
    shape, options = CARRIED[case]
    carried = randn(*shape).double().requires_grad_()
    q, k, v = (x[:1, :, :5, :3].double() for x in (Q, K, V))
    mask = masks.segments(IDS[:5] + torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 0, 1, 3]))
    assert torch.autograd.gradcheck(
        lambda x: attention(q, k, v, mask=mask, kernel=kernel, **options(x)), carried
    )


# ---- arrays of other libraries ----


def of_numpy():
    return {
        "packed": {"mask": masks.segments(ROWS.numpy(), KEYS.numpy())},
        "positions": {"mask": masks.positions(ROWS.numpy(), KEYS.numpy())},
        "tree": {"mask": masks.tree(np.arange(-1, L - 1))},
        "padding": {"mask": masks.padding(LENGTHS.numpy()) & masks.causal()},
        "a function": {"mask": masks.rule(lambda b, h, i, j: np.less(i, j)) | masks.prefix(2)},
        "slopes": {"score_mod": scores.alibi(SLOPES.numpy())},
        "weight": {"similarity": scores.additive(np.linspace(-1, 1, 16, dtype=np.float32))},
    }


@pytest.mark.parametrize("case", of_numpy())
@pytest.mark.parametrize("kernel", [None, "tiled"])
def test_numpy_arrays_and_the_values_that_carry_them_are_placed(case, kernel):
    q, k, v = (x.numpy() for x in (Q, K, V))
    options = of_numpy()[case]
    output = attention(q, k, v, backend="torch", kernel=kernel, **options)
    assert type(output) is np.ndarray
    np.testing.assert_allclose(
        output, attention(q, k, v, kernel="dense", **options), rtol=1e-4, atol=1e-5
    )


def test_tensors_take_numpys_ids():
    options = {"mask": masks.segments(ROWS.numpy(), KEYS.numpy())}
    expected = attention(Q, K, V, mask=masks.segments(ROWS, KEYS))
    close(attention(Q, K, V, backend="torch", **options), expected)
    close(attention(Q, K, V, **options), expected)
