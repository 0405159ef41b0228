"""Functions of torch: held to torch itself, and to the documentation of what needs CUDA."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyattn.dialects import torch as dialect
from polyattn.dialects.flash_attn import flash_attn_varlen_func
from polyattn.dialects.torch import multi_head_attention_forward, varlen_attn

L, S, N, E, H = 5, 7, 3, 16, 4
RNG = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


SEEN = torch.rand(L, S, generator=RNG) > 0.4
SEEN[:, 0] = False
PADDED = torch.arange(S) >= torch.tensor([[7], [4], [5]])
PROJECTED = {"use_separate_proj_weight": True, "in_proj_weight": None}
CASES = {
    "plain": {},
    "no weights": {"need_weights": False},
    "weights of heads": {"average_attn_weights": False},
    "mask": {"attn_mask": SEEN},
    "mask of heads": {"attn_mask": normal(N * H, L, S), "need_weights": False},
    "padding": {"key_padding_mask": PADDED, "need_weights": False},
    "both": {"key_padding_mask": PADDED, "attn_mask": SEEN},
    "both of floats": {"key_padding_mask": normal(N, S), "attn_mask": normal(L, S)},
    "zeros": {"add_zero_attn": True, "key_padding_mask": PADDED},
    "one more": {"bias_k": normal(1, 1, E), "bias_v": normal(1, 1, E), "attn_mask": SEEN},
    "two more": {
        "bias_k": normal(1, 1, E), "bias_v": normal(1, 1, E), "attn_mask": normal(L, S),
        "add_zero_attn": True, "key_padding_mask": PADDED.to(torch.float64), "need_weights": False,
    },
    "separate": PROJECTED | {
        "q_proj_weight": normal(E, E), "k_proj_weight": normal(E, 6),
        "v_proj_weight": normal(E, 10), "sizes": (6, 10),
    },
    "no offsets": {"in_proj_bias": None, "out_proj_bias": None},
    "static": {"static_k": normal(N * H, S, E // H), "static_v": normal(N * H, S, E // H)},
    "not trained": {"training": False, "dropout_p": 0.5},
    "hint": {"is_causal": True, "attn_mask": SEEN, "key_padding_mask": PADDED},
    "one item": {"batch": False, "key_padding_mask": PADDED[1], "attn_mask": SEEN},
    "heads of one item": {"batch": False, "average_attn_weights": False},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_multi_head_attention(name):
    given = dict(CASES[name])
    sizes, batch = given.pop("sizes", (E, E)), (N,) if given.pop("batch", True) else ()
    arrays = normal(L, *batch, E), normal(S, *batch, sizes[0]), normal(S, *batch, sizes[1])
    if sizes == (E, E):
        arrays = arrays[0], arrays[1], arrays[1]
    options = {
        "embed_dim_to_check": E, "num_heads": H, "in_proj_weight": normal(3 * E, E),
        "in_proj_bias": normal(3 * E), "bias_k": None, "bias_v": None, "add_zero_attn": False,
        "dropout_p": 0.0, "out_proj_weight": normal(E, E), "out_proj_bias": normal(E), **given,
    }  # fmt: skip
    expected = torch.nn.functional.multi_head_attention_forward(*arrays, **options)
    plain = {k: x.numpy() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    for found in (
        multi_head_attention_forward(*arrays, **options),
        multi_head_attention_forward(*(x.numpy() for x in arrays), **plain),
    ):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(torch.as_tensor(one), other, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "is_causal is a hint about attn_mask"),
        ({"num_heads": 3}, "vectors of 16 for embed_dim_to_check=16 and num_heads=3"),
        ({"in_proj_weight": None}, "are missing: in_proj_weight"),
        ({"use_separate_proj_weight": True}, "are missing: q_proj_weight, k_proj_weight and"),
        ({"bias_k": np.ones((1, 1, E))}, "both bias_k and bias_v"),
        (
            dict.fromkeys(("bias_k", "bias_v"), np.ones((1, 1, E)))
            | {"static_k": np.ones((N * H, S, 4))},
            "neither static_k nor static_v",
        ),
    ],
)
def test_what_does_not_go_together(options, message):
    x, weight = np.ones((L, N, E)), np.ones((E, E))
    given = {
        "embed_dim_to_check": E, "num_heads": H, "in_proj_weight": np.ones((3 * E, E)),
        "in_proj_bias": None, "bias_k": None, "bias_v": None, "add_zero_attn": False,
        "dropout_p": 0.0, "out_proj_weight": weight, "out_proj_bias": None, **options,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        multi_head_attention_forward(x, x, x, **given)


ENDS_Q, ENDS_K = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 5, 9])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3)])
def test_varlen_attn(window):
    q, k, v = normal(6, 4, 8), normal(9, 2, 8), normal(9, 2, 8)
    aux = SimpleNamespace(lse=True)
    output, lse = varlen_attn(
        q, k, v, ENDS_Q, ENDS_K, 4, 5, window_size=window, scale=0.4, enable_gqa=True,
        return_aux=aux, num_splits=1,
    )  # fmt: skip
    left, right = window
    for rows, keys in zip(
        *(list(map(list, itertools.pairwise(x))) for x in (ENDS_Q, ENDS_K)), strict=False
    ):
        rows, keys = slice(*rows), slice(*keys)
        length, many = len(q[rows]), len(k[keys])
        away = torch.arange(many) - (torch.arange(length) + many - length)[:, None]
        seen = (away >= -left if left >= 0 else away == away) & (
            away <= right if right >= 0 else away == away
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q[rows], k[keys], v[keys])), attn_mask=seen, scale=0.4,
            enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(output[rows], expected.transpose(0, 1))
    assert lse.shape == (4, 6)


def test_varlen_attn_over_used_keys_and_pages():
    q, k = normal(6, 2, 8), normal(9, 2, 8)
    used = torch.tensor([3, 4], dtype=torch.int32)
    output = varlen_attn(q, k, k, ENDS_Q, ENDS_K, 4, 5, seqused_k=used, window_size=(-1, 0))
    own = torch.cat([k[:3], k[5:9]])
    expected = flash_attn_varlen_func(q, own, own, ENDS_Q, torch.tensor([0, 3, 7]), causal=True)
    torch.testing.assert_close(output, expected)
    pool, table = normal(5, 2, 2, 8), torch.tensor([[4, 1, 0], [2, 3, 0]], dtype=torch.int32)
    pool[[4, 1]], pool[[2, 3]] = own[[0, 1, 2, 2]].reshape(2, 2, 2, 8), own[3:].reshape(2, 2, 2, 8)
    paged = varlen_attn(
        q, pool, pool, ENDS_Q, None, 4, 5, seqused_k=used, block_table=table, window_size=(-1, 0)
    )
    torch.testing.assert_close(paged, expected)


def test_what_varlen_attn_refuses():
    q, k = normal(6, 2, 8), normal(9, 1, 8)
    with pytest.raises(ValueError, match="2 heads and key 1: pass enable_gqa=True"):
        varlen_attn(q, k, k, ENDS_Q, ENDS_K, 4, 5)
    with pytest.raises(ValueError, match="block_table needs seqused_k"):
        varlen_attn(q, k[None], k[None], ENDS_Q, None, 4, 5, block_table=ENDS_Q, enable_gqa=True)
    with pytest.raises(ValueError, match="cu_seq_k is missing"):
        varlen_attn(q, k, k, ENDS_Q, None, 4, 5, enable_gqa=True)


def test_the_parameters_are_those_of_torch():
    import inspect

    from torch.nn.attention.varlen import varlen_attn as original

    for own, other in (
        (varlen_attn, original),
        (multi_head_attention_forward, torch.nn.functional.multi_head_attention_forward),
    ):
        assert list(inspect.signature(own).parameters) == list(inspect.signature(other).parameters)
    assert set(dialect.__all__) == {
        "multi_head_attention_forward", "scaled_dot_product_attention", "varlen_attn",
    }  # fmt: skip
