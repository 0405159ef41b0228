"""Layers under the libraries' own transformations: gradients, jit and vmap pass through."""

import numpy as np
import pytest
from optional import jax, jnp, torch

from polyattn import nn
from polyattn.integrations.jax import register

IDS = np.random.default_rng(4).integers(0, 11, size=(2, 6))


def model_of(like, blocks=1, **options):
    shared = {"positions": 8, "key_heads": 2, "rotary": nn.Rotary(6), "tied": True, "seed": 7}
    return nn.Transformer.init(11, 24, 4, blocks, like=like, is_causal=True, **shared | options)


def loss_of(logits, xp):
    """Some function of the logits that is not symmetric in them."""
    return (xp.sin(logits) * logits).mean()


def test_gradients_of_torch_are_right_for_every_layer():
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    for kind, options in {
        nn.LayerNorm: {"activation": "gelu"},
        nn.RMSNorm: {"activation": "silu", "gated": True, "rotary": nn.Rotary(4), "fused": True},
    }.items():
        block = nn.EncoderBlock.init(8, 2, norm=kind, like=x.detach(), **options)
        names = list(block.parameters())
        arrays = [array.requires_grad_() for array in block.parameters().values()]

        def run(x, *arrays, block=block, names=names):
            return block.with_parameters(dict(zip(names, arrays, strict=True)))(x, is_causal=True)

        assert torch.autograd.gradcheck(run, (x, *arrays), fast_mode=True)
    decoder = nn.DecoderBlock.init(8, 2, like=x.detach(), activation="gelu_tanh")
    assert torch.autograd.gradcheck(decoder, (x, memory), fast_mode=True)


@pytest.mark.slow
def test_jax_takes_modules_whole_once_they_are_registered():
    register()
    register()
    model = model_of(jnp.zeros(1), blocks=2, rotary=nn.Rotary(6, pairing="neighbours"))

    def loss(model):
        return loss_of(model(jnp.asarray(IDS), is_causal=True), jnp)

    slopes = jax.jit(jax.value_and_grad(loss))
    before, gradients = slopes(model)
    assert isinstance(gradients, nn.Transformer)
    assert gradients.stack.blocks[0].attention.rotary.pairing == "neighbours"
    by_name = jax.jit(jax.grad(lambda p: loss(model.with_parameters(p))))(model.parameters())
    for name, gradient in gradients.parameters().items():
        np.testing.assert_allclose(gradient, by_name[name], atol=1e-6)
    stepped = jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)
    assert slopes(stepped)[0] < before
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    assert ".stack.blocks[1].attention.query.weight" in paths


def test_a_tree_of_other_things_has_the_structure_of_the_module():
    register()
    model = model_of(jnp.zeros(1))
    axes = jax.tree.map(lambda _: 0, model)
    assert jax.tree.structure(axes) == jax.tree.structure(model)
    ones = jax.tree.leaves(jax.tree.map(lambda zero: zero + 1, axes))
    assert ones == [1] * len(model.parameters())


def test_other_settings_are_compiled_anew():
    register()
    compiled = []

    @jax.jit
    def run(layer, x):
        compiled.append(layer)
        return layer(x)

    x = jnp.ones((2, 4))
    layer = nn.LayerNorm.init(4, like=x)
    for epsilon in (1e-5, 1e-5, 1e-3):
        run(nn.LayerNorm(layer.weight, layer.bias, epsilon), x)
    assert len(compiled) == 2
