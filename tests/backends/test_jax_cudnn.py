"""cuDNN through `jax.nn`: what it is asked, what is refused, and how far a CPU can lower it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import close, draw

import polyattn
from polyattn import attention, explain, masks
from polyattn_jax import cudnn


def in_jax(options):
    return {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


SQUARE = draw((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
OF_HEADS, OF_ITEMS, OF_SCORES = draw((1, 4, 16, 16), (2, 1, 16, 16), (16, 16), seed=1)


@pytest.fixture
def on_cuda(monkeypatch):
    """Let the kernel believe that it is on CUDA, where jax.nn takes what it would there."""
    monkeypatch.setattr(cudnn, "default_kind", lambda: "cuda")
    monkeypatch.setattr(cudnn, "trial", lambda problem: [])


@pytest.fixture
def calls(monkeypatch, on_cuda):
    """Let jax.nn's own XLA form stand for cuDNN, whose meaning it has."""
    genuine, made = jax.nn.dot_product_attention, []

    def stand_in(*arrays, implementation, bias=None, **options):
        assert implementation == "cudnn"
        made.append(options)
        # cuDNN computes in float32, as the other form does not for 16 bits.
        arrays = (x.astype("float32") for x in arrays)
        bias = None if bias is None else bias.astype("float32")
        return genuine(*arrays, bias=bias, implementation="xla", **options).astype("bfloat16")

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    cudnn.compiled.clear_cache()
    yield made
    cudnn.compiled.clear_cache()


BFLOAT16 = [jnp.asarray(x, "bfloat16") for x in SQUARE]
TAKEN = {
    "plain": {},
    "causal window": {"is_causal": True, "window": (5, 0)},
    "window to the left": {"window": (5, 0), "scale": 0.1},
    "rows that see nothing": {"mask": np.arange(16)[:, None] > 3},
    "causal, mask": {"is_causal": True, "mask": np.arange(16) > 2},
    "bias": {"bias": OF_HEADS.astype("bfloat16")},
    "mask and bias": {"mask": OF_SCORES > 0, "bias": OF_ITEMS.astype("bfloat16")},
}


@pytest.mark.parametrize("options", TAKEN.values(), ids=TAKEN)
def test_what_jax_nn_is_asked_means_what_we_mean(calls, options):
    ours = attention(*BFLOAT16, kernel="cudnn", **in_jax(options))
    assert len(calls) == 1
    close(ours, attention(*map(np.asarray, BFLOAT16), **options), 3)
    assert ours.dtype == jnp.bfloat16


def check_gradients(arrays, function):
    """Compare the gradients of a program with those of the formula."""

    def gradients(kernel):
        def loss(*arrays):
            return jnp.sum(jnp.sin(function(*arrays, kernel=kernel)))

        return jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)

    close(gradients("cudnn"), gradients("dense"), 5)


@pytest.mark.parametrize(("rows", "keys", "options"), [(15, 15, {"is_causal": True}), (1, 15, {})])
def test_gradients_of_odd_lengths_are_those_of_even_ones(calls, rows, keys, options):
    lengths = (rows, keys, keys)
    arrays = [x[:, :, :n] for x, n in zip(BFLOAT16, lengths, strict=True)]
    check_gradients(arrays, functools.partial(attention, **options))
    padded = "key_value_seq_lengths" in calls[-1]
    assert padded is (keys % 2 == 1 and not options)


def test_a_program_has_the_keys_that_a_mask_of_numbers_leaves(calls):
    q, k, v = (x[:, :, :n] for x, n in zip(BFLOAT16, (10, 16, 16), strict=True))
    options = {"mask": masks.padding(10), "is_causal": True, "query_offset": 0}
    program = jax.jit(functools.partial(attention, **options, kernel="cudnn"))
    close(program(q, k, v), attention(q, k, v, **options, kernel="dense"), 3)
    assert calls[0]["is_causal"]
    # Outside of a program each number would be compiled.
    with pytest.raises(polyattn.UnsupportedError, match="it does not compute mask_expression"):
        attention(q, k, v, **options, kernel="cudnn")


def test_a_single_query_sees_all_keys(calls):
    q, k, v = BFLOAT16
    attention(q[:, :, :1], k, v, is_causal=True, kernel="cudnn")
    assert calls[0]["is_causal"] is False


@pytest.mark.parametrize(
    ("reason", "options", "dtype", "rows"),
    [
        ("a scale above 0; got -0.5", {"scale": -0.5}, "bfloat16", 16),
        ("float16 and bfloat16 only", {}, "float32", 16),
        ("query_offset=0 and L = S", {"is_causal": True}, "bfloat16", 5),
        ("query_offset=0 and L = S", {"is_causal": True, "query_offset": 3}, "bfloat16", 16),
        ("to the left of a causal row", {"window": (3, 3)}, "bfloat16", 16),
        ("not a window to the right", {"window": (None, 3)}, "bfloat16", 16),
        ("it needs bfloat16", {"mask": np.ones((16, 16), bool)}, "float16", 16),
        ("float32 bias", {"bias": OF_SCORES}, "bfloat16", 16),
        ("even lengths", {"mask": np.ones((15, 16), bool)}, "bfloat16", 15),
    ],
)
def test_what_jax_nn_would_take_to_mean_something_else_is_refused(
    on_cuda, reason, options, dtype, rows
):
    q, k, v = (jnp.asarray(x, dtype) for x in SQUARE)
    told = explain(q[:, :, :rows], k, v, **in_jax(options))
    assert told.chosen.kernel != "cudnn"
    (first,) = (c for c in told.candidates if c.kernel == "cudnn")
    assert reason in "; ".join(first.reasons)


def test_what_jax_nn_itself_refuses_becomes_the_reason(monkeypatch):
    monkeypatch.setattr(cudnn, "default_kind", lambda: "cuda")
    cudnn.trial.cache_clear()
    told = explain(*BFLOAT16)
    assert "jax.nn says: cuDNN is not detected" in str(told)


def test_on_a_cpu_it_says_where_it_runs():
    assert "it runs on cuda only, and JAX would put this on cpu" in str(explain(*BFLOAT16))
    there = [jax.device_put(x, jax.devices()[0]) for x in BFLOAT16]
    assert "it runs on cuda only, and this call is on cpu" in str(explain(*there))


@pytest.fixture
def lowering(monkeypatch):
    """Return a function that lowers another for a CUDA device of compute capability 9.0."""
    inner = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "default_kind", lambda: "cuda")
    monkeypatch.setattr(inner, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(inner, "check_compute_capability", lambda capability: True)
    cudnn.trial.cache_clear()
    yield (
        lambda function, *shapes: (
            jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        )
    )
    cudnn.trial.cache_clear()


def test_arrays_that_vmap_does_not_map_over_have_the_same_gradients(calls):
    q, k, v = BFLOAT16
    bias = jnp.asarray(OF_HEADS, "bfloat16")

    def mapped(q, k, v, bias, kernel):
        call = functools.partial(attention, key=k, value=v, bias=bias, kernel=kernel)
        return jax.vmap(call)(q)

    check_gradients([jnp.stack([q, q * 2, q * 3]), k, v, bias], mapped)


def test_unknown_lengths_are_refused(on_cuda):
    def look(q, mask):
        told.append(explain(q, q, q, mask=mask))

    told, (n,) = [], jax.export.symbolic_shape("n")
    shapes = ((2, 4, n, 64), "bfloat16"), ((n, n), "bool")
    jax.eval_shape(look, *(jax.ShapeDtypeStruct(*one) for one in shapes))
    assert "cudnn" not in (told[0].chosen.kernel, None)
    assert "these are symbolic" in told[0].candidates[0].reasons[0]


@pytest.mark.parametrize(
    ("options", "slope", "length"),
    [
        ("plain", True, 15),
        ("causal window", True, 15),
        ("bias", True, 16),
        ("causal, mask", False, 16),
    ],
)
def test_the_whole_is_lowered_for_cuda(lowering, options, slope, length):
    """As far as a machine without CUDA can go: to the call of cuDNN, forward and backward."""
    given = in_jax(TAKEN[options])
    q, k, v = (jax.ShapeDtypeStruct((2, h, length, 64), "bfloat16") for h in (4, 2, 2))

    def call(q, k, v):
        return attention(q, k, v, **given)

    function = jax.grad(lambda *x: jnp.sum(call(*x)), (0, 1, 2)) if slope else call
    text = lowering(function, q, k, v)
    called = re.findall(r"@__cudnn\$fmha(\w+)", text)
    kind = "ScaleBias" if "mask" in given or "bias" in given else ""
    assert called[0] == f"{kind}Softmax"
    assert any("Backward" in name for name in called) is slope
    assert ("CAUSAL" in text) is bool(given.get("is_causal"))
    if "window" in given:
        assert "sliding_window_length\\22: 6" in text
