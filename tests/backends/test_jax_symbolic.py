"""Programs of jax.export whose lengths stay open: exported once, they run at every size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import close
from jax import export
from open_lengths import OF_ITEMS, D, E, G, H, numbers, weighted

import polyattn
from polyattn import attention, attention_weights, masks, scores

SIZES = [(2, 5, 7), (3, 6, 4)]
OPTIONS = {
    "causal": {"is_causal": True, "softcap": 3.0, "sinks": np.linspace(-1, 1, H, dtype=np.float32)},
    "causal at an offset": {"is_causal": True, "query_offset": 2, "score_mod": scores.alibi(H)},
    "window": {"window": (2, 1), "similarity": scores.cosine()},
    "window, causal": {
        "window": (2, 0), "is_causal": True, "dropout": (0.4, 2**40 + 5, (1, 2, 3, 6))
    },
    "mask expression": {
        "mask": masks.causal() | masks.prefix(2), "normalizer": scores.sparsemax()
    },
    "mask function": {"mask": lambda b, h, i, j: (i + j + b + h) % 3 != 0},
}  # fmt: skip


def exported(function, lengths="b, l, s", per_item=()):
    """Return the program of a function of query, key and value, and of numbers for each item."""
    b, length, *keys = export.symbolic_shape(lengths)
    keys = keys[0] if keys else length
    shapes = (b, H, length, D), (b, G, keys, D), (b, G, keys, E)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    given += [jax.ShapeDtypeStruct((b,), dtype) for dtype in per_item]
    return export.export(jax.jit(function))(*given).call


def outputs(*given):
    """Return the results of calls on query, key, value and a number for each item."""
    *qkv, _ = given
    found = {name: attention(*qkv, **options) for name, options in OPTIONS.items()}
    found |= {name: call(*given) for name, call in OF_ITEMS.items()}
    return found | {"weights": attention_weights(*qkv[:2]), "some weights": weighted(*qkv)}


@pytest.mark.slow
def test_one_program_runs_at_all_lengths():
    run = exported(outputs, per_item=[jnp.int32])
    for size in SIZES:
        inputs = *numbers(*size), np.arange(size[0], dtype=np.int32)
        found, expected = run(*inputs), outputs(*inputs)
        close([found[name] for name in expected], list(expected.values()))


def test_lengths_that_are_the_same_symbol_have_the_offset_0():
    def causal(*qkv):
        found.append(polyattn.explain(*qkv, is_causal=True).problem.query_offset)
        return attention(*qkv, is_causal=True)

    found, inputs = [], numbers(2, 5, 5)
    close(exported(causal, "b, l")(*inputs), attention(*inputs, is_causal=True))
    exported(causal)
    assert found == [0, None]


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


def test_what_needs_numbers_is_refused():
    with pytest.raises(polyattn.UnsupportedError, match="backward only for known lengths"):
        exported(lambda q, k, v: polyattn.attention_vjp(q, k, k)[1](q))
    for options in {"rows": [0]}, {"top": 2}:
        with pytest.raises(ValueError, match="rows= and top= need lengths that are known; got"):
            exported(lambda q, k, v, options=options: attention_weights(q, k, **options))


def test_a_model_is_exported_with_open_lengths():
    nn = polyattn.nn
    like, rotary = np.zeros(1, np.float32), nn.Rotary(8)
    model = nn.Transformer.init(50, 32, 4, 1, like=like, is_causal=True, rotary=rotary)
    parameters = model.parameters()
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in parameters.items()}
    ids_shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, l"), jnp.int32)
    program = export.export(jax.jit(lambda p, ids: model.with_parameters(p)(ids)))
    run = program(shapes, ids_shape).call
    ids = np.random.default_rng(0).integers(0, 50, (2, 11)).astype(np.int32)
    close(run(parameters, ids), model(ids))
