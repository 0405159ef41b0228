"""The computations that cuDNN runs, as hashable tuples, and their form for its frontend.

Such a tuple has everything that is compiled into a plan, so a call never gets another call's plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn_cupy import loading

# The names of the arrays of a graph.
QUERY, KEY, VALUE, OUTPUT, LOGSUMEXP, BIAS = range(1, 7)
OUTPUT_GRADIENT, QUERY_GRADIENT, KEY_GRADIENT, VALUE_GRADIENT = range(7, 11)
QUERY_LENGTHS, KEY_LENGTHS = range(11, 13)
# The frontend's names of dtypes.
DTYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "int32": "INT32"}


class Tensor(NamedTuple):
    """The description of an array with four axes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str


class CudnnBand(NamedTuple):
    """The keys i − left <= j <= i + right; None hides nothing on its side."""

    bottom_right: bool  # whether the last row is at the last key, not the first row at the first
    left: int | None
    right: int | None


class Graph(NamedTuple):
    """Attention, or its gradients: everything that is compiled into a plan."""

    # The gradients of query, key and value are contiguous.

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    output_gradient: Tensor | None  # if these are the gradients
    bias: Tensor | None
    lengths: bool  # whether the numbers of queries and keys are given as arrays
    band: CudnnBand | None
    scale: float
    softcap: float | None
    logsumexp: bool  # whether it is a result


def describe(graph: Graph, **where: Any) -> Any:
    """Return a graph as an unchecked cudnn.pygraph, which needs neither cuDNN nor a device."""
    # `where` is the `handle` of a device, or `sm_version` and `device_property` of an absent one.
    cudnn = loading.library()
    dtypes = {dtype: getattr(cudnn.data_type, name) for dtype, name in DTYPES.items()}
    plan = cudnn.pygraph(
        name="polyattn", io_data_type=dtypes[graph.query.dtype],
        intermediate_data_type=dtypes["float32"], compute_data_type=dtypes["float32"], **where,
    )  # fmt: skip

    def given(uid: int, name: str, tensor: Tensor) -> Any:
        """Return an array of the graph that exists before it runs."""
        return plan.tensor(
            name=name, dim=list(tensor.shape), stride=list(tensor.strides),
            data_type=dtypes[tensor.dtype], uid=uid,
        )  # fmt: skip

    def result(made: Any, uid: int, tensor: Tensor) -> None:
        """Make a result of a node one of the graph."""
        made.set_output(True).set_uid(uid).set_data_type(dtypes[tensor.dtype])
        made.set_dim(list(tensor.shape)).set_stride(list(tensor.strides))

    options = _band_options(cudnn, graph.band) | {
        "q": given(QUERY, "query", graph.query),
        "k": given(KEY, "key", graph.key),
        "v": given(VALUE, "value", graph.value),
        "attn_scale": graph.scale,
    }
    if graph.bias is not None:
        options["bias"] = given(BIAS, "bias", graph.bias)
    if graph.lengths:
        one = Tensor((graph.query.shape[0], 1, 1, 1), (1, 1, 1, 1), "int32")
        options |= {
            "use_padding_mask": True,
            "seq_len_q": given(QUERY_LENGTHS, "query_lengths", one),
            "seq_len_kv": given(KEY_LENGTHS, "key_lengths", one),
        }
    if graph.output_gradient is None:
        if graph.softcap is not None:
            options["score_mod"] = _softcap(cudnn, graph.softcap)
        output, logsumexp = plan.sdpa(generate_stats=graph.logsumexp, **options)
        result(output, OUTPUT, graph.output)
        if graph.logsumexp:
            result(logsumexp, LOGSUMEXP, _rows(graph.output))
        return plan
    gradients = plan.sdpa_backward(
        o=given(OUTPUT, "output", graph.output),
        dO=given(OUTPUT_GRADIENT, "output_gradient", graph.output_gradient),
        stats=given(LOGSUMEXP, "logsumexp", _rows(graph.output)),
        use_deterministic_algorithm=True,
        **options,
    )
    names = (QUERY_GRADIENT, KEY_GRADIENT, VALUE_GRADIENT)
    for gradient, uid, like in zip(gradients, names, graph[:3], strict=True):
        result(gradient, uid, _contiguous(like.shape, like.dtype))
    return plan


def _rows(output: Tensor) -> Tensor:
    """Return the description of the logsumexp that belongs to an output: packed, as cuDNN asks."""
    return _contiguous((*output.shape[:3], 1), "float32")


def _contiguous(shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(shape, tuple(math.prod(shape[n + 1 :]) for n in range(len(shape))), dtype)


def build(graph: Graph, **where: Any) -> Any:
    """Return a graph as a cudnn.pygraph that cuDNN supports, its kernels not yet compiled."""
    cudnn, plan = loading.library(), describe(graph, **where)
    plan.validate()
    plan.build_operation_graph()
    plan.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    plan.check_support()
    return plan


def _band_options(cudnn: Any, band: CudnnBand | None) -> dict[str, Any]:
    """Return the options of a node for a band."""
    options: dict[str, Any] = {}
    if band is not None:
        alignment = cudnn.diagonal_alignment
        options["diagonal_alignment"] = (
            alignment.BOTTOM_RIGHT if band.bottom_right else alignment.TOP_LEFT
        )
        if band.left is not None:
            options["diagonal_band_left_bound"] = band.left + 1  # cuDNN excludes this bound
        if band.right is not None:
            options["diagonal_band_right_bound"] = band.right
    return options


def _softcap(cudnn: Any, softcap: float) -> Callable[[Any, Any], Any]:
    """Return the function with which cuDNN caps scores."""

    def capped(inner: Any, score: Any) -> Any:
        cap = inner.tensor_scalar(softcap, cudnn.scalar_type.RUNTIME_PARAM)
        return inner.mul(a=inner.tanh(input=inner.div(a=score, b=cap)), b=cap)

    return capped
