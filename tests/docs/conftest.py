"""Run the pages as in a clone in which no other distribution adds kernels."""

import pytest

from polyattn._dispatch import cache, extensions, registry


@pytest.fixture(autouse=True, scope="module")
def _without_the_compiled_kernel():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYATTN_NATIVE", "0")
        patch.setattr(registry, "_plugins", {})
        patch.setattr(extensions, "_extensions", [])
        cache.forget()
        yield
    cache.forget()
