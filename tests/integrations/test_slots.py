"""Attention of diffusers and of vLLM-Omni through the slots that they have."""

import sys
from enum import Enum
from types import ModuleType

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
        ({}, 4),
        ({"is_causal": True, "scale": 0.3}, 4),
        ({"enable_gqa": True}, 2),
        ({"attn_mask": torch.arange(9) < torch.tensor([[4], [9]])}, 4),
        ({"attn_mask": torch.zeros(2, 1, 6, 9).index_fill_(3, torch.tensor([3]), -torch.inf)}, 4),
    ],
    ids=["plain", "causal", "grouped", "keys of items", "added"],
)
def test_diffusers(dispatch, given, heads):
    import polyattn

    module, theirs = dispatch
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), *torch.randn(2, 2, 9, heads, 8)
    with polyattn.trace() as trace:
        found = module.dispatch_attention_fn(q, k, v, **given)
    assert [call.count for call in trace.calls] == [1]
    torch.testing.assert_close(found, theirs(q, k, v, **given))


def test_diffusers_refuses_what_is_not_supported(dispatch):
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="set_attention_backend"):
        dispatch[0].dispatch_attention_fn(x, x, x, parallel_config=object())
    from polyattn.integrations import diffusers

    with pytest.raises(ValueError, match="fastest"):
        diffusers.register("fastest")


@pytest.fixture
def omni(monkeypatch):
    """The interface of vLLM-Omni's attention, in our words: it is not installed here."""
    abstract, registry = ModuleType("abstract"), ModuleType("registry")

    class AttentionBackend:
        pass

    class AttentionImpl:
        pass

    class AttentionMetadata:
        def __init__(self, attn_mask=None, full_attn_spans=None):
            self.attn_mask, self.full_attn_spans = attn_mask, full_attn_spans

    abstract.AttentionBackend, abstract.AttentionImpl = AttentionBackend, AttentionImpl
    abstract.AttentionMetadata = AttentionMetadata
    registry.DiffusionAttentionBackendEnum = Enum("Backends", {"TORCH_SDPA": "sdpa"})
    registry.paths = {}
    registry.register_diffusion_backend = registry.paths.__setitem__
    package = ModuleType("backends")
    package.abstract, package.registry = abstract, registry
    for name in ("vllm_omni", "vllm_omni.diffusion", "vllm_omni.diffusion.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm_omni.diffusion.attention.backends", package)
    return package


def test_a_backend_of_vllm_omni(omni):
    from polyattn.integrations import vllm_omni

    backend = vllm_omni.register()
    (path,) = omni.registry.paths.values()
    module, _, name = path.rpartition(".")
    assert getattr(sys.modules[module], name) is backend
    assert backend.supports_attention_mask()
    attend = backend.get_impl_cls()(num_heads=4, head_size=8, softmax_scale=0.3, num_kv_heads=2)
    q, k, v = torch.randn(2, 6, 4, 8), *torch.randn(2, 2, 9, 2, 8)
    mask = torch.arange(9) < torch.tensor([[4], [9]])
    found = attend.forward(q, k, v, omni.abstract.AttentionMetadata(mask))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), mask[:, None, None], scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(vllm_omni.attend(q, k, v, {"attn_mask": mask}, False, 0.3), expected)
    with pytest.raises(NotImplementedError, match="full_attn_spans"):
        attend.forward(q, k, v, omni.abstract.AttentionMetadata(None, [[(0, 2)]]))
