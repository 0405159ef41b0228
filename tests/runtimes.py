"""The runtimes that exported models run on, and a faster way to make the models."""

import copy
import pickle
import warnings

import numpy as np
import pytest

onnx = pytest.importorskip("onnx.version_converter") and pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
folding = pytest.importorskip("spox._value_prop")
from onnx.reference import ReferenceEvaluator  # noqa: E402

# From 1.32 on it computes windows in the operator.
KNOWS_WINDOWS = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32)


def remembered(infer):
    """Let spox, which runs a model for each constant of a graph, run each such model once."""
    known = {}

    def infer_once(model, inputs):
        given = {name: one.value for name, one in inputs.items()}
        key = model.SerializeToString(), pickle.dumps(given)
        if key not in known:
            known[key] = infer(model, inputs)
        return copy.deepcopy(known[key])  # two constants share no memory

    return infer_once


def converted(convert):
    """Let a node whose opset is raised, in 15 ms, stay as it is if one like it stayed."""
    unchanged = set()

    def convert_new(model, version):
        node, *others = model.graph.node
        types = [one.type.tensor_type.elem_type for one in model.graph.input]
        attributes = [one.SerializeToString() for one in node.attribute]
        key = str((node.op_type, attributes, types, model.opset_import[0].version, version))
        if not others and key in unchanged:
            return model
        result = convert(model, version)
        if list(result.graph.node) == [node]:
            unchanged.add(key)
        return result

    return convert_new


folding.infer = remembered(folding.infer)
onnx.version_converter.convert_version = converted(onnx.version_converter.convert_version)


def kinds(model):
    return [node.op_type for node in model.graph.node]


def session(model):
    """Return a session of ONNX Runtime, of a model or its file, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # TensorScatter warns of each copy that it makes
    return onnxruntime.InferenceSession(
        model if isinstance(model, str) else model.SerializeToString(), options
    )


def by_onnxruntime(model):
    run = session(model)
    return lambda inputs: run.run(None, inputs)


def by_reference(model):
    evaluator = ReferenceEvaluator(model)

    def run(inputs):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return evaluator.run(None, inputs)

    return run
