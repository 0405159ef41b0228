"""Programs that import xformers.ops find the functions, the classes of biases, and SwiGLU.

The meaning of a bias is written a second time here, as a matrix made element by element.
"""

import importlib.metadata
import importlib.util
import math
import pickle
import sys

import numpy as np
import pytest

from polyattn.dialects import flash_attn
from polyattn.dialects import xformers as own

torch = pytest.importorskip("torch")
fmha = importlib.import_module("polyattn.dialects.xformers.ops.fmha")
biases = fmha.attn_bias

H, D = 3, 8

FORMS = """
import xformers.ops as xops; f = xops.memory_efficient_attention
from xformers import ops as xops; f = xops.fmha.memory_efficient_attention
import xformers.ops; f = xformers.ops.memory_efficient_attention
from xformers.ops import fmha, scaled_index_add, index_select_cat; f = fmha.memory_efficient_attention
from xformers.ops import memory_efficient_attention as f, unbind, SwiGLU, LowerTriangularMask
from xformers.ops.fmha import memory_efficient_attention as f, BlockDiagonalMask, AttentionBias
from xformers.ops import memory_efficient_attention_forward as f
from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask; import xformers.ops; f = xformers.ops.memory_efficient_attention
import xformers; import xformers.ops; assert xformers.__version__ == "0.0.35"; f = xformers.ops.memory_efficient_attention
""".strip().splitlines()  # noqa: E501 -- lines of code


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_import_resolves(form):
    with own.install():
        found = {}
        exec(form, found)
        assert importlib.util.find_spec("xformers.ops.fmha").name == "xformers.ops.fmha"
        assert importlib.metadata.version("xformers") == own.__version__
    assert found["f"] is own.memory_efficient_attention
    assert not [name for name in sys.modules if name.partition(".")[0] == "xformers"]


def test_both_come_together_and_not_twice():
    with flash_attn.install("flash_attn", "xformers"):
        assert importlib.util.find_spec("flash_attn")
        assert importlib.util.find_spec("xformers.ops")
        assert importlib.util.find_spec("xformers.factory") is None
        assert importlib.util.find_spec("xformers.ops._private") is None
        with pytest.raises(RuntimeError, match="xformers is installed already"):
            own.install()


def matrix(rows, keys, total, sees):
    """Return a bias of blocks: `rows` and `keys` are the spans of each, in `total`."""
    bias = torch.full(total, -math.inf, dtype=torch.float64)
    for (row, stop), (key, end) in zip(rows, keys, strict=True):
        for i in range(stop - row):
            for j in range(end - key):
                if sees(i, j, end - key - (stop - row)):
                    bias[row + i, key + j] = 0
    return bias


def spans(lengths, starts=None):
    starts = np.cumsum([0, *lengths]) if starts is None else starts
    return [(int(a), int(a + n)) for a, n in zip(starts, lengths, strict=False)]


def full(i, j, shift):
    return True


def causal(i, j, shift):
    return j <= i


def causal_last(i, j, shift):
    return j <= i + shift


def local(i, j, shift):
    return i - 2 < j <= i


def local_last(i, j, shift):
    return i + shift - 2 < j <= i + shift


def window_last(i, j, shift):
    return i + shift - 2 <= j <= i + shift + 1


ROWS, KEYS = [2, 1, 3], [4, 3, 5]
BLOCKS, PADDED, GAPS = spans(KEYS), spans(KEYS, [0, 6, 12]), spans(KEYS, [1, 6, 11])
OF_BLOCKS = (ROWS, KEYS)
OF_PADDED, OF_GAPS = (ROWS, 6, KEYS), (ROWS, [1, 6, 11, 18], KEYS)
#: How a program makes the bias, where its keys are, and what a row sees.
MADE = {
    "blocks": (lambda: biases.BlockDiagonalMask.from_seqlens(*OF_BLOCKS), BLOCKS, full),
    "blocks, causal": (
        lambda: biases.BlockDiagonalMask.from_seqlens(*OF_BLOCKS).make_causal(), BLOCKS, causal,
    ),
    "blocks, causal class": (
        lambda: biases.BlockDiagonalCausalMask.from_seqlens(*OF_BLOCKS), BLOCKS, causal,
    ),
    "blocks, from the last": (
        lambda: biases.BlockDiagonalMask.from_seqlens(*OF_BLOCKS).make_causal_from_bottomright(),
        BLOCKS, causal_last,
    ),
    "blocks, local": (
        lambda: biases.BlockDiagonalMask.from_seqlens(*OF_BLOCKS).make_local_attention(2),
        BLOCKS, local,
    ),
    "blocks, local from the last": (
        lambda: biases.BlockDiagonalCausalMask.from_seqlens(
            q_seqlen=ROWS, kv_seqlen=KEYS
        ).make_local_attention_from_bottomright(2),
        BLOCKS, local_last,
    ),
    "padded": (
        lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens(ROWS, 6, torch.tensor(KEYS)),
        PADDED, full,
    ),
    "padded, causal": (
        lambda: biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=ROWS, kv_padding=6, kv_seqlen=KEYS, causal_diagonal=None
        ),
        PADDED, causal_last,
    ),
    "padded, local": (
        lambda: biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
            *OF_PADDED, window_size=2
        ),
        PADDED, local_last,
    ),
    "padded, window": (
        lambda: biases.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
            *OF_PADDED, 2, window_right=1
        ),
        PADDED, window_last,
    ),
    "gaps": (lambda: biases.BlockDiagonalGappyKeysMask.from_seqlens(*OF_GAPS), GAPS, full),
    "gaps, causal": (
        lambda: biases.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            ROWS, kv_seqstarts=[1, 6, 11, 18], kv_seqlen=KEYS
        ),
        GAPS, causal_last,
    ),
    "whole, causal": (biases.LowerTriangularMask, [(0, 18)], causal),
    "whole, from the last": (biases.LowerTriangularFromBottomRightMask, [(0, 18)], causal_last),
    "whole, local": (
        lambda: biases.LowerTriangularFromBottomRightMask().make_local_attention(2),
        [(0, 18)], local_last,
    ),
    "whole, window": (
        lambda: biases.LocalAttentionFromBottomRightMask(window_left=2, window_right=1),
        [(0, 18)], window_last,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_bias_that_a_program_makes(name):
    make, keys, sees = MADE[name]
    bias, is_whole = make(), name.startswith("whole")
    total = 12 if name.startswith("blocks") else 18
    q, k, v = (torch.randn(1, n, H, D, dtype=torch.float64) for n in (6, total, total))
    expected = matrix([(0, 6)] if is_whole else spans(ROWS), keys, (6, total), sees)
    assert torch.equal(bias.materialize((1, H, 6, total), torch.float64)[0, 1], expected)
    weights = torch.softmax(torch.einsum("blhd,bshd->bhls", q, k) / D**0.5 + expected, -1)
    weights = torch.nan_to_num(weights)  # a row that sees no key
    output = torch.einsum("bhls,bshd->blhd", weights, v)
    found, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    torch.testing.assert_close(found, output)
    logits = torch.einsum("blhd,bshd->bhls", q, k) / D**0.5 + expected
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))
    torch.testing.assert_close(own.memory_efficient_attention(q, k, v, bias), output)
    moved = pickle.loads(pickle.dumps(bias)).to("meta")
    assert type(moved) is type(bias)
    assert is_whole or moved.k_seqinfo.seqstart.device.type == "meta"


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_in_pages(has_gaps, is_causal):
    table = torch.tensor([[4, 1, 7], [0, 6, 2], [2, 5, 3]])
    kind = "CausalWithOffset" * is_causal + ("Gappy" if has_gaps else "Padded")
    first = [1, 0, 1] if has_gaps else [0, 0, 0]
    starts = [first] if has_gaps else []
    cls = getattr(biases, f"PagedBlockDiagonal{kind}KeysMask")
    bias = cls.from_seqlens(ROWS, *starts, kv_seqlen=KEYS, block_tables=table, page_size=2)
    q, k = (torch.randn(1, n, H, D, dtype=torch.float64) for n in (6, 16))
    found = own.memory_efficient_attention(q, k, k, bias)
    for n, (row, stop) in enumerate(spans(ROWS)):
        places = [int(table[n, at // 2]) * 2 + at % 2 for at in range(first[n], first[n] + KEYS[n])]
        part = biases.LowerTriangularFromBottomRightMask() if is_causal else None
        expected = own.memory_efficient_attention(q[:, row:stop], *[k[:, places]] * 2, part)
        torch.testing.assert_close(found[:, row:stop], expected)
    with pytest.raises(ValueError, match=r"has no array of shape \(6, 16\)"):
        bias.materialize((6, 16))


def test_lists_of_tensors_become_blocks_and_tensors_again():
    """As DINOv2 attends to images of two sizes."""
    images = [torch.randn(2, 3, H, D), torch.randn(1, 5, H, D)]
    bias, tokens = biases.BlockDiagonalMask.from_tensor_list(images)
    assert tokens.shape == (1, 11, H, D)
    assert (bias.q_seqinfo.max_seqlen, bias.q_seqinfo.min_seqlen) == (5, 3)
    assert bias.q_seqinfo.seqstart.tolist() == [0, 3, 6, 11]
    for x, found in zip(images, bias.split(own.memory_efficient_attention(*[tokens] * 3, bias))):  # noqa: B905
        torch.testing.assert_close(found, own.memory_efficient_attention(x, x, x))
    with pytest.raises(ValueError, match=r"split takes \(1, 11, ...\); got \(1, 10, 3, 8\)"):
        bias.split(tokens[:, 1:])
    bias, tokens = biases.BlockDiagonalMask.from_tensor_list([images[0][:, :0], images[0]])
    assert [part.shape[1] for part in bias.split(tokens)] == [0, images[0].shape[1]]
    other = [torch.randn(2, 1, H, D), torch.randn(1, 2, H, D)]
    bias, q, k, v = biases.BlockDiagonalMask.from_tensor_lists_qkv(other, images)
    assert (q.shape[1], k.shape[1], v) == (4, 11, None)
    assert [x.shape[:2] for x in bias.split_kv(k)] == [(2, 3), (1, 5)]
    assert [x.shape[:2] for x in bias.split_queries(q)] == [(2, 1), (1, 2)]


def test_a_tensor_that_is_added_has_a_gradient():
    x = torch.randn(2, 5, H, D, dtype=torch.float64)
    added = torch.randn(2, H, 5, 5, dtype=torch.float64, requires_grad=True)
    bias = biases.LowerTriangularMask().add_bias(added)
    assert isinstance(bias, biases.LowerTriangularMask)
    plain = bias.materialize((2, H, 5, 5), torch.float64)
    found = own.memory_efficient_attention(x, x, x, bias)
    expected = own.memory_efficient_attention(x, x, x, plain)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), added)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads)


def test_families_are_subclasses_and_kernels_are_names():
    assert issubclass(biases.BlockDiagonalCausalMask, biases.BlockDiagonalMask)
    padded = biases.BlockDiagonalPaddedKeysMask
    assert issubclass(biases.BlockDiagonalCausalWithOffsetPaddedKeysMask, padded)
    assert not issubclass(biases.PagedBlockDiagonalPaddedKeysMask, padded)
    assert {type(make()).__name__ for make, _, _ in MADE.values()} <= set(own.BIASES)
    x = torch.randn(1, 4, H, D)
    forward, backward = fmha.MemoryEfficientAttentionFlashAttentionOp
    assert forward.supports(fmha.Inputs(query=x, key=x, value=x, attn_bias=None))
    found = own.memory_efficient_attention(x, x, x, op=(fmha.flash.FwOp, backward))
    assert torch.equal(found, own.memory_efficient_attention(x, x, x))


BLOCKS_OF = biases.BlockDiagonalMask.from_seqlens
PADDED_OF = biases.BlockDiagonalPaddedKeysMask.from_seqlens
GAPS_OF = biases.BlockDiagonalGappyKeysMask.from_seqlens


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BLOCKS_OF([2, -1]), r"0 to inf.*got the lengths \[2, -1\]"),
        (lambda: PADDED_OF([1], 3, [4]), r"0 to 3 tokens"),
        (lambda: GAPS_OF([1], [0], [4]), r"starts \[0\]"),
        (lambda: PADDED_OF([1], 3), "takes q_seqlen, kv_padding, kv_seqlen; got q_seqlen, 3$"),
        (lambda: PADDED_OF([1], 3, [2], kv=1), r"got q_seqlen, 3, \[2\], kv$"),
        (lambda: PADDED_OF([1], 3, [2], None, 1), "None, 1$"),
        (lambda: BLOCKS_OF([2]).materialize((3, 3)), r"shape \(3, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("packed", [True, False])
def test_swiglu_has_the_weights_of_the_original(packed):
    from polyattn.dialects.xformers.ops import SwiGLU, swiglu

    layer = SwiGLU(6, 10, 4, _pack_weights=packed).double()
    names = {"w12"} if packed else {"w1", "w2"}
    assert {name.partition(".")[0] for name in layer.state_dict()} == names | {"w3"}
    x, state = torch.randn(2, 3, 6, dtype=torch.float64), layer.state_dict()
    if packed:
        for kind in ("weight", "bias"):
            state[f"w1.{kind}"], state[f"w2.{kind}"] = state[f"w12.{kind}"].chunk(2)
    one, other = (x @ state[f"{n}.weight"].T + state[f"{n}.bias"] for n in ("w1", "w2"))
    gate = one / (1 + torch.exp(-one))
    expected = (gate * other) @ state["w3.weight"].T + state["w3.bias"]
    torch.testing.assert_close(layer(x), expected)
    weights = [state[f"{n}.{kind}"] for n in ("w1", "w2", "w3") for kind in ("weight", "bias")]
    torch.testing.assert_close(swiglu(x, *weights), expected)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_rows_of_stochastic_depth():
    from polyattn.dialects.xformers.ops import index_select_cat, scaled_index_add, unbind

    x, residual, scaling = torch.zeros(4, 2, 3), torch.ones(2, 2, 3), torch.tensor([1.0, 2.0, 3.0])
    found = scaled_index_add(x, torch.tensor([3, 1]), residual, scaling=scaling, alpha=2.0)
    assert found is x
    assert x[:, 0].tolist() == [[0, 0, 0], [2, 4, 6], [0, 0, 0], [2, 4, 6]]
    source, weight = (torch.ones(n, 2, 3, requires_grad=True) for n in (2, 1))
    scaled_index_add(x * 1, torch.tensor([3, 1]), source, weight[0, 0], 2.0).sum().backward()
    assert (source.grad == 2).all()
    assert weight.grad[0, 0].tolist() == [8, 8, 8]
    flat = index_select_cat([x, residual], [torch.tensor([1]), torch.tensor([0, 1])])
    assert flat.tolist() == [*x[1].flatten().tolist(), *residual.flatten().tolist()]
    assert [part.shape for part in unbind(x, dim=1)] == [(4, 3)] * 2
