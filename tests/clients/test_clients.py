"""Programs that import another library's attention, unedited, against their own path by torch."""

import importlib

import pytest
from optional import torch

from polyattn.dialects import flash_attn

pytestmark = pytest.mark.with_native

MODELS = ["bert", "gpt", "vision"]


@pytest.fixture(scope="module")
def program():
    """Import a program while the modules that it imports are polyattn's."""
    with flash_attn.install("flash_attn", "flash_attn_interface", "xformers"):
        yield importlib.import_module


def to(dtype, inputs):
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def models(module, dtype):
    """Return a program's model, its own path in the same dtype, and that in float64."""
    torch.manual_seed(1)
    model = module.Model().to(dtype)
    own = [module.ByHand().to(one) for one in (dtype, torch.float64)]
    for one in own:
        one.load_state_dict(model.state_dict())
    return model, *own


def results(model, inputs):
    """Return the outputs of a model, and the gradients of its parameters by a sum of them."""
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = (torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs)
    sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True)).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {f"output {number}": x.detach() for number, x in enumerate(outputs)} | gradients


def agree(model, own, exact, inputs):
    """Assert that a model's errors are at most twice those of its own path, or 4 roundings."""
    wanted = results(exact, to(torch.float64, inputs))
    found, limits = results(model, inputs), results(own, inputs)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        rounding = torch.finfo(found[name].dtype).eps * x.abs().max()
        limit = 2 * (limits[name] - x).abs().max() + 4 * rounding
        assert (found[name] - x).abs().max() <= limit, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(program, name, dtype):
    module, dtype = program(name), getattr(torch, dtype)
    agree(*models(module, dtype), to(dtype, module.inputs()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about a break of the graph
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_program(program, name):
    module = program(name)
    model, own, exact = models(module, torch.float32)
    torch.compiler.reset()
    is_whole = name != "bert"  # which makes a number from a tensor, so its parts are compiled
    model.compile(backend="aot_eager", fullgraph=is_whole)
    agree(model, own, exact, module.inputs())


def test_a_gpt_generates_from_its_cache(program):
    module = program("gpt")
    model, _, exact = models(module, torch.float32)
    (tokens,) = module.inputs(5)
    wanted = tokens
    for _ in range(20):
        wanted = torch.cat([wanted, exact(wanted)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(tokens, 20), wanted)
