"""The backend of libraries that no plugin serves, by what the array API standard asks of them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._dispatch.errors import UnsupportedError
from polyattn.plugin import Backend


class StandardBackend(Backend):
    """A library that may lack a part of the standard, which an error then names."""

    @contextlib.contextmanager
    def shield(self, problem: Problem, operands: Operands) -> Iterator[None]:
        try:
            with super().shield(problem, operands):
                yield
        except AttributeError as error:
            self._name_what_is_missing(error)
            raise

    def _name_what_is_missing(self, error: AttributeError) -> None:
        """Raise an error that names what the kernels ask of the library, and it lacks.

        A function of the caller may ask for more than the standard; its errors are its own.
        """
        library = self.xp.__name__.removeprefix("array_api_compat.")
        if error.obj is self.xp and _asked_by_us(error, library.partition(".")[0]):
            raise UnsupportedError(
                f"{library} has no `{error.name}`, which the array API standard asks for: convert"
                " the arrays to another library, for example by numpy.asarray"
            ) from error


def _asked_by_us(error: AttributeError, library: str) -> bool:
    """Return whether the last frame outside the library is one of polyattn."""
    frames = traceback.walk_tb(error.__traceback__)
    rooms = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    outside = [room for room in rooms if room != library]
    return bool(outside) and outside[-1] == "polyattn"
