"""The computation that cuDNN is asked for, as a hashable `Graph`, and its form for the frontend.

A `Graph` has everything that is compiled into a plan, so a call never gets another call's plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn_cupy import loading

__all__ = [
    "BIAS", "KEY", "LOGSUMEXP", "OUTPUT", "QUERY", "VALUE", "Band", "Graph", "Tensor", "build",
    "describe",
]  # fmt: skip

# The names of the arrays of a graph.
QUERY, KEY, VALUE, OUTPUT, LOGSUMEXP, BIAS = range(1, 7)


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
    """Everything that is compiled into a plan."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    bias: Tensor | None
    band: Band | None
    scale: float
    softcap: float | None
    logsumexp: bool


def describe(graph: Graph, **where: Any) -> Any:
    """Return a graph as an unchecked cudnn.pygraph, which needs neither cuDNN nor a device.

    `where` is the `handle` of a device, or `sm_version` and `device_property` of an absent one.
    """
    cudnn = loading.library()
    types = cudnn.data_type
    dtypes = {"float16": types.HALF, "bfloat16": types.BFLOAT16, "float32": types.FLOAT}
    dtype = dtypes[graph.query.dtype]
    plan = cudnn.pygraph(
        name="polyattn", io_data_type=dtype, intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT, **where,
    )  # fmt: skip

    def tensor_of(uid: int, name: str, tensor: Tensor) -> Any:
        return plan.tensor(
            name=name, dim=list(tensor.shape), stride=list(tensor.strides),
            data_type=dtypes[tensor.dtype], uid=uid,
        )  # fmt: skip

    options = _options(cudnn, graph)
    if graph.bias is not None:
        options["bias"] = tensor_of(BIAS, "bias", graph.bias)
    output, logsumexp = plan.sdpa(
        q=tensor_of(QUERY, "query", graph.query),
        k=tensor_of(KEY, "key", graph.key),
        v=tensor_of(VALUE, "value", graph.value),
        attn_scale=graph.scale,
        generate_stats=graph.logsumexp,
        **options,
    )
    output.set_output(True).set_uid(OUTPUT).set_data_type(dtype)
    output.set_dim(list(graph.output.shape)).set_stride(list(graph.output.strides))
    if graph.logsumexp:
        items, heads, length, _ = graph.output.shape
        logsumexp.set_output(True).set_uid(LOGSUMEXP).set_data_type(types.FLOAT)
        logsumexp.set_dim([items, heads, length, 1]).set_stride([heads * length, length, 1, 1])
    return plan


def build(graph: Graph, **where: Any) -> Any:
    """Return a graph as a cudnn.pygraph that cuDNN supports, its kernels not yet compiled."""
    cudnn, plan = loading.library(), describe(graph, **where)
    plan.validate()
    plan.build_operation_graph()
    plan.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    plan.check_support()
    return plan


def _options(cudnn: Any, graph: Graph) -> dict[str, Any]:
    """Return the options of sdpa for the band and the softcap of a graph."""
    options: dict[str, Any] = {}
    if graph.band is not None:
        alignment = cudnn.diagonal_alignment
        options["diagonal_alignment"] = (
            alignment.BOTTOM_RIGHT if graph.band.bottom_right else alignment.TOP_LEFT
        )
        if graph.band.left is not None:
            options["diagonal_band_left_bound"] = graph.band.left + 1  # cuDNN excludes this bound
        if graph.band.right is not None:
            options["diagonal_band_right_bound"] = graph.band.right
    if graph.softcap is not None:
        softcap = graph.softcap

        def capped(inner: Any, score: Any) -> Any:
            cap = inner.tensor_scalar(softcap, cudnn.scalar_type.RUNTIME_PARAM)
            return inner.mul(a=inner.tanh(input=inner.div(a=score, b=cap)), b=cap)

        options["score_mod"] = capped
    return options
