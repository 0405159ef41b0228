"""Arrays that are refused, by library and class, with what to pass instead."""

# Classes that look like arrays but do not behave like them, with the message for each.
REFUSED = {
    ("numpy", "matrix"): "is a numpy.matrix, whose * and shapes differ from an array's; pass"
    " numpy.asarray({0})",
    ("numpy", "MaskedArray"): "is a masked array, whose mask would be lost; pass {0}.data, and say"
    " with mask= which keys take part",
    ("autograd", "ArrayBox"): "is a box of autograd, which differentiates no attention by itself:"
    " register attention_vjp with it, as docs/how-to/gradients.md shows",
    ("torch", "MaskedTensor"): "is a masked tensor, whose mask would be lost; pass"
    " {0}.get_data(), and say with mask= which keys take part",
    ("torch", "CausalBias"): "is torch's CausalBias, which is not an array: pass is_causal=True,"
    " and query_offset=0 for causal_upper_left",
    ("sparse", "SparseArray"): "is a sparse array, and softmax makes every score other than 0; pass"
    " {0}.todense()",
    ("blosc2", "NDArray"): "is a compressed array, which has to be read first; pass {0}[...]",
    ("dask_array", "Array"): "is an array of dask-array, whose graphs are planned by queries: pass"
    " an array of dask.array",
    ("dask", "ArrayExpr"): "is an array of dask's query planning: set array.query-planning to"
    " False in dask's configuration before dask.array is imported",
    (
        "torch",
        "DTensor",
    ): "is a DTensor, for which most kernels have no rule: pass"
    " {0}.to_local(), or call attention inside torch.distributed.tensor.experimental.local_map",
    ("torch", "BlockMask"): "is torch's BlockMask, which is not an array: pass the function that it"
    " was made of, its .mask_mod, in mask=",
}


_GRADIENT = "numpy.asarray({0}) converts it, and ends the gradient"
_STORED = "wrap it by dask.array.from_array({0}), or read a part of it, {0}[...]"
# What to do with the arrays of libraries without the standard.
CONVERSIONS = {
    **dict.fromkeys(("tensorflow", "keras", "paddle", "mindspore"), _GRADIENT),
    "tinygrad": "{0}.numpy() converts it, and ends the gradient",
    **dict.fromkeys(("zarr", "h5py"), _STORED),
    "xarray": "pass {0}.data, or call xarray.apply_ufunc, which keeps the names of axes, as"
    " docs/how-to/long-arrays.md shows",
    **dict.fromkeys(("pandas", "polars"), "pass {0}.to_numpy()"),
    **dict.fromkeys(("scipy", "jax"), "if it is sparse, pass {0}.todense()"),
}
