"""The runtimes that exported models run on."""

import warnings

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx.reference import ReferenceEvaluator  # noqa: E402

# From 1.32 on it computes windows in the operator.
KNOWS_WINDOWS = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32)


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
