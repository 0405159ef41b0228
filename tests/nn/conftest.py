"""Tiny models of transformers, made once for all tests of layers."""

import pytest
from optional import jax, torch
from tiny_models import LIBRARIES


@pytest.fixture(autouse=True)
def careful_jax():
    """Have JAX refuse to broadcast other ranks, and to mix dtypes."""
    if not jax:
        yield
        return
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=LIBRARIES)
def library(request):
    """A pair of functions: from NumPy to a library, and back."""
    return LIBRARIES[request.param]


@pytest.fixture(scope="session")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        module = pytest.importorskip("transformers")
        module.logging.set_verbosity_error()
        module.logging.disable_progress_bar()
        return module


@pytest.fixture(scope="session")
def made(transformers):
    """Return tiny models of random weights, none of them 0 or 1, by name and kind of head."""
    models = {}

    def make(name, settings, kind="AutoModelForCausalLM"):
        key = name, kind, str(settings)
        if key not in models:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(name.split()[0], **settings)
            config._attn_implementation = "eager"  # with softcaps
            model = getattr(transformers, kind).from_config(config).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            models[key] = model
        return models[key]

    return make
