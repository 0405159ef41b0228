"""Write calls and modules as models of ONNX, which other programs run without Python.

A function is called once, with arrays of ndonnx, which record what is done to them. A call of
attention becomes one node, the standard's operator Attention, where that computes the same; the
kernel `dense` writes out the others. `polyattn.explain` tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

import polyattn
from polyattn.arguments import check_int
from polyattn.arrays import Array
from polyattn.dispatch.request import use_backend
from polyattn.dispatch.transfer import backend_of
from polyattn.extras import require_onnx
from polyattn.nn.module import Module

__all__ = ["onnx"]

Shape = tuple[int | str, ...]


def onnx(
    function: Callable[..., Any] | Module,
    inputs: Mapping[str, Shape],
    *,
    opset: int = 24,
    dtype: str | Mapping[str, str] = "float32",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return a function or a module as a model of ONNX.

    Parameters
    ----------
    function : callable or Module
        Takes the inputs by name, and returns an array, or several in a tuple or a dictionary. The
        parameters of a module become initializers of the same names.
    inputs : mapping of str to tuple of (int or str)
        The shape of each input. A string names a length that is known when the model runs only:
        of the batch, L or S.
    opset : {24, 23, 25}
        The newest opset whose operator Attention may be used. ONNX Runtime runs 24; windows are an
        attribute from 25 on, and before that a mask that the model computes.
    dtype : str or mapping of str to str
        The dtype of the inputs, or of each by name: float32 for those that are not named.
    options : mapping of str to Any, optional
        Further arguments of the function, such as ``is_causal``, which the model has built in.

    Returns
    -------
    onnx.ModelProto
        The model, which ``onnx.checker`` has checked. ``onnx.save`` writes it to a file.

    Raises
    ------
    ValueError
        If `opset` is not one of these, or a length is neither positive nor a name.
    ImportError
        If onnx, ndonnx or spox is not installed.

    Examples
    --------
    >>> import polyattn.export
    >>> model = polyattn.export.onnx(
    ...     lambda query, key, value: polyattn.attention(query, key, value, softcap=30.0),
    ...     {"query": ("B", 8, "L", 64), "key": ("B", 2, "S", 64), "value": ("B", 2, "S", 64)},
    ... )
    >>> [node.op_type for node in model.graph.node]
    ['Attention']
    """
    if opset not in (23, 24, 25):
        raise ValueError(f"opset must be 23, 24 or 25, whose operator is Attention; got {opset!r}")
    for name, shape in inputs.items():
        _check_lengths(name, shape)
    spox, ndonnx = require_onnx("spox"), require_onnx("ndonnx")
    given = {name: _argument(spox, _dtype(dtype, name), shape) for name, shape in inputs.items()}
    weights: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    called: Any = function
    if isinstance(function, Module):
        weights = {name: _host(array) for name, array in function.parameters().items()}
        parameters = {n: _argument(spox, str(w.dtype), w.shape) for n, w in weights.items()}
        called = function.with_parameters({n: ndonnx.asarray(v) for n, v in parameters.items()})
    with use_backend(f"onnx:{opset}"):
        result = called(**{n: ndonnx.asarray(v) for n, v in given.items()}, **options or {})
    outputs = {name: array.unwrap_spox() for name, array in _named(result).items()}
    model = spox.build(given | parameters, outputs)
    _without_copies(model)
    require_onnx("onnx.checker").check_model(model, full_check=True)
    _store(model, weights)
    _sign(model)
    return model


def _dtype(dtype: str | Mapping[str, str], name: str) -> str:
    return dtype if isinstance(dtype, str) else dtype.get(name, "float32")


def _check_lengths(name: str, shape: Shape) -> None:
    for n in shape:
        if not (n.isidentifier() if isinstance(n, str) else check_int("a length", n) > 0):
            raise ValueError(
                f"the shape of {name} must hold positive lengths and names, such as"
                f" ('B', 8, 'L', 64); got {tuple(shape)!r}"
            )


def _argument(spox: Any, dtype: str, shape: Shape) -> Any:
    return spox.argument(spox.Tensor(numpy.dtype(dtype), tuple(shape)))


def _host(array: Array) -> Any:
    return numpy.asarray(backend_of(array).fetch(array))


def _named(result: Any) -> dict[str, Array]:
    """Return the outputs of a function, and their names."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple):
        names = getattr(result, "_fields", [f"output_{n}" for n in range(len(result))])
        return dict(zip(names, result, strict=True))
    return {"output": result}


def _without_copies(model: Any) -> None:
    """Let nodes write the model's outputs themselves, where a node Identity copies them."""
    outputs = {output.name for output in model.graph.output}
    copies = {
        node.input[0]: node.output[0]
        for node in model.graph.node
        if node.op_type == "Identity" and node.output[0] in outputs
    }
    made = {name for node in model.graph.node for name in node.output}
    copies = {name: copy for name, copy in copies.items() if name in made - outputs}
    kept = [node for node in model.graph.node if node.output[0] not in copies.values()]
    for node in kept:
        for names in (node.input, node.output):
            names[:] = [copies.get(name, name) for name in names]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _store(model: Any, weights: Mapping[str, Any]) -> None:
    """Turn the inputs that are weights into initializers."""
    inputs = [one for one in model.graph.input if one.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    from_array = require_onnx("onnx.numpy_helper").from_array
    model.graph.initializer.extend(from_array(array, name) for name, array in weights.items())


def _sign(model: Any) -> None:
    """Write into a model what made it, and by which reading of the operators."""
    model.producer_name, model.producer_version = "polyattn", polyattn.__version__
    model.graph.name = "polyattn"
    require_onnx("onnx.helper").set_model_props(model, {"onnx": require_onnx("onnx").__version__})
