"""Models that torch's own exporter writes: what a call becomes, and what the file computes."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from open_lengths import OF_ITEMS, Calls, H, numbers

import polyattn
from polyattn import attention, masks

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


def kinds(model):
    return [node.op_type for node in model.graph.node]


class Model(NamedTuple):
    """A function of query, key and value, and the nodes of attention in its model."""

    function: Any
    nodes: int = 0
    opset: int = 24


def call(**options):
    return lambda *qkv: attention(*qkv, **options)


MODELS = {
    "plain": Model(call(), nodes=1),
    "scale": Model(call(scale=0.3), nodes=1),
    "softcap and sinks": Model(call(softcap=5.0, sinks=np.linspace(-1, 1, H, dtype=np.float32))),
    "empty rows": Model(call(is_causal=True)),
    "empty rows in opset 20": Model(call(is_causal=True), opset=20),
    "empty rows of a window in opset 20": Model(call(mask=masks.window(0, 0)), opset=20),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_model_runs_at_all_lengths(name):
    function, nodes, opset = MODELS[name]
    model = exported(function, opset=opset)
    assert kinds(model).count("Attention") == nodes
    for size in SIZES:
        inputs = numbers(*size)
        (output,) = run(model, *inputs)
        assert abs(output - function(*inputs)).max() < 2e-6


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
    for size in SIZES:
        inputs = [*numbers(*size), np.arange(size[0])]
        (found,) = run(model, *inputs)
        assert abs(found - function(*inputs)).max() < 2e-6


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
