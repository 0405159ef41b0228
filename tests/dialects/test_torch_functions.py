"""Functions of torch: held to torch itself, and to the documentation of what needs CUDA."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from polyattn.dialects import torch as dialect
from polyattn.dialects.flash_attn import flash_attn_varlen_func
from polyattn.dialects.torch import varlen_attn

RNG = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


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

    own, theirs = (list(inspect.signature(one).parameters) for one in (varlen_attn, original))
    assert own == theirs
    assert set(dialect.__all__) == {"scaled_dot_product_attention", "varlen_attn"}
