"""Triangle attention of protein models, with its gradient, on NumPy, torch and JAX."""

import numpy as np
from array_api_compat import array_namespace

from polyattn import attention, attention_vjp

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE


def split(pairs, weight):
    """Return query, key, value (N, H, N, D) and bias (1, H, N, N), a product of pairs (N, N, M)."""
    xp, n = array_namespace(pairs), pairs.shape[0]
    columns = pairs @ weight
    parts = xp.reshape(columns[..., :-HEADS], (n, n, 3, HEADS, SIZE))
    query, key, value = (xp.permute_dims(parts[:, :, i], (0, 2, 1, 3)) for i in range(3))
    return query, key, value, xp.permute_dims(columns[..., -HEADS:], (2, 0, 1))[None]


def triangle(pairs, known, weight):
    """Return (N, H, N, D): pair (i, j) reads the known (i, k), with a bias by (j, k)."""
    query, key, value, bias = split(pairs, weight)
    return attention(query, key, value, bias=bias, mask=known[:, None, None, :])


def on_numpy(pairs, known, weight, along):
    """Return the gradient of the weight (M, 3M + H), without autograd."""
    query, key, value, bias = split(pairs, weight)
    _, pullback = attention_vjp(query, key, value, bias=bias, mask=known[:, None, None, :])
    of = pullback(along)
    parts = np.stack((of.query, of.key, of.value), axis=1).transpose(0, 3, 1, 2, 4)
    parts = parts.reshape(*known.shape, 3 * WIDTH)
    columns = np.concatenate((parts, of.bias[0].transpose(1, 2, 0)), axis=-1)
    return np.einsum("ijm,ijc->mc", pairs, columns)


def on_torch(pairs, known, weight, along):
    """Return the gradient of the weight by autograd."""
    import torch

    pairs, known, weight, along = map(torch.from_numpy, (pairs, known, weight, along))
    output = triangle(pairs, known, weight.requires_grad_())
    return torch.autograd.grad(output, weight, along)[0].numpy()


def on_jax(pairs, known, weight, along):
    """Return the gradient of the weight by `jax.grad`, compiled."""
    import jax

    gradient = jax.grad(lambda *x: (triangle(*x[:3]) * x[3]).sum(), argnums=2)
    return np.asarray(jax.jit(gradient)(*map(jax.numpy.asarray, (pairs, known, weight, along))))


if __name__ == "__main__":
    draw = np.random.default_rng(0).standard_normal
    pairs, weight = draw((24, 24, WIDTH), "float32"), draw((WIDTH, 3 * WIDTH + HEADS), "float32")
    given = pairs, pairs[..., 0] < 1, weight / WIDTH**0.5, draw((24, HEADS, 24, SIZE), "float32")
    print(*(f"{one.__name__} {one(*given).std():.4f}" for one in (on_numpy, on_torch, on_jax)))
