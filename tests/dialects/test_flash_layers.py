"""FlashAttention's layers, norms, losses and rotation, against `attention` and definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairs import turn

from polyattn import attention
from polyattn.dialects import flash_attn as fa2
from polyattn.dialects.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from polyattn.dialects.flash_attn.losses.cross_entropy import CrossEntropyLoss, cross_entropy_loss
from polyattn.dialects.flash_attn.modules import mha
from polyattn.dialects.flash_attn.ops import activations
from polyattn.dialects.flash_attn.ops import layer_norm as norms

close = torch.testing.assert_close


def normal(*shape, **options):
    return torch.randn(*shape, dtype=torch.float64, **options)


# ---- rotation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packed", "first", "interleaved"),
    [("grouped", torch.tensor([4, 1]), True), ("q and kv", 3, False)],
    ids=["grouped", "q and kv"],
)
def test_rotation_of_queries_and_keys_in_place(packed, first, interleaved):
    """With gradients, also of the array that is written."""
    q, k, v = (normal(2, 3, n, 10, requires_grad=True) for n in (4, 2, 2))
    angles, of_keys = normal(8, 4), normal(8, 4)
    places = torch.as_tensor(first).reshape(-1, 1) + torch.arange(3)
    expected = turn(q, angles[places], interleaved), turn(k, of_keys[places], interleaved), v
    tables = angles.cos(), angles.sin(), of_keys.cos(), of_keys.sin()
    options = {"interleaved": interleaved, "seqlen_offsets": first}
    if packed == "q and kv":
        given = (q * 1, torch.stack((k, v), 2))
        turned_q = apply_rotary_emb(given[0], *tables[:2], inplace=True, **options)
        found = turned_q, *apply_rotary_emb_kv_(given[1], *tables[2:], **options).unbind(2)
        written = given[0], *given[1].unbind(2)
    else:
        given = torch.cat((q, k, v), 2)
        found = apply_rotary_emb_qkv_(given, *tables, **options, num_heads_q=4)
        found, written = (x.split((4, 2, 2), 2) for x in (found, given))
    found, written = list(found), list(written)
    close(found, [*expected])
    close(written, [*expected])
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(some, (q, k, v), weights, retain_graph=True)
        for some in (found, expected)
    ]
    close(*gradients)


@pytest.mark.parametrize("kind", ["a leaf", "one of several views"])
def test_rotation_returns_what_autograd_does_not_let_it_write(kind):
    qkv = normal(2, 3, 3, 4, 8, requires_grad=True)
    angles = normal(3, 4)
    x = (qkv * 1).unbind(2)[0] if kind != "a leaf" else normal(2, 3, 4, 8, requires_grad=True)
    before = x.detach().clone()
    found = apply_rotary_emb(x, angles.cos(), angles.sin(), inplace=True)
    close(found, turn(before, angles[None]))
    close(x.detach(), before)
    found.sum().backward()
    assert (x if x.is_leaf else qkv).grad is not None


@pytest.mark.parametrize(("scale_base", "dtype"), [(None, torch.float64), (4.0, torch.bfloat16)])
def test_rotary_embedding(scale_base, dtype):
    layer = RotaryEmbedding(8, base=100.0, scale_base=scale_base, pos_idx_in_fp32=True).to(dtype)
    qkv = normal(2, 5, 3, 4, 10).to(dtype)
    place = torch.arange(7, dtype=torch.float64)[:, None]
    angles = place * 100.0 ** -(torch.arange(4) / 4)
    growth = torch.ones(7, 4, dtype=torch.float64)
    if scale_base:
        growth = ((2 * torch.arange(4) + 3.2) / 11.2) ** ((place - 7 // 2) / scale_base)
    q, k, v = qkv.double().unbind(2)
    own, factor = angles[None, 2:], growth[2:].repeat(1, 2)[:, None]
    expected = [turn(q, own), turn(k, own), v]
    expected[0] = torch.cat((expected[0][..., :8] * factor, q[..., 8:]), -1)
    expected[1] = torch.cat((expected[1][..., :8] / factor, k[..., 8:]), -1)
    limits = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float64 else {"atol": 0.1, "rtol": 0.03}
    given = [qkv.clone(), (qkv[:, :, 0].clone(), qkv[:, :, 1:].clone())]
    whole = layer(given[0], seqlen_offset=2)
    one, others = layer(*given[1], seqlen_offset=torch.tensor([2, 2]), max_seqlen=7)
    for found in (whole, torch.cat((one[:, :, None], others), 2)):
        close(found.double(), torch.stack(expected, 2), **limits)
    assert layer._cos_cached.shape == (7, 4)
    assert layer._cos_cached.dtype == dtype
    assert layer.state_dict() == {}


def test_tables_of_rotation_are_made_once_and_grow():
    layer, x = RotaryEmbedding(4), torch.randn(1, 3, 3, 1, 4)
    layer(x)
    first = layer._cos_cached
    layer(x[:, :2])
    assert layer._cos_cached is first
    layer(x, seqlen_offset=1)
    assert layer._cos_cached.shape == (4, 2)
    layer(x.double())
    assert layer._cos_cached.dtype == torch.float64
    served = RotaryEmbedding(4).eval()
    with torch.inference_mode():
        served(x)
    served(x.clone().requires_grad_() * 1).sum().backward()


def test_threads_that_make_tables_of_rotation_at_once(monkeypatch):
    layer = RotaryEmbedding(4, scale_base=4.0).bfloat16()
    made, x = layer._compute_inv_freq, torch.randn(1, 7, 3, 1, 4, dtype=torch.bfloat16)

    def with_another(device):
        monkeypatch.undo()
        layer(x.clone())
        return made(device)

    monkeypatch.setattr(layer, "_compute_inv_freq", with_another)
    layer(x[:, :2].clone())
    assert layer(x.clone()).shape == x.shape


def test_rotation_refuses_what_it_cannot_place():
    angles, x = normal(3, 2), normal(1, 3, 2, 4)
    with pytest.raises(
        ValueError, match="cos has 3 positions, and x the 3 from seqlen_offsets = 1"
    ):
        apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=1)
    with pytest.raises(ValueError, match=r"qkv of shape \(1, 3, 2, 4\) needs num_heads_q"):
        apply_rotary_emb_qkv_(x, angles.cos(), angles.sin())
    for own in (torch.asarray, np.asarray):
        with pytest.raises(ValueError, match="seqlen_offsets = -1 on: make the tables longer"):
            apply_rotary_emb(*map(own, (x, angles.cos(), angles.sin())), seqlen_offsets=own([-1]))
    with pytest.raises(ValueError, match="cos has 3 angles, of pairs, for the 4 entries of x"):
        apply_rotary_emb(x, normal(3, 3), normal(3, 3))
    assert apply_rotary_emb_qkv_(normal(0, 5, 3, 2, 4), normal(5, 2), normal(5, 2)).shape[0] == 0
    with pytest.raises(ValueError, match="a tensor seqlen_offset needs max_seqlen"):
        RotaryEmbedding(4)(normal(1, 3, 3, 2, 4), seqlen_offset=torch.tensor([1]))


# ---- norms and losses --------------------------------------------------------------------------


def norm(x, weight, bias, is_rms, eps=1e-3):
    """Return the norm in float64, by its definition."""
    x, weight = x.double(), weight.double()
    x = x if is_rms else x - x.mean(-1, keepdim=True)
    result = x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weight
    return result if bias is None else result + bias.double()


@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_norms_of_a_sum(is_rms, dtype):
    """In float32 at least, and rounded once."""
    x, x1, residual = (normal(2, 3, 8).to(dtype) for _ in range(3))
    weight, bias, weight1, scale = (normal(8).to(dtype) for _ in range(4))
    rows = normal(2, 3).to(dtype)
    once = {"atol": 1e-5, "rtol": 1e-12 if dtype == torch.float64 else 2**-8}
    function = norms.rms_norm_fn if is_rms else norms.layer_norm_fn
    scaled = x.double() * rows.double()[..., None]
    total = scaled + x1.double() + residual.double()
    found = function(
        x, weight, bias, residual, x1=x1, weight1=weight1, eps=1e-3, rowscale=rows, prenorm=True
    )
    expected = norm(total, weight, bias, is_rms), norm(total, weight1, None, is_rms), total
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        close(one.double(), other, **once)
    alone = norms.rms_norm(x, weight, 1e-3) if is_rms else norms.layer_norm(x, weight, bias, 1e-3)
    close(alone.double(), norm(x, weight, None if is_rms else bias, is_rms), **once)
    centred = function(
        x, weight, None, eps=1e-3, zero_centered_weight=True, out_dtype=torch.float64
    )
    close(centred, norm(x, 1 + weight.double(), None, is_rms), atol=1e-5, rtol=1e-5)
    flat = [one.reshape(-1, *one.shape[2:]) for one in (residual, x1, rows)]
    given = {"x1": flat[1], "weight1": weight1, "rowscale": flat[2], "eps": 1e-3, "prenorm": True}
    close(function(x, weight, bias, flat[0], **given), found)
    with pytest.raises(RuntimeError, match="invalid for input of size 8"):
        function(x, weight, bias, residual[0, 0])
    older = norms.dropout_add_rms_norm if is_rms else norms.dropout_add_layer_norm
    found, total, kept = older(
        x, None, weight, bias, 0.0, 1e-3, rows, scale, prenorm=True, residual_in_fp32=True,
        return_dropout_mask=True,
    )  # fmt: skip
    scaled = scaled * scale.double()
    assert (found.dtype, total.dtype, kept.dtype) == (dtype, torch.float32, torch.uint8)
    assert kept.all()
    close(total.double(), scaled, atol=1e-5, rtol=1e-5)
    close(found.double(), norm(scaled, weight, bias, is_rms), **once)


def test_norms_after_dropout_say_what_is_kept():
    x, x1, residual, weight = normal(40, 50), normal(40, 50), normal(40, 50), normal(50)
    options = {"eps": 1e-3, "dropout_p": 0.25, "return_dropout_mask": True, "prenorm": True}
    found, total, keep, keep1 = norms.layer_norm_fn(x, weight, None, residual, x1, **options)
    close(total, (keep * x + keep1 * x1) / 0.75 + residual)
    close(found, norm(total, weight, None, False))
    assert 0.70 < keep.double().mean() < 0.80
    assert not torch.equal(keep, keep1)
    layer = norms.DropoutAddRMSNorm(50, prenorm=True, p=0.5, eps=1e-3, dtype=torch.float64)
    assert (layer(x)[1] == 0).any()
    close(layer.eval()(x)[1], x)
    assert [*layer.state_dict()] == ["weight"]
    layer = norms.RMSNorm(50, dropout_p=0.5, dtype=torch.float64)
    assert (layer(x) == 0).any()
    close(layer.eval()(x, residual, True)[1], x + residual)
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and below 1; got 1"):
        norms.layer_norm_fn(x, weight, None, dropout_p=1)


@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.0), ("sum", 0.1), ("none", 0.1)])
def test_cross_entropy(reduction, smoothing):
    logits, labels = normal(6, 5, requires_grad=True), torch.tensor([0, 4, -1, 2, -1, 3])
    layer = CrossEntropyLoss(
        ignore_index=-1, reduction=reduction, label_smoothing=smoothing, logit_scale=0.7,
        lse_square_scale=0.2, inplace_backward=True, return_z_loss=True,
    )  # fmt: skip
    loss, squares = layer(logits, labels)
    x, used = (0.7 * logits).double(), labels != -1
    total = x.exp().sum(-1).log()
    target = torch.full((6, 5), smoothing / 5, dtype=torch.float64)
    target[torch.arange(6), labels.clamp(min=0)] += 1 - smoothing
    rows = torch.where(used, -(target * (x - total[:, None])).sum(-1) + 0.2 * total**2, 0.0)
    of_squares = torch.where(used, 0.2 * total**2, 0.0)
    reduce = {"mean": lambda y: y.sum() / 4, "sum": torch.sum, "none": lambda y: y}[reduction]
    close(loss, reduce(rows))
    close(squares, reduce(of_squares).detach())
    one, other = (torch.autograd.grad(y.sum(), logits)[0] for y in (loss, reduce(rows)))
    close(one, other)
    small = cross_entropy_loss(logits.to(torch.bfloat16), labels, ignore_index=-1)[0]
    assert small.dtype == torch.float32
    with pytest.raises(TypeError, match=r"labels must be integers, .*; got torch.float64"):
        layer(logits, labels.double())
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none'; got 'all'"):
        CrossEntropyLoss(reduction="all")


# ---- layers of attention -----------------------------------------------------------------------


def eager(q, k, v, **options):
    return attention(q, k, v, layout="...LHD", **options)


NAMES = {
    "self": ({}, ["Wqkv", "out_proj"]),
    "grouped": ({"num_heads_kv": 2}, ["Wqkv", "out_proj"]),
    "cross": ({"cross_attn": True}, ["Wq", "Wkv", "out_proj"]),
    "rotary": ({"rotary_emb_dim": 4, "use_flash_attn": True}, ["Wqkv", "out_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_the_published_names(name):
    options, layers = NAMES[name]
    layer = mha.MHA(16, 4, **options)
    assert set(layer.state_dict()) == {f"{x}.{kind}" for x in layers for kind in ("weight", "bias")}
    without = mha.MHA(16, 4, qkv_proj_bias=False, out_proj_bias=False, **options)
    assert not [x for x in without.state_dict() if "bias" in x]


@pytest.mark.parametrize("name", NAMES)
def test_mha(name):
    options = NAMES[name][0]
    layer = mha.MHA(
        16, 4, causal=name != "cross", softmax_scale=0.4, return_residual=True,
        checkpointing=name == "grouped", dtype=torch.float64, **options,
    )  # fmt: skip
    x, other = normal(2, 5, 16), normal(2, 3, 16) if name == "cross" else None
    found, residual = layer(x, other)
    assert residual is x
    if name == "cross":
        q = layer.Wq(x)
        k, v = layer.Wkv(other).chunk(2, -1)
    else:
        whole = layer.Wqkv(x)
        q, k, v = whole.split((16, *[(whole.shape[-1] - 16) // 2] * 2), -1)
    q, k, v = (y.unflatten(-1, (-1, 4)) for y in (q, k, v))
    if name == "rotary":
        angles = (torch.arange(5)[:, None] * 10000.0 ** -(torch.arange(2) / 2))[None].double()
        q, k = turn(q, angles), turn(k, angles)
    output = eager(q, k, v, is_causal=name != "cross", scale=0.4)
    expected = layer.out_proj(output.flatten(-2))
    close(found, expected, atol=1e-6, rtol=1e-6)
    weights, parameters = torch.randn_like(found), [*layer.parameters()]
    gradients = [torch.autograd.grad(y, parameters, weights) for y in (found, expected)]
    close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [({"num_heads_kv": 2}, False), ({"rotary_emb_scale_base": 8.0}, True)],
    ids=["grouped", "xPos"],
)
@torch.no_grad()
def test_mha_generates_from_its_cache(options, lengths):
    layer = mha.MHA(
        16, 4, causal=True, layer_idx=3, rotary_emb_dim=4, use_flash_attn=True,
        dtype=torch.float64, **options,
    )  # fmt: skip
    x = normal(2, 7, 16)
    params = SimpleNamespace(
        max_seqlen=7, max_batch_size=4, seqlen_offset=0, batch_size_offset=1,
        lengths_per_sample=None, key_value_memory_dict={},
    )  # fmt: skip
    parts = []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        params.seqlen_offset = start
        if lengths:
            params.lengths_per_sample = torch.tensor([9, start, start, 9], dtype=torch.int32)
        parts.append(layer(x[:, start:end], inference_params=params))
    close(torch.cat(parts, 1), layer(x), atol=1e-6, rtol=1e-6)
    assert params.key_value_memory_dict[3].shape == (4, 7, 2, options.get("num_heads_kv", 4), 4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_the_keys_of_a_mask(is_causal):
    q, kv, qkv = normal(2, 4, 4, 8), normal(2, 6, 2, 2, 8), normal(2, 6, 3, 4, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
    seen = mask.bool()[:, None, None]
    shown = torch.arange(6) <= torch.arange(4)[:, None] + torch.tensor([1, -1])[:, None, None, None]
    for layer in (mha.CrossAttention(is_causal), mha.CrossAttention()):
        found = layer(q, kv, causal=is_causal, key_padding_mask=mask)
        close(found, eager(q, *kv.unbind(2), mask=seen & shown if is_causal else seen))
    found = mha.SelfAttention(is_causal, 0.3)(qkv, key_padding_mask=mask)
    close(found, eager(*qkv.unbind(2), mask=seen, is_causal=is_causal, scale=0.3))
    close(mha.SelfAttention(is_causal)(qkv), eager(*qkv.unbind(2), is_causal=is_causal))


def test_layers_of_packed_sequences_and_their_options():
    x, ends = normal(9, 3, 4, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    slopes = torch.tensor(mha.get_alibi_slopes(4), dtype=torch.float64)
    layer = mha.FlashSelfAttention(True, 0.3, 0.5, (2, 0), slopes).eval()
    own = {"softmax_scale": 0.3, "causal": True, "window_size": (2, 0), "alibi_slopes": slopes}
    packed = layer(x, cu_seqlens=ends, max_seqlen=5)
    close(packed, fa2.flash_attn_varlen_qkvpacked_func(x, ends, 5, **own))
    cross = mha.FlashCrossAttention(True, 0.3, 0.0, (2, 0), slopes)
    close(cross(x[:, 0], x[:, 1:], cu_seqlens=ends, max_seqlen=5), packed)
    close(cross(x[None, :, 0], x[None, :, 1:])[0], layer(x[None])[0])
    assert not torch.equal(layer.train()(x[None]), layer.eval()(x[None]))
    whole = mha.MHA(32, 4, use_alibi=True, window_size=(2, 0), causal=True, use_flash_attn=True,
                    dtype=torch.float64)  # fmt: skip
    tokens = normal(9, 32)
    qkv = whole.Wqkv(tokens).unflatten(-1, (3, 4, 8))
    expected = fa2.flash_attn_varlen_qkvpacked_func(
        qkv, ends, 5, causal=True, window_size=(2, 0), alibi_slopes=slopes
    )
    close(whole(tokens, cu_seqlens=ends, max_seqlen=5), whole.out_proj(expected.flatten(1)))


def test_slopes_of_alibi():
    np.testing.assert_allclose(mha.get_alibi_slopes(4), [1 / 4, 1 / 16, 1 / 64, 1 / 256])
    twice = [0.5, 0.5**3, 0.5**5, 0.5**7]  # every other one of 8
    np.testing.assert_allclose(
        mha.get_alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, *twice[:2]]
    )


ONE, TWO, STARTS = torch.ones(1, 2, 16), torch.ones(1, 2), torch.tensor([0, 1])
REFUSED = {
    "num_heads must divide embed_dim": ({"num_heads": 5}, {}),
    "num_heads_kv 3": ({"num_heads_kv": 3}, {}),
    "rotary_emb_dim is for self-attention": ({"rotary_emb_dim": 4, "cross_attn": True}, {}),
    "need use_flash_attn=True": ({"use_alibi": True}, {}),
    "x_kv and mixer_subset are for": ({}, {"x_kv": ONE}),
    "key_padding_mask is for": ({"use_flash_attn": True}, {"key_padding_mask": TWO}),
    "cu_seqlens needs use_flash_attn=True": ({}, {"cu_seqlens": STARTS}),
    "and rotary_emb_dim 0": (
        {"use_flash_attn": True, "rotary_emb_dim": 4}, {"cu_seqlens": STARTS},
    ),
    "causal cannot be given with inference_params": (
        {"layer_idx": 0}, {"inference_params": SimpleNamespace(), "causal": True},
    ),
    "inference_params needs layer_idx": ({}, {"inference_params": SimpleNamespace()}),
    "and no key_padding_mask and cu_seqlens": (
        {"layer_idx": 0}, {"inference_params": SimpleNamespace(), "key_padding_mask": TWO},
    ),
    "dwconv=True, a convolution before attention, is refused": ({"dwconv": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_mha_refuses(message):
    options, given = REFUSED[message]
    with pytest.raises((NotImplementedError, ValueError), match=message):
        mha.MHA(**{"embed_dim": 16, "num_heads": 4} | options)(ONE, **given)


@pytest.mark.slow
def test_a_layer_compiles_whole():
    layer = mha.MHA(16, 4, causal=True, rotary_emb_dim=4, use_flash_attn=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    close(*(torch.autograd.grad(one(x).square().sum(), x)[0] for one in (compiled, layer)))


# ---- activations -------------------------------------------------------------------------------


def tanh_gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


#: Each function, that of its gradients, the formula, and the shapes of the arrays.
ACTIVATIONS = {
    "swiglu": (
        activations.swiglu, lambda g, x, y: activations.swiglu_bwd(x, y, g),
        lambda x, y: x * x.sigmoid() * y, [(5, 8), (5, 8)],
    ),
    "bias_gelu": (
        activations.bias_gelu, activations.bias_gelu_back,
        lambda y, bias: tanh_gelu(y + bias), [(5, 8), (8,)],
    ),
    "gelu": (activations.gelu_fwd, activations.gelu_bwd, tanh_gelu, [(5, 8)]),
    "sqrelu": (
        activations.sqrelu_fwd, activations.sqrelu_bwd, lambda x: x.clamp(min=0) ** 2, [(5, 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients(name):
    function, backward, formula, shapes = ACTIVATIONS[name]
    arrays, weights = [normal(*shape, requires_grad=True) for shape in shapes], normal(5, 8)
    expected, own = formula(*arrays), function(*arrays)
    close(own, expected)
    wanted = torch.autograd.grad(expected, arrays, weights)
    close(torch.autograd.grad(own, arrays, weights), wanted)
    found = backward(weights, *(x.detach() for x in arrays))
    close(found if isinstance(found, tuple) else (found,), wanted)


def test_activations_of_16_bits_are_rounded_once():
    x, y = (normal(5, 8).bfloat16() for _ in range(2))
    expected = (x.double().sigmoid() * x.double() * y.double()).bfloat16()
    assert torch.equal(activations.SwiGLUFunction.apply(x, y), expected)
    expected = tanh_gelu(x.double() + y.double()).bfloat16()
    assert torch.equal(activations.GeLUFunction.apply(x, y), expected)
    assert activations.fast_gelu_impl is activations.FastGeLUFunction.apply
    close(activations.relu_bwd(y, x), y * (x >= 0))
