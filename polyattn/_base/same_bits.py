"""The block in which a row has the same bits, however its sequence is cut."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from polyattn._base.quirks import TracedValue
from polyattn._base.settings import Context

_context: Context[bool] = Context("polyattn_same_bits")
_here = TracedValue(lambda: _context.get() or False)


def keeps_bits() -> bool:
    """Return whether the caller is in a block of `same_bits`."""
    return _context.is_open_anywhere and _here.value


@contextmanager
def same_bits() -> Iterator[None]:
    """Let each row have the same bits, however its sequence is cut, in all calls inside the block.

    A row then depends on its query, on the keys and values that it sees, in their order, and on the
    options at their positions. It does not depend on whether the other rows are computed in the
    same call, one by one or in chunks; on pages, padding, packing and batches; and on the number of
    threads. Only kernels that declare ``cut_invariant`` run; a call that none of them computes is
    refused. It works around the call of a function compiled by torch.compile or jax.jit, in the
    same thread or task.

    Yields
    ------
    None
        Nothing; the promise ends with the block.

    Examples
    --------
    >>> import polyattn
    >>> shape = (1, 8, 128, 64)
    >>> with polyattn.same_bits():
    ...     explanation = polyattn.explain(shape, shape, shape, backend="array-api")
    >>> explanation.candidates[-1].reasons
    ('it does not promise the same bits for each cut of a sequence (cut_invariant)',)
    """
    with _context.block(True), _context_of_jax():
        yield


def _context_of_jax() -> AbstractContextManager[Any]:
    """Return a context that the programs of jax.jit are kept by, where JAX is imported."""
    jax = sys.modules.get("jax")
    context = _made_for(jax)
    if context is not None:
        return context(True)  # type: ignore[no-any-return]
    return nullcontext() if jax is None else _without_programs(jax)


@functools.cache
def _made_for(jax: Any) -> Any:
    make = getattr(jax, "make_user_context", None)  # since 0.8
    return None if make is None else make(False)


@contextmanager
def _without_programs(jax: Any) -> Iterator[None]:
    """Let JAX trace each program anew, inside and afterwards."""
    jax.clear_caches()
    try:
        yield
    finally:
        jax.clear_caches()
