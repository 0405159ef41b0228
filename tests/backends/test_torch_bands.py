"""torch's function with masks: which keys it gets, and when `tiled` is faster."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from arrays import close, draw, to_torch

from polyattn import attention, explain, masks

L, S = 200, 300
Q, K, V = draw((2, 4, L, 16), (2, 2, S, 16), (2, 2, S, 20), to=to_torch)
ROWS, KEYS = torch.arange(L) // 70, torch.arange(S) // 70
LENGTHS = torch.tensor([130, 299])


OF_KEYS, OF_ROWS = draw((1, 4, 1, S), (7, 1), to=to_torch)
#: A number of rows and the options of a call; the keys that torch's function gets, and its mask.
BANDS = {
    "one token": (1, {"window": (9, 0)}, 10, None),
    "a band that hides nothing": (1, {"window": (400, 0)}, S, None),
    "rows at the end": (7, {"window": (9, 3), "query_offset": 150}, 19, (1, 1, 7, 19)),
    "rows before the keys": (7, {"is_causal": True, "query_offset": -3}, 4, (1, 1, 7, 4)),
    "square and causal": (7, {"is_causal": True, "query_offset": 0}, 7, None),
    "no key": (3, {"window": (1, 1), "query_offset": 900}, S, (1, 1, 3, S)),
    "a mask of keys": (7, {"window": (9, 0), "mask": torch.arange(S) % 3 > 0}, 16, (1, 1, 7, 16)),
    "a mask value": (
        L, {"window": (9, 0), "query_offset": 40, "mask": masks.segments(ROWS, KEYS)},
        209, (1, 1, L, 209),
    ),
    "a bias": (
        7, {"window": (9, 0), "bias": OF_KEYS, "mask": masks.padding(LENGTHS)}, 16, (2, 4, 7, 16)
    ),
    "a bias of one": (7, {"window": (9, 0), "bias": OF_ROWS}, 16, (1, 1, 7, 16)),
    "an offset of each item": (7, {"window": (9, 0), "query_offset": LENGTHS}, S, (2, 1, 7, S)),
    "lengths of keys": (7, {"mask": masks.padding(LENGTHS)}, 299, (2, 1, 1, 299)),
}  # fmt: skip


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
def test_torch_gets_the_keys_of_the_band(given, case):
    rows, options, keys, mask = BANDS[case]
    query = Q[:, :, -rows:]
    found = attention(query, K, V, kernel="sdpa", **options)
    assert given == [(keys, keys, mask)]
    close(found, attention(query, K, V, kernel="dense", **options))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch imports it
def test_a_program_gives_torch_the_keys_of_the_band_if_lengths_are_known():
    keys = []

    def backend(program, _):
        for node in program.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                keys.append(str(node.args[1].meta["example_value"].shape[-2]))
        return program

    def call(query, key, value):
        return attention(query, key, value, window=(9, 0), kernel="sdpa")

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=False, backend=backend)
    close(compiled(Q[:, :, -1:], K, V), call(Q[:, :, -1:], K, V))
    assert keys == ["10"]


IDS = np.zeros(8192, dtype=np.int64)


def blocks_of(b, h, i, j):
    return (i // 100 + j // 100) % 2 == 0


BY_ITEM = {"is_causal": True, "query_offset": (8,)}
EIGHT = torch.tensor([5] * 8)
LONG_IDS = masks.segments(np.zeros(2**14, dtype=np.int64))
PADDED, BEFORE = masks.padding(EIGHT), masks.padding(None, EIGHT)
#: The kernel that is chosen on a CPU, and a call: its rows, keys and options, then heads and items.
CHOICES = {
    "window": ("tiled", 8192, 8192, {"window": (128, 0)}),
    "window, short": ("sdpa", 1024, 1024, {"window": (128, 0)}),  # `dense` would follow
    "window, one row": ("sdpa", 1, 16384, {"window": (127, 0)}),
    "causal": ("sdpa", 8192, 8192, {"is_causal": True}),
    "causal, offset": ("tiled", 8192, 8192, {"is_causal": True, "query_offset": 1}),
    "causal, one head": ("tiled", 4096, 8192, {"is_causal": True}),
    "causal, 8 heads": ("sdpa", 4096, 8192, {"is_causal": True}, 8),
    "bias": ("sdpa", 8192, 8192, {"bias": (8192, 8192)}),
    "packed": ("tiled", 8192, 8192, {"mask": masks.segments(IDS)}),
    "packed, short": ("sdpa", 2048, 2048, {"mask": masks.segments(IDS[:2048])}),
    "padding": ("sdpa", 8192, 8192, {"mask": masks.padding(5)}),
    "a function": ("sdpa", 2048, 2048, {"mask": masks.rule(blocks_of)}),
    "mask, causal": ("sdpa", 8192, 8192, {"mask": (8192, 8192), "is_causal": True}),
    "mask, window": ("tiled", 8192, 8192, {"mask": (8192, 8192), "window": (128, 0)}),
    "too large: a function": ("tiled", 4096, 4096, {"mask": blocks_of}, 4, 2),
    "too large: offsets of items": ("tiled", 4096, 4096, BY_ITEM, 1, 8),
    "too large: lengths of both": ("tiled", 2**14, 2**14, {"mask": PADDED & BEFORE}, 2, 8),
    "too large: packed": ("tiled", 2**14, 2**14, {"mask": LONG_IDS}, 2, 8),
    "too large, of keys": ("sdpa", 2**14, 2**14, {"mask": PADDED}, 2, 8),
}


def decided(rows, keys, options, heads=1, items=1, **more):
    shapes = [(items, heads, n, 64) for n in (rows, keys, keys)]
    return explain(*shapes, library="torch", **options, **more)


@pytest.mark.parametrize("name", CHOICES)
def test_a_mask_that_hides_much_goes_to_tiled(name):
    kernel, rows, keys, *call = CHOICES[name]
    is_large = name.startswith("too large")
    said = f"it computes all {rows * keys:,} scores of a head"
    said = "it would need a mask of" if is_large else said
    explained = decided(rows, keys, *call)
    assert explained.chosen.kernel == kernel
    assert (said in str(explained)) == (kernel == "tiled")
    if kernel == "tiled" and not is_large:
        cuda = decided(rows, keys, *call, device="cuda:0", dtype="bfloat16")
        assert cuda.chosen.kernel == "sdpa"


def test_a_mask_that_is_large_is_made_where_the_kernel_is_named(monkeypatch):
    monkeypatch.setattr("polyattn._core.tiles.visibility.LARGEST_MADE", L * S - 1)
    options = {"mask": masks.segments(ROWS.expand(2, L), KEYS.expand(2, S))}
    left = explain(Q, K, V, **options)
    assert left.chosen.kernel != "sdpa"
    assert [c.status for c in left.candidates if c.kernel == "sdpa"] == ["on request"]
    named = explain(Q, K, V, kernel="sdpa", **options).chosen
    assert (named.kernel, named.reasons) == ("sdpa", ())
    assert "it would need a mask of 120,000 elements" in named.on_request
    found = attention(Q, K, V, kernel="sdpa", **options)
    close(found, attention(Q, K, V, kernel="dense", **options))


@pytest.mark.parametrize(("trained", "kernel"), [("bias", "tiled"), ("query", "sdpa")])
def test_a_bias_that_is_trained_goes_to_tiled_sooner(trained, kernel):
    x = {name: torch.zeros(1, 1, 2048, 8) for name in ("query", "key", "value")}
    x["bias"] = torch.zeros(1, 1, 1, 2048)
    x[trained].requires_grad_()
    explained = explain(**x, is_causal=True)
    assert (explained.problem.trained, explained.chosen.kernel) == ({trained}, kernel)
