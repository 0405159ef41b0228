"""Make a product of ndonnx's arrays one node of their graph.

ndonnx's own is several, with a branch for products of no terms.

Importing this module is not needed: the first array of ndonnx that polyattn meets imports it.
"""

from __future__ import annotations

import types
from typing import Any

import ndonnx
import spox.opset.ai.onnx.v21 as op

from polyattn.arrays import Library

__all__ = ["LIBRARY"]


def _matmul(a: Any, b: Any) -> Any:
    terms = a.shape[-1] or b.shape[-2 if b.ndim > 1 else -1]
    # In float64 ONNX Runtime would put a factor of a bare product into the node, as a float32.
    if not terms or a.dtype != ndonnx.float32 or b.dtype != ndonnx.float32:
        return ndonnx.matmul(a, b)
    return ndonnx.asarray(op.matmul(a.unwrap_spox(), b.unwrap_spox()))


def _namespace() -> Any:
    xp = types.ModuleType(ndonnx.__name__)
    vars(xp).update(vars(ndonnx), matmul=_matmul)
    return xp


LIBRARY = Library("ndonnx", _namespace(), traced=True)
