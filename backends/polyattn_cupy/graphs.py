"""The computations that cuDNN is asked for, as hashable tuples, and their form for the frontend.

Such a tuple has everything that is compiled into a plan, so a call never gets another call's plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn_cupy import loading

# The names of the arrays of a graph.
QUERY, KEY, VALUE, OUTPUT, LOGSUMEXP, BIAS = range(1, 7)
OUTPUT_GRADIENT, QUERY_GRADIENT, KEY_GRADIENT, VALUE_GRADIENT, BIAS_GRADIENT = range(7, 12)
QUERY_LENGTHS, KEY_LENGTHS = range(12, 14)


class Tensor(NamedTuple):
    """The description of an array with four axes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str


class Band(NamedTuple):
    """The keys i − left <= j <= i + right; None hides nothing on its side."""

    bottom_right: bool  # whether the last row is at the last key, not the first row at the first
    left: int | None
    right: int | None


class Graph(NamedTuple):
    """The attention: everything that is compiled into its plan."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    bias: Tensor | None
    band: Band | None
    scale: float
    softcap: float | None
    logsumexp: bool


class GradientGraph(NamedTuple):
    """The gradients: everything that is compiled into their plan.

    The gradients of query, key and value are contiguous; that of the bias is like the bias.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    output_gradient: Tensor
    bias: Tensor | None
    bias_gradient: bool
    lengths: bool  # whether the numbers of queries and keys are given as arrays
    band: Band | None
    scale: float


def describe(graph: Graph | GradientGraph, **where: Any) -> Any:
    """Return a graph as an unchecked cudnn.pygraph, which needs neither cuDNN nor a device.

    `where` is the `handle` of a device, or `sm_version` and `device_property` of an absent one.
    """
    cudnn = loading.library()
    dtypes = _dtypes(cudnn)
    plan = cudnn.pygraph(
        name="polyattn", io_data_type=dtypes[graph.query.dtype],
        intermediate_data_type=dtypes["float32"], compute_data_type=dtypes["float32"], **where,
    )  # fmt: skip
    if isinstance(graph, Graph):
        _describe_attention(cudnn, plan, graph)
    else:
        _describe_gradients(cudnn, plan, graph)
    return plan


def _describe_attention(cudnn: Any, plan: Any, graph: Graph) -> None:
    options = _band_options(cudnn, graph.band)
    if graph.softcap is not None:
        options["score_mod"] = _softcap(cudnn, graph.softcap)
    if graph.bias is not None:
        options["bias"] = _input(cudnn, plan, BIAS, "bias", graph.bias)
    output, logsumexp = plan.sdpa(
        q=_input(cudnn, plan, QUERY, "query", graph.query),
        k=_input(cudnn, plan, KEY, "key", graph.key),
        v=_input(cudnn, plan, VALUE, "value", graph.value),
        attn_scale=graph.scale,
        generate_stats=graph.logsumexp,
        **options,
    )
    _return(cudnn, output, OUTPUT, graph.output)
    if graph.logsumexp:
        _return(cudnn, logsumexp, LOGSUMEXP, _rows(graph.output))


def _describe_gradients(cudnn: Any, plan: Any, graph: GradientGraph) -> None:
    options = _band_options(cudnn, graph.band)
    if graph.bias is not None:
        options["bias"] = _input(cudnn, plan, BIAS, "bias", graph.bias)
        if graph.bias_gradient:
            options["dBias"] = _input(cudnn, plan, BIAS_GRADIENT, "bias_gradient", graph.bias)
    if graph.lengths:
        one = Tensor((graph.query.shape[0], 1, 1, 1), (1, 1, 1, 1), "int32")
        options |= {
            "use_padding_mask": True,
            "seq_len_q": _input(cudnn, plan, QUERY_LENGTHS, "query_lengths", one),
            "seq_len_kv": _input(cudnn, plan, KEY_LENGTHS, "key_lengths", one),
        }
    gradients = plan.sdpa_backward(
        q=_input(cudnn, plan, QUERY, "query", graph.query),
        k=_input(cudnn, plan, KEY, "key", graph.key),
        v=_input(cudnn, plan, VALUE, "value", graph.value),
        o=_input(cudnn, plan, OUTPUT, "output", graph.output),
        dO=_input(cudnn, plan, OUTPUT_GRADIENT, "output_gradient", graph.output_gradient),
        stats=_input(cudnn, plan, LOGSUMEXP, "logsumexp", _rows(graph.output)),
        attn_scale=graph.scale,
        use_deterministic_algorithm=True,
        **options,
    )
    names = (QUERY_GRADIENT, KEY_GRADIENT, VALUE_GRADIENT)
    for gradient, uid, like in zip(gradients, names, graph[:3], strict=True):
        _return(cudnn, gradient, uid, _contiguous(like.shape, like.dtype))


def _dtypes(cudnn: Any) -> dict[str, Any]:
    types = cudnn.data_type
    return {
        "float16": types.HALF,
        "bfloat16": types.BFLOAT16,
        "float32": types.FLOAT,
        "int32": types.INT32,
    }


def _input(cudnn: Any, plan: Any, uid: int, name: str, tensor: Tensor) -> Any:
    """Return an array of a graph that exists before it runs."""
    return plan.tensor(
        name=name, dim=list(tensor.shape), stride=list(tensor.strides),
        data_type=_dtypes(cudnn)[tensor.dtype], uid=uid,
    )  # fmt: skip


def _return(cudnn: Any, result: Any, uid: int, tensor: Tensor) -> None:
    """Make a result of a graph's node a result of the graph."""
    result.set_output(True).set_uid(uid).set_data_type(_dtypes(cudnn)[tensor.dtype])
    result.set_dim(list(tensor.shape)).set_stride(list(tensor.strides))


def _rows(output: Tensor) -> Tensor:
    """Return the description of the logsumexp that belongs to an output: packed, as cuDNN asks."""
    return _contiguous((*output.shape[:3], 1), "float32")


def _contiguous(shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(shape, tuple(math.prod(shape[n + 1 :]) for n in range(len(shape))), dtype)


def build(graph: Graph | GradientGraph, **where: Any) -> Any:
    """Return a graph as a cudnn.pygraph that cuDNN supports, its kernels not yet compiled."""
    cudnn, plan = loading.library(), describe(graph, **where)
    plan.validate()
    plan.build_operation_graph()
    plan.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    plan.check_support()
    return plan


def _band_options(cudnn: Any, band: Band | None) -> dict[str, Any]:
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
