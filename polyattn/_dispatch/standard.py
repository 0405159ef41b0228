"""The backend of libraries that no plugin serves, by what the array API standard asks of them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._dispatch.errors import UnsupportedError
from polyattn.plugin import Backend

#: The revision of the standard that kernels are written for.
REVISION = "2024.12"


class StandardBackend(Backend):
    """A library that may lack a part of the standard, which an error then names.

    One of an older revision runs what it can.
    """

    @contextlib.contextmanager
    def shield(self, problem: Problem, operands: Operands) -> Iterator[None]:
        try:
            with super().shield(problem, operands):
                yield
        except (AttributeError, RuntimeError, TypeError) as error:
            self._name_what_is_missing(error)
            raise

    def _name_what_is_missing(self, error: Exception) -> None:
        """Raise an error that names what the kernels ask of the library, and it lacks.

        A function of the caller may ask for more than the standard; its errors are its own.
        """
        library = self.xp.__name__.removeprefix("array_api_compat.")
        revision = getattr(self.xp, "__array_api_version__", REVISION)
        if isinstance(error, AttributeError) and error.obj is self.xp:
            lack = f"{library} has no `{error.name}`, which the array API standard asks for"
        elif revision < REVISION:
            lack = f"{library} has the array API standard of {revision}, and this call needs that"
            lack += f" of {REVISION}"
        else:
            return
        if _asked_by_us(error, library.partition(".")[0]):
            raise UnsupportedError(
                f"{lack}: convert the arrays to another library, for example by numpy.asarray"
            ) from error


def _asked_by_us(error: Exception, library: str) -> bool:
    """Return whether the last frame outside the library is one of polyattn."""
    frames = traceback.walk_tb(error.__traceback__)
    rooms = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    outside = [room for room in rooms if room != library]
    return bool(outside) and outside[-1] == "polyattn"
