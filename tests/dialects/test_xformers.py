"""xFormers: its functions on any array, the classes of biases, forms of import, and SwiGLU.

What a bias means is said in the options of `attention`, for each block by itself.
"""

import importlib
import importlib.metadata
import importlib.util
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from pairs import TO, normal, ours, spans

from polyattn.dialects import flash_attn
from polyattn.dialects import xformers as own
from polyattn.dialects.xformers import memory_efficient_attention

torch = pytest.importorskip("torch")
fmha = importlib.import_module("polyattn.dialects.xformers.ops.fmha")
ops, biases = importlib.import_module("polyattn.dialects.xformers.ops"), fmha.attn_bias
close = torch.testing.assert_close

H, D, E = 3, 8, 4

FORMS = """
import xformers.ops as xops; f = xops.memory_efficient_attention
from xformers import ops as xops; f = xops.fmha.memory_efficient_attention
from xformers.ops import fmha, scaled_index_add, index_select_cat; f = fmha.memory_efficient_attention
from xformers.ops import memory_efficient_attention as f, unbind, SwiGLU, LowerTriangularMask
from xformers.ops.fmha import memory_efficient_attention as f, BlockDiagonalMask, AttentionBias
from xformers.ops import memory_efficient_attention_forward as f
from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask; from xformers.ops import memory_efficient_attention as f
import xformers; import xformers.ops; assert xformers.__version__ == "0.0.35"; f = xformers.ops.memory_efficient_attention
""".strip().splitlines()  # noqa: E501 -- lines of code


def test_forms_of_import_resolve():
    for form in FORMS:
        with own.install():
            found = {}
            exec(form, found)
            assert importlib.util.find_spec("xformers.ops.fmha").name == "xformers.ops.fmha"
            assert importlib.metadata.version("xformers") == own.__version__
        assert found["f"] is memory_efficient_attention
        assert not [name for name in sys.modules if name.partition(".")[0] == "xformers"]
    with flash_attn.install("flash_attn", "xformers"):
        assert importlib.util.find_spec("flash_attn")
        assert importlib.util.find_spec("xformers.factory") is None
        assert importlib.util.find_spec("xformers.ops._private") is None
        with pytest.raises(RuntimeError, match="xformers is installed already"):
            own.install()


ROWS, KEYS, STARTS = [2, 1, 3], [4, 3, 5], [1, 6, 11, 18]
BLOCKS = spans([0, 4, 7, 12])
PADDED, GAPS = ([slice(a, a + n) for a, n in zip(x, KEYS)] for x in ([0, 6, 12], STARTS))  # noqa: B905
TABLE = np.array([[4, 1, 7], [0, 6, -1], [2, 5, 3]])
PLACES = (TABLE[:, :, None] * 2 + np.arange(2)).reshape(3, 6)
IN_PAGES, IN_GAPS = (
    [PLACES[n, a : a + KEYS[n]] for n, a in enumerate(x)] for x in ([0] * 3, [1, 0, 1])
)
WHOLE, OF_PAGES = [slice(0, 18)], {"kv_seqlen": KEYS, "block_tables": TABLE, "page_size": 2}
ADDED = normal(1, H, 6, 18)
FROM_FIRST, FROM_LAST = {"is_causal": True, "query_offset": 0}, {"is_causal": True}
LOCAL, NEAR = {"window": (1, 0)}, {"window": (2, 1)}
#: A class, or a function of it, and its arguments; where its keys are; what it means.
MADE = {
    "blocks": ("BlockDiagonalMask", (ROWS, KEYS), BLOCKS, {}),
    "blocks, causal": ("BlockDiagonalMask.make_causal", (ROWS, KEYS), BLOCKS, FROM_FIRST),
    "blocks, causal class": ("BlockDiagonalCausalMask", (ROWS, KEYS), BLOCKS, FROM_FIRST),
    "blocks, from the last": (
        "BlockDiagonalMask.make_causal_from_bottomright", (ROWS, KEYS), BLOCKS, FROM_LAST,
    ),
    "blocks, local": (
        "BlockDiagonalMask.make_local_attention", (ROWS, KEYS, 2), BLOCKS,
        LOCAL | {"query_offset": 0},
    ),
    "blocks, local from the last": (
        "BlockDiagonalCausalMask.make_local_attention_from_bottomright", (ROWS, KEYS, 2), BLOCKS,
        LOCAL,
    ),
    "padded": ("BlockDiagonalPaddedKeysMask", (ROWS, 6, torch.tensor(KEYS)), PADDED, {}),
    "padded, causal": (
        "BlockDiagonalCausalWithOffsetPaddedKeysMask",
        {"q_seqlen": ROWS, "kv_padding": 6, "kv_seqlen": KEYS, "causal_diagonal": None}, PADDED,
        FROM_LAST,
    ),
    "padded, local": (
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask", (ROWS, 6, KEYS, 2), PADDED, LOCAL,
    ),
    "padded, window": (
        "BlockDiagonalLocalAttentionPaddedKeysMask", (ROWS, 6, KEYS, 2, 1), PADDED, NEAR,
    ),
    "gaps": ("BlockDiagonalGappyKeysMask", (ROWS, STARTS, KEYS), GAPS, {}),
    "gaps, causal": (
        "BlockDiagonalCausalWithOffsetGappyKeysMask", (ROWS, STARTS, KEYS), GAPS, FROM_LAST,
    ),
    "gaps, window": (
        "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask", (ROWS, STARTS, KEYS, 2, 1),
        GAPS, NEAR,
    ),
    "pages": ("PagedBlockDiagonalPaddedKeysMask", {"q_seqlen": ROWS, **OF_PAGES}, IN_PAGES, {}),
    "pages, causal": (
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", {"q_seqlen": ROWS, **OF_PAGES},
        IN_PAGES, FROM_LAST,
    ),
    "pages, local": (
        "PagedBlockDiagonalCausalLocalPaddedKeysMask",
        {"q_seqlen": ROWS, **OF_PAGES, "window_size": 2}, IN_PAGES, LOCAL,
    ),
    "pages, gaps": (
        "PagedBlockDiagonalGappyKeysMask",
        {"q_seqlen": ROWS, "kv_seqstarts": [1, 0, 1], **OF_PAGES}, IN_GAPS, {},
    ),
    "pages, gaps, causal": (
        "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
        {"q_seqlen": ROWS, "kv_seqstarts": [1, 0, 1], **OF_PAGES}, IN_GAPS, FROM_LAST,
    ),
    "whole, causal": ("LowerTriangularMask", (), WHOLE, FROM_FIRST),
    "whole, added": (
        "LowerTriangularMask.add_bias", (torch.asarray(ADDED),), WHOLE,
        FROM_FIRST | {"bias": ADDED[0]},
    ),
    "whole, from the last": ("LowerTriangularFromBottomRightMask", (), WHOLE, FROM_LAST),
    "whole, local": (
        "LowerTriangularFromBottomRightMask.make_local_attention", (2,), WHOLE, LOCAL,
    ),
    "whole, window": ("LocalAttentionFromBottomRightMask", (2, 1), WHOLE, NEAR),
}  # fmt: skip


def made(name):
    """Return a bias as a program makes it, where its keys are, and what it means."""
    path, given, keys, meaning = MADE[name]
    kind, _, then = path.partition(".")
    cls, is_whole = getattr(biases, kind), name.startswith("whole")
    if isinstance(given, dict):
        tables = {x: torch.asarray(y) for x, y in given.items() if isinstance(y, np.ndarray)}
        return cls.from_seqlens(**given | tables), keys, meaning
    cut = (0 if is_whole else 2) if then else len(given)
    bias = cls(*given[:cut]) if is_whole else cls.from_seqlens(*given[:cut])
    return getattr(bias, then)(*given[cut:]) if then else bias, keys, meaning


def foreign(bias, to):
    """Return a bias of another class with the name and the fields of xFormers'."""
    fields = {x: to(y.numpy()) if isinstance(y, torch.Tensor) else y for x, y in vars(bias).items()}
    return type(type(bias).__name__, (SimpleNamespace,), {})(**fields)


@pytest.mark.parametrize("name", MADE)
def test_a_bias_that_a_program_makes(name):
    bias, places, meaning = made(name)
    is_whole = name.startswith("whole")
    total = 12 if name.startswith("blocks") else 16 if name.startswith("pages") else 18
    arrays = q, k, v = normal(1, 6, H, D), normal(1, total, H, D), normal(1, total, H, E)
    expected = [
        ours(q[0, rows], k[0, keys], v[0, keys], **meaning)
        for rows, keys in zip(
            [slice(0, 6)] if is_whole else spans([0, 2, 3, 6]), places, strict=True
        )
    ]
    expected = [np.concatenate(x, axis)[None] for x, axis in zip(zip(*expected), (0, 1))]  # noqa: B905
    of_torch = [torch.asarray(x) for x in arrays]
    for one, other in zip(
        fmha.memory_efficient_attention_forward_requires_grad(*of_torch, bias),
        expected,
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-12)
    for library in ("numpy", "torch"):
        to = TO[library]
        found = memory_efficient_attention(*map(to, arrays), foreign(bias, to))
        np.testing.assert_allclose(found, expected[0], atol=1e-12)
    if name.startswith("pages"):
        with pytest.raises(ValueError, match=r"has no array of shape \(6, 16\)"):
            bias.materialize((6, 16))
        return
    added = bias.materialize((1, H, 6, total), torch.float64)
    close(memory_efficient_attention(*of_torch, added), torch.asarray(expected[0]))
    moved = pickle.loads(pickle.dumps(bias)).to("meta")
    assert type(moved) is type(bias)
    assert is_whole or moved.k_seqinfo.seqstart.device.type == "meta"


def test_classes_are_all_known_and_those_of_a_family_are_subclasses():
    known = {type(made(name)[0]).__name__ for name in MADE}
    assert known == set(own.BIASES)
    assert issubclass(biases.BlockDiagonalCausalMask, biases.BlockDiagonalMask)
    padded = biases.BlockDiagonalPaddedKeysMask
    assert issubclass(biases.BlockDiagonalCausalWithOffsetPaddedKeysMask, padded)
    assert not issubclass(biases.PagedBlockDiagonalPaddedKeysMask, padded)
    q, k, v = normal(2, 5, H, D), normal(2, 7, H, D), normal(2, 7, H, E)
    mine = type("Mine", (biases.LowerTriangularFromBottomRightMask,), {})()
    found = memory_efficient_attention(q, k, v, mine)
    np.testing.assert_allclose(found, ours(q, k, v, is_causal=True)[0], atol=1e-12)
    newer = type("LowerTriangularMaskWithTensorBias", (), {"_subtensor": normal(2, H, 5, 7)})()
    expected = ours(q, k, v, bias=newer._subtensor, **FROM_FIRST)[0]
    found = memory_efficient_attention(q, k, v, newer)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    forward, backward = fmha.MemoryEfficientAttentionFlashAttentionOp
    assert forward.supports(fmha.Inputs(query=q, key=k, value=v, attn_bias=None))
    found = memory_efficient_attention(q, k, v, op=(fmha.flash.FwOp, backward))
    assert np.array_equal(found, memory_efficient_attention(q, k, v))


def test_arrays_of_three_and_five_axes_and_a_bias_to_add():
    q, k, v = normal(2, 5, 6, D), normal(2, 7, 6, D), normal(2, 7, 6, E)
    bias = normal(2, 6, 5, 7)
    expected = ours(q, k, v, bias=bias, scale=0.3)[0]
    found = memory_efficient_attention(q, k, v, bias, 0.0, 0.3)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    grouped = [x.reshape(*x.shape[:2], 2, 3, -1) for x in (q, k, v)]
    found = memory_efficient_attention(*grouped, bias.reshape(2, 2, 3, 5, 7), scale=0.3)
    np.testing.assert_allclose(found, expected.reshape(2, 5, 2, 3, E), atol=1e-12)
    alone = [x[:, :, 0] for x in (q, k, v)]
    found = memory_efficient_attention(*alone, bias[:, 0], scale=0.3, output_dtype=np.float32)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected[:, :, 0], atol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(B, L, H, D\).*got \(5, 8\)"):
        memory_efficient_attention(q[0, :, 0], k[0, :, 0], v[0, :, 0])


def test_lists_of_tensors_become_blocks_and_tensors_again():
    """As DINOv2 attends to images of two sizes."""
    images = [torch.randn(2, 3, H, D), torch.randn(1, 5, H, D)]
    bias, tokens = biases.BlockDiagonalMask.from_tensor_list(images)
    assert tokens.shape == (1, 11, H, D)
    assert (bias.q_seqinfo.max_seqlen, bias.q_seqinfo.min_seqlen) == (5, 3)
    assert bias.q_seqinfo.seqstart.tolist() == [0, 3, 6, 11]
    parts = bias.split(memory_efficient_attention(*[tokens] * 3, bias))
    close(list(parts), [memory_efficient_attention(x, x, x) for x in images])
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
    plain = bias.materialize((2, H, 5, 5), torch.float64)
    found, expected = (memory_efficient_attention(x, x, x, one) for one in (bias, plain))
    close(*(torch.autograd.grad(y.square().sum(), added)[0] for y in (found, expected)))


BLOCKS_OF = biases.BlockDiagonalMask.from_seqlens
PADDED_OF = biases.BlockDiagonalPaddedKeysMask.from_seqlens
X = torch.ones(2, 5, H, D)
REFUSED = {
    r"0 to inf.*got the lengths \[2, -1\]": lambda: BLOCKS_OF([2, -1]),
    "0 to 3 tokens": lambda: PADDED_OF([1], 3, [4]),
    r"starts \[0\]": lambda: biases.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [4]),
    "takes q_seqlen, kv_padding, kv_seqlen; got q_seqlen, 3$": lambda: PADDED_OF([1], 3),
    "None, 1$": lambda: PADDED_OF([1], 3, [2], None, 1),
    r"shape \(3, 3\)": lambda: BLOCKS_OF([2]).materialize((3, 3)),
    "class Other, which is not one of xformers'": lambda: memory_efficient_attention(
        X, X, X, type("Other", (), {})()
    ),
    r"is for a batch of one.*\(2, 5, 3, 8\)": lambda: memory_efficient_attention(
        X, X, X, BLOCKS_OF([5, 5])
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=message):
        REFUSED[message]()


def test_dropout_has_a_seed_of_the_generator():
    x = torch.randn(1, 12, H, D)
    for given in (None, BLOCKS_OF([4, 8])):
        torch.manual_seed(1)
        first, other = (memory_efficient_attention(x, x, x, given, 0.5) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(memory_efficient_attention(x, x, x, given, 0.5), first)
        assert not torch.equal(first, other)


def test_swiglu_has_the_weights_of_the_original():
    apart = ops.SwiGLU(6, 10, 4, _pack_weights=False).double()
    layer = ops.SwiGLU(6, 10, 4).double()
    x, state = torch.randn(2, 3, 6, dtype=torch.float64), layer.state_dict()
    assert state.keys() == {
        f"{name}.{kind}" for name in ("w12", "w3") for kind in ("weight", "bias")
    }
    for kind in ("weight", "bias"):
        state[f"w1.{kind}"], state[f"w2.{kind}"] = state.pop(f"w12.{kind}").chunk(2)
    apart.load_state_dict(state)
    one, other = (x @ state[f"{n}.weight"].T + state[f"{n}.bias"] for n in ("w1", "w2"))
    expected = (one * one.sigmoid() * other) @ state["w3.weight"].T + state["w3.bias"]
    close([layer(x), apart(x)], [expected] * 2)
    weights = [state[f"{n}.{kind}"] for n in ("w1", "w2", "w3") for kind in ("weight", "bias")]
    close(ops.swiglu(x, *weights), expected)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_rows_of_stochastic_depth():
    x, residual, scaling = torch.zeros(4, 2, 3), torch.ones(2, 2, 3), torch.tensor([1.0, 2.0, 3.0])
    rows = torch.tensor([3, 1])
    assert ops.scaled_index_add(x, rows, residual, scaling=scaling, alpha=2.0) is x
    assert x[:, 0].tolist() == [[0, 0, 0], [2, 4, 6], [0, 0, 0], [2, 4, 6]]
    source, weight = (torch.ones(n, 2, 3, requires_grad=True) for n in (2, 1))
    ops.scaled_index_add(x * 1, rows, source, weight[0, 0], 2.0).sum().backward()
    assert (source.grad == 2).all()
    assert weight.grad[0, 0].tolist() == [8, 8, 8]
    flat = ops.index_select_cat([x, residual], [torch.tensor([1]), torch.tensor([0, 1])])
    assert flat.tolist() == [*x[1].flatten().tolist(), *residual.flatten().tolist()]
    assert [part.shape for part in ops.unbind(x, dim=1)] == [(4, 3)] * 2
