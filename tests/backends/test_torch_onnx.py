"""Models that torch's own exporter writes: what a call becomes, and what the file computes."""

import warnings

import numpy as np
import pytest
import torch
from arrays import close, to_torch
from open_lengths import OF_ITEMS, Calls, H, numbers

import polyattn
from polyattn import attention, masks

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

BATCH, LENGTH, KEYS = (torch.export.Dim(name, min=1) for name in ("batch", "length", "keys"))


def program_of(module, arrays, shapes, opset=24):
    """Return the program that torch exports; `model_proto` is its model."""
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


SINKS = np.linspace(-1, 1, H, dtype=np.float32)
#: The nodes of attention in a model, its opset, and the options of its calls.
MODELS = {
    "calls": (2, 24, [{}, {"scale": 0.3}, {"softcap": 5.0, "sinks": SINKS}, {"is_causal": True}]),
    "empty rows": (0, 20, [{"is_causal": True}, {"mask": masks.window(0, 0)}]),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_model_runs_at_all_lengths(name):
    nodes, opset, calls = MODELS[name]

    def function(query, key, value, each):
        of_items = [call(query, key, value, each) for call in OF_ITEMS.values()]
        return [attention(query, key, value, **options) for options in calls] + of_items

    given = tuple(map(to_torch, (*numbers(2, 5, 7), np.array([0, 3]))))
    of_keys = {0: BATCH, 2: KEYS}
    shapes = {"query": {0: BATCH, 2: LENGTH}, "key": of_keys, "value": of_keys}
    shapes["more"] = ({0: BATCH},)
    model = program_of(Calls(function).eval(), given, shapes, opset).model_proto
    assert kinds(model).count("Attention") == nodes
    for size in [(2, 5, 7), (3, 6, 4), (1, 1, 9), (4, 9, 1)]:
        inputs = [*numbers(*size), np.arange(size[0])]
        close(run(model, *inputs), function(*inputs))


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

    ids = torch.ones(2, 5, dtype=torch.int64)
    model = program_of(Wrapped().eval(), (ids,), ({0: BATCH, 1: LENGTH},)).model_proto
    nodes = [node for node in model.graph.node if node.op_type == "Attention"]
    assert len(nodes) == 2
    assert all({a.name: a.i for a in node.attribute}["is_causal"] == 1 for node in nodes)
    assert "weights.embedding/weight" in [one.name for one in model.graph.initializer]
    for shape in ((1, 3), (2, 11)):
        ids = np.random.default_rng(0).integers(0, 50, shape)
        (logits,) = run(model, ids)
        close(logits, transformer(ids, is_causal=True))
