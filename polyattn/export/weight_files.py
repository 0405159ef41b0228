"""Put weights into a model, or into a file beside it if a model cannot hold them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy

from polyattn._base.extras import require_onnx
from polyattn._base.files import replacing

#: How many bytes of weights a model holds: less than protobuf's 2 GiB, for the nodes beside them.
LARGEST = 2**31 - 2**26
#: The weights in a file begin at multiples of this, so that a runtime can map them into memory.
PAGE = 4096


def check_size(weights: Mapping[str, Any], file: Path | None) -> None:
    """Raise if a model without a file cannot hold the weights."""
    size = _size(weights)
    if file is None and size > LARGEST:
        raise ValueError(
            f"the weights take {size:,} bytes, and a model of ONNX holds 2 GB at most:"
            " pass file='model.onnx', which writes the model there and its weights beside it"
        )


def _size(weights: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in weights.values())


def store(model: Any, weights: Mapping[str, Any], file: Path | None) -> None:
    """Turn the inputs that are weights into initializers, and write the file if there is one."""
    inputs = [one for one in model.graph.input if one.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    is_large = file is not None and _size(weights) > LARGEST
    if not is_large:
        from_array = require_onnx("onnx.numpy_helper").from_array
        model.graph.initializer.extend(from_array(a, name) for name, a in weights.items())
    if file is None:
        return
    # The weights first: a new model must not read old ones. A model has text in UTF-8.
    data = f"{file.name.encode(errors='replace').decode()}.data"
    with replacing(file.parent, *([data] if is_large else []), file.name) as made:
        if is_large:
            model.graph.initializer.extend(_written(weights, made / data))
        (made / file.name).write_bytes(model.SerializeToString())
        path = str(made / file.name)
        # onnx opens a path in UTF-8 only.
        if is_large and path == path.encode(errors="replace").decode():
            require_onnx("onnx.checker").check_model(path)


def _written(weights: Mapping[str, Any], file: Path) -> Iterator[Any]:
    """Write the weights to a file, one at a time, and yield initializers that say where each is."""
    helper, proto = require_onnx("onnx.helper"), require_onnx("onnx")
    with file.open("wb") as stream:
        for name, array in weights.items():
            stream.seek(-stream.tell() % PAGE, os.SEEK_CUR)
            place = {"location": file.name, "offset": stream.tell(), "length": array.nbytes}
            flat = numpy.asarray(array, array.dtype.newbyteorder("<")).reshape(-1)
            stream.write(flat.view(numpy.uint8).data)  # tofile says nothing of a full disk
            yield proto.TensorProto(
                name=name,
                dims=array.shape,
                data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
                data_location=proto.TensorProto.EXTERNAL,
                external_data=[
                    proto.StringStringEntryProto(key=key, value=str(value))
                    for key, value in place.items()
                ],
            )
