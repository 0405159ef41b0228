"""torch's function with causal and window: which keys it gets, and when `tiled` is faster."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from polyattn import attention, attention_partial, explain, masks

RNG = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=RNG)


def close(one, other):
    torch.testing.assert_close(one, other)


L, S = 200, 300
Q, K, V = randn(2, 4, L, 16), randn(2, 2, S, 16), randn(2, 2, S, 20)
ROWS, KEYS = torch.arange(L) // 70, torch.arange(S) // 70
LENGTHS = torch.tensor([130, 299])


BANDS = {
    "one token": (1, {"window": (9, 0)}),
    "rows at the end": (7, {"window": (9, 3), "query_offset": 150}),
    "rows before the keys": (7, {"is_causal": True, "query_offset": -3}),
    "square and causal": (7, {"is_causal": True, "query_offset": 0}),
    "no key": (3, {"window": (1, 1), "query_offset": 900}),
    "a mask of keys": (7, {"window": (9, 0), "mask": torch.arange(S) % 3 > 0}),
    "a mask value": (L, {"window": (9, 0), "query_offset": 40, "mask": masks.segments(ROWS, KEYS)}),
    "a bias": (7, {"window": (9, 0), "bias": randn(1, 4, 1, S), "mask": masks.padding(LENGTHS)}),
    "a bias of one": (7, {"window": (9, 0), "bias": randn(7, 1)}),
    "an offset of each item": (7, {"window": (9, 0), "query_offset": LENGTHS}),
    "lengths of keys": (7, {"mask": masks.padding(LENGTHS)}),
}


@pytest.fixture
def given(monkeypatch):
    """Return what torch's function is called with: the number of keys and the mask."""
    seen = []
    genuine = F.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        mask = options.get("attn_mask")
        seen.append((key.shape[-2], value.shape[-2], mask if mask is None else tuple(mask.shape)))
        return genuine(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    return seen


@pytest.mark.parametrize("case", BANDS)
def test_keys_outside_of_the_band_are_left_out(case):
    rows, options = BANDS[case]

    def computed(kernel):
        arrays = [x.clone().requires_grad_() for x in (Q[:, :, -rows:], K, V)]
        output = attention(*arrays, kernel=kernel, **options)
        output.square().sum().backward()
        partial = attention_partial(Q[:, :, -rows:], K, V, kernel=kernel, **options)
        return output, *partial, *(x.grad for x in arrays)

    for found, expected in zip(computed("sdpa"), computed("dense"), strict=True):
        close(found, expected)


@pytest.mark.parametrize(
    ("case", "keys", "mask"),
    [
        ("one token", 10, None),
        ("rows at the end", 19, (1, 1, 7, 19)),
        ("rows before the keys", 4, (1, 1, 7, 4)),
        ("square and causal", 7, None),
        ("no key", S, (1, 1, 3, S)),
        ("a mask of keys", 16, (1, 1, 7, 16)),
        ("a bias", 16, (2, 4, 7, 16)),
        ("an offset of each item", S, (2, 1, 7, S)),
        ("lengths of keys", 299, (2, 1, 1, 299)),
    ],
)
def test_torch_gets_the_keys_of_the_band(given, case, keys, mask):
    rows, options = BANDS[case]
    attention(Q[:, :, -rows:], K, V, kernel="sdpa", **options)
    assert given == [(keys, keys, mask)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch imports it
@pytest.mark.parametrize(("dynamic", "is_cut"), [(False, True), (True, False)])
def test_a_program_gives_torch_the_keys_of_the_band_if_lengths_are_known(dynamic, is_cut):
    keys = []

    def backend(program, _):
        for node in program.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                keys.append(str(node.args[1].meta["example_value"].shape[-2]))
        return program

    def call(query, key, value):
        return attention(query, key, value, window=(9, 0), kernel="sdpa")

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
    close(compiled(Q[:, :, -1:], K, V), call(Q[:, :, -1:], K, V))
    assert [length == "10" for length in keys] == [is_cut]


IDS = np.zeros(8192, dtype=np.int64)


def blocks_of(b, h, i, j):
    return (i // 100 + j // 100) % 2 == 0


class Choice(NamedTuple):
    """A call of so many rows and keys, and the kernel that is chosen on a CPU."""

    kernel: str
    rows: int
    keys: int
    options: dict
    heads: int = 1
    batch: int = 1


BY_ITEM = {"is_causal": True, "query_offset": (8,)}
LONG_IDS = masks.segments(np.zeros(2**14, dtype=np.int64))
PADDED = masks.padding(torch.tensor([5] * 8))
CHOICES = {
    "window": Choice("tiled", 8192, 8192, {"window": (128, 0)}),
    "window, short": Choice("sdpa", 1024, 1024, {"window": (128, 0)}),  # `dense` would follow
    "window, wide": Choice("sdpa", 2048, 2048, {"window": (1500, 0)}),
    "window, one row": Choice("sdpa", 1, 16384, {"window": (127, 0)}),
    "window, few rows": Choice("sdpa", 256, 16384, {"window": (127, 0)}),
    "causal": Choice("sdpa", 8192, 8192, {"is_causal": True}),
    "causal, offset": Choice("tiled", 8192, 8192, {"is_causal": True, "query_offset": 1}),
    "causal, bias": Choice("tiled", 8192, 8192, {"is_causal": True, "bias": (8192,)}),
    "causal, one head": Choice("tiled", 4096, 8192, {"is_causal": True}),
    "causal, 8 heads": Choice("sdpa", 4096, 8192, {"is_causal": True}, heads=8),
    "bias": Choice("sdpa", 8192, 8192, {"bias": (8192, 8192)}),
    "packed": Choice("tiled", 8192, 8192, {"mask": masks.segments(IDS)}),
    "packed, short": Choice("sdpa", 2048, 2048, {"mask": masks.segments(IDS[:2048])}),
    "packed, one row": Choice("sdpa", 1, 8192, {"mask": masks.segments(IDS[:1], IDS)}),
    "padding": Choice("sdpa", 8192, 8192, {"mask": masks.padding(5)}),
    "a function": Choice("sdpa", 2048, 2048, {"mask": masks.rule(blocks_of)}),
    "mask, causal": Choice("sdpa", 8192, 8192, {"mask": (8192, 8192), "is_causal": True}),
    "mask, window": Choice("tiled", 8192, 8192, {"mask": (8192, 8192), "window": (128, 0)}),
}
#: Masks of more elements than are made.
TOO_LARGE = {
    "window": Choice("tiled", 2**14, 2**14, {"window": (100, 0)}),
    "a function": Choice("tiled", 4096, 4096, {"mask": blocks_of}, heads=4, batch=2),
    "offsets of items": Choice("tiled", 4096, 4096, BY_ITEM, batch=8),
    "lengths of both": Choice(
        "tiled", 2**14, 2**14, {"mask": PADDED & masks.padding(None, torch.tensor([5] * 8))},
        heads=2, batch=8,
    ),
    "packed": Choice("tiled", 2**14, 2**14, {"mask": LONG_IDS}, heads=2, batch=8),
    "lengths of keys": Choice("sdpa", 2**14, 2**14, {"mask": PADDED}, heads=2, batch=8),
}  # fmt: skip


def decided(choice, **options):
    shapes = [(choice.batch, choice.heads, n, 64) for n in (choice.rows, choice.keys, choice.keys)]
    return explain(*shapes, library="torch", **choice.options, **options)


@pytest.mark.parametrize("name", CHOICES)
def test_a_mask_that_hides_much_goes_to_tiled(name):
    choice = CHOICES[name]
    explained = decided(choice)
    assert explained.chosen.kernel == choice.kernel
    if choice.kernel == "tiled":
        scores = f"{choice.rows * choice.keys:,}"
        assert f"it computes all {scores} scores of a head" in str(explained)
        cuda = decided(choice, device="cuda:0", dtype="bfloat16")
        assert cuda.chosen.kernel == "sdpa"


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_mask_too_large_to_make_goes_to_tiled(name):
    explained = decided(TOO_LARGE[name])
    assert explained.chosen.kernel == TOO_LARGE[name].kernel
    assert ("it would need a mask of" in str(explained)) == (explained.chosen.kernel == "tiled")


@pytest.mark.parametrize(("trained", "kernel"), [("bias", "tiled"), ("query", "sdpa")])
@pytest.mark.parametrize(("heads", "size"), [(1, 8), (16, 4)])
def test_a_bias_that_is_trained_goes_to_tiled_sooner(trained, kernel, heads, size):
    x = {name: torch.zeros(1, heads, 2048, size) for name in ("query", "key", "value")}
    x["bias"] = torch.zeros(1, 1, 1, 2048)
    x[trained].requires_grad_()
    explained = explain(**x, is_causal=True)
    assert (explained.problem.trained, explained.chosen.kernel) == ({trained}, kernel)
