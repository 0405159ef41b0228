"""Make a product of ndonnx's arrays one node of their graph.

ndonnx's own is several, with a branch for products of no terms.

Importing this module is not needed: the first array of ndonnx that polyattn meets imports it.
"""

from __future__ import annotations

from typing import Any

import ndonnx
import numpy as np
import spox.opset.ai.onnx.v21 as op

from polyattn._base.arrays import Library, broadcast_shapes
from polyattn.integrations import with_names


def _matmul(a: Any, b: Any) -> Any:
    terms = a.shape[-1] or b.shape[-2 if b.ndim > 1 else -1]
    # In float64 ONNX Runtime would put a factor of a bare product into the node, as a float32.
    if not terms or a.dtype != ndonnx.float32 or b.dtype != ndonnx.float32:
        return _with_lengths(ndonnx.matmul(a, b), a, b)
    return ndonnx.asarray(op.matmul(a.unwrap_spox(), b.unwrap_spox()))


def _with_lengths(product: Any, a: Any, b: Any) -> Any:
    """Return a product with the known lengths of its factors, which the branches lose."""
    lead = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if min(a.ndim, b.ndim) < 2 or lead is None:
        return product
    # 0 stands for the length that an axis has.
    lengths = np.asarray([n or 0 for n in (*lead, a.shape[-2], b.shape[-1])], np.int64)
    return ndonnx.asarray(op.reshape(product.unwrap_spox(), op.const(lengths)))


LIBRARY = Library("ndonnx", with_names(ndonnx, matmul=_matmul), traced=True)
