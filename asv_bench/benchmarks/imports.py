"""Time imports, each in a new interpreter."""

from __future__ import annotations


class Imports:
    """Statements of a new process."""

    version = "1"
    repeat = (3, 5, 20.0)
    timeout = 300

    def timeraw_numpy(self) -> str:
        """Import only NumPy, which all others import too."""
        return "import numpy"

    def timeraw_polyattn(self) -> str:
        """Import the package, which loads nothing else before a name is used."""
        return "import polyattn"

    def timeraw_first_call(self) -> str:
        """Import the package and NumPy's backend, and make a small call."""
        return """
        import numpy, polyattn
        query = numpy.ones((1, 1, 16, 16), dtype=numpy.float32)
        polyattn.attention(query, query, query)
        """

    def timeraw_list_backends(self) -> str:
        """List the backends, which loads every installed array library."""
        return "import polyattn; polyattn.list_backends()"
