"""FlexAttention: when it is compiled, what it refuses, and the tiles that it is told to compute."""

import pytest
import torch
from arrays import close, draw, to_torch
from torch._dynamo.utils import counters
from torch_devices import problem

import polyattn
from polyattn import attention, attention_partial, explain, masks, scores
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.layout import heads_first
from polyattn.plugin import Operands, Span, combined_mask
from polyattn_torch import block_mask, flex
from polyattn_torch.attn_mask import attn_mask
from polyattn_torch.backend import TorchBackend
from polyattn_torch.flex import Flex

# torch imports what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
TORCH = TorchBackend()
RNG = torch.Generator().manual_seed(0)
# Tiles of 128 end within both lengths.
L, S = 200, 300
Q, K, V = draw((2, 4, L, 16), (2, 2, S, 16), (2, 2, S, 16), to=to_torch)


def blocks_of(b, h, i, j):
    return (i // 100 + j // 100) % 2 == 0


def by_head(b, h, i, j):
    return j - i < 100 * h


# ---- whether it runs ----


SAME = {"score_mod": lambda s, b, h, i, j: s}


@pytest.mark.parametrize(
    ("rows", "keys", "device", "options", "status"),
    [
        ((2, 16, 1024, 64), 1024, "cuda:0", SAME, "chosen"),
        ((2, 4, 2**14, 64), 2**14, "cuda:0", {"mask": blocks_of}, "chosen"),
        ((1, 16, 2**13, 64), 2**13, "cuda:0", {"score_mod": scores.alibi(16)}, "chosen"),
        ((2, 16, 64, 64), 64, "cuda:0", {"mask": blocks_of}, "on request"),
        ((64, 64, 1, 64), 2**13, "cuda:0", SAME, "on request"),  # a program for each length
        ((2, 16, 1024, 64), 1024, "cuda:0", {"softcap": 2.0}, "on request"),
        ((2, 16, 1024, 64), 1024, "cpu", {"mask": blocks_of}, "on request"),
    ],
)
def test_it_runs_by_itself_on_cuda_where_compiling_pays(
    monkeypatch, rows, keys, device, options, status
):
    monkeypatch.setattr(flex, "HAS_TRITON", True)
    shape = (*rows[:2], keys, 64)
    explained = explain(rows, shape, shape, library="torch", device=device, **options)
    assert next(c.status for c in explained.candidates if c.kernel == "flex") == status


@pytest.mark.parametrize(
    ("without", "options", "reason"),
    [
        (None, {"dtype": "float64"}, "not support float64 on CUDA"),
        (None, {"value": (2, 4, 64, 8)}, "vectors of 16"),
        ("HAS_TRITON", {}, "Triton"),
        (None, {"logsumexp": True}, ""),
        ("AuxRequest", {"logsumexp": True}, "from torch 2.10 on"),
    ],
)
def test_it_says_what_it_does_not_support_on_cuda(monkeypatch, without, options, reason):
    monkeypatch.setattr(flex, "HAS_TRITON", True)
    if without:
        monkeypatch.setattr(flex, without, None)
    reasons = "".join(Flex().reasons_against(problem(**options)))
    assert reason in reasons if reason else not reasons


@pytest.mark.parametrize(
    ("arrays", "options", "reason"),
    [
        ((Q.double(), K.double(), V.double()), {}, "not support float64 on the CPU"),
        ((Q, K, V), {"score_mod": scores.alibi(torch.ones(4, requires_grad=True))},
         "no gradient on the CPU"),
        ((Q.numpy(), K.numpy(), V.numpy()), {"mask": blocks_of}, "another library"),
        ((Q, K, V), {"sinks": torch.zeros(4)}, "does not compute sinks"),
    ],
)  # fmt: skip
def test_it_says_what_it_does_not_support_on_the_cpu(arrays, options, reason):
    with pytest.raises(polyattn.UnsupportedError, match=reason):
        attention(*arrays, backend="torch", kernel="flex", **options)


# ---- what it computes ----


def test_a_function_that_returns_something_else_is_explained():
    with pytest.raises(Exception, match="must return a bool array"):
        attention(Q, K, V, kernel="flex", mask=lambda b, h, i, j: i + j)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_returns_the_logsumexp(monkeypatch):
    # Uncompiled, which alone has one on the CPU.
    monkeypatch.setattr(flex, "_compiled", lambda problem, codes: flex._call)
    q, k, v = (x[None, :, :, :9] for x in (Q, K, V))
    mask = torch.rand(9, 9, generator=RNG) > 0.4
    mask[2] = False
    asked = explain(q, k, v, mask=mask, logsumexp=True).problem
    output, logsumexp = Flex()(asked, Operands(query=q, key=k, value=v, mask=mask), TORCH)
    expected = attention_partial(q, k, v, mask=mask, kernel="dense")
    close((output, logsumexp), tuple(expected))


@pytest.mark.slow
def test_masks_of_other_arrays_are_compiled_once():
    def call(kernel, number):
        mask = masks.segments(torch.arange(140) // number) & masks.causal()
        return attention(*[x[:, :, :140] for x in (Q, K, V)], kernel=kernel, mask=mask)

    call("flex", 20)
    made = counters["stats"]["unique_graphs"]
    for number in (70, 7):
        close(call("flex", number), call("dense", number))
    assert counters["stats"]["unique_graphs"] == made


# ---- the tiles ----

IDS = torch.arange(S) // 90
LENGTHS = torch.tensor([130, 299])
TILES = {
    "packed": {"mask": masks.segments(IDS[:L].expand(2, L), IDS.expand(2, S)) & masks.causal()},
    "positions": {
        "mask": masks.positions(IDS[:L] * 9, IDS * 9 - 2, masks.window(9, 0) & masks.dilated(2))
    },
    "tree": {"mask": masks.tree((torch.arange(L) - 1 - torch.arange(L) % 3).clamp(-1))},
    "padding": {"mask": masks.padding(LENGTHS, torch.tensor([0, 140]))},
    "prefix": {"mask": masks.causal() | masks.prefix(LENGTHS)},
    "all but an array": {"mask": ~masks.dense(torch.rand(2, 1, L, S, generator=RNG) > 0.5)},
    "a function of heads": {"mask": masks.rule(by_head) & masks.padding(LENGTHS)},
    "a table of heads": {"mask": masks.compile(by_head, L, S, like=Q, heads=4, tile=50)},
    "nothing": {"mask": masks.prefix(0) | masks.prefix(0)},
    "window": {"window": (30, 30)},
    "offsets": {"is_causal": True, "query_offset": LENGTHS},
    "an array": {"mask": (torch.arange(L)[:, None] < 130).expand(2, 1, L, S)},
}
#: Of these not all that there is to know is told: of the others by their intervals.
INEXACT = ("all but an array", "a table of heads")
#: Nor of these where the arrays of the mask are not read.
UNREAD = (*INEXACT, "packed", "positions")
#: The axes of batch and heads of the tables.
AXES = {"packed": (2, 1), "a function of heads": (2, 4), "a table of heads": (1, 4)}


def told(q, k, v, *, reads=True, **options):
    """Return what flex is told to compute, with the problem and operands of the call."""
    call, operands = describe(q, k, v, **options)
    asked, x = examine(call), heads_first(call, operands)
    mask = combined_mask(asked, x)
    tiles = block_mask.known_tiles(asked, x, mask, TORCH) if reads else None
    return block_mask.block_mask(asked, x, mask, TORCH.xp, tiles), asked, x


def looked_at(seen):
    """Return which tiles hold any, and which hold all, by looking at each."""
    across = [part.split(block_mask.TILE, -1) for part in seen.split(block_mask.TILE, -2)]
    return (
        torch.stack([torch.stack([f(f(t, -1), -1) for t in row], -1) for row in across], -2)
        for f in (torch.any, torch.all)
    )


@pytest.mark.parametrize("reads", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize("name", TILES)
def test_no_tile_is_left_out_and_none_taken_for_full(name, reads):
    from torch.nn.attention.flex_attention import _ordered_to_dense as dense

    tiles, asked, x = told(Q, K, V, reads=reads, **TILES[name])
    wide = tiles.kv_indices.shape[-1]
    some = dense(tiles.kv_num_blocks, tiles.kv_indices, wide).bool()
    full = dense(tiles.full_kv_num_blocks, tiles.full_kv_indices, wide).bool()
    seen = attn_mask(asked, x, Span(0, S), banded=True)
    any_, all_ = looked_at(seen.expand(*seen.shape[:2], L, S))
    assert not (some & full).any()
    assert not (any_ & ~(some | full)).any()
    assert not (full & ~all_).any()
    if name not in (INEXACT if reads else UNREAD):
        assert torch.equal((some | full).expand_as(any_), any_)
        assert torch.equal(full.expand_as(all_), all_)
    assert some.shape[:2] == AXES.get(name, some.shape[:2])


def test_tiles_of_long_sequences_are_known_without_looking_at_each_key():
    # Of 2³⁶ scores nothing is as large as a row of tiles' scores: it would not fit.
    length = 2**18
    q = torch.ones(1, 1, 1, 16).expand(1, 1, length, 16)
    mask = masks.segments(torch.arange(length) // 2**12)
    tiles, _, _ = told(q, q, q, mask=mask)
    assert (tiles.full_kv_num_blocks == 32).all()
    assert not tiles.kv_num_blocks.any()
