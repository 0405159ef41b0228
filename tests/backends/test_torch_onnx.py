"""Models that torch.onnx.export writes: what a call becomes, and what the file computes."""

import warnings

import numpy as np
import pytest
import torch
from open_lengths import OF_ITEMS, Calls, H, numbers

import polyattn
from polyattn import attention, masks, scores

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SIZES = [(2, 5, 7), (3, 6, 4), (1, 1, 9), (4, 9, 1)]


def exported(function, *more, opset=24):
    """Return the model of a function of query, key and value, and of numbers for each item."""
    batch, length, keys = (torch.export.Dim(name, min=1) for name in ("batch", "length", "keys"))
    arrays = [torch.from_numpy(x) for x in (*numbers(2, 5, 7), *more)]
    shapes = {"query": {0: batch, 2: length}, "key": {0: batch, 2: keys}}
    shapes |= {"value": shapes["key"]} | ({"more": ({0: batch},) * len(more)} if more else {})
    return model_of(Calls(function).eval(), tuple(arrays), shapes, opset)


def model_of(*args, **kwargs):
    return program_of(*args, **kwargs).model_proto


def program_of(module, arrays, shapes, opset=24):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, arrays, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False
        )
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program


def run(model, *inputs):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {x.name: y for x, y in zip(session.get_inputs(), inputs, strict=True)})


def by_reference(model, *inputs):
    evaluator = onnx.reference.ReferenceEvaluator(model)
    names = [one.name for one in model.graph.input]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return evaluator.run(None, dict(zip(names, inputs, strict=True)))


def kinds(model):
    return [node.op_type for node in model.graph.node]


NATIVE = {
    "causal": {"is_causal": True},
    "softcap and scale": {"softcap": 5.0, "scale": -0.3},
    "softcap, causal from the first key": {"softcap": 5.0, "is_causal": True, "query_offset": 0},
    "softcap, causal": {"softcap": 5.0, "is_causal": True},
    "window": {"window": (2, 1)},
    "window, causal": {"window": (2, 0), "is_causal": True, "softcap": 5.0},
    "mask expression": {"mask": masks.causal() | masks.prefix(2)},
    "sinks": {"sinks": np.linspace(-1, 1, H, dtype=np.float32)},
    "alibi": {"is_causal": True, "score_mod": scores.alibi(H)},
}


@pytest.mark.slow
def test_a_softcap_is_one_node_at_all_lengths():
    model = exported(lambda *qkv: attention(*qkv, softcap=5.0, scale=0.3))
    assert kinds(model) == ["Attention"]
    assert {a.name: round(a.f, 3) for a in model.graph.node[0].attribute if a.f} == {
        "softcap": 5.0,
        "scale": 0.3,
    }
    for size in SIZES:
        inputs = numbers(*size)
        (found,) = run(model, *inputs)
        assert abs(found - attention(*inputs, softcap=5.0, scale=0.3)).max() < 2e-6


@pytest.mark.slow
def test_torch_can_run_the_program_of_a_plain_call():
    def call(query, key, value):
        return attention(query, query, query, is_causal=True, scale=0.3)

    x = torch.from_numpy(numbers(2, 5, 7)[0])
    length = {0: torch.export.Dim("batch", min=1), 2: torch.export.Dim("length", min=1)}
    program = program_of(
        Calls(call).eval(), (x, x, x), dict.fromkeys(("query", "key", "value"), length)
    )
    assert kinds(program.model_proto) == ["Attention"]
    assert torch.equal(program.exported_program.module()(x, x, x), call(x, x, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_one_model_runs_at_all_lengths(name):
    options = NATIVE[name]
    model = exported(lambda *qkv: attention(*qkv, **options))
    assert kinds(model).count("Attention") == 1
    for size in SIZES:
        inputs = numbers(*size)
        (found,) = run(model, *inputs)
        assert abs(found - attention(*inputs, **options)).max() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("call", OF_ITEMS.values(), ids=OF_ITEMS)
def test_lengths_and_offsets_of_the_items_are_inputs(call):
    model = exported(call, np.array([0, 3]))
    assert kinds(model).count("Attention") == 1
    for size in SIZES:
        inputs = [*numbers(*size), np.arange(size[0])]
        (found,) = run(model, *inputs)
        assert abs(found - call(*inputs)).max() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "window, causal"])
def test_windows_are_an_attribute_from_opset_25_on(name):
    model = exported(lambda *qkv: attention(*qkv, **NATIVE[name]), opset=25)
    (node,) = (n for n in model.graph.node if n.op_type == "Attention")
    assert {a.name: a.i for a in node.attribute}["left_window_size"] == 2
    for size in SIZES[:3]:
        inputs = numbers(*size)
        (found,) = by_reference(model, *inputs)
        assert abs(found - attention(*inputs, **NATIVE[name])).max() < 2e-6


@pytest.mark.slow
def test_float64_keeps_its_digits():
    model = exported(lambda *qkv: attention(*[x.double() for x in qkv], softcap=4.0))
    assert kinds(model).count("Attention") == 1
    inputs = numbers(3, 6, 4)
    wanted = attention(*[x.astype(np.float64) for x in inputs], softcap=4.0)
    assert abs(run(model, *inputs)[0] - wanted).max() < 1e-14


@pytest.mark.slow
def test_rows_without_keys_are_written_out_in_float64():
    def causal(*qkv):
        found.append(polyattn.explain(*qkv, is_causal=True))
        return attention(*qkv, is_causal=True)

    found, inputs = [], [x.astype(np.float64) for x in numbers(3, 6, 4)]
    model = exported(lambda *qkv: causal(*[x.double() for x in qkv]))
    assert "Attention" not in kinds(model)
    # torch's exporter rounds the scale to float32.
    (output,) = run(model, *numbers(3, 6, 4))
    assert abs(output - attention(*inputs, is_causal=True)).max() < 1e-7
    (sdpa,) = [one for one in found[-1].candidates if one.kernel == "sdpa"]
    assert sdpa.reasons == ("ONNX Runtime gives NaN for a row without keys in float64",)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mask": masks.window(1, 1)}])
def test_two_batch_axes_are_left_to_torchs_own_node(options):
    def more_axes(*qkv):
        return attention(*[x[None] for x in qkv], **options)

    length, keys = (torch.export.Dim(name, min=1) for name in ("length", "keys"))
    shapes = {"query": {2: length}, "key": {2: keys}, "value": {2: keys}}
    arrays = tuple(map(torch.from_numpy, numbers(2, 5, 7)))
    model = model_of(Calls(more_axes).eval(), arrays, shapes)
    assert kinds(model).count("Attention") == 1
    for size in (2, 5, 7), (2, 6, 4):
        inputs = numbers(*size)
        assert abs(run(model, *inputs)[0] - more_axes(*inputs)).max() < 2e-6


@pytest.mark.slow
def test_a_logsumexp_is_written_out():
    def joined(*qkv):
        output, logsumexp = polyattn.attention_partial(*qkv, window=(2, None))
        return output * logsumexp[..., None]

    model = exported(joined)
    assert "Attention" not in kinds(model)
    for size in SIZES[:2]:
        inputs = numbers(*size)
        assert abs(run(model, *inputs)[0] - joined(*inputs)).max() < 1e-5


@pytest.mark.slow
def test_an_older_opset_has_an_older_operator_or_none():
    def causal(*qkv):
        found.append(polyattn.explain(*qkv, is_causal=True, softcap=5.0))
        return attention(*qkv, is_causal=True, softcap=5.0)

    inputs, found = numbers(3, 6, 4), []
    wanted = attention(*inputs, is_causal=True, softcap=5.0)
    for opset in (23, 20, None):
        model = exported(causal, opset=opset)
        assert kinds(model).count("Attention") == (opset == 23)
        assert [x.version for x in model.opset_import if not x.domain] == [opset or 20]
        assert abs(run(model, *inputs)[0] - wanted).max() < 2e-6
    assert found[0].candidates[0].remark == "one node, Attention of opset 23"
    reason = "its operator needs torch.onnx.export(opset_version=23) or more"
    assert [one.candidates[0].reasons for one in found[-2:]] == [(reason,)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"is_causal": True}, {"mask": masks.window(0, 0)}])
def test_rows_without_keys_are_zero_in_an_older_opset_too(options):
    model = exported(lambda *qkv: attention(*qkv, **options), opset=20)
    for size in SIZES:
        inputs = numbers(*size)
        assert abs(run(model, *inputs)[0] - attention(*inputs, **options)).max() < 2e-6


@pytest.mark.slow
def test_dropout_is_written_out():
    model = exported(lambda *qkv: attention(*qkv, dropout=(0.4, 5)))
    for size in SIZES:
        inputs = numbers(*size)
        assert abs(run(model, *inputs)[0] - attention(*inputs, dropout=(0.4, 5))).max() < 2e-6


def test_outside_of_an_export_there_is_no_such_kernel():
    x = torch.zeros(1, 2, 3, 4)
    assert "onnx" not in [one.kernel for one in polyattn.explain(x, x, x).candidates]


@pytest.mark.slow
def test_a_model_has_one_node_for_each_layer():
    nn = polyattn.nn
    like = np.zeros(1, np.float32)
    rotary = nn.Rotary(8)
    transformer = nn.Transformer.init(50, 32, 4, 2, like=like, is_causal=True, rotary=rotary)

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            arrays = transformer.parameters().items()
            self.weights = torch.nn.ParameterDict(
                {name.replace(".", "/"): torch.from_numpy(array) for name, array in arrays}
            )

        def forward(self, ids):
            weights = {name.replace("/", "."): w for name, w in self.weights.items()}
            return transformer.with_parameters(weights)(ids, is_causal=True)

    lengths = {n: torch.export.Dim(name, min=1) for n, name in enumerate(("batch", "length"))}
    model = model_of(Wrapped().eval(), (torch.ones(2, 5, dtype=torch.int64),), (lengths,))
    nodes = [node for node in model.graph.node if node.op_type == "Attention"]
    assert len(nodes) == 2
    assert all({a.name: a.i for a in node.attribute}["is_causal"] == 1 for node in nodes)
    assert "weights.embedding/weight" in [one.name for one in model.graph.initializer]
    for shape in ((1, 3), (2, 11)):
        ids = np.random.default_rng(0).integers(0, 50, shape)
        (logits,) = run(model, ids)
        assert abs(logits - transformer(ids, is_causal=True)).max() < 2e-6
