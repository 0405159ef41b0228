"""The compiled kernel by each set of instructions that this processor has."""

import pytest

try:
    from polyattn_native import library
except (ImportError, OSError):  # it is not installed, or not built
    ISAS = ()
else:
    ISAS = tuple(library.instruction_sets(library.library()))


@pytest.fixture(params=ISAS)
def isa(request):
    library.use(library.library(), request.param)
    yield request.param
    library.use(library.library(), ISAS[0])
