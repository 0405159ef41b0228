"""Models of ONNX: what they compute in two runtimes, and what a call becomes."""

import functools
import sys

import numpy as np
import pytest
from runtimes import by_onnxruntime, by_reference, kinds, onnx

import polyattn
from polyattn import attention, masks, nn, scores
from polyattn.cli import main
from polyattn.export import onnx as export

H, G, D, E = 4, 2, 8, 6
SHAPES = {"query": ("B", H, "L", D), "key": ("B", G, "S", D), "value": ("B", G, "S", E)}
WEIGHED = {name: SHAPES[name] for name in ("query", "key")}
SIZES = [(2, 5, 7), (3, 6, 4)]
SINKS = np.linspace(-1, 1, H, dtype=np.float32)
TABLE = np.linspace(-1, 1, 8 * H, dtype=np.float32).reshape(8, H)  # of relative distances


def numbers(batch, length, keys, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, H, length, D), (batch, G, keys, D), (batch, G, keys, E)]
    return dict(
        zip(SHAPES, (rng.standard_normal(s, dtype=np.float32) for s in shapes), strict=True)
    )


CALLS = {
    "causal at an offset": {"is_causal": True, "query_offset": 2},
    "mask function": {"mask": lambda b, h, i, j: (i + j + b + h) % 3 != 0},
    "T5's bias and sinks": {"sinks": SINKS, "score_mod": scores.relative_bias(TABLE)},
    "temperature": {"is_causal": True, "score_mod": scores.temperature(2.0) >> scores.alibi(H)},
}


@functools.cache
def exported(name):
    return export(attention, SHAPES, options=CALLS[name])


def test_outputs_name_the_lengths_that_are_those_of_inputs():
    def lengths(x):
        weighed = attention(x, x, x, is_causal=True)
        return {"same": weighed, "shorter": weighed[:, :, 1:, :]}

    same, shorter = (
        [d.dim_param or d.dim_value or None for d in output.type.tensor_type.shape.dim]
        for output in export(lengths, {"x": ("B", H, "L", D)}).graph.output
    )
    assert same == ["B", H, "L", D]
    assert shorter == ["B", H, None, D]
    model = nn.Transformer.init(50, 8, 2, 2, like=np.zeros(1, np.float32), is_causal=True)
    (output,) = export(model, {"ids": ("B", "L")}, dtype="int64").graph.output
    assert [d.dim_param for d in output.type.tensor_type.shape.dim[:2]] == ["B", "L"]
    dims = exported("temperature").graph.output[0].type.tensor_type.shape.dim
    assert [d.dim_value for d in dims] == [0, H, 0, E]  # of what is written out too


@pytest.mark.parametrize("name", CALLS)
def test_one_export_runs_at_all_lengths(name):
    model, options = exported(name), CALLS[name]
    assert kinds(model).count("Attention") == (name != "temperature")
    for run in by_onnxruntime, by_reference:
        call = run(model)
        for size in SIZES:
            inputs = numbers(*size)
            (found,) = call(inputs)
            assert abs(found - attention(*inputs.values(), **options)).max() < 2e-6


def test_a_plain_call_is_one_node_and_nothing_else():
    model = export(attention, SHAPES)
    assert kinds(model) == ["Attention"]
    assert [one.name for one in model.graph.input] == list(SHAPES)
    assert [one.name for one in model.graph.output] == ["output"]
    assert model.producer_name == "polyattn"
    assert model.producer_version == polyattn.__version__
    several = export(polyattn.attention_partial, SHAPES).graph.output
    assert [one.name for one in several] == ["output", "logsumexp"]  # by the names of the fields


@pytest.mark.parametrize(
    ("opset", "options", "run"),
    [(25, {"window": (2, 1)}, by_reference), (23, {"window": (2, 1)}, by_onnxruntime)],
)
def test_an_opset_is_the_newest_that_is_used(opset, options, run):
    model = export(attention, SHAPES, opset=opset, options=options)
    (node,) = (n for n in model.graph.node if n.op_type == "Attention")
    attributes = {a.name: a.i for a in node.attribute}
    window = (attributes.get("left_window_size"), attributes.get("right_window_size"))
    assert window == ((2, 1) if opset == 25 else (None, None))
    assert [one.version for one in model.opset_import] == [opset]
    inputs = numbers(2, 5, 7)
    (found,) = run(model)(inputs)
    assert abs(found - attention(*inputs.values(), **options)).max() < 2e-6


def test_an_explanation_says_before_the_export_what_a_call_becomes():
    ndonnx = pytest.importorskip("ndonnx")
    q, k, v = (ndonnx.argument(shape=s, dtype=ndonnx.float32) for s in SHAPES.values())
    native = polyattn.explain(q, k, v, softcap=2.0)
    assert native.chosen.kernel == "native"
    assert "one node, Attention of opset 24" in str(native)
    decomposed = polyattn.explain(q, k, v, score_mod=scores.temperature(2.0))
    assert decomposed.chosen.kernel == "dense"
    assert "it supports only a score_mod= that adds to the scores" in str(decomposed)
    assert "its tiles need lengths that are known" in str(decomposed)


ARRAYS = {
    "mask": ({"mask": ("B", 1, 1, "S")}, lambda mask: {"mask": mask}),
    "bias": ({"bias": (H, "L", "S")}, lambda bias: {"bias": bias[None, ...]}),
    "padding": ({"lengths": ("B",)}, lambda lengths: {"mask": masks.padding(lengths)}),
    "seed": ({"seed": ()}, lambda seed: {"dropout": (0.4, seed, (1, 2, 3, 6))}),
    "positions": (
        {"rows": ("B", "L"), "keys": ("S",)},
        lambda rows, keys: {"mask": masks.positions(rows, keys, masks.window(2, 0))},
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_the_options_may_be_inputs(name):
    more, to_options = ARRAYS[name]
    dtypes = {"mask": "bool", "bias": "float32"}
    dtype = {n: dtypes.get(n, "int64") for n in more}

    def call(query, key, value, **given):
        return attention(query, key, value, **to_options(**given))

    model = export(call, SHAPES | more, dtype=dtype)
    assert kinds(model).count("Attention") == (name != "seed")
    rng, run = np.random.default_rng(1), by_onnxruntime(model)
    for batch, length, keys in SIZES:
        lengths = {"B": batch, "L": length, "S": keys}
        inputs = numbers(batch, length, keys)
        for n, shape in more.items():
            drawn = rng.integers(0, 4, [lengths.get(x, x) for x in shape])
            inputs[n] = np.asarray(drawn, dtype[n])
        (found,) = run(inputs)
        assert abs(found - call(**inputs)).max() < 2e-6


def test_weights_run_at_all_lengths():
    options = {"sinks": SINKS, "is_causal": True, "heads": [3, 0], "per_key": True}
    model = export(polyattn.attention_weights, WEIGHED, options=options)
    for size in SIZES:
        inputs = {name: numbers(*size)[name] for name in WEIGHED}
        wanted = polyattn.attention_weights(**inputs, **options)
        for run in by_onnxruntime, by_reference:
            assert abs(run(model)(inputs)[0] - wanted).max() < 2e-6


def test_a_score_function_gets_and_gives_arrays_of_unknown_shape():
    options = {"score_mod": lambda s, b, h, i, j: 0.1 * h - 0.2 * j}
    shapes = {n: (b, 1, *rest) for n, (b, _, *rest) in SHAPES.items()}
    run = by_onnxruntime(export(attention, shapes, dtype="float64", options=options))
    for size in SIZES:
        inputs = {n: x[:, :1].astype("float64") for n, x in numbers(*size).items()}
        (found,) = run(inputs)
        assert abs(found - attention(*inputs.values(), **options)).max() < 2e-6


X, LINEAR = {"x": ("B", 4)}, polyattn.nn.Linear.init(4, 3, like=np.zeros(1, np.float32))
LENGTHS = "the shape of key must hold positive lengths and names"
MODEL = polyattn.nn.Transformer.init(9, 8, 2, 1, like=np.zeros(1, np.float32), is_causal=True)
REFUSED = {
    "dtype of no input": ((attention, SHAPES), {"dtype": {"quer": "float64"}}, "not an input; the"),
    "dtype": ((attention, SHAPES), {"dtype": "bfloat16"}, "input query is of dtype 'bfloat16',"),
    "opset": ((attention, SHAPES), {"opset": 24.0}, "opset must be an integer; got 24.0"),
    "old opset": ((attention, SHAPES), {"opset": 22}, "opset must be 23, 24 or 25"),
    "inputs": ((attention, list(SHAPES)), {}, "inputs must map names to shapes, such as .* list"),
    "shape": ((LINEAR, {"x": 5}), {}, "the shape of x must hold positive lengths and names.* 5"),
    "name": ((attention, SHAPES | {"key": ("a b", H, "S", D)}), {}, LENGTHS),
    "length": ((attention, SHAPES | {"key": (-3, H, "S", D)}), {}, LENGTHS),
    "heads": ((attention, SHAPES | {"query": ("B", "H", "L", D)}), {}, "but not heads and sizes"),
    "top": ((polyattn.attention_weights, WEIGHED), {"options": {"top": 2}}, "lengths that are kno"),
    "gradient": (
        (lambda query, **kv: polyattn.attention_vjp(query, **kv)[1](query),
         SHAPES | {"value": SHAPES["key"]}), {}, "backward only for known len",
    ),
    "list": ((lambda **qkv: [*qkv.values()], SHAPES), {}, "a dictionary; this one returned a list"),
    "output": ((lambda output: output + 1, {"output": (3,)}), {}, "given twice: output"),
    "table": (
        (lambda table, **qkv: attention(**qkv, score_mod=scores.relative_bias(table)),
         SHAPES | {"table": ("N", H)}), {}, "with a known number of buckets; got",
    ),
    "around a model": (
        (lambda ids: MODEL(ids)[..., 0, :], {"ids": ("B", "L")}), {"dtype": "int64"},
        r"parameters are of numpy, .*: pass the model itself to po",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_of_an_export_says_what_is_wrong(name):
    arguments, options, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError, polyattn.UnsupportedError), match=message):
        export(*arguments, **options)


def test_ids_may_be_narrow_lengths_integers_of_numpy_and_weights_of_any_byte_order():
    swapped = LINEAR.with_parameters({n: a.astype(">f4") for n, a in LINEAR.parameters().items()})
    x = np.ones((2, 4), np.float32)
    assert np.array_equal(by_onnxruntime(export(swapped, X))({"x": x})[0], LINEAR(x))
    table = polyattn.nn.Embedding.init(50, 4, like=np.zeros(1, np.float32))
    model = export(table, {"ids": ("B", np.int64(3))}, dtype=np.uint8)
    ids = np.array([[5, 7, 11], [2, 3, 49]], np.uint8)
    assert np.array_equal(by_onnxruntime(model)({"ids": ids})[0], table(ids))


def test_a_write_that_fails_leaves_an_older_model_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "model.onnx"
    export(LINEAR, X, file=file)
    before = file.read_bytes()

    def full(self, data):
        self.open("wb").close()
        raise OSError("no space left on device")

    monkeypatch.setattr("polyattn.export.weight_files.Path.write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        export(LINEAR, X, file=file)
    assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]
    assert file.read_bytes() == before


def test_the_command_line_writes_a_model_and_says_what_it_became(tmp_path, capsys, monkeypatch):
    file = tmp_path / "attention.onnx"
    shapes = ["--shape", "B,4,L,8", "--key-shape", "B,2,S,8"]
    assert main(["export", str(file), *shapes, "--softcap", "3"]) == 0
    assert capsys.readouterr().out == f"{file}: opset 24, 1 node, one is Attention\n"
    model = onnx.load(file)
    inputs = {**numbers(2, 5, 7), "value": np.ones((2, 2, 7, 8), np.float32)}
    (found,) = by_onnxruntime(model)(inputs)
    assert abs(found - attention(*inputs.values(), softcap=3.0)).max() < 2e-6
    assert main(["export", str(file), *shapes, "--causal", "--dtype", "float64"]) == 0
    reason = "none is Attention: ONNX Runtime gives NaN for a row without keys in float64\n"
    assert capsys.readouterr().out.endswith(reason)
    assert main(["export", str(file), *shapes, "--opset", "12"]) == 2
    assert "opset must be 23, 24 or 25" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "spox", None)
    assert main(["export", str(tmp_path / "no" / "a.onnx"), "--shape", "B,4,L,8"]) == 2
    assert "file needs a file in an existing folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "a.onnx"), "--shape", "B,4,L,8"]) == 2
    assert 'pip install "polyattn[onnx]"' in capsys.readouterr().err


def test_a_model_has_a_node_for_each_layer_and_weights_beside_it_that_it_cannot_hold(
    tmp_path, monkeypatch
):
    options = {"like": np.zeros(1, np.float32), "is_causal": True, "rotary": nn.Rotary(8)}
    transformer = nn.Transformer.init(50, 32, 4, 2, **options)
    call = functools.partial(export, transformer, {"ids": ("B", "L")}, dtype="int64")
    size = sum(array.nbytes for array in transformer.parameters().values())
    monkeypatch.setattr("polyattn.export.weight_files.LARGEST", size - 1)
    with pytest.raises(ValueError, match=f"weights take {size:,} bytes, .* pass file='mo"):
        call()
    file = tmp_path / "model.onnx"
    model = call(file=file)
    assert kinds(model).count("Attention") == 2
    assert "If" not in kinds(model)  # a product is one node
    assert {one.name for one in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert file.read_bytes() == model.SerializeToString()
    assert not any(one.raw_data for one in model.graph.initializer)
    places = [{e.key: e.value for e in one.external_data} for one in model.graph.initializer]
    assert all(int(place["offset"]) % 4096 == 0 for place in places)
    loaded = onnx.load(file)
    parameters = transformer.parameters()
    assert {one.name for one in loaded.graph.initializer} == parameters.keys()
    for one in loaded.graph.initializer:
        assert np.array_equal(onnx.numpy_helper.to_array(one), parameters[one.name])
    ids = np.array([[5, 7, 11], [2, 3, 0]])
    (logits,) = by_onnxruntime(str(file))({"ids": ids})
    assert abs(logits - transformer(ids)).max() < 2e-6
