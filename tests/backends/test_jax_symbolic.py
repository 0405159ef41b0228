"""Programs of jax.export whose lengths stay open: exported once, they run at every size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from open_lengths import OF_ITEMS, D, E, G, H, numbers, weighted

import polyattn
from polyattn import attention, attention_weights, masks, scores

SIZES = [(2, 5, 7), (3, 6, 4)]
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal from the first key": {"is_causal": True, "query_offset": 0},
    "causal at an offset": {"is_causal": True, "query_offset": 2},
    "window": {"window": (2, 1)},
    "window, causal": {"window": (2, 0), "is_causal": True},
    "softcap": {"softcap": 3.0},
    "mask expression": {"mask": masks.causal() | masks.prefix(2)},
    "mask function": {"mask": lambda b, h, i, j: (i + j + b + h) % 3 != 0},
    "alibi": {"is_causal": True, "score_mod": scores.alibi(H)},
    "sinks": {"sinks": np.linspace(-1, 1, H, dtype=np.float32)},
    "sparsemax": {"normalizer": scores.sparsemax()},
    "cosine": {"similarity": scores.cosine()},
    "dropout": {"dropout": (0.4, 2**40 + 5, (1, 2, 3, 6))},
}


def exported(function, lengths="b, l, s", more=()):
    """Return the program of a function of query, key and value, and of numbers for each item."""
    b, length, *keys = export.symbolic_shape(lengths)
    keys = keys[0] if keys else length
    shapes = (b, H, length, D), (b, G, keys, D), (b, G, keys, E)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return export.export(jax.jit(function))(*given, *more).call


@pytest.mark.parametrize("name", OPTIONS)
def test_one_program_runs_at_all_lengths(name):
    run = exported(lambda *qkv: attention(*qkv, **OPTIONS[name]))
    for size in SIZES:
        inputs = numbers(*size)
        assert abs(run(*inputs) - attention(*inputs, **OPTIONS[name])).max() < 2e-6


@pytest.mark.parametrize("layout", ["...HLD", "...LHD"])
def test_lengths_that_are_the_same_symbol_have_the_offset_0(layout):
    def causal(*qkv):
        if layout == "...LHD":
            qkv = [array.swapaxes(1, 2) for array in qkv]
        found.append(polyattn.explain(*qkv, is_causal=True, layout=layout).problem.query_offset)
        output = attention(*qkv, is_causal=True, layout=layout)
        return output if layout == "...HLD" else output.swapaxes(1, 2)

    found = []
    run = exported(causal, "b, l")
    exported(causal)
    assert found == [0, None]
    inputs = numbers(2, 5, 5)
    assert abs(run(*inputs) - attention(*inputs, is_causal=True)).max() < 2e-6


@pytest.mark.parametrize("call", OF_ITEMS.values(), ids=OF_ITEMS)
def test_lengths_and_offsets_of_the_items_are_inputs(call):
    (b,) = export.symbolic_shape("b")
    run = export.export(jax.jit(call))(
        *(jax.ShapeDtypeStruct((b, H, *x.shape[2:]), x.dtype) for x in numbers(1, 5, 5)[:1]),
        *(jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in numbers(1, 5, 7)[1:]),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    ).call
    for batch in (2, 3):
        inputs = [*numbers(batch, 5, 7), np.arange(batch, dtype=np.int32)]
        assert abs(run(*inputs) - call(*inputs)).max() < 2e-6


@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap", "alibi"])
def test_gradients_are_exported_too(name):
    def gradients(*qkv):
        return jax.grad(lambda *x: (attention(*x, **OPTIONS[name]) ** 2).sum(), (0, 1, 2))(*qkv)

    run = exported(gradients)
    for size in SIZES:
        inputs = numbers(*size)
        output, of_output = polyattn.attention_vjp(*inputs, **OPTIONS[name])
        for found, wanted in zip(run(*inputs), of_output(2 * output)[:3], strict=True):
            assert abs(found - wanted).max() < 1e-5


def test_an_explanation_says_which_kernels_need_numbers():
    def explained(*qkv):
        found.append(polyattn.explain(*qkv, is_causal=True))
        return qkv[0]

    found = []
    exported(explained)
    assert found[0].chosen.kernel == "dense"
    reasons = {one.kernel: one.reasons for one in found[0].candidates}
    assert reasons["xla"] == ("it lays out tiles by lengths, and these are symbolic",)
    assert reasons["tiled"] == ("its tiles need lengths that are known",)


@pytest.mark.parametrize("function", [weighted, lambda *qkv: attention_weights(*qkv[:2])])
def test_weights_are_exported_too(function):
    run = exported(function)
    for size in SIZES:
        assert abs(run(*numbers(*size)) - function(*numbers(*size))).max() < 2e-6


def test_what_needs_numbers_is_refused():
    with pytest.raises(polyattn.UnsupportedError, match="backward only for known lengths"):
        exported(lambda q, k, v: polyattn.attention_vjp(q, k, k)[1](q))
    for options in {"rows": [0]}, {"top": 2}:
        with pytest.raises(ValueError, match="rows= and top= need lengths that are known; got"):
            exported(lambda q, k, v, options=options: attention_weights(q, k, **options))


def test_a_model_is_exported_with_open_lengths():
    nn = polyattn.nn
    model = nn.Transformer.init(50, 32, 4, 2, like=np.zeros(1, np.float32), rotary=nn.Rotary(8))
    parameters = model.parameters()
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in parameters.items()}
    ids_shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, l"), jnp.int32)
    program = export.export(jax.jit(lambda p, ids: model.with_parameters(p)(ids, is_causal=True)))
    run = program(shapes, ids_shape).call
    for size in ((1, 3), (2, 11)):
        ids = np.random.default_rng(0).integers(0, 50, size).astype(np.int32)
        assert abs(run(parameters, ids) - model(ids, is_causal=True)).max() < 3e-6
