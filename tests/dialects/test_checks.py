"""Every dialect checks all shapes, dtypes and numbers of the host before it writes or computes."""

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


# ---- caches ------------------------------------------------------------------------------------

TABLE = np.array([[0, 1], [2, 3], [4, 5]])
NEW = {"k": normal(B, 1, G, D), "v": normal(B, 1, G, D), "cache_seqlens": np.array([1, 2, 3])}
#: Changes of a right call that appends, and words of the error.
WRONG = {
    "one head": ({"k": normal(B, 1, 1, D)}, r"k must .* \(B, N, G, D\).*G is 2.*got"),
    "another dtype": ({"k": NEW["k"].astype("float32")}, "k must be as k_cache, .* float32"),
    "a length": ({"cache_seqlens": np.array([1])}, r"cache_seqlens must .*\(B\), .*got \(1,\)"),
    "floats": ({"cache_seqlens": np.array([1.0, 2, 3])}, "cache_seqlens must hold integers"),
    "too long": ({"cache_seqlens": np.array([1, 8, 3])}, "from 0 to 7.*1 of them new; got 8"),
    "no item": ({"cache_batch_idx": np.array([0, 3, 1])}, "from 0 to 2, since k_cache has 3 items"),
    "few sequences": ({"q": normal(5, 1, H, D), "k": normal(5, 1, G, D), "v": normal(5, 1, G, D),
        "cache_seqlens": 1}, "5 sequences for the 3 items"),
    "heads": ({"q": normal(B, 1, 3, D)}, "multiple of that of key heads; got 3 and 2"),
    "dtype of q": ({"q": normal(B, 1, H, D).astype("float32")}, "must have one dtype"),
    "scale": ({"softmax_scale": "1"}, "scale must be a number"),
    "window": ({"window_size": (1.7, 0)}, "an end of window_size must be an integer; got 1.7"),
    "half a window": ({"window_size": (1,)}, r"window_size must be a pair .*; got \(1,\)"),
    "slopes": ({"alibi_slopes": normal(7)}, r"alibi_slopes must .*\(H\), where H is 4; got \(7,\)"),
    "angles": ({"rotary_cos": normal(9, 9), "rotary_sin": normal(9, 9)}, "more than the 16"),
    "a page": ({"block_table": TABLE + 3}, "pages from 0 to 2 for the keys of a sequence; got 3"),
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


@pytest.mark.parametrize(("library", "paged"), [("numpy", False), ("torch", True)])
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
#: A query of one token with a cache of 6, and packed queries with one of 3 sequences.
ONE = [normal(2, 1, G, D), *normal(2, 2, 6, G, D)]
PACKED = [normal(6, H, D), *normal(2, 3, S, G, D)]
cache2, cache3 = fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache
varlen3 = fa3.flash_attn_varlen_func


def packed(*numbers):
    return {"cache_seqlens": np.int64(4), "cu_seqlens_q": np.array(numbers)}


REFUSED = {
    "batch": (fa2.flash_attn_func, [Y, Y[:1], Y[:1]], {}, r"k must .*B is 2.*got \(1, 4, 3, 16\)"),
    "qv": (fa3.flash_attn_func, [Y, Y, Y], {"qv": Y[:, :2]}, r"qv must have .*L is 4"),
    "packed in four": (fa2.flash_attn_qkvpacked_func, [normal(2, 5, 4, H, D)], {},
        r"qkv must have the shape \(B, L, 3, H, D\)"),
    "packed in three": (fa2.flash_attn_kvpacked_func, [Y, normal(2, 4, 3, 3, D)], {}, "kv must"),
    "three": (fa2.flash_attn_varlen_kvpacked_func, [X, normal(9, 3, H, D), ENDS, ENDS], {},
        r"kv must have the shape \(S, 2, G, D\)"),
    "values": (fa2.flash_attn_varlen_func, [X, X, normal(12, H, D), ENDS, ENDS], {},
        r"v must .*S is 9.*got \(12, 4, 16\)"),
    "slopes": (fa2.flash_attn_varlen_func, [X, X, X, ENDS, ENDS], {"alibi_slopes": normal(3, H)},
        r"alibi_slopes must .*B is 2"),
    "float ends": (fa2.flash_attn_varlen_func, [X, X, X, ENDS * 1.0, ENDS], {},
        "starts and lengths of query must be integers"),
    "no ends": (fa2.flash_attn_varlen_func, [X, X, X, ENDS, None], {}, "cu_seqlens_k is missing"),
    "no keys": (fa2.flash_attn_varlen_func, [X, None, X, ENDS, ENDS], {}, "k is of type NoneType"),
    "a list": (fa3.flash_attn_func, [Y, Y, Y], {"qv": Y.tolist()}, "qv is of type list"),
    "dtype of qv": (fa3.flash_attn_func, [Y, Y, Y], {"qv": Y.astype("float32")}, "one dtype"),
    "chunk": (fa3.flash_attn_func, [Y, Y, Y], {"attention_chunk": -2}, "at least 1; got -2"),
    "rate": (fa2.flash_attn_func, [Y, Y, Y], {"dropout_p": "0.1"}, "dropout_p must .*got '0.1'"),
    "angles": (apply_rotary, [X, *normal(2, 4, 8)], {"cu_seqlens": ENDS}, "x the 5 from .* = 0 on"),
    "packed in rows": (fa3.flash_attn_qkvpacked_func, [X], {"num_heads_q": 2}, "a qkv of shape"),
    "no letter": (fa2.flash_attn_func, [ENDS, X, X], {}, r"q must have .* H, D\); got"),
    "negative page": (fa2.flash_attn_varlen_func, [X, POOL, POOL, ENDS, ENDS],
        {"block_table": np.array([[0, 1], [-1, 1]])}, "pages from 0 to 3 .*; got -1"),
    "pages of values": (fa2.flash_attn_varlen_func, [X, POOL, POOL[:, :2], ENDS, ENDS],
        {"block_table": np.array([[0, 1], [2, 1]])}, r"v must have the shape \(N, P, G, E\)"),
    "page of torch's": (torch_dialect.varlen_attn, [X, POOL, POOL, ENDS, None],
        {"block_table": np.array([[0, 1], [7, 1]]), "seqused_k": np.array([3, 4])}, "got 7"),
    "order": (varlen3, [X, X, X, np.array([0, 7, 5, 9]), ENDS], {},
        r"of query must be packed in order in its 9 tokens; .* at \[0, 7, 5, 9\]"),
    "beyond": (varlen3, [X, X, X, ENDS, np.array([0, 5, 10])], {}, "key must .* its 9 tokens"),
    "used": (varlen3, [X, X, X, ENDS, ENDS], {"seqused_q": np.array([6, 3])},
        r"of query must .*, of which \[6, 3\] are used"),
    "sequences": (varlen3, [X, X, X, ENDS, ENDS[::2]], {}, "query has 2 sequences, and key 1"),
    "cache: ends": (cache3, PACKED, packed(0, 2, 4), "must rise from 0 to the 6 tokens of q"),
    "cache: no end": (cache3, PACKED, packed(0), "one sequence at least"),
    "cache: items": (cache3, PACKED, packed(0, 1, 2, 3, 6), "4 sequences for the 3 items"),
    "cache: indices": (cache3, PACKED, packed(0, 1, 6) | {"cache_batch_idx": np.array([1])},
        "differ: cu_seqlens_q 2, cache_"),
    "cache: k": (cache2, [*ONE, ONE[0]], {}, "both k and v"),
    "cache: no lengths": (cache2, [*ONE, *ONE[:1] * 2], {}, "k and v need cache_seqlens"),
    "cache: length": (cache2, ONE, {"cache_seqlens": 7}, "holds 6 tokens of a sequence; got 7"),
    "cache: cos": (cache2, ONE, {"rotary_cos": ONE[0]}, "both rotary_cos and rotary_sin"),
    "cache: angles": (cache2, ONE, {"rotary_cos": ONE[0], "rotary_sin": ONE[0]}, "need k and v"),
    "cache: pages": (cache2, ONE, {"cache_batch_idx": 1, "block_table": 1},
        "block_table or cache_batch_idx"),
    "padding": (fa2.unpad_input, [normal(2, 5, 4), np.ones((2, 4))], {}, "attention_mask must"),
    "no padding": (fa2.pad_input, [normal(3, 4), np.array([0, 1]), 2, 5], {}, "indices must"),
    "natten: window": (natten.na1d, [Y, Y, Y, 7], {}, "at most the length"),
    "natten: axes": (natten.na2d, [Y, Y, Y, 3], {}, r"query .* shape \(B, X, Y, H, D\)"),
    "natten: tiles": (natten.na1d, [Y, Y, Y, 3], {"q_tile": 4}, "keyword argument 'q_tile'"),
    "natten: keys": (natten.na1d, [Y, Y, Y, 3], {"additional_keys": Y}, "give both"),
    "jax: batch": (jax_dialect.dot_product_attention, [Y, Y[:1], Y[:1]], {}, "key must"),
    "jax: of one": (jax_dialect.dot_product_attention, [Y[0], Y[0], Y[0]],
        {"query_seq_lengths": [2, 3]}, r"query_seq_lengths must .*B is 1; got \(2,\)"),
    "flax: batch": (flax.dot_product_attention, [Y, Y[:1], Y[:1]], {}, "key must"),
    "keras: batch": (keras.dot_product_attention, [Y, Y[:1], Y[:1]], {}, "key must"),
    "onnx: past": (onnx.onnx_attention, [Y, Y[:, :, :2], Y, None, Y[:, :, :2], Y[:, :, :1]], {},
        r"V must .*S is 2"),
    "onnx: lengths": (onnx.onnx_attention, [Y, Y, Y], {"nonpad_kv_seqlen": ENDS}, "B is 2"),
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


def test_layers_of_a_step_of_decoding_are_described_once(monkeypatch):
    calls = []
    for name in ("run", "attention"):
        module = sys.modules[f"polyattn._api.{name}"]

        def describe(*given, real=module.describe, **options):
            calls.append(given)
            return real(*given, **options)

        monkeypatch.setattr(module, "describe", describe)
    caches = [torch.zeros(2, S, G, D) for _ in range(2)]
    q, k, v = (torch.ones(2, 1, n, D) for n in (H, G, G))
    for n in range(S):
        for layer in range(3):
            if layer == 1:
                calls.clear()
            lengths = torch.full((2,), n, dtype=torch.int32)
            fa2.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
        assert not calls


# ---- nothing to compute ------------------------------------------------------------------------

EMPTY = {
    "a batch of a grid": (natten.na2d, [(0, 3, 3, 2, 4)] * 3 + [3], (0, 3, 3, 2, 4)),
    "rows of two axes of heads": (xformers.memory_efficient_attention,
        [(2, 0, 2, 3, 4), (2, 5, 2, 3, 4), (2, 5, 2, 3, 4)], (2, 0, 2, 3, 4)),
    "padding": (lambda *x: fa2.unpad_input(*x)[0], [(0, 5, 4), (0, 5)], (0, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_is_computed(name):
    function, given, shape = EMPTY[name]
    arrays = [normal(*x) if isinstance(x, tuple) else x for x in given]
    assert function(*arrays).shape == shape
