"""The libraries that expressions are tested on."""

import pytest
from arrays import EVERYWHERE


@pytest.fixture(params=EVERYWHERE, ids=str)
def library(request):
    """Return each library in turn: `library.to` makes its arrays, `library.back` NumPy's."""
    return request.param
