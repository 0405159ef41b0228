"""Attention of diffusers through the slot that it has."""

import pytest
from optional import torch


@pytest.fixture
def dispatch():
    """The dispatcher of diffusers with polyattn in the place of torch's function."""
    module = pytest.importorskip("diffusers.models.attention_dispatch")
    from polyattn.integrations import diffusers

    registry, name = module._AttentionBackendRegistry, module.AttentionBackendName.NATIVE
    kept = {
        table: getattr(registry, table).copy()
        for table in vars(registry)
        if table[:5] == "_supp" or table in ("_backends", "_constraints")
    }
    theirs = diffusers.register()
    yield module, theirs
    for table, value in kept.items():
        setattr(registry, table, value)
    assert registry._backends[name] is theirs


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ({"is_causal": True, "scale": 0.3}, 4),
        ({"attn_mask": torch.arange(9) < torch.tensor([[4], [9]]), "enable_gqa": True}, 2),
        ({"attn_mask": torch.zeros(2, 1, 6, 9).index_fill_(3, torch.tensor([3]), -torch.inf)}, 4),
    ],
    ids=["causal", "keys of items", "added"],
)
def test_diffusers(dispatch, given, heads, monkeypatch):
    from polyattn.integrations import diffusers

    module, theirs = dispatch
    q, k, v = torch.randn(2, 6, 4, 8), *torch.randn(2, 2, 9, heads, 8)
    calls, ours = [], diffusers.scaled_dot_product_attention
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(diffusers, name, lambda *x: calls.append(x) or ours(*x))
    found = module.dispatch_attention_fn(q, k, v, **given)
    assert len(calls) == 1
    torch.testing.assert_close(found, theirs(q, k, v, **given))


def test_diffusers_refuses_what_is_not_supported(dispatch):
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="set_attention_backend"):
        dispatch[0].dispatch_attention_fn(x, x, x, parallel_config=object())
    from polyattn.integrations import diffusers

    with pytest.raises(ValueError, match="fastest"):
        diffusers.register("fastest")
