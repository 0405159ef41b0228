"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar, cast

from polyattn._api.names import with_our_names
from polyattn._api.run import planned_call, run_planned
from polyattn._base.arrays import Array
from polyattn._base.autocast import autocast
from polyattn._core.call.describe import describe
from polyattn._core.call.options import AUTOCAST, Start
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.replacements import Normalizer, ScaleRule, Similarity
from polyattn._core.expressions.scores import Score
from polyattn.plugin import Kernel


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `attention`, which documents them."""

    mask: Array | Mask | Callable[..., Array] | None
    bias: Array | None
    is_causal: bool
    window: tuple[int | None, int | None] | None
    query_offset: int | Array | None
    key_lengths: int | Array | None
    block_table: Array | None
    scale: float | ScaleRule | None
    softcap: float | None
    score_mod: Score | Callable[..., Array] | None
    sinks: Array | None
    dropout: tuple[float, int | Array] | tuple[float, int | Array, Start | Array] | None
    similarity: Similarity | None
    normalizer: Normalizer | None
    layout: str
    backend: str | Sequence[str] | None
    kernel: str | Sequence[str] | Kernel | None


A = TypeVar("A")  # the type of the query, which the result has


@run_planned(lambda results: results[0])
@with_our_names()
def attention(
    query: A,
    key: Array,
    value: Array,
    *,
    mask: Array | Mask | Callable[..., Array] | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: int | Array | None = None,
    key_lengths: int | Array | None = None,
    block_table: Array | None = None,
    scale: float | ScaleRule | None = None,
    softcap: float | None = None,
    score_mod: Score | Callable[..., Array] | None = None,
    sinks: Array | None = None,
    dropout: tuple[float, int | Array] | tuple[float, int | Array, Start | Array] | None = None,
    similarity: Similarity | None = None,
    normalizer: Normalizer | None = None,
    layout: str = "...HLD",
    backend: str | Sequence[str] | None = None,
    kernel: str | Sequence[str] | Kernel | None = None,
) -> A:
    """Compute scaled dot-product attention, softmax(scale · query·keyᵀ) · value.

    In the shapes below, ``...`` is any number of batch axes, which broadcast against each other. H
    is the number of query heads and G that of key/value heads; H is a multiple of G. L and S are
    the lengths of query and key. D is the size of a query or key vector, and E that of a value
    vector. Arrays of rank 2 are one head.

    Parameters
    ----------
    query : Array
        Queries, shape (..., H, L, D), float16, bfloat16, float32 or float64, of NumPy, PyTorch,
        JAX, CuPy, Dask or any library that follows the array API standard.
    key : Array
        Keys, shape (..., G, S, D), the dtype of the query. Query head h reads head h // (H // G).
    value : Array
        Values, shape (..., G, S, E), the dtype of the query.
    mask : Array of bool, mask expression, or callable, optional
        The keys that take part (True): an array that broadcasts to (..., H, L, S), of that rank or
        of at most 2; an expression such as ``masks.window(256, 0) | masks.prefix(16)``; or a
        function ``mask(b, h, i, j)`` of index arrays. The other keys are absent, whatever they or
        their values hold.
    bias : Array of float, optional
        Added to the scores; broadcasts to (..., H, L, S), of that rank or of at most 2. Where it is
        −inf the key is absent.
    is_causal : bool
        Whether row i sees only the keys j <= i + `query_offset`.
    window : tuple of (int or None, int or None), optional
        Number of keys that a row sees before and after its own position; None for no bound. The
        position of row i is i + `query_offset`.
    query_offset : int or Array of int, optional
        The position of the first query among the keys; an array gives one for each batch item. By
        default S − L: the queries are the newest tokens.
    key_lengths : int or Array of int, optional
        The number of keys of each batch item, shape (...), or of all; the keys from it on are
        absent. The default of `query_offset` is then ``key_lengths - L``.
    block_table : Array of int, optional
        The pages of each batch item, shape (..., n), in a key and value that are pools of pages,
        (pages, G, page, D) and (pages, G, page, E). Needs `key_lengths`; pages beyond an item's
        length are never read, and may be any number.
    scale : float or scale rule of polyattn.scores, optional
        Multiplies the scores; 1/√D by default, and 1 with a `similarity`.
    softcap : float, optional
        Bounds the scaled scores by s = softcap · tanh(s / softcap), before `score_mod` and `bias`.
    score_mod : score expression or callable, optional
        An expression such as ``scores.alibi(8)``; or a function ``score_mod(score, b, h, i, j)``
        that returns the new score. It gets index arrays that broadcast with the score: batch item
        (flat), query head, row and key.
    sinks : Array of float, optional
        One more logit for each query head in the softmax's denominator, shape (H,), with no value.
    dropout : tuple of (float, int) or (float, int, tuple of int), optional
        The rate at which weights are dropped, and the seed. The seed, batch item, head, row and key
        decide whether a weight is dropped, the same on every backend. The seed may be an integer
        array without axes, so that each step of a compiled training loop gets a new one. In a call
        over a part of the scores, a third item gives the batch item (flat), head, row and key that
        the part begins with, so that it drops what the whole would drop there. It may be an integer
        array of the four.
    similarity : similarity of polyattn.scores, optional
        Replaces the product query·key, such as ``scores.cosine()``.
    normalizer : normalizer of polyattn.scores, optional
        Replaces softmax, such as ``scores.sparsemax()``.
    layout : {"...HLD", "...LHD"}
        The order of heads and length in query, key, value and output.
    backend : str or sequence of str, optional
        A backend, ``name`` or ``name:device``, or an ordered list: the first that is installed and
        supports the call runs; no other is tried. The arrays move there and the result moves back.
        ``auto`` is the arrays' own library. By default `use_backend`, then ``POLYATTN_BACKEND``,
        then the arrays' own library decides.
    kernel : str, sequence of str or polyattn.plugin.Kernel, optional
        A kernel of the backend, or an ordered list: the first that can run the call runs, also one
        that runs only on request. ``auto`` is the automatic choice, which is the default. Or a
        kernel object.

    Returns
    -------
    Array
        The attention, shape (..., H, L, E) in the layout of the query, in the query's library and
        dtype, on its device. A row that sees no key is 0.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind, library or dtype.
    ValueError
        If shapes do not fit together or an option is out of range.
    UnknownBackendError
        If no plugin has a requested name.
    BackendUnavailableError
        If none of the requested backends can be loaded.
    UnsupportedError
        If none of the loaded backends supports the call.

    See Also
    --------
    attention_partial : Also return the logsumexp, to join attention over parts of the keys.
    explain : Explain which kernel runs, and why no other.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention
    >>> rng = np.random.default_rng(0)
    >>> query = rng.standard_normal((2, 8, 5, 64), dtype=np.float32)  # (batch, H, L, D)
    >>> key = rng.standard_normal((2, 2, 7, 64), dtype=np.float32)  # 2 heads serve 8
    >>> value = rng.standard_normal((2, 2, 7, 32), dtype=np.float32)
    >>> attention(query, key, value, is_causal=True).shape
    (2, 8, 5, 32)
    """
    options = {
        "mask": mask, "bias": bias, "window": window, "query_offset": query_offset,
        "key_lengths": key_lengths, "block_table": block_table, "scale": scale, "softcap": softcap,
        "score_mod": score_mod, "sinks": sinks, "dropout": dropout, "similarity": similarity,
        "normalizer": normalizer,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    arguments = autocast({"query": query, "key": key, "value": value, **given}, AUTOCAST)
    # From here on the options go by their table, `OPTIONS`.
    described = describe(**arguments, is_causal=is_causal, layout=layout)
    return cast(A, planned_call(*described, backend, kernel))  # `run_planned` returns its output
