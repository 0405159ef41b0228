"""What cuDNN is asked to compute, as a value, and how the frontend is told of it.

All that is compiled into a plan is in its `Graph`, so that no call is given another's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn_cupy import loading

__all__ = [
    "BIAS",
    "KEY",
    "LOGSUMEXP",
    "OUTPUT",
    "QUERY",
    "VALUE",
    "Band",
    "Graph",
    "Tensor",
    "build",
    "describe",
]

#: The names of the arrays of a graph.
QUERY, KEY, VALUE, OUTPUT, LOGSUMEXP, BIAS = range(1, 7)


class Tensor(NamedTuple):
    """An array as cuDNN is told of it.

    Attributes
    ----------
    shape, strides : tuple of int
        In elements, four axes.
    dtype : str
        Its dtype.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Band(NamedTuple):
    """The keys i − left <= j <= i + right, counted from the first key or the last.

    Attributes
    ----------
    bottom_right : bool
        Whether the last row stands at the last key, rather than the first at the first.
    left, right : int or None
        None where nothing is hidden.
    """

    bottom_right: bool
    left: int | None
    right: int | None


class Graph(NamedTuple):
    """All that a plan is compiled for."""

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
    """Tell the frontend of a graph, which needs neither cuDNN nor a device.

    Parameters
    ----------
    graph : Graph
        What is to be computed.
    **where
        The `handle` of a device, or `sm_version` and `device_property` of one that is not here.

    Returns
    -------
    cudnn.pygraph
        Not yet checked in any way.
    """
    cudnn = loading.library()
    types = cudnn.data_type
    known = {"float16": types.HALF, "bfloat16": types.BFLOAT16, "float32": types.FLOAT}
    dtype = known[graph.query.dtype]
    plan = cudnn.pygraph(
        name="polyattn", io_data_type=dtype, intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT, **where,
    )  # fmt: skip

    def given(uid: int, name: str, tensor: Tensor) -> Any:
        return plan.tensor(
            name=name, dim=list(tensor.shape), stride=list(tensor.strides),
            data_type=known[tensor.dtype], uid=uid,
        )  # fmt: skip

    options = _options(cudnn, graph)
    if graph.bias is not None:
        options["bias"] = given(BIAS, "bias", graph.bias)
    output, logsumexp = plan.sdpa(
        q=given(QUERY, "query", graph.query),
        k=given(KEY, "key", graph.key),
        v=given(VALUE, "value", graph.value),
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
    """Let cuDNN plan a graph, as far as that needs no device.

    Parameters
    ----------
    graph : Graph
        What is to be computed.
    **where
        As `describe` takes it.

    Returns
    -------
    cudnn.pygraph
        Checked to be supported, its kernels not yet compiled.
    """
    cudnn, plan = loading.library(), describe(graph, **where)
    plan.validate()
    plan.build_operation_graph()
    plan.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    plan.check_support()
    return plan


def _options(cudnn: Any, graph: Graph) -> dict[str, Any]:
    """Return what of the graph becomes an option of sdpa."""
    options: dict[str, Any] = {}
    if graph.band is not None:
        alignment = cudnn.diagonal_alignment
        options["diagonal_alignment"] = (
            alignment.BOTTOM_RIGHT if graph.band.bottom_right else alignment.TOP_LEFT
        )
        if graph.band.left is not None:
            options["diagonal_band_left_bound"] = graph.band.left + 1  # cuDNN's excludes its end
        if graph.band.right is not None:
            options["diagonal_band_right_bound"] = graph.band.right
    if graph.softcap is not None:
        softcap = graph.softcap

        def capped(inner: Any, score: Any) -> Any:
            cap = inner.tensor_scalar(softcap, cudnn.scalar_type.RUNTIME_PARAM)
            return inner.mul(a=inner.tanh(input=inner.div(a=score, b=cap)), b=cap)

        options["score_mod"] = capped
    return options
