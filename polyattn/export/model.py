"""Write calls and modules as models of ONNX, which other programs run without Python.

A function is called once, with arrays of ndonnx, which record the operations. A call of
attention becomes one node, the standard's operator Attention, where that computes the same; the
kernel `dense` writes out the others. `polyattn.explain` tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

import polyattn
from polyattn._base.arguments import check_int
from polyattn._base.extras import require_onnx
from polyattn._base.files import check_file
from polyattn._base.host import native
from polyattn._dispatch.request import use_backend
from polyattn._dispatch.transfer import backend_of
from polyattn.export.caches import (
    Caches,
    Shape,
    are_caches,
    arrays_of,
    check_kind,
    named,
    with_caches,
)
from polyattn.export.weight_files import check_size, store
from polyattn.nn.module import Module

#: The first opset with TensorScatter, which writes to a cache.
CACHED = 24
#: The dtypes that ndonnx has.
DTYPES = (
    "float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip


def onnx(
    function: Callable[..., Any] | Module,
    inputs: Mapping[str, Shape | Caches],
    *,
    opset: int = 24,
    dtype: str | Mapping[str, str] = "float32",
    options: Mapping[str, Any] | None = None,
    file: str | Path | None = None,
) -> Any:
    """Return a function or a module as a model of ONNX.

    Parameters
    ----------
    function : callable or Module
        Takes the inputs by name, and returns an array, or several in a tuple or a dictionary. The
        parameters of a module become initializers of the same names.
    inputs : mapping of str to sequence of (int or str), KVCache or sequence of KVCache
        The shape of each input. A string names a length that is known only when the model runs, and
        is at least 1: of the batch, L or S. An input ``caches``, such as
        ``model.caches("S", batch=("B",))``, is the inputs ``caches.0.key``, ``caches.0.value`` and
        so on, and ``caches.length``, the number of tokens in all of them; the caches that the
        function returns are outputs of these names after ``next_``.
    opset : {24, 23, 25}
        The newest opset whose operator Attention may be used. ONNX Runtime runs 24; windows are an
        attribute from 25 on, and before that a mask that the model computes.
    dtype : str or mapping of str to str
        The dtype of the inputs, or of each by name: float32 for those that are not named.
    options : mapping of str to Any, optional
        Further arguments of the function, such as ``is_causal``, which the model has built in.
    file : str or Path, optional
        Where to write the model. Weights of more than 2 GB, which a model cannot hold, are written
        beside it, to a file of this name with ``.data`` at its end.

    Returns
    -------
    onnx.ModelProto
        The model, which ``onnx.checker`` has checked. Weights that are written beside it are only
        named in it.

    Raises
    ------
    TypeError
        If `inputs` is not a mapping or holds other caches than KVCaches, `opset` or a length is not
        an integer, or the function returns anything but arrays and caches.
    ValueError
        If `opset` is not one of these or has no operator for a cache, a length is neither positive
        nor a name, `dtype` names no input or one that a graph does not have, two arrays of the
        model share a name, a cache has slid, a function does not return as many caches as it takes,
        the folder of `file` does not exist, or the weights exceed 2 GB and there is no `file`.
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
    if check_int("opset", opset) not in (23, 24, 25):
        raise ValueError(f"opset must be 23, 24 or 25, whose operator is Attention; got {opset!r}")
    file = None if file is None else Path(file)
    if file is not None:
        check_file("file", file)
    facts = _facts(inputs, dtype, opset)
    spox, ndonnx = require_onnx("spox"), require_onnx("ndonnx")
    given = {name: _argument(spox, *one) for name, one in facts.items()}
    weights: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    called: Any = function
    if isinstance(function, Module):
        arrays = function.parameters().items()
        weights = {n: native(numpy.asarray(backend_of(x).fetch(x))) for n, x in arrays}
        for name, array in weights.items():
            _check_dtype(f"the parameter {name}", str(array.dtype))
        check_size(weights, file)
        parameters = {n: _argument(spox, str(w.dtype), w.shape) for n, w in weights.items()}
        called = function.with_parameters({n: ndonnx.asarray(v) for n, v in parameters.items()})
    passed = with_caches(inputs, {name: ndonnx.asarray(x) for name, x in given.items()})
    with use_backend(f"onnx:{opset}"):
        result = called(**passed, **options or {})
    outputs = {n: ndonnx.asarray(x).unwrap_spox() for n, x in named(result, inputs).items()}
    _check_names(given, parameters, outputs)
    model = spox.build(given | parameters, outputs)
    _without_copies(model)
    _name_lengths(model)
    require_onnx("onnx.checker").check_model(model, full_check=True)
    _sign(model)
    store(model, weights, file)
    return model


def _name_lengths(model: Any) -> None:
    """Give the unknown lengths of outputs the names of the inputs' lengths that they equal."""
    # Where a length is a name, shape inference loses it in computed shapes; numbers it keeps.
    named = [_lengths_if(model, *numbers) for numbers in ((1009, 211), (2003, 307))]
    for output, *names in zip(model.graph.output, *named, strict=True):
        lengths = output.type.tensor_type.shape.dim
        for length, one, other in zip(lengths, *names, strict=True):
            if one and one == other and not length.WhichOneof("value"):
                length.dim_param = one


def _lengths_if(model: Any, first: int, step: int) -> list[list[str | None]]:
    """Return the names of the outputs' lengths if those of the inputs are distinct numbers."""
    numbered: Any = type(model)()
    names: dict[str, int] = {}
    numbered.CopyFrom(model)
    for given in numbered.graph.input:
        for length in given.type.tensor_type.shape.dim:
            if length.dim_param:
                length.dim_value = names.setdefault(length.dim_param, first + step * len(names))
    found = require_onnx("onnx.shape_inference").infer_shapes(numbered, data_prop=True)
    at = {number: name for name, number in names.items()}
    return [
        [at.get(length.dim_value) for length in output.type.tensor_type.shape.dim]
        for output in found.graph.output
    ]


def _facts(
    inputs: Mapping[str, Shape | Caches], dtype: str | Mapping[str, str], opset: int
) -> dict[str, tuple[str, Shape]]:
    """Return the dtype and shape of each input of the model, by its name."""
    if not isinstance(inputs, Mapping):
        raise TypeError(
            "inputs must map names to shapes, such as {'ids': ('B', 'L')}; got"
            f" {type(inputs).__name__}"
        )
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(inputs, dtype)
    unknown = sorted(dtypes.keys() - inputs.keys())
    if unknown:
        raise ValueError(
            f"dtype names {', '.join(unknown)}, not an input; the inputs are {', '.join(inputs)}"
        )
    facts: dict[str, tuple[str, Shape]] = {}
    one: Any
    for name, one in inputs.items():
        check_kind(name, one)
        if are_caches(one):
            if opset < CACHED:
                raise ValueError(
                    f"opset must be {CACHED} or 25 for the cache {name}, which is written by"
                    f" the operator TensorScatter; got {opset}"
                )
            if isinstance(dtype, Mapping) and name in dtype:
                raise ValueError(f"dtype must not name the cache {name}: its arrays have a dtype")
            facts |= arrays_of(name, one)
        else:
            facts[name] = dtypes.get(name, "float32"), one
    return {
        name: (_check_dtype(f"the input {name}", kind), _check_lengths(name, shape))
        for name, (kind, shape) in facts.items()
    }


def _check_lengths(name: str, shape: Any) -> Shape:
    lengths = shape if isinstance(shape, (tuple, list)) else (0,)
    checked: list[int | str] = []
    for n in lengths:
        checked.append(n if isinstance(n, str) else check_int("a length", n))
        if not (n.isidentifier() if isinstance(n, str) else 0 < n < 2**63):
            raise ValueError(
                f"the shape of {name} must hold positive lengths and names, such as"
                f" ('B', 8, 'L', 64); got {shape!r}"
            )
    return tuple(checked)


def _check_dtype(what: str, dtype: Any) -> str:
    name = getattr(dtype, "__name__", None) or str(dtype)  # numpy.float32 is a class
    if name not in DTYPES:
        raise ValueError(
            f"{what} is of dtype {name!r}, which a graph of ndonnx does not have: cast to one of"
            f" {', '.join(DTYPES)}"
        )
    return name


def _check_names(*groups: Mapping[str, Any]) -> None:
    """Raise if an input, a parameter and an output share a name."""
    names = [name for group in groups for name in group]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            "inputs, parameters and outputs of a model need names of their own; given twice:"
            f" {', '.join(twice)}. A function names its outputs by returning a dictionary"
        )


def _argument(spox: Any, dtype: str, shape: Shape) -> Any:
    return spox.argument(spox.Tensor(numpy.dtype(dtype), tuple(shape)))


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


def _sign(model: Any) -> None:
    """Write into a model what made it, and by which reading of the operators."""
    model.producer_name, model.producer_version = "polyattn", polyattn.__version__
    model.graph.name = "polyattn"
    require_onnx("onnx.helper").set_model_props(model, {"onnx": require_onnx("onnx").__version__})
