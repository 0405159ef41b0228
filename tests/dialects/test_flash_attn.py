"""FlashAttention's functions on any array, against a formula written from its documentation."""

import contextlib
import itertools
import math
import types

import numpy as np
import pytest
from optional import jax, jnp, torch

from polyattn.dialects import _packed
from polyattn.dialects import flash_attn as fa2
from polyattn.dialects import flash_attn_interface as fa3

RNG = np.random.default_rng(0)
B, H, G, D, E = 2, 4, 2, 16, 8
TO = {"numpy": lambda x: x, "torch": torch.asarray, "jax": jnp.asarray}


def normal(*shape):
    return RNG.standard_normal(shape)


def formula(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None,
            chunk=0, left=0):  # fmt: skip
    """Return output and logsumexp of one sequence, (L, H, D) and (S, G, D), by the documentation.

    Keys before `left` are hidden.
    """
    length, keys = len(q), len(k)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * np.tanh(s / softcap) if softcap else s
    i, j = np.ogrid[:length, :keys]
    place = i + keys - length
    s = s if slopes is None else s - slopes[:, None, None] * abs(place - j)
    seen = (j >= left) & (j <= place if causal else True)
    seen = seen & (window[0] < 0 or j >= place - window[0])
    seen = seen & (window[1] < 0 or j <= place + window[1])
    seen = seen & ((j - left) // chunk == (place - left) // chunk if chunk else True)
    s = np.where(seen, s, -math.inf)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(s).sum(-1))
    weights = np.where(seen, np.exp(s - np.where(np.isinf(total), 0, total)[..., None]), 0)
    return np.einsum("hij,jhd->ihd", weights, v), total


def close(actual, expected, **limits):
    np.testing.assert_allclose(np.asarray(actual), expected, **{"atol": 2e-6, **limits})


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True) if jax else contextlib.nullcontext():
        yield


OPTIONS = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "half a window": {"window_size": (-1, 1), "causal": True},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": normal(H) ** 2, "causal": True},
    "alibi of items": {"alibi_slopes": normal(B, H) ** 2},
    "ignored": {"deterministic": True},
}
NAMES = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes",
    "attention_chunk": "chunk"}  # fmt: skip


def one(options, n):
    """Return the options of the formula for a sequence."""
    given = {NAMES.get(k, k): x for k, x in options.items() if k not in ("deterministic", "qv")}
    if np.ndim(given.get("slopes", 0)) == 2:
        given["slopes"] = given["slopes"][n]
    return given


def moved(options, library):
    return {k: TO[library](x) if isinstance(x, np.ndarray) else x for k, x in options.items()}


SHORT, LONG = (3, 7), (7, 3)


@pytest.mark.parametrize(
    ("name", "library", "lengths"),
    [
        *((name, "numpy", lengths) for name in OPTIONS for lengths in (SHORT, LONG)),
        *((name, "torch", SHORT) for name in OPTIONS),
    ],
)
def test_dense(name, library, lengths):
    q, k, v = normal(B, lengths[0], H, D), normal(B, lengths[1], G, D), normal(B, lengths[1], G, E)
    options = OPTIONS[name]
    output, lse, weights = fa2.flash_attn_func(
        *map(TO[library], (q, k, v)), **moved(options, library), return_attn_probs=True
    )
    expected = [formula(q[n], k[n], v[n], **one(options, n)) for n in range(B)]
    close(output, [x for x, _ in expected])
    close(lse, [x for _, x in expected])
    assert weights is None
    again = fa2.flash_attn_func(*map(TO[library], (q, k, v)), **moved(options, library))
    close(again, output, atol=1e-12)


def test_packed_arrays_and_positional_arguments():
    qkv = normal(B, 5, 3, H, D)
    given = (0.0, 0.4, True, (3, 0), 0.9, normal(H) ** 2, False, True)
    expected = fa2.flash_attn_func(*qkv.swapaxes(0, 2).swapaxes(1, 2), *given)
    for found in (
        fa2.flash_attn_qkvpacked_func(qkv, *given),
        fa2.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], *given),
    ):
        close(found[0], expected[0], atol=1e-12)
        close(found[1], expected[1], atol=1e-12)
    flat, ends = qkv.reshape(-1, 3, H, D), np.array([0, 5, 10], np.int32)
    for found in (
        fa2.flash_attn_varlen_qkvpacked_func(flat, ends, 5, *given),
        fa2.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], ends, ends, 5, 5, *given),
    ):
        close(found[0].reshape(expected[0].shape), expected[0], atol=1e-12)
        close(found[1], np.concatenate(list(expected[1]), axis=-1), atol=1e-12)


ENDS_Q, ENDS_K = np.array([0, 3, 3, 8, 12], np.int32), np.array([0, 5, 7, 9, 9], np.int32)


def sequences(ends):
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, "numpy") for name in OPTIONS]
    + [(name, "vmap") for name in OPTIONS]
    + [("window", "torch"), ("alibi of items", "torch")],
)
def test_varlen(name, library):
    """Of unlike lengths, some 0: one by one on NumPy and torch, and all at once where traced."""
    q, k, v = normal(12, H, D), normal(9, G, D), normal(9, G, E)
    options = OPTIONS[name]
    if name == "alibi of items":
        options = {"alibi_slopes": normal(4, H) ** 2}
    to = TO["torch" if library == "vmap" else library]
    given = moved(options, "torch" if library == "vmap" else library)

    def call(*arrays):
        return fa2.flash_attn_varlen_func(
            *arrays, *map(to, (ENDS_Q, ENDS_K)), 5, 5, **given, return_attn_probs=True
        )[:2]

    if library == "vmap":
        output, lse = (x[0] for x in torch.func.vmap(call)(*(to(x)[None] for x in (q, k, v))))
    else:
        output, lse = call(*map(to, (q, k, v)))
    for n, (rows, keys) in enumerate(zip(sequences(ENDS_Q), sequences(ENDS_K), strict=False)):
        expected = formula(q[rows], k[keys], v[keys], **one(options, n))
        close(output[rows], expected[0])
        close(lse[:, rows], expected[1])
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


def test_a_run_of_equal_lengths_is_one_call(shapes):
    x = normal(11, H, D)
    ends = np.array([0, 3, 6, 9, 11])
    fa2.flash_attn_varlen_func(x, x, x, ends, ends, 3, 3)
    assert shapes == [(3, 3, H, D), (1, 2, H, D)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("calls", "ends", "other", "total", "name"),
    [
        (1, [0, 3, 7, 7, 12], [0, 5, 5, 9, 11], 12, "plain"),
        (1, [0, 3, 7, 7, 12], [0, 3, 7, 7, 12], 12, "causal"),
        (1, [0, 3, 7, 7, 12], [0, 3, 7, 7, 12], 12, "window"),
        (3, [0, 3, 8, 12], [0, 5, 6, 11], 12, "causal"),  # rows are at positions of their own
        (3, [0, 3, 8, 12], [0, 3, 8, 12], 12, "alibi"),
        (3, [0, 3, 7], [0, 3, 7], 9, "plain"),  # the last are rows of no sequence
        (1, [0, 6, 12], [0, 6, 12], 12, "plain"),  # a batch
    ],
)
def test_short_sequences_are_documents_of_one_call(
    monkeypatch, shapes, library, calls, ends, other, total, name
):
    """Where the kernel skips the other documents, and the call means the same."""
    kernel_for, chosen = _packed.kernel_for, []

    def that_skips(*arrays, **given):
        chosen.append(kernel_for(*arrays, **given))
        return types.SimpleNamespace(promises={"skips_documents"})

    monkeypatch.setattr(_packed, "kernel_for", that_skips)
    q, k, v = normal(total, H, D), normal(other[-1], G, D), normal(other[-1], G, E)
    if library == "numpy":  # the engine that torch has without the compiled kernel reads it
        k[0] = v[0] = np.nan
    lengths = np.array(ends), np.array(other)
    given = map(TO[library], (q, k, v, *lengths))
    output, lse, _ = fa2.flash_attn_varlen_func(
        *given, 9, 9, **OPTIONS[name], return_attn_probs=True
    )
    meant = {NAMES.get(name, name): option for name, option in OPTIONS[name].items()}
    for n, (rows, keys) in enumerate(zip(*map(sequences, lengths), strict=True)):
        if n and rows.stop > rows.start:
            expected = formula(q[rows], k[keys], v[keys], **meant)
            close(output[rows], expected[0])
            close(lse[:, rows], expected[1])
    assert len(shapes) == calls
    assert len(chosen) == (calls == 1 < len(ends) - 2)


@pytest.mark.needs("torch")
def test_documents_that_were_met_in_inference_mode_can_be_trained(monkeypatch):
    skips = types.SimpleNamespace(promises={"skips_documents"})
    monkeypatch.setattr(_packed, "kernel_for", lambda *arrays, **given: skips)
    monkeypatch.setattr(_packed, "_segments", kept := {})
    x, ends = torch.randn(12, H, D), torch.tensor([0, 3, 7, 12])
    with torch.inference_mode():
        fa2.flash_attn_varlen_func(x, x, x, ends, ends, 5, 5)
    assert len(kept) == 1
    x.requires_grad_()
    fa2.flash_attn_varlen_func(x, x, x, ends, ends, 5, 5).sum().backward()


@pytest.mark.parametrize(
    ("ends", "other", "used", "words"),
    [
        ([0, 7, 5, 9], [0, 3, 5, 9], None, r"of query must .* its 9 tokens; .* at \[0, 7, 5, 9\]"),
        ([0, 5, 9], [0, 5, 10], None, "of key must be packed in order in its 9 tokens"),
        ([0, 5, 9], [0, 5, 9], [6, 3], r"of query must .*, of which \[6, 3\] are used"),
        ([0, 5, 9], [0, 9], None, "query has 2 sequences, and key 1"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(ends, other, used, words):
    x, used = normal(9, H, D), used and np.array(used)
    with pytest.raises(ValueError, match=words):
        fa3.flash_attn_varlen_func(x, x, x, np.array(ends), np.array(other), seqused_q=used)


@pytest.mark.parametrize("library", TO)
def test_varlen_over_pages(library):
    pool_k, pool_v = normal(9, 4, G, D), normal(9, 4, G, E)
    table = np.array([[7, 2, -1], [0, 8, 3]], np.int32)
    q, ends_q, ends_k = normal(5, H, D), np.array([0, 2, 5], np.int32), np.array([0, 6, 17])
    pool_k[2, 2:] = pool_v[2, 2:] = np.nan  # slots that were never written

    def call(*arrays, table):
        return fa2.flash_attn_varlen_func(*arrays, 3, 11, causal=True, block_table=table)

    arrays = map(TO[library], (q, pool_k, pool_v, ends_q, ends_k))
    output = (jax.jit(call) if library == "jax" else call)(*arrays, table=TO[library](table))
    for rows, pages, length in zip(sequences(ends_q), table, (6, 11), strict=False):
        k, v = (x[pages].reshape(12, G, -1)[:length] for x in (pool_k, pool_v))
        close(output[rows], formula(q[rows], k, v, causal=True)[0])


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_dropout_draws_from_the_generator_of_the_library(library):
    module = torch if library == "torch" else np.random
    to = TO[library]
    x, ends = to(normal(20, H, D)), to(np.array([0, 10, 20]))

    def draw():
        (module.manual_seed if library == "torch" else module.seed)(3)
        first = fa2.flash_attn_func(x[None], x[None], x[None], 0.5)
        return first, fa2.flash_attn_varlen_func(x, x, x, ends, ends, 10, 10, 0.5)

    one_, other = draw(), draw()
    assert all((a == b).all() for a, b in zip(one_, other, strict=False))
    assert not (one_[0] == fa2.flash_attn_func(x[None], x[None], x[None], 0.5)).all()
    rows, apart = normal(10, H, D), to(np.array([0, 10, 11, 21]))
    same = to(np.concatenate([rows, rows[:1], rows]))
    dropped = fa2.flash_attn_varlen_func(same, same, same, apart, apart, 10, 10, 0.5)
    assert not (dropped[:10] == dropped[11:]).all()  # each sequence drops its own
    with pytest.raises(NotImplementedError, match="return_attn_probs with dropout_p"):
        fa2.flash_attn_func(x[None], x[None], x[None], 0.5, return_attn_probs=True)


# ---- FlashAttention 3 --------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["plain", "chunk", "qv"])
def test_flash_attention_3(name, library):
    q, k, v = normal(B, 6, H, D), normal(B, 9, G, D), normal(B, 9, G, E)
    qv = normal(B, 6, H, E)
    options = {"plain": {"causal": True}, "chunk": {"attention_chunk": 4}, "qv": {"qv": qv}}[name]
    joined = np.concatenate([q, qv], -1), np.concatenate([k, v], -1)
    own_q, own_k = joined if name == "qv" else (q, k)
    ignored = {"num_splits": 2, "pack_gqa": True, "deterministic": True, "sm_margin": 3}
    arrays = [TO[library](x) for x in (q, k, v)]
    given = moved(options, library) | ignored
    output, lse = fa3.flash_attn_func(*arrays, **given, return_attn_probs=True)
    flat = [x.reshape(-1, *x.shape[2:]) for x in arrays]
    ends = [TO[library](np.arange(3) * n) for n in (6, 9)]
    packed = given | {"qv": TO[library](qv.reshape(-1, H, E))} if name == "qv" else given
    other, total = fa3.flash_attn_varlen_func(*flat, *ends, 6, 9, **packed, return_attn_probs=True)
    for n in range(B):
        expected = formula(own_q[n], own_k[n], v[n], **one(options, n))
        close(output[n], expected[0])
        close(lse[n], expected[1])
        close(other[6 * n : 6 * n + 6], expected[0])
        close(total[:, 6 * n : 6 * n + 6], expected[1])
    assert fa3.flash_attn_func(*arrays, **given).shape == output.shape


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_used_tokens_of_flash_attention_3(library):
    q, k, v = normal(9, H, D), normal(10, G, D), normal(10, G, E)
    ends = [np.array([0, 4, 9]), np.array([0, 6, 10])]
    used = [np.array([3, 5]), np.array([5, 2])]
    output, lse = fa3.flash_attn_varlen_func(
        *map(TO[library], (q, k, v, *ends)), 5, 6, *map(TO[library], used), causal=True,
        return_attn_probs=True,
    )  # fmt: skip
    for n in range(2):
        rows, keys = (slice(e[n], e[n] + u[n]) for e, u in zip(ends, used, strict=False))
        expected = formula(q[rows], k[keys], v[keys], causal=True)
        close(output[rows], expected[0])
        close(lse[:, rows], expected[1])
    assert (np.asarray(output[3]) == 0).all()
    assert (np.asarray(lse[:, 3]) == -math.inf).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_parts_of_the_keys_are_combined(library):
    to, (q, k, v) = TO[library], (normal(B, n, H, D) for n in (3, 8, 8))
    whole = fa3.flash_attn_func(*map(to, (q, k, v)), return_attn_probs=True)
    parts = [(0, 3), (3, 3), (3, 8)]
    pieces = [
        fa3.flash_attn_func(*map(to, (q, k[:, a:b], v[:, a:b])), return_attn_probs=True)
        for a, b in parts
    ]
    outputs = to(np.stack([np.asarray(x) for x, _ in pieces]))
    totals = to(np.stack([np.asarray(x).swapaxes(1, 2) for _, x in pieces]))
    output, lse = fa3.flash_attn_combine(outputs, totals)
    close(output, np.asarray(whole[0]))
    close(lse, np.asarray(whole[1]).swapaxes(1, 2))
    packed, none = fa3.flash_attn_combine(outputs[:, 0], totals[:, 0], return_lse=False)
    close(packed, np.asarray(whole[0])[0])
    assert none is None
    small = fa3.flash_attn_combine(outputs, totals, out_dtype=to(np.ones(1, np.float32)).dtype)[0]
    assert "float32" in str(small.dtype)
    place = to(np.empty((B, 3, H, D)))
    assert fa3.flash_attn_combine(outputs, totals, place)[0] is place
    close(place, np.asarray(whole[0]))
    with pytest.raises(ValueError, match="lse_partial must have the shape"):
        fa3.flash_attn_combine(outputs, totals[:2])


def test_metadata_of_a_scheduler_has_no_entries_and_changes_nothing():
    x, cache = normal(B, 1, H, D), normal(B, 5, H, D)
    lengths = np.array([2, 4])
    metadata = fa3.get_scheduler_metadata(B, 1, 5, H, H, D, lengths, causal=True)
    assert metadata.shape == (0,)
    found = fa3.flash_attn_with_kvcache(
        x, cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata
    )
    close(found, fa3.flash_attn_with_kvcache(x, cache, cache, cache_seqlens=lengths))


def test_packed_arrays_of_flash_attention_3():
    x = normal(B, 5, 8, D)
    given = {"causal": True, "softcap": 0.5}
    expected = fa3.flash_attn_func(x[:, :, :4], x[:, :, 4:6], x[:, :, 6:], **given)
    close(fa3.flash_attn_qkvpacked_func(x, num_heads_q=4, **given), expected)
    other = normal(B, 5, 3, H, D)
    expected = fa3.flash_attn_func(*(other[:, :, n] for n in range(3)), **given)
    close(fa3.flash_attn_qkvpacked_func(other, **given), expected)
    with pytest.raises(ValueError, match=r"\(2, 5, 8, 16\) needs num_heads_q"):
        fa3.flash_attn_qkvpacked_func(x)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_what_flash_attention_3_alone_can_do_is_refused(name):
    x, ends = normal(1, 4, 2, 8), np.array([0, 4])
    scale = {name: np.ones((1, 2))}
    for call, arrays in (
        (fa3.flash_attn_func, [x] * 3),
        (fa3.flash_attn_varlen_func, [x[0]] * 3 + [ends] * 2 + [4, 4]),
        (fa3.flash_attn_with_kvcache, [x] * 3),
    ):
        with pytest.raises(
            NotImplementedError, match=f"{name} is not supported: multiply {name[0]}"
        ):
            call(*arrays, **scale)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q and cu_seqlens_k_new are read by"):
        jax.jit(lambda n: fa3.flash_attn_with_kvcache(*[jnp.asarray(x)] * 3, cu_seqlens_q=n))(ends)


# ---- caches ------------------------------------------------------------------------------------


def rotated(x, cos, sin, places, interleaved):
    """Rotate (L, H, D) by positions (L,)."""
    cos, sin, half = cos[places][:, None], sin[places][:, None], cos.shape[-1]
    pairs = (
        np.arange(2 * half).reshape(half, 2)
        if interleaved
        else np.arange(2 * half).reshape(2, half).T
    )
    out = x.copy()
    one_, other = x[..., pairs[:, 0]], x[..., pairs[:, 1]]
    out[..., pairs[:, 0]] = one_ * cos - other * sin
    out[..., pairs[:, 1]] = one_ * sin + other * cos
    return out


CACHES = {
    "plain": {"causal": True},
    "no new keys": {"new": 0},
    "a number": {"seqlens": 4, "causal": True},
    "fewer new keys": {"new": 1, "window_size": (3, 0)},
    "items": {"items": [3, 1], "softcap": 0.8},
    "left padding": {"leftpad": [2, 0], "causal": True, "rotary": True},
    "rotary, not causal": {"rotary": True, "interleaved": False},
    "rotary, halves": {"rotary": True, "interleaved": False, "causal": True},
    "pages": {"paged": True, "causal": True, "rotary": True},
    "alibi": {"alibi_slopes": normal(B, H) ** 2, "causal": True},
    "alibi of heads": {"alibi_slopes": normal(H) ** 2, "softmax_scale": 0.3},
    "chunk": {"attention_chunk": 5, "causal": True},
    "chunk and padding": {"attention_chunk": 5, "leftpad": [1, 0]},
    "positions": {"rotary": True, "causal": True, "rotary_seqlens": [9, 1]},
    "qv": {"qv": normal(B, 3, H, E)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, "numpy") for name in CACHES]
    + [(name, "torch") for name in ("plain", "items", "left padding", "pages", "positions", "qv")],
)
def test_kvcache(name, library):
    given = dict(CACHES[name])
    to, length, size = TO[library], 3, 12
    new = given.pop("new", 3)
    seqlens = given.pop("seqlens", np.array([6, 2], np.int32))
    items, leftpad = given.pop("items", None), given.pop("leftpad", None)
    paged, rotary = given.pop("paged", False), given.pop("rotary", False)
    interleaved, first = given.pop("interleaved", True), given.pop("rotary_seqlens", None)
    three = {"attention_chunk", "qv"} & given.keys() or first is not None
    q, k, v = normal(B, length, H, D), normal(B, new, G, D), normal(B, new, G, E)
    cache = [normal(4, size, G, n) for n in (D, E)]
    before = [x.copy() for x in cache]
    table = np.array([[5, 0, 2], [1, 4, 3]], np.int32)
    stored = [
        np.concatenate([x[:2].reshape(6, 4, G, -1)[np.argsort(table.reshape(-1))]]) for x in cache
    ]
    places = [to(x.copy()) for x in (stored if paged else cache)]
    angles = normal(20, 4)
    options = {"cache_seqlens": np.int64(seqlens) if isinstance(seqlens, int) else to(seqlens)}
    if new:
        options |= {"k": to(k), "v": to(v)}
    if rotary:
        options |= {"rotary_cos": to(np.cos(angles)), "rotary_sin": to(np.sin(angles))}
        options |= {"rotary_interleaved": interleaved}
    if first is not None:
        options["rotary_seqlens"] = to(np.array(first))
    if items:
        options["cache_batch_idx"] = to(np.array(items, np.int32))
    if leftpad:
        options["cache_leftpad"] = to(np.array(leftpad, np.int32))
    if paged:
        options["page_table" if three else "block_table"] = to(table)
    function = (fa3 if three else fa2).flash_attn_with_kvcache
    output, lse = function(
        to(q), *places, **options, **moved(given, library), return_softmax_lse=True, num_splits=1
    )
    assert function(to(q), *places, **options, **moved(given, library)).shape == output.shape
    if paged:
        places = [np.asarray(x)[table.reshape(-1)].reshape(2, size, G, -1) for x in places]
    for n in range(B):
        start = seqlens if isinstance(seqlens, int) else int(seqlens[n])
        item, end = items[n] if items else n, start + new
        own_q, own_k = q[n], k[n]
        if rotary:
            begin = start if first is None else first[n]
            moves = given.get("causal") or "window_size" in given
            own_k = rotated(
                own_k, np.cos(angles), np.sin(angles), begin + np.arange(new), interleaved
            )
            own = begin + np.arange(length) * bool(moves)
            own_q = rotated(own_q, np.cos(angles), np.sin(angles), own, interleaved)
        before[0][item, start:end], before[1][item, start:end] = own_k, v[n]
        keys, values = (x[item, :end] for x in before)
        if "qv" in given:
            own_q = np.concatenate([own_q, given["qv"][n]], -1)
            keys = np.concatenate([keys, values], -1)
        expected = formula(own_q, keys, values, **one(given, n), left=leftpad[n] if leftpad else 0)
        close(output[n], expected[0])
        close(lse[n], expected[1])
    for found, wanted in zip(places, before, strict=False):
        close(found, wanted[: len(found)], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": [0, 2, 4]}, "must rise from 0 to the 6 tokens of q"),
        ({"cu_seqlens_q": [0]}, "one sequence at least"),
        ({"cu_seqlens_q": [0, 1, 2, 3, 6]}, "4 sequences for the 3 items of k_cache"),
        ({"cu_seqlens_q": [0, 1, 6], "cache_batch_idx": [1]}, "differ: cu_seqlens_q 2, cache_"),
    ],
    ids=str,
)
def test_ends_that_do_not_fit_a_cache_are_refused_before_it_is_written(change, words):
    caches = normal(3, 8, G, D), normal(3, 8, G, E)
    change = {name: np.array(ends) for name, ends in change.items()}
    with pytest.raises(ValueError, match=words):
        fa3.flash_attn_with_kvcache(normal(6, H, D), *caches, cache_seqlens=np.int64(4), **change)


@pytest.mark.parametrize("packed", ["queries", "new keys", "both"])
@pytest.mark.parametrize("where", ["items", "pages", "cache"])
def test_packed_queries_and_new_keys_of_a_cache(packed, where):
    """Each sequence by itself is the same, with its lengths, padding, places and rotation."""
    lengths, new = [2, 3], [1, 3]
    ends, ends_new = (np.array([0, n[0], sum(n)]) for n in (lengths, new))
    if packed == "queries":
        new = [2, 2]
    elif packed == "new keys":
        lengths = [2, 2]
    q, k, v = normal(sum(lengths), H, D), normal(sum(new), G, D), normal(sum(new), G, E)
    caches = [normal(*((6, 4) if where == "pages" else (3, 12)), G, n) for n in (D, E)]
    before = [x.copy() for x in caches]
    angles, qv = normal(20, 4), normal(sum(lengths), H, E)
    options = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "causal": True}
    own = {"cache_seqlens": np.array([6, 2]), "rotary_seqlens": np.array([1, 5])}
    if where == "pages":
        own["page_table"] = np.array([[5, 0, 2], [1, 4, 3]])
    else:
        own |= {"cache_leftpad": np.array([1, 0])}
        own |= {"cache_batch_idx": np.array([2, 0])} if where == "items" else {}

    def batch(x, starts):
        return x if starts is not None else x.reshape(2, -1, *x.shape[1:])

    given = {"queries": (ends, None), "new keys": (None, ends_new), "both": (ends, ends_new)}
    starts, starts_new = given[packed]
    rows, more = batch(q, starts), batch(qv, starts)
    new_k, new_v = batch(k, starts_new), batch(v, starts_new)
    output, lse = fa3.flash_attn_with_kvcache(
        rows, *caches, new_k, new_v, more, **options, **own, return_softmax_lse=True,
        cu_seqlens_q=starts, cu_seqlens_k_new=starts_new,
    )  # fmt: skip
    for n in range(2):
        part, added = (slice(sum(x[:n]), sum(x[: n + 1])) for x in (lengths, new))
        each = {name: x[n : n + 1] for name, x in own.items()}
        if where == "cache":
            each["cache_batch_idx"] = np.array([n])
        expected, total = fa3.flash_attn_with_kvcache(
            q[None, part], *before, k[None, added], v[None, added], qv[None, part], **options,
            **each, return_softmax_lse=True,
        )  # fmt: skip
        close(output[n] if starts is None else output[part], expected[0])
        close(lse[n] if starts is None else lse[:, part], total[0])
    for found, wanted in zip(caches, before, strict=True):
        close(found, wanted, atol=0)
    plain = fa3.flash_attn_with_kvcache(rows, *caches, qv=more, cu_seqlens_q=starts, **own)
    assert plain.shape == output.shape


def test_a_cache_of_jax_is_read_and_not_written():
    q, new = jnp.ones((B, 1, H, D)), jnp.ones((B, 1, G, D))
    cache = jnp.asarray(normal(B, 6, G, D))
    seqlens = jnp.array([6, 3])
    output = jax.jit(lambda n: fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=n))(
        seqlens
    )
    for n in range(B):
        own = np.asarray(cache)[n, : seqlens[n]]
        close(output[n], formula(np.ones((1, H, D)), own, own)[0])
    with pytest.raises(NotImplementedError, match=r"arrays of jax cannot be written: .*KVCache"):
        fa2.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=seqlens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 1}, "both k and v"),
        ({"k": 1, "v": 1}, "k and v need cache_seqlens"),
        ({"cache_seqlens": 7}, "from 0 to 6, since k_cache holds 6 tokens of a sequence; got 7"),
        ({"rotary_cos": 1, "cache_seqlens": 2}, "both rotary_cos and rotary_sin"),
        ({"rotary_cos": 1, "rotary_sin": 1}, "rotary_cos and rotary_sin need k and v"),
        ({"cache_batch_idx": 1, "block_table": 1}, "block_table or cache_batch_idx"),
    ],
)
def test_arguments_that_do_not_go_together(options, message):
    x, cache = normal(B, 1, G, D), normal(B, 6, G, D)
    given = {k: x if n == 1 else n for k, n in options.items()}
    with pytest.raises(ValueError, match=message):
        fa2.flash_attn_with_kvcache(x, cache, cache, **given)


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
    padded = fa2.pad_input(tokens, indices, 3, 5)
    close(padded, np.where(mask[..., None, None], x, 0))
    unused = np.zeros_like(mask)
    unused[1, :2] = 1
    more = fa2.unpad_input(to(x), to(mask), to(unused))
    assert np.asarray(more[2]).tolist() == [0, 2, 4, 8]
    assert np.asarray(more[4]).tolist() == [2, 0, 4]


def test_padding_has_gradients():
    x = torch.randn(2, 4, 3, requires_grad=True, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])

    def both(x):
        tokens, indices, *_ = fa2.unpad_input(x, mask)
        return fa2.pad_input(tokens * tokens, indices.flip(0), 2, 4)

    assert torch.autograd.gradcheck(both, x)
    assert fa2.index_put_first_axis(torch.zeros(0, 3), torch.zeros(0, dtype=int), 4).shape == (4, 3)
    close(fa2.index_first_axis(x, torch.tensor([1])).detach(), x[1:].detach())
