"""What a new process pays, each timed in an interpreter of its own that has imported nothing."""

from __future__ import annotations


class Imports:
    """Statements of a new process."""

    version = "1"
    repeat = (3, 5, 20.0)
    timeout = 300

    def timeraw_numpy(self) -> str:
        """NumPy alone, which all the others pay too."""
        return "import numpy"

    def timeraw_polyattn(self) -> str:
        """The package."""
        return "import polyattn"

    def timeraw_first_call(self) -> str:
        """The package, NumPy's backend, and a call of no size."""
        return """
        import numpy, polyattn
        query = numpy.ones((1, 1, 16, 16), dtype=numpy.float32)
        polyattn.attention(query, query, query)
        """

    def timeraw_list_backends(self) -> str:
        """The table of backends, which loads every array library that is installed."""
        return "import polyattn; polyattn.list_backends()"
