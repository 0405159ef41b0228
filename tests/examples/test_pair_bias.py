"""The triangle attention of `examples/pair_bias` and its gradient are those of the formula."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

FILE = Path(__file__).resolve().parents[2] / "examples" / "pair_bias" / "triangle.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("triangle_attention", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written_out(module, pairs, known, weight):
    """Return triangle attention by einsum, in float64."""
    n, size = pairs.shape[0], module.SIZE
    columns = torch.einsum("ijm,mc->ijc", pairs, weight)
    q, k, v = columns[..., : -module.HEADS].reshape(n, n, 3, -1, size).unbind(2)
    scores = torch.einsum("ijhd,ikhd->ihjk", q, k) / size**0.5
    scores = scores + columns[..., -module.HEADS :].permute(2, 0, 1)
    weights = scores.masked_fill(~known[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("ihjk,ikhd->ihjd", weights, v)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("residues", [1, 33])
def test_its_gradient_is_that_of_the_formula(example, library, residues):
    pytest.importorskip(library)
    rng = np.random.default_rng(residues)
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
    found = getattr(example, f"on_{library}")(*given)
    np.testing.assert_allclose(found, exact, atol=2e-5 * exact.abs().max())
