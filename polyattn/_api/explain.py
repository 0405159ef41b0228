"""Explain which kernel would run a call, and why no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from polyattn._api.attention import AttentionOptions
from polyattn._api.names import with_our_names
from polyattn._base.arguments import Shape, check_int, check_shape
from polyattn._base.arrays import Array, ArrayFacts, Chunks, as_facts, library_of
from polyattn._base.autocast import autocast, casts
from polyattn._base.span import Span
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.features import DTYPES
from polyattn._core.call.options import AUTOCAST, OPTIONS
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.masks import Mask
from polyattn._dispatch.explanation import Explanation
from polyattn._dispatch.request import parse_kernel, request
from polyattn._dispatch.select import check_possible, default_device, explain_selection


@with_our_names()
def explain(
    query: Array | tuple[int, ...],
    key: Array | tuple[int, ...],
    value: Array | tuple[int, ...],
    *,
    logsumexp: bool = False,
    gradients: bool = False,
    library: str = "numpy",
    device: str | None = None,
    dtype: str = "float32",
    chunks: int | tuple[int, ...] | None = None,
    **options: Unpack[AttentionOptions],
) -> Explanation:
    """Explain what `attention` would do with a call: which kernel runs, and why no other.

    Nothing is computed, converted or moved.

    Parameters
    ----------
    query, key, value : Array or tuple of int
        As for `attention`, or only their shapes.
    logsumexp : bool
        Whether to explain `attention_partial` instead.
    gradients : bool
        Whether to explain `attention_backward` instead, which `attention_vjp` calls too.
    library : str
        Library assumed for arguments given as shapes.
    device : str, optional
        Device assumed for shapes; by default the library's default device.
    dtype : str
        Dtype assumed for shapes.
    chunks : int or tuple of int, optional
        Length of the chunks assumed for the shapes of query, key and value, if the library is dask:
        of their tokens, or along each axis; by default one chunk.
    **options
        As for `attention`: mask, bias, is_causal, window, query_offset, key_lengths, block_table,
        scale, softcap, score_mod, sinks, dropout, similarity, normalizer, layout, backend and
        kernel. A shape is enough for mask, bias, query_offset, key_lengths, block_table and sinks.

    Returns
    -------
    Explanation
        The decision; it prints as a table.

    Examples
    --------
    >>> import polyattn
    >>> shape = (2, 8, 128, 64)
    >>> print(polyattn.explain(shape, shape, shape, is_causal=True, backend="numpy"))
    attention: query (2, 8, 128, 64), key (2, 8, 128, 64), value (2, 8, 128, 64), float32, numpy ...
    needs:     causal
    selected by backend='numpy'
      numpy  small  on request  the problem is large: tiles are faster
      numpy  tiled  CHOSEN
      numpy  dense  next
    """
    arguments: dict[str, Any] = dict(options)
    backend, kernel = arguments.pop("backend", None), arguments.pop("kernel", None)
    for name, text in (("library", library), ("device", "" if device is None else device)):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a string, such as 'numpy' or 'cpu'; got {text!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if logsumexp and gradients:
        raise ValueError("logsumexp=True and gradients=True are two calls: explain one at a time")
    if chunks is not None and library != "dask":
        raise ValueError(f'chunks are of arrays of dask: library="dask"; got {library!r}')
    layout = arguments.get("layout", "...HLD")
    only_shapes = isinstance(query, (tuple, list))

    def facts_of_shape(shape: Any, dtype: str, cut: bool = False) -> Any:
        # Beside arrays, a list is numbers.
        if not isinstance(shape, (tuple, list) if only_shapes else tuple):
            return shape
        target = default_device(library) if device is None else device
        lengths = check_shape(shape)
        pieces = _cut(lengths, chunks, layout) if cut and library == "dask" else None
        return ArrayFacts(library, dtype, target, lengths, chunks=pieces)

    dtypes = {n: row.dtype or dtype for n, row in OPTIONS.items() if row.axes is not None}
    arguments |= {n: facts_of_shape(arguments[n], dtypes[n]) for n in dtypes if n in arguments}
    arrays = [facts_of_shape(array, dtype, cut=True) for array in (query, key, value)]
    call, operands = describe(*arrays, **arguments, logsumexp=logsumexp, facts=as_facts)
    if only_shapes:
        check_possible(call.query.library, call.query.device)
    changed = tuple(casts(call._asdict(), AUTOCAST))
    call = call._replace(**autocast(call._asdict(), AUTOCAST))
    kernels = parse_kernel(kernel)
    requested = request(backend)
    if isinstance(operands.mask, Mask) and isinstance(call.mask, Mask):
        # A remark may count the tiles of a compiled mask.
        call = call._replace(mask=operands.mask.spec(as_facts, tables=True))
    xp = None if only_shapes else library_of(query).xp
    problem = examine(call)
    if gradients:
        problem = problem._replace(features=problem.features | {"backward"})
    explanation = explain_selection(call, problem, requested, kernels, xp)
    return replace(explanation, autocast=changed, notes=_notes(problem, query))


def _notes(problem: Problem, query: Any) -> tuple[str, ...]:
    """Return warnings about the indices that a mask or score function gets."""
    if problem.features.isdisjoint(("mask_mod", "score_mod")):
        return ()
    notes = []
    if problem.query_length != problem.key_length:
        offset = "query_offset" if problem.query_offset is None else problem.query_offset
        notes.append(
            "functions count rows from 0, as FlexAttention does, also where L is not S: row i is at"
            f" the position i + {offset} among the keys"
        )
    if "vmap" in problem.transforms or type(query).__name__ == "BatchTracer":
        notes.append("inside vmap, functions get b = 0 for every item: use batch axes instead")
    return tuple(notes)


def _cut(shape: Shape, chunks: int | tuple[int, ...] | None, layout: str) -> Chunks:
    """Return the lengths of the chunks of an array, from one length or one for each axis."""
    if chunks is None:
        sizes = shape
    elif isinstance(chunks, tuple):
        sizes = check_shape(chunks)
    else:
        tokens = len(shape) - (3 if layout == "...LHD" and len(shape) > 2 else 2)
        length = check_int("chunks", chunks)
        sizes = tuple([length if axis == tokens else n for axis, n in enumerate(shape)])
    if len(sizes) != len(shape) or any(size < 1 <= n for size, n in zip(sizes, shape, strict=True)):
        raise ValueError(f"chunks must be at least 1, one or {len(shape)} of them; got {chunks!r}")
    spans = [Span(0, n).split(max(1, size)) for n, size in zip(shape, sizes, strict=True)]
    return tuple(tuple(part.length for part in along) or (0,) for along in spans)
