"""The block in which a row has the same bits, however its sequence is cut."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from polyattn._base.arrays import Array, library_of
from polyattn._base.quirks import TracedValue
from polyattn._base.settings import Context

_context: Context[bool] = Context("polyattn_same_bits")
_here = TracedValue(lambda: _context.get() or False)


class _OfThread(threading.local):
    """The open blocks that began in a thread, and what marks its programs of JAX meanwhile."""

    def __init__(self) -> None:
        self.blocks: set[object] = set()
        self.mark: ExitStack | None = None


_of_thread = _OfThread()


def keeps_bits(array: Array | None = None) -> bool:
    """Return whether the caller is in a block of `same_bits`, or JAX traces an array for one."""
    return _context.is_open_anywhere and (_here.value or _is_traced_for_a_block(array))


def _is_traced_for_a_block(array: Array | None) -> bool:
    """Return whether an array is of a program that blocks of this thread will find in its cache."""
    if array is None or (library := library_of(array)).name != "jax":
        return False
    return library.traced and _of_thread.mark is not None


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
    with _marked(), _context.block(True):
        yield


def _marked() -> AbstractContextManager[Any]:
    """Return a context in which JAX keeps the programs of this thread apart, if it is imported."""
    jax = sys.modules.get("jax")
    if jax is None or getattr(jax.__spec__, "_initializing", False):  # by another thread
        return nullcontext()
    return _with_mark(_context_of(jax))


@functools.cache
def _context_of(jax: Any) -> Callable[[bool], AbstractContextManager[Any]]:
    """Return what JAX finds programs by in its cache, beside their arguments."""
    make = getattr(jax, "make_user_context", None)  # since 0.8
    return (lambda _: _without_programs(jax)) if make is None else make(False)


@contextmanager
def _with_mark(context: Callable[[bool], AbstractContextManager[Any]]) -> Iterator[None]:
    """Mark programs as long as any block is open that began in this thread.

    Tasks and generators share the mark of their thread, and leave their blocks in any order.
    """
    blocks, block = _of_thread.blocks, object()
    try:
        blocks.add(block)
        if _of_thread.mark is None:
            with ExitStack() as stack:
                stack.enter_context(context(True))
                stack.callback(_context.count, -1)
                _context.count(1)  # so that calls look for the mark
                _of_thread.mark = stack.pop_all()
        yield
    finally:
        blocks.discard(block)
        mark = _of_thread.mark
        if mark is not None and not _of_thread.blocks:
            _of_thread.mark = None
            mark.close()


@contextmanager
def _without_programs(jax: Any) -> Iterator[None]:
    """Let JAX trace each program anew, inside and afterwards."""
    jax.clear_caches()
    try:
        yield
    finally:
        jax.clear_caches()
