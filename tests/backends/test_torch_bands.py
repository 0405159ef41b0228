"""torch's function with causal and window: which keys it gets, and when `tiled` is faster."""

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
    ],
)
def test_torch_gets_the_keys_of_the_band(given, case, keys, mask):
    rows, options = BANDS[case]
    attention(Q[:, :, -rows:], K, V, kernel="sdpa", **options)
    assert given == [(keys, keys, mask)]


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


@pytest.mark.without_native
@pytest.mark.parametrize(
    ("rows", "keys", "options", "kernel"),
    [
        (8192, 8192, {"window": (128, 0)}, "tiled"),
        (2048, 2048, {"window": (256, 0)}, "tiled"),
        (2048, 2048, {"window": (1500, 0)}, "sdpa"),
        (1024, 1024, {"window": (128, 0)}, "sdpa"),  # `dense` would follow
        (1, 16384, {"window": (127, 0)}, "sdpa"),
        (256, 16384, {"window": (127, 0)}, "sdpa"),
        (8192, 8192, {"is_causal": True}, "sdpa"),
        (8192, 8192, {"is_causal": True, "query_offset": 1}, "tiled"),
        (8192, 8192, {"is_causal": True, "bias": (8192,)}, "tiled"),
        (8192, 8192, {"bias": (8192, 8192)}, "sdpa"),
        (8192, 8192, {"mask": masks.segments(IDS)}, "tiled"),
        (2048, 2048, {"mask": masks.segments(IDS[:2048])}, "sdpa"),
        (1, 8192, {"mask": masks.segments(IDS[:1], IDS)}, "sdpa"),
        (8192, 8192, {"mask": masks.padding(5)}, "sdpa"),
        (2048, 2048, {"mask": masks.rule(blocks_of)}, "sdpa"),
        (8192, 8192, {"mask": (8192, 8192), "is_causal": True}, "sdpa"),
        (8192, 8192, {"mask": (8192, 8192), "window": (128, 0)}, "tiled"),
    ],
)
def test_a_mask_that_hides_much_goes_to_tiled(rows, keys, options, kernel):
    shapes = (1, 1, rows, 64), (1, 1, keys, 64), (1, 1, keys, 64)
    decided = explain(*shapes, library="torch", **options)
    assert decided.chosen.kernel == kernel
    if kernel == "tiled":
        assert f"it computes all {rows * keys:,} scores of a head" in str(decided)
        cuda = explain(*shapes, library="torch", device="cuda:0", dtype="bfloat16", **options)
        assert cuda.chosen.kernel == "sdpa"


@pytest.mark.without_native
@pytest.mark.parametrize(("heads", "kernel"), [(1, "tiled"), (8, "sdpa")])
def test_many_heads_share_what_a_mask_costs(heads, kernel):
    shapes = (1, heads, 4096, 64), (1, heads, 8192, 64), (1, heads, 8192, 64)
    assert explain(*shapes, library="torch", is_causal=True).chosen.kernel == kernel


@pytest.mark.without_native
@pytest.mark.parametrize(("trained", "kernel"), [("bias", "tiled"), ("query", "sdpa")])
def test_a_bias_that_is_trained_goes_to_tiled_sooner(trained, kernel):
    x = {name: torch.zeros(1, 1, 2048, 8) for name in ("query", "key", "value")}
    x["bias"] = torch.zeros(2048)
    x[trained].requires_grad_()
    decided = explain(**x, is_causal=True)
    assert (decided.problem.trained, decided.chosen.kernel) == ({trained}, kernel)
