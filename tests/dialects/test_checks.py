"""Every dialect checks all shapes, dtypes and numbers of the host before it writes or computes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from optional import torch
from pairs import TO, D, G, H, moved, normal

import polyattn
from polyattn.dialects import flash_attn as fa2
from polyattn.dialects import flash_attn_interface as fa3
from polyattn.dialects import flax, keras, natten, onnx, xformers
from polyattn.dialects import jax as jax_dialect
from polyattn.dialects import torch as torch_dialect
from polyattn.dialects.flash_attn.ops.triton.rotary import apply_rotary

B, S = 3, 8
LIBRARIES = "numpy", "torch"


# ---- caches ------------------------------------------------------------------------------------

TABLE = np.array([[0, 1], [2, 3], [4, 5]])
NEW = {"k": normal(B, 1, G, D), "v": normal(B, 1, G, D), "cache_seqlens": np.array([1, 2, 3])}
#: Changes of a right call that appends, and words of the error.
WRONG = {
    "one head": ({"k": normal(B, 1, 1, D)}, r"k must .* \(B, N, G, D\).*G is 2.*got"),
    "a batch of 1": ({"v": normal(1, 1, G, D)}, r"v must .*, where B is 3.*got \(1, 1, 2, 16\)"),
    "more values": ({"v": normal(B, 2, G, D)}, r"v must .*N is 1.*got \(3, 2, 2, 16\)"),
    "another dtype": ({"k": NEW["k"].astype("float32")}, "k must be as k_cache, .* float32"),
    "a length": ({"cache_seqlens": np.array([1])}, r"cache_seqlens must .*\(B\), .*got \(1,\)"),
    "floats": ({"cache_seqlens": np.array([1.0, 2, 3])}, "cache_seqlens must hold integers"),
    "too long": ({"cache_seqlens": np.array([1, 8, 3])}, "from 0 to 7.*1 of them new; got 8"),
    "negative": ({"cache_seqlens": [1, -1, 3]}, "cache_seqlens must be from 0 to 7.*; got -1"),
    "no item": ({"cache_batch_idx": np.array([0, 3, 1])}, "from 0 to 2, since k_cache has 3 items"),
    "few sequences": ({"q": normal(5, 1, H, D), "k": normal(5, 1, G, D), "v": normal(5, 1, G, D),
        "cache_seqlens": 1}, "5 sequences for the 3 items"),
    "heads": ({"q": normal(B, 1, 3, D)}, "multiple of that of key heads; got 3 and 2"),
    "dtype of q": ({"q": normal(B, 1, H, D).astype("float32")}, "must have one dtype"),
    "scale": ({"softmax_scale": "1"}, "scale must be a number"),
    "softcap": ({"softcap": float("inf")}, "softcap"),
    "window": ({"window_size": (1.7, 0)}, "an end of window_size must be an integer; got 1.7"),
    "half a window": ({"window_size": (1,)}, r"window_size must be a pair .*; got \(1,\)"),
    "slopes": ({"alibi_slopes": normal(7)}, r"alibi_slopes must .*\(H\), where H is 4; got \(7,\)"),
    "angles": ({"rotary_cos": normal(9, 9), "rotary_sin": normal(9, 9)}, "more than the 16"),
    "a page": ({"block_table": TABLE + 3}, "pages from 0 to 2 for the keys of a sequence; got 3"),
    "a negative page": ({"block_table": TABLE - 1}, "for the keys of a sequence; got -1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, "numpy") for name in WRONG] + [(name, "torch") for name in ("no item", "a page")],
)
def test_a_cache_is_not_written_before_all_is_checked(name, library):
    change, words = WRONG[name]
    given = {"q": normal(B, 1, H, D), **NEW, **change}
    given = moved(library, given)
    caches = [TO[library](normal(B, S, G, D)) for _ in range(2)]
    before = [np.asarray(x).copy() for x in caches]
    with pytest.raises((TypeError, ValueError), match=words):
        fa2.flash_attn_with_kvcache(given.pop("q"), *caches, **given)
    assert all((np.asarray(x) == y).all() for x, y in zip(caches, before, strict=True))


def test_a_cache_is_not_written_where_no_kernel_takes_the_call(monkeypatch):
    caches = [np.zeros((B, S, G, D)) for _ in range(2)]
    monkeypatch.setenv("POLYATTN_BACKEND", "absent")
    with pytest.raises(polyattn.UnknownBackendError):
        fa2.flash_attn_with_kvcache(normal(B, 1, H, D), *caches, **NEW)
    assert not any(x.any() for x in caches)


def test_no_sequence_of_many_is_written_before_all_are_checked():
    caches = [np.zeros((2, S, G, D)) for _ in range(2)]
    new, ends = normal(5, G, D), np.array([0, 2, 5])
    q = normal(5, H, D)

    def call(k, v, seqlens):
        return fa3.flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=seqlens, cu_seqlens_q=ends, cu_seqlens_k_new=ends
        )

    with pytest.raises(ValueError, match=r"from 0 to 5, since .*, 3 of them new; got 6"):
        call(new, new, [1, 6])
    with pytest.raises(ValueError, match=r"v must .*N is 5.*; got \(7, 2, 16\)"):
        call(new, normal(7, G, D), [1, 2])
    assert not any(x.any() for x in caches)
    call(new, new, [1, 2])
    assert [[bool(row.any()) for row in x[..., 0]] for x in caches[0]] == [
        [False, True, True] + [False] * 5,
        [False, False] + [True] * 3 + [False] * 3,
    ]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("paged", [False, True])
def test_lengths_of_a_cache_in_every_form(library, paged):
    """A list, an array of NumPy beside torch, integers of any width, and one number for all."""
    to, table = TO[library], {"block_table": TABLE.tolist()} if paged else {}
    q, added = to(normal(B, 1, H, D)), [to(normal(B, 1, G, D)) for _ in range(2)]
    shape = (6, 4, G, D) if paged else (B, S, G, D)
    caches = [normal(*shape) for _ in range(2)]

    def call(lengths, **options):
        own = [to(x.copy()) for x in caches]
        found = fa2.flash_attn_with_kvcache(q, *own, *added, cache_seqlens=lengths, **options)
        return [np.asarray(x) for x in (found, *own)]

    if not paged:  # an index of 8 bits is no mask
        items = to(np.array([2, 0, 1], np.uint8))
        found = call([1, 2, 3], cache_batch_idx=items)[0]
        np.testing.assert_array_equal(found, call([1, 2, 3], cache_batch_idx=[2, 0, 1])[0])
    forms = [[3, 3, 3], np.array([3, 3, 3]), to(np.array([3] * 3, np.int16)), to(np.array(3)), 3]
    first, *others = [call(form, **table) for form in forms]
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)
    single = call([3, 3, 3], **table)[0][0]
    assert np.abs(single - call([2, 3, 3], **table)[0][0]).max() > 1e-3


@pytest.mark.needs("torch")
def test_lengths_of_another_library_are_refused():
    x = normal(B, S, G, D)
    with pytest.raises(TypeError, match="cache_seqlens must hold integers, in an array of numpy"):
        fa2.flash_attn_with_kvcache(normal(B, 1, H, D), x, x, cache_seqlens=torch.tensor([1, 2, 3]))


def test_ends_of_new_keys_have_no_effect_without_new_keys():
    """Servers always pass them, where keys are written elsewhere."""
    q, caches = normal(5, H, D), [normal(2, S, G, D) for _ in range(2)]
    options = {"cache_seqlens": np.array([4, 6]), "causal": True}
    starts, new = {"cu_seqlens_q": np.array([0, 2, 5])}, {"cu_seqlens_k_new": np.array([0, 4, 10])}
    expected = fa3.flash_attn_with_kvcache(q, *caches, **options, **starts)
    found = fa3.flash_attn_with_kvcache(q, *caches, **options, **starts, **new)
    assert (found == expected).all()
    padded = fa3.flash_attn_with_kvcache(q[:2, None], *caches, **options, **new)
    assert padded.shape == (2, 1, H, D)


# ---- shapes of every dialect -------------------------------------------------------------------

X, Y, ENDS = normal(9, H, D), normal(2, 4, 3, D), np.array([0, 4, 9])
POOL = normal(4, 4, H, D)


def onnx_packed(*arrays):
    return onnx.onnx_attention(*arrays, q_num_heads=2, kv_num_heads=2)


REFUSED = {
    "batch": (fa2.flash_attn_func, [Y, Y[:1], Y[:1]], {}, r"k must .*B is 2.*got \(1, 4, 3, 16\)"),
    "qv": (fa3.flash_attn_func, [Y, Y, Y], {"qv": Y[:, :2]}, r"qv must have .*L is 4"),
    "packed in four": (fa2.flash_attn_qkvpacked_func, [normal(2, 5, 4, H, D)], {},
        r"qkv must have the shape \(B, L, 3, H, D\)"),
    "four of 3": (fa3.flash_attn_qkvpacked_func, [normal(2, 5, 4, H, D)], {}, "qkv must"),
    "packed in three": (fa2.flash_attn_kvpacked_func, [Y, normal(2, 4, 3, 3, D)], {}, "kv must"),
    "tokens in four": (fa2.flash_attn_varlen_qkvpacked_func, [normal(9, 4, H, D), ENDS], {}, "qkv"),
    "three": (fa2.flash_attn_varlen_kvpacked_func, [X, normal(9, 3, H, D), ENDS, ENDS], {},
        r"kv must have the shape \(S, 2, G, D\)"),
    "values": (fa2.flash_attn_varlen_func, [X, X, normal(12, H, D), ENDS, ENDS], {},
        r"v must .*S is 9.*got \(12, 4, 16\)"),
    "slopes": (fa2.flash_attn_varlen_func, [X, X, X, ENDS, ENDS], {"alibi_slopes": normal(3, H)},
        r"alibi_slopes must .*B is 2"),
    "window": (fa2.flash_attn_varlen_func, [X, X, X, ENDS, ENDS], {"window_size": (1.5, 0)}, "1.5"),
    "float ends": (fa2.flash_attn_varlen_func, [X, X, X, ENDS * 1.0, ENDS], {},
        "starts and lengths of query must be integers"),
    "nested ends": (fa2.flash_attn_varlen_func, [X, X, X, ENDS[:, None], ENDS], {},
        "starts and lengths of query must be integers"),
    "no ends": (fa2.flash_attn_varlen_func, [X, X, X, ENDS, None], {}, "cu_seqlens_k is missing"),
    "no keys": (fa2.flash_attn_varlen_func, [X, None, X, ENDS, ENDS], {}, "k is of type NoneType"),
    "a list": (fa3.flash_attn_func, [Y, Y, Y], {"qv": Y.tolist()}, "qv is of type list"),
    "dtype of qv": (fa3.flash_attn_func, [Y, Y, Y], {"qv": Y.astype("float32")}, "one dtype"),
    "chunk": (fa3.flash_attn_func, [Y, Y, Y], {"attention_chunk": -2}, "at least 1; got -2"),
    "rate": (fa2.flash_attn_func, [Y, Y, Y], {"dropout_p": "0.1"}, "dropout_p must .*got '0.1'"),
    "cap": (fa2.flash_attn_func, [Y, Y, Y], {"softcap": "30"}, "softcap must be a number"),
    "angles": (apply_rotary, [X, *normal(2, 4, 8)], {"cu_seqlens": ENDS}, "x the 5 from .* = 0 on"),
    "packed in rows": (fa3.flash_attn_qkvpacked_func, [X], {"num_heads_q": 2}, "a qkv of shape"),
    "no letter": (fa2.flash_attn_func, [ENDS, X, X], {}, r"q must have .* H, D\); got"),
    "negative page": (fa2.flash_attn_varlen_func, [X, POOL, POOL, ENDS, ENDS],
        {"block_table": np.array([[0, 1], [-1, 1]])}, "pages from 0 to 3 .*; got -1"),
    "pages of values": (fa2.flash_attn_varlen_func, [X, POOL, POOL[:, :2], ENDS, ENDS],
        {"block_table": np.array([[0, 1], [2, 1]])}, r"v must have the shape \(N, P, G, E\)"),
    "page of torch's": (torch_dialect.varlen_attn, [X, POOL, POOL, ENDS, None],
        {"block_table": np.array([[0, 1], [7, 1]]), "seqused_k": np.array([3, 4])}, "got 7"),
    "padding": (fa2.unpad_input, [normal(2, 5, 4), np.ones((2, 4))], {}, "attention_mask must"),
    "no padding": (fa2.pad_input, [normal(3, 4), np.array([0, 1]), 2, 5], {}, "indices must"),
    "jax: batch": (jax_dialect.dot_product_attention, [Y, Y[:1], Y[:1]], {}, "key must"),
    "jax: of one": (jax_dialect.dot_product_attention, [Y[0], Y[0], Y[0]],
        {"query_seq_lengths": [2, 3]}, r"query_seq_lengths must .*B is 1; got \(2,\)"),
    "flax: batch": (flax.dot_product_attention, [Y, Y[:1], Y[:1]], {}, "key must"),
    "keras: batch": (keras.dot_product_attention, [Y, Y[:1], Y[:1]], {}, "key must"),
    "onnx: past": (onnx.onnx_attention, [Y, Y[:, :, :2], Y, None, Y[:, :, :2], Y[:, :, :1]], {},
        r"V must .*S is 2"),
    "onnx: lengths": (onnx.onnx_attention, [Y, Y, Y], {"nonpad_kv_seqlen": ENDS}, "B is 2"),
    "onnx: packed": (onnx_packed, [normal(2, 3, 8), *normal(2, 1, 3, 8)], {}, "K must"),
    "xformers: batch": (xformers.memory_efficient_attention, [Y, Y[:1], Y[:1]], {}, "key must"),
    "xformers: heads": (xformers.memory_efficient_attention, [Y, Y, Y[:, :, :1]], {},
        r"value must have the shape \(B, S, G, E\).*G is 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_shapes_that_would_broadcast_or_be_cut_are_refused(name):
    function, arrays, options, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=words):
        function(*arrays, **options)


@pytest.mark.needs("torch")
def test_no_number_is_drawn_for_a_call_that_is_refused():
    before, x = torch.random.get_rng_state(), torch.asarray(Y)
    for call in (fa2.flash_attn_func, torch_dialect.scaled_dot_product_attention):
        with pytest.raises(ValueError, match=r"k must|heads"):
            call(x, x[:1, :2], x[:1, :2], dropout_p=0.5)
    assert (torch.random.get_rng_state() == before).all()


# ---- nested tensors ----------------------------------------------------------------------------

CALLS = {
    "torch": lambda x, n: torch_dialect.scaled_dot_product_attention(x, x, x),
    "varlen_attn": lambda x, n: torch_dialect.varlen_attn(x, x, x, n, n),
    "onnx": lambda x, n: onnx.onnx_attention(x, x, x),
    "varlen": lambda x, n: fa2.flash_attn_varlen_func(x, x, x, n, n),
    "qkv": lambda x, n: fa2.flash_attn_qkvpacked_func(x),
    "cache of 3": lambda x, n: fa3.flash_attn_with_kvcache(x, x, x, cu_seqlens_q=n),
    "padding": lambda x, n: fa2.unpad_input(x, torch.ones(2, 5)),
}


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_nested_tensors_are_refused_by_name(name):
    parts = [torch.randn(n, H, D) for n in (3, 5)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        with pytest.raises(TypeError, match="is a nested tensor"):
            CALLS[name](nested, torch.tensor([0, 3, 8]))


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_the_first_call_of_a_program_may_be_compiled():
    code = """if True:
        import torch
        from polyattn.dialects.flash_attn import flash_attn_func
        x = torch.randn(2, 3, 4, 8)
        call = torch.compile(lambda x: flash_attn_func(x, x, x), backend="eager", fullgraph=True)
        torch.testing.assert_close(call(x), flash_attn_func(x, x, x))
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("library", "items", "paged"), [("numpy", 2, True), ("torch", 1, True), ("torch", 2, False)]
)
def test_a_step_of_decoding_is_described_once(library, items, paged, monkeypatch):
    """All layers of a model decode with the same lengths; a page and a cache have new slots."""
    calls = []
    for name in ("run", "attention"):
        module = sys.modules[f"polyattn._api.{name}"]

        def describe(*given, real=module.describe, **options):
            calls.append(given)
            return real(*given, **options)

        monkeypatch.setattr(module, "describe", describe)
    to = TO[library]
    table = to(np.arange(items * 2).reshape(items, 2)[:, ::-1].copy())
    gathers = paged and os.environ["POLYATTN_NATIVE"] == "0"  # by the lengths of each call
    pool = (items * 2, S // 2) if paged else (items, S)
    pools = [to(np.zeros((*pool, G, D))) for _ in range(2)]
    keys, values = normal(items, S, G, D), normal(items, S, G, D)
    q, more = normal(items, 1, H, D), {"block_table": table} if paged else {}
    for n in range(S):
        new = [to(x[:, n : n + 1].copy()) for x in (keys, values)]
        expected = polyattn.attention(q, keys[:, : n + 1], values[:, : n + 1], layout="...LHD")
        for layer in range(3):
            if layer == 1:
                calls.clear()
            lengths = to(np.full(items, n, np.int32))
            found = fa2.flash_attn_with_kvcache(
                to(q), *pools, *new, cache_seqlens=lengths, causal=True, **more
            )
            np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-12)
        assert not calls or gathers


# ---- nothing to compute ------------------------------------------------------------------------

EMPTY = {
    "a batch of a grid": (natten.na2d, [(0, 3, 3, 2, 4)] * 3 + [3], (0, 3, 3, 2, 4)),
    "rows of two axes of heads": (xformers.memory_efficient_attention,
        [(2, 0, 2, 3, 4), (2, 5, 2, 3, 4), (2, 5, 2, 3, 4)], (2, 0, 2, 3, 4)),
    "padding": (lambda *x: fa2.unpad_input(*x)[0], [(0, 5, 4), (0, 5)], (0, 4)),
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_is_computed(name, library):
    function, given, shape = EMPTY[name]
    arrays = [TO[library](normal(*x)) if isinstance(x, tuple) else x for x in given]
    assert tuple(function(*arrays).shape) == shape
