"""Models that torch.onnx.export writes: what a call becomes, and what the file computes."""

import warnings
from typing import Any, NamedTuple

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


class Model(NamedTuple):
    """A function of query, key and value, and the nodes of attention in its model."""

    function: Any
    nodes: int = 1
    opset: int | None = 24
    tolerance: float = 2e-6


def call(**options):
    return lambda *qkv: attention(*qkv, **options)


def scaled_by_logsumexp(*qkv):
    output, logsumexp = polyattn.attention_partial(*qkv, window=(2, None))
    return output * logsumexp[..., None]


def in_float64(*qkv):
    return attention(*[x * np.float64(1) if isinstance(x, np.ndarray) else x.double() for x in qkv],
                     softcap=4.0)  # fmt: skip


CAPPED = {"is_causal": True, "softcap": 5.0}
MODELS = {
    "causal": Model(call(is_causal=True)),
    "softcap and scale": Model(call(softcap=5.0, scale=-0.3)),
    "softcap, causal from the first key": Model(call(query_offset=0, **CAPPED)),
    "softcap, causal": Model(call(**CAPPED)),
    "window": Model(call(window=(2, 1))),
    "window, causal": Model(call(window=(2, 0), **CAPPED)),
    "mask expression": Model(call(mask=masks.causal() | masks.prefix(2))),
    "sinks": Model(call(sinks=np.linspace(-1, 1, H, dtype=np.float32))),
    "alibi": Model(call(is_causal=True, score_mod=scores.alibi(H))),
    "float64": Model(in_float64, tolerance=1e-14),
    "dropout": Model(call(dropout=(0.4, 5)), nodes=0),
    "logsumexp": Model(scaled_by_logsumexp, nodes=0, tolerance=1e-5),
    "opset 23": Model(call(**CAPPED), opset=23),
    "opset 20": Model(call(**CAPPED), nodes=0, opset=20),
    "no opset": Model(call(**CAPPED), nodes=0, opset=None),
    "empty rows in opset 20": Model(call(is_causal=True), nodes=0, opset=20),
    "empty rows of a window in opset 20": Model(call(mask=masks.window(0, 0)), nodes=0, opset=20),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_model_runs_at_all_lengths(name):
    function, nodes, opset, tolerance = MODELS[name]
    model = exported(function, opset=opset)
    assert kinds(model).count("Attention") == nodes
    assert [x.version for x in model.opset_import if not x.domain] == [opset or 20]
    for size in SIZES:
        inputs = numbers(*size)
        (found,) = run(model, *inputs)
        assert abs(found - function(*inputs)).max() < tolerance


@pytest.mark.slow
def test_a_softcap_is_one_node():
    model = exported(call(softcap=5.0, scale=0.3))
    assert kinds(model) == ["Attention"]
    attributes = {a.name: round(a.f, 3) for a in model.graph.node[0].attribute if a.f}
    assert attributes == {"softcap": 5.0, "scale": 0.3}


@pytest.mark.slow
def test_torch_can_run_the_program_of_a_plain_call():
    def plain(query, key, value):
        return attention(query, query, query, is_causal=True, scale=0.3)

    x = torch.from_numpy(numbers(2, 5, 7)[0])
    length = {0: torch.export.Dim("batch", min=1), 2: torch.export.Dim("length", min=1)}
    program = program_of(
        Calls(plain).eval(), (x, x, x), dict.fromkeys(("query", "key", "value"), length)
    )
    assert kinds(program.model_proto) == ["Attention"]
    assert torch.equal(program.exported_program.module()(x, x, x), plain(x, x, x))


@pytest.mark.slow
@pytest.mark.parametrize("function", OF_ITEMS.values(), ids=OF_ITEMS)
def test_lengths_and_offsets_of_the_items_are_inputs(function):
    model = exported(function, np.array([0, 3]))
    assert kinds(model).count("Attention") == 1
    for size in SIZES:
        inputs = [*numbers(*size), np.arange(size[0])]
        (found,) = run(model, *inputs)
        assert abs(found - function(*inputs)).max() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "window, causal"])
def test_windows_are_an_attribute_from_opset_25_on(name):
    function = MODELS[name].function
    model = exported(function, opset=25)
    (node,) = (n for n in model.graph.node if n.op_type == "Attention")
    assert {a.name: a.i for a in node.attribute}["left_window_size"] == 2
    for size in SIZES[:3]:
        inputs = numbers(*size)
        (found,) = by_reference(model, *inputs)
        assert abs(found - function(*inputs)).max() < 2e-6


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
def test_an_older_opset_has_an_older_operator_or_none():
    def explained(*qkv):
        found.append(polyattn.explain(*qkv, **CAPPED).candidates[0])
        return attention(*qkv, **CAPPED)

    found = []
    exported(explained, opset=23)
    assert found[-1].remark == "one node, Attention of opset 23"
    exported(explained, opset=20)
    reason = "its operator needs torch.onnx.export(opset_version=23) or more"
    assert found[-1].reasons == (reason,)


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
