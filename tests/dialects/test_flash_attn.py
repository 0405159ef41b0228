"""FlashAttention's functions on any array, beside `attention` of each sequence."""

import math
import types

import numpy as np
import pytest
from arrays import close, to_numpy
from optional import jax, jnp, torch
from pairs import TO, B, D, E, G, H, moved, normal, ours, spans, turn

from polyattn import masks, scores
from polyattn.dialects import _packed
from polyattn.dialects import flash_attn as fa2
from polyattn.dialects import flash_attn_interface as fa3

SLOPES, OF_ITEMS = normal(H) ** 2, normal(4, H) ** 2
#: Their options, and ours for sequence n.
OPTIONS = {
    "plain": ({"softmax_scale": 0.3, "deterministic": True}, lambda n: {"scale": 0.3}),
    "causal": ({"causal": True}, lambda n: {"is_causal": True}),
    "window": ({"window_size": (2, 1)}, lambda n: {"window": (2, 1)}),
    "half a window": (
        {"window_size": (-1, 1), "causal": True}, lambda n: {"window": (None, 0)},
    ),
    "softcap": ({"softcap": 0.7}, lambda n: {"softcap": 0.7}),
    "alibi": (
        {"alibi_slopes": SLOPES, "causal": True},
        lambda n: {"score_mod": scores.alibi(SLOPES), "is_causal": True},
    ),
    "alibi of items": (
        {"alibi_slopes": OF_ITEMS}, lambda n: {"score_mod": scores.alibi(OF_ITEMS[n])},
    ),
}  # fmt: skip


def same(found, expected, atol=1e-12):
    """Compare arrays, or tuples of them, in float64."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(to_numpy(one), to_numpy(other), rtol=0, atol=atol)


@pytest.fixture
def wide():
    """Let JAX have float64."""
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name):
    q, k, v = normal(4, 3, H, D), normal(4, 7, G, D), normal(4, 7, G, E)
    theirs, own = OPTIONS[name]
    output, lse, weights = fa2.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    for n in range(4):
        same((output[n], lse[n]), ours(q[n], k[n], v[n], **own(n)))
    assert weights is None
    same([fa2.flash_attn_func(q, k, v, **theirs)], [output])


def test_packed_arrays_and_positional_arguments():
    qkv = normal(B, 5, 3, H, D)
    given = (0.0, 0.4, True, (3, 0), 0.9, SLOPES, False, True)
    expected = fa2.flash_attn_func(*qkv.swapaxes(0, 2).swapaxes(1, 2), *given)[:2]
    same(fa2.flash_attn_qkvpacked_func(qkv, *given)[:2], expected)
    same(fa2.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], *given)[:2], expected)
    flat, ends = qkv.reshape(-1, 3, H, D), np.array([0, 5, 10], np.int32)
    expected = expected[0].reshape(-1, H, D), np.concatenate(list(expected[1]), axis=-1)
    same(fa2.flash_attn_varlen_qkvpacked_func(flat, ends, 5, *given)[:2], expected)
    two = fa2.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], ends, ends, 5, 5, *given)
    same(two[:2], expected)


ENDS_Q, ENDS_K = np.array([0, 3, 3, 8, 12], np.int32), np.array([0, 5, 7, 9, 9], np.int32)


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, "numpy") for name in OPTIONS]
    + [(name, "vmap") for name in ("causal", "window", "alibi of items")]
    + [("window", "torch")],
)
def test_varlen(name, library):
    """Of unlike lengths, some 0: one by one on NumPy and torch, and all at once where traced."""
    arrays = normal(12, H, D), normal(9, G, D), normal(9, G, E)
    theirs, own = OPTIONS[name]
    to = TO["torch" if library == "vmap" else library]
    given = moved("torch" if library == "vmap" else library, theirs)

    def call(*arrays):
        return fa2.flash_attn_varlen_func(
            *arrays, *map(to, (ENDS_Q, ENDS_K)), 5, 5, **given, return_attn_probs=True
        )[:2]

    if library == "vmap":
        output, lse = (x[0] for x in torch.func.vmap(call)(*(to(x)[None] for x in arrays)))
    else:
        output, lse = call(*map(to, arrays))
    for n, (rows, keys) in enumerate(zip(spans(ENDS_Q), spans(ENDS_K), strict=True)):
        q, k, v = (x[part] for x, part in zip(arrays, (rows, keys, keys), strict=True))
        if len(q):
            same((output[rows], lse[:, rows]), ours(q, k, v, **own(n)))
    assert lse.shape == (H, 12)


def uses(array, result):
    """Return how many steps of the graph of a result read an array: so many gradients are added."""
    seen, waiting, count = set(), [result.grad_fn], 0
    while waiting:
        node = waiting.pop()
        for other, _ in () if node in seen else node.next_functions:
            count += getattr(other, "variable", None) is array
            waiting += [] if other is None else [other]
        seen.add(node)
    return count


def test_varlen_copies_the_used_columns_of_a_table(monkeypatch):
    from polyattn.dialects import _flash

    copied, compute = [], _flash.packed_attention
    monkeypatch.setattr(
        _flash, "packed_attention", lambda *x, **o: copied.append(len(x[1])) or compute(*x, **o)
    )
    pool, ends = normal(6, 4, G, D), np.array([0, 7, 8])
    table = np.array([[3, 1] + [-1] * 50, [0] + [99] * 51])
    fa2.flash_attn_varlen_func(normal(8, H, D), pool, pool, ends, ends, block_table=table)
    assert copied == [2 * 2 * 4]


def test_packed_sequences_have_one_gradient():
    """A slice for each has one each, as long as the whole: sequences times tokens."""
    ends = torch.tensor([0, 2, 3, 3, 6, 10])
    q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (12, 11, 11))
    output = fa2.flash_attn_varlen_func(q, k, v, ends, ends, 4, 4)
    assert [uses(x, output) for x in (q, k, v)] == [1, 1, 1]
    cache = torch.randn(2, 5, 8, 2, 8).unbind()
    rows, qv = (torch.randn(10, 2, 8, requires_grad=True) for _ in range(2))
    output = fa3.flash_attn_with_kvcache(rows, *cache, qv=qv, cu_seqlens_q=ends)
    assert [uses(x, output) for x in (rows, qv)] == [1, 1]


def test_packed_sequences_have_one_gradient_on_jax():
    x, ends = jax.numpy.ones((10, 2, 8)), [0, 2, 3, 3, 6, 10]
    gradient = jax.grad(lambda x: fa2.flash_attn_varlen_func(x, x, x, ends, ends, 4, 4).sum())
    assert " pad[" not in str(jax.make_jaxpr(gradient)(x))


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of the queries of calls over packed sequences."""
    shapes = []
    for name in ("attention", "attention_partial"):
        run = getattr(_packed, name)
        monkeypatch.setattr(
            _packed, name, lambda *x, run=run, **o: shapes.append(x[0].shape) or run(*x, **o)
        )
    return shapes


SKIPS = types.SimpleNamespace(promises={"skips_documents"})


@pytest.mark.parametrize(
    ("calls", "ends", "other", "total", "name"),
    [
        (1, [0, 3, 7, 7, 12], [0, 5, 5, 9, 11], 12, "plain"),
        (1, [0, 3, 7, 7, 12], [0, 3, 7, 7, 12], 12, "window"),
        (3, [0, 3, 8, 12], [0, 5, 6, 11], 12, "causal"),  # rows are at positions of their own
        (3, [0, 3, 7], [0, 3, 7], 9, "plain"),  # the last are rows of no sequence
        (1, [0, 6, 12], [0, 6, 12], 12, "plain"),  # a batch
    ],
)
def test_short_sequences_are_documents_of_one_call(
    monkeypatch, shapes, calls, ends, other, total, name
):
    """Where the kernel skips the other documents, and the call means the same."""
    chosen = []
    monkeypatch.setattr(_packed, "kernel_for", lambda *x, **given: chosen.append(x) or SKIPS)
    q, k, v = normal(total, H, D), normal(other[-1], G, D), normal(other[-1], G, E)
    k[0] = v[0] = np.nan
    lengths, (theirs, own) = (np.array(ends), np.array(other)), OPTIONS[name]
    output, lse, _ = fa2.flash_attn_varlen_func(
        q, k, v, *lengths, 9, 9, **theirs, return_attn_probs=True
    )
    for n, (rows, keys) in enumerate(zip(*map(spans, lengths), strict=True)):
        if n and rows.stop > rows.start:
            same((output[rows], lse[:, rows]), ours(q[rows], k[keys], v[keys], **own(n)))
    assert len(shapes) == calls
    assert len(chosen) == (calls == 1 < len(ends) - 2)


@pytest.mark.needs("torch")
def test_the_starts_of_sequences_are_read_in_each_call(monkeypatch):
    planned, plan = [], _packed._plan
    monkeypatch.setattr(_packed, "_plans", {})
    monkeypatch.setattr(_packed, "_plan", lambda *x: planned.append(x) or plan(*x))
    x, ends = torch.randn(12, H, D), torch.tensor([0, 3, 7, 12])
    for first in (3, 5, 3):
        ends[1] = first
        output = fa2.flash_attn_varlen_func(x, x, x, ends, ends, 5, 5, causal=True)
        parts = x.tensor_split([first, 7])
        expected = torch.cat(
            [fa2.flash_attn_func(*[part[None]] * 3, causal=True)[0] for part in parts]
        )
        same([output], [expected], 1e-6)
    assert len(planned) == 2
    with pytest.raises(TypeError, match="must be integers"):
        fa2.flash_attn_varlen_func(x, x, x, ends.double(), ends)


@pytest.mark.native  # it computes all sequences in one call
@pytest.mark.needs("torch")
def test_a_kept_plan_is_that_of_a_rule():
    x, ends = torch.randn(12, H, D), torch.tensor([0, 3, 7, 12])
    slopes = torch.linspace(0.1, 1.0, H)
    for rule in ({}, {"causal": True}, {"window_size": (1, 0)}, {"alibi_slopes": slopes}):
        output = fa2.flash_attn_varlen_func(x, x, x, ends, ends, 5, 5, **rule)
        parts = [fa2.flash_attn_func(*[one[None]] * 3, **rule)[0] for one in x.split([3, 4, 5])]
        same([output], [torch.cat(parts)], 1e-6)


@pytest.mark.needs("torch")
def test_documents_that_were_met_in_inference_mode_can_be_trained(monkeypatch):
    monkeypatch.setattr(_packed, "kernel_for", lambda *arrays, **given: SKIPS)
    monkeypatch.setattr(_packed, "_plans", kept := {})
    x, ends = torch.randn(12, H, D), torch.tensor([0, 3, 7, 12])
    with torch.inference_mode():
        fa2.flash_attn_varlen_func(x, x, x, ends, ends, 5, 5)
    assert len(kept) == 1
    x.requires_grad_()
    fa2.flash_attn_varlen_func(x, x, x, ends, ends, 5, 5).sum().backward()


@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_varlen_over_pages(library, wide):
    pool_k, pool_v = normal(9, 4, G, D), normal(9, 4, G, E)
    table = np.array([[7, 2, -1], [0, 8, 3]], np.int32)
    q, ends_q, ends_k = normal(5, H, D), np.array([0, 2, 5], np.int32), np.array([0, 6, 17])
    pool_k[2, 2:] = pool_v[2, 2:] = np.nan  # slots that were never written

    def call(*arrays, table):
        return fa2.flash_attn_varlen_func(*arrays, 3, 11, causal=True, block_table=table)

    arrays = map(TO[library], (q, pool_k, pool_v, ends_q, ends_k))
    output = (jax.jit(call) if library == "jax" else call)(*arrays, table=TO[library](table))
    for rows, pages, length in zip(spans(ends_q), table, (6, 11), strict=True):
        k, v = (x[pages].reshape(12, G, -1)[:length] for x in (pool_k, pool_v))
        same([output[rows]], [ours(q[rows], k, v, is_causal=True)[0]])


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_dropout_draws_from_the_generator_of_the_library(library):
    to, seed = TO[library], np.random.seed if library == "numpy" else torch.manual_seed
    x, ends = to(normal(20, H, D)), to(np.array([0, 10, 20]))

    def draw():
        seed(3)
        first = fa2.flash_attn_func(x[None], x[None], x[None], 0.5)
        return first, fa2.flash_attn_varlen_func(x, x, x, ends, ends, 10, 10, 0.5)

    one, other = draw(), draw()
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
    assert not (one[0] == fa2.flash_attn_func(x[None], x[None], x[None], 0.5)).all()
    rows, apart = normal(10, H, D), to(np.array([0, 10, 11, 21]))
    twice = to(np.concatenate([rows, rows[:1], rows]))
    dropped = fa2.flash_attn_varlen_func(twice, twice, twice, apart, apart, 10, 10, 0.5)
    assert not (dropped[:10] == dropped[11:]).all()  # each sequence drops its own
    with pytest.raises(NotImplementedError, match="return_attn_probs with dropout_p"):
        fa2.flash_attn_func(x[None], x[None], x[None], 0.5, return_attn_probs=True)


# ---- FlashAttention 3 --------------------------------------------------------------------------


def chunks(length, keys, chunk, left=0):
    """Return the mask of the keys in the chunk of each row; chunks count from key `left`."""
    rows, columns = (np.arange(n) - left for n in (length, keys))
    return masks.segments((rows + keys - length) // chunk, columns // chunk)


@pytest.mark.parametrize("name", ["plain", "chunk", "qv"])
def test_flash_attention_3(name):
    q, k, v, qv = normal(B, 6, H, D), normal(B, 9, G, D), normal(B, 9, G, E), normal(B, 6, H, E)
    options, own = {
        "plain": ({"causal": True}, {"is_causal": True}),
        "chunk": ({"attention_chunk": 4}, {"mask": chunks(6, 9, 4)}),
        "qv": ({"qv": qv}, {}),
    }[name]
    given = {"num_splits": 2, "pack_gqa": True, "deterministic": True, "sm_margin": 3, **options}
    output, lse = fa3.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    flat, ends = (
        [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)],
        [np.arange(3) * n for n in (6, 9)],
    )
    packed = given | {"qv": qv.reshape(-1, H, E)} if name == "qv" else given
    other, total = fa3.flash_attn_varlen_func(*flat, *ends, 6, 9, **packed, return_attn_probs=True)
    if name == "qv":
        q, k = np.concatenate([q, qv], -1), np.concatenate([k, v], -1)
    for n, rows in enumerate(spans(ends[0])):
        expected = ours(q[n], k[n], v[n], **own)
        same((output[n], lse[n]), expected)
        same((other[rows], total[:, rows]), expected)


def test_used_tokens_of_flash_attention_3():
    q, k, v = normal(9, H, D), normal(10, G, D), normal(10, G, E)
    ends, used = [np.array([0, 4, 9]), np.array([0, 6, 10])], [np.array([3, 5]), np.array([5, 2])]
    output, lse = fa3.flash_attn_varlen_func(
        q, k, v, *ends, 5, 6, *used, causal=True, return_attn_probs=True
    )
    for n in range(2):
        rows, keys = (slice(e[n], e[n] + u[n]) for e, u in zip(ends, used, strict=True))
        expected = ours(q[rows], k[keys], v[keys], is_causal=True)
        same((output[rows], lse[:, rows]), expected)
    assert (output[3] == 0).all()
    assert (lse[:, 3] == -math.inf).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_parts_of_the_keys_are_combined(library):
    to, (q, k, v) = TO[library], (normal(B, n, H, D) for n in (3, 8, 8))
    output, total = ours(q, k, v)
    total = total.swapaxes(1, 2)
    pieces = [ours(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 3), (3, 3), (3, 8))]
    outputs, totals = (to(np.stack(x)) for x in zip(*pieces, strict=True))
    totals = totals.swapaxes(2, 3)
    same(fa3.flash_attn_combine(outputs, totals), (output, total))
    packed, none = fa3.flash_attn_combine(outputs[:, 0], totals[:, 0], return_lse=False)
    same([packed], output[:1])
    assert none is None
    small = fa3.flash_attn_combine(outputs, totals, out_dtype=to(np.ones(1, np.float32)).dtype)[0]
    assert "float32" in str(small.dtype)
    place = to(np.empty((B, 3, H, D)))
    assert fa3.flash_attn_combine(outputs, totals, place)[0] is place
    same([place], [output])
    with pytest.raises(ValueError, match="lse_partial must have the shape"):
        fa3.flash_attn_combine(outputs, totals[:2])


def test_packed_arrays_of_flash_attention_3():
    x, given = normal(B, 5, 8, D), {"causal": True, "softcap": 0.5}
    expected = fa3.flash_attn_func(x[:, :, :4], x[:, :, 4:6], x[:, :, 6:], **given)
    same([fa3.flash_attn_qkvpacked_func(x, num_heads_q=4, **given)], [expected])
    other = normal(B, 5, 3, H, D)
    expected = fa3.flash_attn_func(*(other[:, :, n] for n in range(3)), **given)
    same([fa3.flash_attn_qkvpacked_func(other, **given)], [expected])
    with pytest.raises(ValueError, match=r"\(2, 5, 8, 16\) needs num_heads_q"):
        fa3.flash_attn_qkvpacked_func(x)


def test_what_flash_attention_3_alone_can_do_is_refused():
    x, ends = normal(1, 4, 2, 8), np.array([0, 4])
    for call, arrays, name in (
        (fa3.flash_attn_func, [x] * 3, "q"),
        (fa3.flash_attn_varlen_func, [x[0]] * 3 + [ends] * 2 + [4, 4], "k"),
        (fa3.flash_attn_with_kvcache, [x] * 3, "v"),
    ):
        words = f"{name}_descale is not supported: multiply {name}"
        with pytest.raises(NotImplementedError, match=words):
            call(*arrays, **{f"{name}_descale": np.ones((1, 2))})
    with pytest.raises(NotImplementedError, match="cu_seqlens_q and cu_seqlens_k_new are read by"):
        jax.jit(lambda n: fa3.flash_attn_with_kvcache(*[jnp.asarray(x)] * 3, cu_seqlens_q=n))(ends)


# ---- caches ------------------------------------------------------------------------------------

#: Their options beside the arrays and lengths, and ours for sequence n.
CACHES = {
    "causal": ({"causal": True}, lambda n: {"is_causal": True}),
    "no new keys": ({"new": 0}, lambda n: {}),
    "a number": ({"cache_seqlens": np.int64(4), "causal": True}, lambda n: {"is_causal": True}),
    "fewer new keys": ({"new": 1, "window_size": (3, 0)}, lambda n: {"window": (3, 0)}),
    "items": (
        {"cache_batch_idx": np.array([3, 1], np.int32), "softcap": 0.8}, lambda n: {"softcap": 0.8},
    ),
    "left padding": (
        {"cache_leftpad": np.array([2, 0], np.int32), "causal": True, "rotary": True},
        lambda n: {"is_causal": True},
    ),
    "rotary, not causal": ({"rotary": True, "rotary_interleaved": False}, lambda n: {}),
    "pages": ({"causal": True, "rotary": True, "paged": True}, lambda n: {"is_causal": True}),
    "alibi": (
        {"alibi_slopes": OF_ITEMS[:B], "causal": True},
        lambda n: {"score_mod": scores.alibi(OF_ITEMS[n]), "is_causal": True},
    ),
    "chunk": (
        {"attention_chunk": 5, "causal": True},
        lambda n: {"mask": chunks(3, (9, 5)[n], 5), "is_causal": True},
    ),
    "chunk and padding": (
        {"attention_chunk": 5, "cache_leftpad": np.array([1, 0])},
        lambda n: {"mask": chunks(3, (9, 5)[n], 5, (1, 0)[n])},
    ),
    "positions": (
        {"rotary": True, "causal": True, "rotary_seqlens": np.array([9, 1])},
        lambda n: {"is_causal": True},
    ),
    "qv": ({"qv": normal(B, 3, H, E)}, lambda n: {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, "numpy") for name in CACHES]
    + [(name, "torch") for name in ("items", "left padding", "pages", "qv")],
)
def test_kvcache(name, library):
    (theirs, own), to = CACHES[name], TO[library]
    given = {"cache_seqlens": np.array([6, 2], np.int32), **theirs}
    new, paged, rotary = (given.pop(option, False) for option in ("new", "paged", "rotary"))
    new = 3 if new is False else new
    q, k, v = normal(B, 3, H, D), normal(B, new, G, D), normal(B, new, G, E)
    angles, table = normal(20, 4), np.array([[5, 0, 2], [1, 4, 3]], np.int32)
    places = [normal(*((6, 4) if paged else (4, 12)), G, n) for n in (D, E)]
    stored = [x[table].reshape(2, 12, G, -1) if paged else x.copy() for x in places]
    if new:
        given |= {"k": k, "v": v}
    if rotary:
        given |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    is_of_3 = {"attention_chunk", "qv", "rotary_seqlens"} & given.keys()
    if paged:
        given["block_table"] = table
    call = (fa3 if is_of_3 else fa2).flash_attn_with_kvcache
    arrays, options = [to(x) for x in (q, *places)], moved(library, given)
    output, lse = call(*arrays, **options, return_softmax_lse=True, num_splits=1)
    if is_of_3:  # metadata has no entries, and changes nothing
        metadata = fa3.get_scheduler_metadata(B, 3, 12, H, G, D, given["cache_seqlens"])
        assert metadata.shape == (0,)
        options["scheduler_metadata"] = metadata
    same([call(*arrays, **options)], [output])
    if paged:
        places = [x[table].reshape(2, 12, G, -1) for x in places]
    for n in range(B):
        start = int(np.broadcast_to(given["cache_seqlens"], (B,))[n])
        item, end = int(given.get("cache_batch_idx", range(B))[n]), start + new
        left, own_q, own_k = int(given.get("cache_leftpad", [0, 0])[n]), q[n], k[n]
        if rotary:
            begin = int(given["rotary_seqlens"][n]) if "rotary_seqlens" in given else start
            is_neox = not given.get("rotary_interleaved", True)
            rows = begin + np.arange(3) * bool(given.get("causal"))
            own_k = turn(own_k, angles[begin : begin + new], not is_neox)
            own_q = turn(own_q, angles[rows], not is_neox)
        stored[0][item, start:end], stored[1][item, start:end] = own_k, v[n]
        keys, values = (x[item, :end] for x in stored)
        if "qv" in given:
            own_q = np.concatenate([own_q, given["qv"][n]], -1)
            keys = np.concatenate([keys, values], -1)
        same((output[n], lse[n]), cut(own_q, keys, values, left, own(n)))
    same(places, stored)


def cut(q, k, v, left, options):
    """Return attention to the keys from `left` on, which have the positions that they had."""
    if "mask" in options:
        shown = np.broadcast_to(np.arange(len(k)) >= left, (len(q), len(k)))
        return ours(q, k, v, **options | {"mask": options["mask"] & masks.dense(shown)})
    return ours(q, k[left:], v[left:], **options)


@pytest.mark.parametrize("where", ["items", "cache", "pages"])
def test_packed_queries_and_new_keys_of_a_cache(where):
    """Each sequence by itself is the same, with its lengths, padding, places and rotation."""
    ends, ends_new = np.array([0, 2, 5]), np.array([0, 1, 4])
    q, k, v, qv = normal(5, H, D), normal(4, G, D), normal(4, G, E), normal(5, H, E)
    caches = [normal(*((6, 4) if where == "pages" else (3, 12)), G, n) for n in (D, E)]
    before, angles = [x.copy() for x in caches], normal(20, 4)
    options = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "causal": True}
    own = {"cache_seqlens": np.array([6, 2]), "rotary_seqlens": np.array([1, 5])}
    if where == "pages":
        own["page_table"] = np.array([[5, 0, 2], [1, 4, 3]])
    else:
        own["cache_leftpad"] = np.array([1, 0])
    if where == "items":
        own["cache_batch_idx"] = np.array([2, 0])
    given = own | {"qv": qv, "cu_seqlens_q": ends}
    output, lse = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, **given, cu_seqlens_k_new=ends_new, **options, return_softmax_lse=True
    )
    for n, (part, added) in enumerate(zip(spans(ends), spans(ends_new), strict=True)):
        each = {name: x[n : n + 1] for name, x in own.items()}
        if where == "cache":
            each["cache_batch_idx"] = np.array([n])
        expected = fa3.flash_attn_with_kvcache(
            q[None, part], *before, k[None, added], v[None, added], qv[None, part], **options,
            **each, return_softmax_lse=True,
        )  # fmt: skip
        same([output[None, part], lse[None, :, part]], expected)
    same(caches, before, atol=0)
    assert fa3.flash_attn_with_kvcache(q, *caches, **given).shape == output.shape


def test_a_cache_of_jax_is_read_and_not_written(wide):
    q, new = jnp.ones((B, 1, H, D)), jnp.ones((B, 1, G, D))
    cache, seqlens = jnp.asarray(normal(B, 6, G, D)), jnp.array([6, 3])
    read = jax.jit(lambda n: fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=n))
    output = read(seqlens)
    for n in range(B):
        own = cache[n, : seqlens[n]]
        close(output[n], ours(q[n], own, own)[0])
    with pytest.raises(NotImplementedError, match=r"arrays of jax cannot be written: .*KVCache"):
        fa2.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=seqlens)


# ---- padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_padding_out_and_in(library):
    to = TO[library]
    x, mask = normal(3, 5, 2, 4), np.array([[1, 1, 0, 0, 0], [0] * 5, [1, 1, 1, 1, 0]])
    tokens, indices, ends, longest, used = fa2.unpad_input(to(x), to(mask))
    close(tokens, x[mask.astype(bool)])
    assert np.asarray(indices).tolist() == np.flatnonzero(mask).tolist()
    assert np.asarray(ends).tolist() == [0, 2, 2, 6]
    assert (longest, np.asarray(used).tolist(), str(ends.dtype)[-5:]) == (4, [2, 0, 4], "int32")
    close(fa2.pad_input(tokens, indices, 3, 5), np.where(mask[..., None, None], x, 0))
    unused = np.zeros_like(mask)
    unused[1, :2] = 1
    more = fa2.unpad_input(to(x), to(mask), to(unused))
    assert np.asarray(more[2]).tolist() == [0, 2, 4, 8]
    assert np.asarray(more[4]).tolist() == [2, 0, 4]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_padding_is_differentiated_and_mapped(library, wide):
    to, of = TO[library], torch.func if library == "torch" else jax
    x, weights, at = normal(2, 3, 4), normal(1, 6, 4), np.array([4, 0, 2])

    def padded(x):
        return (fa2.pad_input(x, to(at), 1, 6) * to(weights)).sum()

    def taken(x):
        return (fa2.index_first_axis(x, to(at)) * to(x_of_item)).sum()

    close(of.vmap(of.grad(padded))(to(x)), np.stack([weights[0, at]] * 2))
    x_of_item, expected = x[0], np.zeros((6, 4))
    expected[at] = x_of_item
    close(of.grad(taken)(to(weights[0])), expected)
