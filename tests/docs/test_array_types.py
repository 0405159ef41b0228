"""Each row of the page on array types, run."""

import array_types
import pytest


@pytest.mark.parametrize("name", array_types.KINDS)
def test_what_happens_with_a_type_of_array_is_on_the_page(name):
    """Mend by: python docs/capabilities.py."""
    kind = array_types.KINDS[name]
    found = array_types.outcome(kind)
    if found is None:
        pytest.skip(f"there is no array of {kind.module} here")
    assert array_types.written()[name] == found
