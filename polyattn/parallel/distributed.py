"""Attention over many ranks, its gradients, and what it would do."""

from __future__ import annotations

import importlib
import numbers
from collections.abc import Callable
from typing import Any

from polyattn._api.gradients import as_given
from polyattn._base.arguments import check_shape
from polyattn._base.arrays import Array, ArrayFacts, is_array, library_of
from polyattn._base.autocast import autocast
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.options import AUTOCAST
from polyattn.parallel.agreement import check_one_call
from polyattn.parallel.choice import ParallelExplanation, chosen, examined
from polyattn.parallel.over import communicator_of
from polyattn.parallel.rank_task import RankTask
from polyattn.parallel.token_layout import check_size

#: The libraries that differentiate, and the modules with the rule for each.
_RECORDED = {
    "jax": "polyattn.parallel.jax_vjp",
    "torch": "polyattn.parallel.torch_autograd",
}


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    over: Any,
    strategy: str = "auto",
    layout: str = "contiguous",
    **options: Any,
) -> Array:
    """Compute attention over sequences that are spread over many devices.

    Each rank calls it with its tokens of query, key and value, and gets the output of its rows: the
    numbers that `polyattn.attention` gives for the whole sequence. All ranks call it with the same
    options. They describe the whole sequence: a mask array has all rows and all keys, in the order
    of the sequence, and positions count from its first token.

    Parameters
    ----------
    query : Array
        This rank's queries, shape (..., H, L / n, D) for n ranks. With ``strategy="decode"`` all
        queries, the same on every rank, shape (..., H, L, D).
    key, value : Array
        This rank's keys and values, shapes (..., G, S / n, D) and (..., G, S / n, E).
    over : str, process group, DeviceMesh, mpi4py communicator or Communicator
        The ranks: the name of a mesh axis inside ``jax.shard_map``; a process group of torch, or a
        DeviceMesh with one dimension; a communicator of mpi4py, for NumPy and CuPy.
    strategy : {"auto", "heads", "gather", "ring", "decode"}
        How the ranks share the work. ``heads`` exchanges tokens for heads, and each rank computes
        whole sequences of some heads. ``gather`` gathers all keys on every rank. ``ring`` passes
        keys around and never holds more than two ranks' keys. ``decode`` computes all rows over
        each rank's keys. ``auto`` takes the first of heads, gather if all keys and values take at
        most 1 GiB, and ring, that can compute the call.
    layout : {"contiguous", "zigzag"}
        The tokens of each rank: chunk r of n, or the chunks r and 2n − 1 − r of 2n, which gives all
        ranks the same work under a causal mask.
    **options
        As for `polyattn.attention`, without the layout of axes. Dropout needs the same seed on all
        ranks.

    Returns
    -------
    Array
        The output of this rank's rows, shape (..., H, L / n, E); of all rows with ``"decode"``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `polyattn.attention`; ValueError for an unknown strategy or layout, and, on every
        rank, if the ranks differ in shapes, dtypes or options.
    NotImplementedError
        If the strategy cannot compute the call.

    See Also
    --------
    explain : Explain which strategy runs, why, and what each rank computes and sends.
    shard, permute, positions : Bring tokens to ranks.

    Notes
    -----
    The ranks first compare their calls, by a digest of 16 bytes: shapes, dtypes and options, an
    array by its shape and dtype. `backend` and `kernel` may differ.

    torch and JAX differentiate it. A second pass over the ranks computes the gradients, and nothing
    of other ranks is kept for it. The gradient of an option that is an array, such as `bias` or
    `sinks`, is this rank's share in torch, to be summed over the ranks as those of a model's
    parameters are; in JAX it is whole where the array is the same on all devices.

    References
    ----------
    .. [1] Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.
    .. [2] Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv:2309.14509.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, parallel
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 16, 4))
    >>> def attend(ranks):
    ...     own = [parallel.shard(x, over=ranks) for x in (query, key, value)]
    ...     return parallel.attention(*own, over=ranks, is_causal=True)
    >>> output = np.concatenate(parallel.run_threads(4, attend), axis=-2)
    >>> bool(np.allclose(output, attention(query, key, value, is_causal=True)))
    True
    """
    task, arrays, flat = _task("attention", over, strategy, layout, options, query, key, value)
    library = library_of(query).name
    if library in _RECORDED:
        output = importlib.import_module(_RECORDED[library]).attend(task, arrays)
    else:
        output, _ = task.forward(*arrays, for_gradient=False)
    return output[0, ...] if flat else output


def attention_vjp(
    query: Array,
    key: Array,
    value: Array,
    *,
    over: Any,
    strategy: str = "auto",
    layout: str = "contiguous",
    **options: Any,
) -> tuple[Array, Callable[[Array], Gradients]]:
    """Compute attention over many devices, and return a function that computes its gradients.

    Parameters
    ----------
    query, key, value : Array
        As for `attention`.
    over : object
        As for `attention`.
    strategy, layout : str
        As for `attention`.
    **options
        As for `attention`.

    Returns
    -------
    output : Array
        As from `attention`.
    pullback : callable
        Takes the gradient of this rank's output and returns `Gradients`: those of this rank's
        query, key and value, and this rank's share of those of the options (with ``"decode"`` they
        and the query's are whole). All ranks call it.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, NotImplementedError
        As for `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import parallel
    >>> x = np.ones((8, 4, 16))
    >>> def attend(ranks):
    ...     output, pullback = parallel.attention_vjp(x, x, x, over=ranks, strategy="ring")
    ...     return pullback(output).key.shape
    >>> parallel.run_threads(2, attend)
    [(8, 4, 16), (8, 4, 16)]
    """
    task, arrays, flat = _task("attention_vjp", over, strategy, layout, options, query, key, value)
    given = {"query": query, "key": key, "value": value, **options}
    output, saved = task.forward(*arrays)

    def pullback(gradient: Array) -> Gradients:
        """Return the gradients from that of this rank's output."""
        check_one_call(task.ranks, {"output_gradient": gradient}, {})
        gradients = task.backward(arrays, saved, gradient[None, ...] if flat else gradient)
        if flat:
            own = {name: getattr(gradients, name)[0, ...] for name in ("query", "key", "value")}
            gradients = gradients._replace(**own)
        return as_given(gradients, given)

    return output[0, ...] if flat else output, pullback


def explain(
    query: Array | tuple[int, ...],
    key: Array | tuple[int, ...],
    value: Array | tuple[int, ...],
    *,
    over: Any,
    strategy: str = "auto",
    layout: str = "contiguous",
    library: str = "numpy",
    dtype: str = "float32",
    **options: Any,
) -> ParallelExplanation:
    """Explain which strategy `attention` would take, and what each rank computes and sends.

    Nothing is computed or sent.

    Parameters
    ----------
    query, key, value : Array or tuple of int
        As for `attention`, this rank's, or only their shapes.
    over : int or as for `attention`
        The ranks, or only their number.
    strategy, layout : str
        As for `attention`.
    library, dtype : str
        Those assumed for arguments given as shapes.
    **options
        As for `attention`.

    Returns
    -------
    ParallelExplanation
        The decision; it prints as a table.

    Raises
    ------
    TypeError, ValueError
        As for `attention`.

    Examples
    --------
    >>> from polyattn import parallel
    >>> shape = (1, 6, 2048, 64)
    >>> print(parallel.explain(shape, shape, shape, over=4, layout="zigzag", is_causal=True))
    attention over 4 ranks: L = 8192, S = 8192, zigzag, 8 chunks, 36 visible pairs
    needs: causal
    selected by strategy='auto': pairs and bytes sent of a rank
      heads   refused                    H = 6 query heads are not a multiple of 4 ranks
      gather  CHOSEN   9 pairs  18.9 MB
      ring    next     9 pairs  18.9 MB
    """

    def facts(given: Any) -> Any:
        if not isinstance(given, (tuple, list)):
            return given
        shape = check_shape(given)
        return ArrayFacts(library, dtype, "cpu", (1, *shape) if len(shape) == 2 else shape)

    size = check_size(over) if isinstance(over, numbers.Integral) else communicator_of(over).size
    arrays = {"query": facts(query), "key": facts(key), "value": facts(value)}
    return examined("explain", arrays, dict(options), size, strategy, layout)


def _task(
    function: str,
    over: Any,
    strategy: str,
    layout: str,
    options: Any,
    query: Array,
    key: Array,
    value: Array,
) -> tuple[RankTask, list[Array], bool]:
    """Return what this rank has to do, its arrays with an axis of heads, and if that was added."""
    ranks = communicator_of(over)
    options = autocast({"query": query, "key": key, "value": value, **options}, AUTOCAST)
    given = {name: options.pop(name) for name in ("query", "key", "value")}
    check_one_call(ranks, given, {"strategy": strategy, "layout": layout, **options})
    flat = all(is_array(x) and len(x.shape) == 2 for x in given.values())
    if flat:
        given = {name: array[None, ...] for name, array in given.items()}
    decision = examined(function, given, options, ranks.size, strategy, layout)
    return RankTask(chosen(decision), ranks, decision.call), list(given.values()), flat
