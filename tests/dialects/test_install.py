"""Programs that import flash_attn find these modules, whole or not at all, in every form of import.

Each form is one that a public program has; results are compared with plain formulas of torch.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import types

import numpy as np
import pytest
from optional import torch
from pairs import normal, turn

from polyattn.dialects import flash_attn as fa2
from polyattn.dialects import flash_attn_interface as fa3


def test_install_is_found_and_undone(tmp_path, monkeypatch):
    names = ["flash_attn", "flash_attn.bert_padding", "flash_attn.ops.triton.rotary"]
    with fa2.install():
        import flash_attn
        from flash_attn.bert_padding import pad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        assert flash_attn.flash_attn_func is fa2.flash_attn_func
        assert flash_attn.__name__ == flash_attn.__spec__.name == "flash_attn"
        assert (pad_input, flash_attn_varlen_func) == (fa2.pad_input, fa2.flash_attn_varlen_func)
        assert all(importlib.util.find_spec(name) for name in names)
        for name in ("flash_attn", "flash-attn"):
            assert importlib.metadata.version(name) == flash_attn.__version__ == "2.8.3"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert [*importlib.metadata.distributions(path=[str(tmp_path)])] == []
        with pytest.raises(RuntimeError, match="flash_attn is installed already"):
            fa2.install()
    assert not [name for name in sys.modules if name.startswith("flash_attn")]
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    installed = fa2.install()
    installed.close()
    installed.close()
    assert importlib.util.find_spec("flash_attn") is None
    (tmp_path / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="flash_attn_interface is installed already"):
        fa2.install("flash_attn", "flash_attn_interface")


def test_flash_attention_3_comes_by_name():
    """Programs prefer it where they find it, and expect its results of one time or the other."""
    x = normal(2, 3, 4, 8)
    with fa2.install():
        assert importlib.util.find_spec("flash_attn_interface") is None
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash_attn_3")
    with fa2.install("flash_attn_interface"):
        import flash_attn_interface

        assert flash_attn_interface.flash_attn_func is fa3.flash_attn_func
        assert importlib.util.find_spec("flash_attn") is None
        assert importlib.metadata.version("flash_attn_3") == "3.0.0"
    with fa2.install("flash_attn", "flash_attn_interface", tuples=True):
        import flash_attn_interface

        assert importlib.import_module("flash_attn").pad_input is fa2.pad_input
        ends = np.array([0, 3, 6])
        output, lse = flash_attn_interface.flash_attn_func(x, x, x, causal=True)
        packed, total = flash_attn_interface.flash_attn_varlen_func(
            *[x.reshape(6, 4, 8)] * 3, ends, ends, max_seqlen_q=3, max_seqlen_k=3, causal=True
        )
        np.testing.assert_allclose(packed.reshape(x.shape), output, atol=1e-12)
        assert (lse.shape, total.shape) == ((2, 4, 3), (4, 6))
        three = flash_attn_interface.flash_attn_qkvpacked_func(np.stack([x] * 3, 2), causal=True)
        np.testing.assert_array_equal(three[0], output)
        assert flash_attn_interface.flash_attn_with_kvcache(x, x, x).shape == x.shape
    assert fa3.flash_attn_func(x, x, x).shape == x.shape
    with pytest.raises(ValueError, match="tuples=True is about flash_attn_interface: name it"):
        fa2.install(tuples=True)
    with pytest.raises(NotImplementedError, match=r"flash_attn, flash_.*; got 'flash_attn_1'"):
        fa2.install("flash_attn", "flash_attn_1")
    with fa2.install("natten"):
        from natten.functional import na1d

        from polyattn.dialects.natten import na1d as own

        assert na1d is own
        assert importlib.metadata.version("natten") == "0.21.0"


#: Each form of import that a public program has; `f` is the function.
FORMS = """
import flash_attn; f = flash_attn.flash_attn_interface.flash_attn_func
import flash_attn.flash_attn_interface as m; f = m.flash_attn_func
from flash_attn import flash_attn_interface; f = flash_attn_interface.flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_func as f, _flash_attn_varlen_forward
from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward
from flash_attn import flash_attn_func as f; from flash_attn.bert_padding import IndexFirstAxis
import flash_attn.ops.triton.rotary; f = flash_attn.flash_attn_func
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_func
from flash_attn.layers.rotary import apply_rotary_emb_qkv_, apply_rotary_emb_torch
import flash_attn.layers.rotary; flash_attn.layers.rotary.apply_rotary_emb_kv_
from flash_attn.modules.mha import MHA, FlashSelfAttention, FlashCrossAttention, get_alibi_slopes
from flash_attn.modules.mha import SelfAttention, CrossAttention, RotaryEmbedding
from flash_attn.modules.mha import flash_attn_kvpacked_func, flash_attn_varlen_kvpacked_func
from flash_attn.modules.mha import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func
from flash_attn.modules.mha import flash_attn_with_kvcache
from flash_attn.ops.activations import swiglu, sqrelu_fwd, sqrelu_bwd, gelu_bwd, bias_gelu_impl
from flash_attn.ops.rms_norm import RMSNorm, rms_norm, dropout_add_rms_norm, DropoutAddRMSNorm
import flash_attn.ops.rms_norm as ops; ops.rms_norm
from flash_attn.ops.layer_norm import dropout_add_layer_norm, DropoutAddLayerNorm, layer_norm
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn, RMSNorm
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.bert_padding import IndexFirstAxisResidual, IndexPutFirstAxis
""".strip().splitlines()


@pytest.mark.needs("torch")
def test_forms_of_import_resolve():
    for form in FORMS:
        found = {}
        with fa2.install():
            exec(form, found)
        assert found.get("f", fa2.flash_attn_func) is fa2.flash_attn_func


@pytest.mark.needs("torch")
def test_rows_with_the_whole_array_have_one_gradient():
    x, rows = torch.ones(3, 2, requires_grad=True), torch.tensor([2, 0])
    taken, whole = fa2.bert_padding.index_first_axis_residual(x, rows)
    (taken.sum() + 2 * whole.sum()).backward()
    assert x.grad[:, 0].tolist() == [3, 2, 3]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flash_attn_2_cuda", "made of kernels for GPUs, .* call flash_attn.flash_attn_func"),
        ("rotary_emb", "rotary_emb is made .* call flash_attn.layers.rotary.apply_rotary_emb"),
        ("flash_attn.flash_attn_triton", "call flash_attn.flash_attn_func"),
    ],
)
def test_kernels_say_what_to_call_instead(name, words, tmp_path, monkeypatch):
    with fa2.install():
        assert importlib.util.find_spec(name) is None  # programs ask so, and do without it
        with pytest.raises(ModuleNotFoundError, match=words) as caught:
            importlib.import_module(name)
    assert caught.value.name == name
    if "." not in name:
        (tmp_path / f"{name}.py").write_text("own = 1")  # a program's own module of this name
        monkeypatch.syspath_prepend(tmp_path)
        with fa2.install():
            assert importlib.util.find_spec(name)
            assert importlib.import_module(name).own == 1
        del sys.modules[name]
    with fa2.install(), pytest.raises(ImportError):  # which programs catch that can do without it
        importlib.import_module("flash_attn.modules.mlp")


def test_functions_of_einops_are_those_of_einops(monkeypatch):
    from polyattn.dialects.flash_attn import bert_padding

    stand_in = types.SimpleNamespace(rearrange=max, repeat=min)
    monkeypatch.setitem(sys.modules, "einops", stand_in)
    assert (bert_padding.rearrange, bert_padding.repeat) == (max, min)
    monkeypatch.setitem(sys.modules, "einops", None)
    with pytest.raises(ImportError, match="einops"):
        exec("from polyattn.dialects.flash_attn.bert_padding import rearrange")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from polyattn.dialects.flash_attn.bert_padding import nothing")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_padded_and_packed_tokens(interleaved):
    x, angles, first = normal(2, 3, 4, 10), normal(7, 4), np.array([4, 1])
    expected = turn(x, angles[first[:, None] + np.arange(3)], interleaved)
    from polyattn.dialects.flash_attn.ops.triton.rotary import apply_rotary

    tables, options = (np.cos(angles), np.sin(angles)), {"interleaved": interleaved}
    found = apply_rotary(x, *tables, first, **options)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    packed = apply_rotary(x.reshape(6, 4, 10), *tables, first, np.array([0, 3, 6]), 3, interleaved)
    np.testing.assert_allclose(packed.reshape(x.shape), expected, atol=1e-12)
    back = apply_rotary(found, *tables, [4, 1], **options, conjugate=True)
    np.testing.assert_allclose(back, x, atol=1e-12)
    assert apply_rotary(x, *tables, **options, inplace=True) is x
    with pytest.raises(ValueError, match=r"seqlen_offsets must have the shape \(B\), where B is 2"):
        apply_rotary(x, *tables, np.array([1]))


def with_gradients(function, lead, *ends, **options):
    """Return arrays of a call, its output, weights of it, and the gradients by them."""
    shapes = ((6, 4), (9, 2), (9, 2))
    arrays = [torch.randn(*lead, *x, 8, dtype=torch.float64, requires_grad=True) for x in shapes]
    output = function(*arrays, *ends, **options)
    weights = torch.randn_like(output)
    return arrays, output, weights, torch.autograd.grad((output * weights).sum(), arrays)


@pytest.mark.needs("torch")
def test_private_functions_join_parts_of_the_keys():
    """As ring attention calls them: the gradients of a part, from the logsumexp of the whole."""
    (q, k, v), output, weights, expected = with_gradients(fa2.flash_attn_func, (2,), softcap=2.0)
    whole = (0.0, None, False, -1, -1, 2.0, None, False)
    with torch.no_grad():
        out, lse, drops, state = fa2._flash_attn_forward(q, k, v, *whole)
        torch.testing.assert_close(out, output)
        assert (drops, state) == (None, None)
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for part in (slice(0, 4), slice(4, 9)):
            dq, dk, dv = torch.empty_like(q), *(x[:, part] for x in found[1:])
            sums = fa2._flash_attn_backward(
                weights, q, k[:, part], v[:, part], out, lse, dq, dk, dv, *whole
            )
            found[0] += dq
    torch.testing.assert_close(tuple(found), expected)
    torch.testing.assert_close(sums, (weights * out).sum(-1).transpose(1, 2))
    with pytest.raises(NotImplementedError, match="dropout_p is for the public functions"):
        fa2._flash_attn_forward(q, k, v, 0.1, None, True)
    with pytest.raises(ValueError, match="dk must have the shape"):
        fa2._flash_attn_backward(weights, q, k, v, out, lse, dq, dk, v, *whole)


@pytest.mark.needs("torch")
def test_private_functions_of_packed_sequences():
    ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5, 5, 6], [0, 4, 6, 8, 9])]
    slopes = torch.rand(4, 4, dtype=torch.float64)
    (q, k, v), output, weights, expected = with_gradients(
        fa2.flash_attn_varlen_func, (), *ends, 3, 4, causal=True, alibi_slopes=slopes
    )
    options = (*ends, 3, 4, 0.0, None, True, -1, -1, 0.0, slopes)
    with torch.no_grad():
        out, lse, _, _ = fa2._flash_attn_varlen_forward(q, k, v, *options)
        found = [torch.empty_like(x) for x in (q, k, v)]
        sums = fa2._flash_attn_varlen_backward(weights, q, k, v, out, lse, *found, *options)
    torch.testing.assert_close(out, output)
    torch.testing.assert_close(tuple(found), expected)
    torch.testing.assert_close(sums, (weights * out).sum(-1).T)


@pytest.mark.needs("torch", "transformers")
def test_transformers_runs_its_own_code_on_these_functions(monkeypatch):
    """It asks for the package before it imports it, and calls with padding and without."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.utils import import_utils

    for name, value in vars(utils).items():
        if name.startswith(("_flash", "_pad_fn", "_unpad_fn", "_process", "_loaded")):
            monkeypatch.setattr(utils, name, value)  # what the first call changes
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    x, options = torch.randn(2, 5, 4, 8), {"attn_implementation": "flash_attention_2"}
    with fa2.install():
        available = import_utils._is_package_available("flash_attn", return_version=True)
        assert available == (True, "2.8.3")
        assert not import_utils.is_flash_attn_2_available.__wrapped__()  # which asks for a GPU
        for mask, lengths in ((None, (5, 5)), (torch.arange(5) < torch.tensor([[5], [3]]), (5, 3))):
            found = utils._flash_attention_forward(x, x, x, mask, 5, is_causal=True, **options)
            for item, own, length in zip(found, x, lengths, strict=True):
                expected = fa2.flash_attn_func(*[own[None, :length]] * 3, causal=True)[0]
                torch.testing.assert_close(item[:length], expected)
        assert utils._flash_fn is fa2.flash_attn_func
