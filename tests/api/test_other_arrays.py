"""Arrays that attention refuses: each message says what they are and what to pass."""

import h5py
import numpy as np
import pandas
import pytest
from optional import array_api_strict, autograd, torch, xarray, zarr

from polyattn import UnsupportedError, attention, attention_vjp, masks, nn

X = np.ones((2, 3, 4), np.float32)


def foreign(module, kind):
    """An array of a library that is not installed."""
    return type(kind, (), {"__module__": f"{module}.framework", "shape": (2, 3), "dtype": "f4"})()


GIVEN = {
    "h5py": (
        lambda folder: h5py.File(folder / "x.h5", "w").create_dataset("x", data=X),
        ["query is of type h5py.Dataset", "dask.array.from_array(query)", "query[...]"],
    ),
    "zarr": (lambda folder: zarr.array(X), ["zarr.Array", "dask.array.from_array(query)"]),
    "xarray": (
        lambda folder: xarray.DataArray(X),
        ["query is of type xarray.DataArray", "pass query.data", "xarray.apply_ufunc, "],
    ),
    "pandas": (lambda folder: pandas.DataFrame(X[0]), ["pandas.DataFrame", "query.to_numpy()"]),
    "tensorflow": (
        lambda folder: foreign("tensorflow.python", "Tensor"),
        ["tensorflow.Tensor", "numpy.asarray(query)", "ends the gradient"],
    ),
    "autograd": (
        lambda folder: autograd.tracer.new_box(X, 0, None),
        ["query is a box of autograd", "register attention_vjp"],
    ),
    "matrix": (lambda folder: np.matrix(X[0]), ["query is a numpy.matrix", "numpy.asarray(query)"]),
    "masked array": (
        lambda folder: np.ma.masked_array(X, X == 0),
        ["query is a masked array", "query.data", "mask="],
    ),
    "sparse": (lambda folder: foreign("sparse", "SparseArray"), ["pass query.todense()"]),
    "quantized tensor": (
        lambda folder: torch.quantize_per_tensor(torch.ones(5, 7), 0.1, 0, torch.qint8),
        ["query is a sparse, quantized", "query.dequantize()"],
    ),
    "nested tensor": (
        lambda folder: torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged),
        ["masks.segments"],
    ),
    "array of objects": (lambda folder: X.astype(object), ["has dtype object", "cast it first"]),
    "list": (lambda folder: X.tolist(), ["query is of type list", "numpy.asarray(query)"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GIVEN)
def test_the_message_says_whose_it_is(name, tmp_path):
    make, parts = GIVEN[name]
    given = make(tmp_path)
    with pytest.raises(TypeError) as error:
        attention(given, given, given)
    assert all(part in str(error.value) for part in parts), str(error.value)


INTEGERS = {
    "masked array": (lambda: np.ma.masked_array([3, 2], [1, 0]), "is a masked .* pass {}.data"),
    "Series": (lambda: pandas.Series([3, 2]), r"is of type pandas.* pass {}.to_numpy\(\)"),
    "expression": (lambda: foreign("blosc2", "LazyExpr"), r"is of type blosc2.*asarray\({}\)"),
}
POOL = np.ones((4, 2, 3, 4), np.float32)  # 4 pages of 3 slots, 2 heads
MODEL = nn.Transformer.init(7, 8, 2, 1, like=X, is_causal=True, positions=9, tied=True)
#: Calls that read integers on the host, by the argument that has them.
READERS = {
    "key_lengths": lambda x: attention(X, X, X, key_lengths=x),
    "block_table": lambda x: attention(X, POOL, POOL, key_lengths=[3], block_table=x),
    "masks.tree: parents": lambda x: masks.tree(x),
    "masks.padding: key_lengths": lambda x: masks.padding(x),
    "counts": lambda x: MODEL(
        np.ones((2, 3), int), caches=MODEL.caches(9, batch=(2,), kind=nn.PagedCache), counts=x
    ),
    "lengths": lambda x: nn.generate(MODEL, np.ones((2, 3), int), 1, lengths=x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "masked array") for name in READERS), *(("key_lengths", kind) for kind in INTEGERS)],
)
def test_integers_are_refused_as_operands_are(name, kind):
    make, message = INTEGERS[kind]
    wanted = f"^{name} {message.format(name.rpartition(': ')[2])}"
    with pytest.raises(TypeError, match=wanted):
        READERS[name](make())


@pytest.mark.parametrize("call", [attention, attention_vjp])
def test_what_the_library_lacks_of_the_standard_is_named(monkeypatch, call):
    monkeypatch.delattr(array_api_strict, "matmul")
    x = array_api_strict.asarray(X)
    with pytest.raises(UnsupportedError, match="array_api_strict has no `matmul`, which the"):
        call(x, x, x, is_causal=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", [attention, attention_vjp])
def test_an_older_revision_of_the_standard_is_named(call):
    x = array_api_strict.asarray(X)
    with (
        array_api_strict.ArrayAPIStrictFlags(api_version="2023.12"),
        pytest.raises(UnsupportedError, match=r"standard of 2023.12, .* that of 2024.12: "),
    ):
        call(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    "wrong", [lambda s, b, h, i, j: s.transposed, lambda *s: array_api_strict.einsum(s)]
)
def test_errors_of_a_function_are_its_own(wrong):
    x = array_api_strict.asarray(X)
    with pytest.raises(AttributeError, match=r"transposed|einsum"):
        attention(x, x, x, score_mod=wrong)
