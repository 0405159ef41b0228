"""The progress of a long call, shown where a block asks for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec

from polyattn._base.settings import Context

#: Takes the share of a call that is done, from 0 to 1.
Show = Callable[[float], None]

_context: Context[float] = Context("polyattn_progress")
_none: AbstractContextManager[Show] = contextlib.nullcontext(lambda share: None)


@contextmanager
def show_progress(after: float = 2.0) -> Iterator[None]:
    """Show a bar for each long call of a NumPy kernel inside the block.

    The bar is tqdm's, on standard error or in a notebook, and disappears at the end of the call;
    where tqdm is not installed, a warning says so.
    The compiled kernel and that of tiles show it; for dask, use ``dask.diagnostics.ProgressBar``.

    Parameters
    ----------
    after : float
        Seconds after which a call is shown.

    Yields
    ------
    None
        Nothing; it ends with the block.

    Raises
    ------
    ValueError
        If `after` is not a number of at least 0.

    Examples
    --------
    >>> import numpy as np
    >>> import polyattn
    >>> x = np.ones((8, 512, 64), dtype=np.float32)
    >>> with polyattn.show_progress():
    ...     polyattn.attention(x, x, x).shape
    (8, 512, 64)
    """
    if not isinstance(after, (int, float)) or not after >= 0:
        raise ValueError(f"show_progress takes seconds of at least 0, such as 2; got {after!r}")
    if find_spec("tqdm") is None:
        message = "show_progress shows nothing without tqdm: pip install tqdm"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        yield
        return
    with _context.block(after):
        yield


def progress() -> AbstractContextManager[Show]:
    """Return a context whose function shows the share of a call that is done, if that is asked."""
    after = _context.get()
    return _none if after is None else _bar(after)


@contextmanager
def _bar(after: float) -> Iterator[Show]:
    from tqdm.auto import tqdm

    form = "attention {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    with tqdm(total=1, delay=after, leave=False, miniters=0, bar_format=form) as bar:
        yield lambda share: bar.update(share - bar.n) and None
