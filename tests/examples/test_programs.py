"""The examples: models that import flash_attn, triangle attention, and texts in a batch."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from polyattn import nn
from polyattn.dialects import flash_attn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    """Import a program of an example."""
    file = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- no_gpu: programs that import flash_attn and xformers ----


@pytest.fixture(scope="module")
def models():
    with flash_attn.install("flash_attn", "xformers"):
        return load("no_gpu/models.py")


def test_a_packed_batch_is_each_of_its_sequences_and_each_of_its_steps(models):
    torch.manual_seed(0)
    layer = models.CausalAttention()
    x, mask = torch.randn(2, 7, models.WIDTH), torch.ones(2, 7, dtype=int)
    mask[1, 4:] = 0
    output = layer(x, mask)
    assert (output[1, 4:] == 0).all()
    short = layer(x[1:, :4], mask[1:, :4])
    torch.testing.assert_close(output[1, :4], short[0])
    caches = torch.zeros(2, 2, models.LONGEST, models.HEADS, models.SIZE)
    for n in range(7):
        lengths = torch.full((2,), n, dtype=torch.int32)
        step = layer.step(x[:, n : n + 1], *caches, lengths)
        torch.testing.assert_close(step[0, 0], output[0, n])
    layer.qkv.weight.grad = None
    output.sum().backward()
    assert layer.qkv.weight.grad.abs().sum() > 0


def test_images_of_several_sizes_are_apart(models):
    layer = models.ImageAttention()
    images = [torch.randn(2, 4, models.WIDTH), torch.randn(1, 9, models.WIDTH)]
    for x, found in zip(images, layer(images), strict=True):
        torch.testing.assert_close(found, layer([x])[0])


# ---- pair_bias: triangle attention ----


@pytest.fixture(scope="module")
def example():
    return load("pair_bias/triangle.py")


def written_out(module, pairs, known, weight):
    """Return triangle attention by einsum, in float64."""
    n, size = pairs.shape[0], module.SIZE
    columns = torch.einsum("ijm,mc->ijc", pairs, weight)
    q, k, v = columns[..., : -module.HEADS].reshape(n, n, 3, -1, size).unbind(2)
    scores = torch.einsum("ijhd,ikhd->ihjk", q, k) / size**0.5
    scores = scores + columns[..., -module.HEADS :].permute(2, 0, 1)
    weights = scores.masked_fill(~known[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("ihjk,ikhd->ihjd", weights, v)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_its_gradient_is_that_of_the_formula(example, name):
    pytest.importorskip(name)
    residues, rng = 33, np.random.default_rng(0)
    pairs = rng.standard_normal((residues, residues, example.WIDTH))
    known = rng.random((residues, residues)) < 0.8
    known[:, 0] = True
    weight = rng.standard_normal((example.WIDTH, 3 * example.WIDTH + example.HEADS)) / 6
    along = rng.standard_normal((residues, example.HEADS, residues, example.SIZE))
    leaf = torch.from_numpy(weight).requires_grad_()
    output = written_out(example, torch.from_numpy(pairs), torch.from_numpy(known), leaf)
    (exact,) = torch.autograd.grad(output, leaf, torch.from_numpy(along))
    given = [x.astype("float32") if x.dtype == float else x for x in (pairs, known, weight, along)]
    np.testing.assert_allclose(example.triangle(*given[:3]), output.detach(), atol=2e-5)
    found = getattr(example, f"on_{name}")(*given)
    np.testing.assert_allclose(found, exact, atol=2e-5 * exact.abs().max())


# ---- serving: texts of a batch that grows and shrinks share pages ----


@pytest.fixture(scope="module")
def batching():
    return load("serving/batching.py")


def test_each_text_is_what_it_is_by_itself(batching):
    like = np.zeros(1, np.float32)
    options = {"like": like, "is_causal": True, "rotary": nn.Rotary(8), "seed": 1}
    model = nn.Transformer.init(50, 32, 4, 2, **options)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 21).tolist()
    texts = [
        batching.Text(rng.integers(0, 50, n).tolist(), steps)
        for n, steps in ((3, 4), (1, 9), (9, 2), (2, 7), (5, 1), (1, 8))
    ]
    server = batching.Server(model, prompt, most=3, to=np.asarray, page=4)
    server.waiting.extend(texts)
    sizes, ended = [], []
    while server.waiting or any(server.running):
        ended += server.step()
        sizes.append(len(server.running))
        assert server.pages() <= 6 + 3 * 4  # those of the prompt once, and of three texts
    assert (max(sizes), sizes[-1]) == (3, 1)
    assert len(ended) == 6
    for text in texts:
        whole = np.asarray(prompt + text.question)
        assert nn.generate(model, whole, text.steps)[len(whole) :].tolist() == text.answer


def test_the_program_says_how_the_batch_grows_and_shrinks(batching, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["batching.py"])
    batching.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 texts in ")
    assert sum(int(line.split()[-2]) for line in lines) == 10
