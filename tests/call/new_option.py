"""What each way to call does with an option `head_scale`, (H,), that multiplies the scores.

`test_new_option.py` runs this in copies of the package that have so much of the option. It prints
for each way "right", "refused", or what is wrong.
"""

import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np
import torch

import polyattn
from polyattn import attention, attention_jvp, attention_vjp, nn, parallel

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 2, 4, 4, 8))
ALONG = RNG.standard_normal(Q.shape)
F = RNG.uniform(0.5, 2, 4)
WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


def scaled(query, factors):
    """Return a query whose scores are those of `head_scale`."""
    return query * factors[:, None, None]


def expected():
    """Return the output and the gradients, by calls without the option."""
    output, pullback = attention_vjp(scaled(Q, F), K, V, is_causal=True)
    found = pullback(ALONG)
    of_query = scaled(found.query, F)
    return output, (of_query, found.key, found.value, (found.query * Q).sum((0, 2, 3)))


def near(found, wanted):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-5)


OUTPUT, GRADIENTS = expected()


@way
def forward():
    for kernel in (None, "tiled"):
        near(attention(Q, K, V, is_causal=True, head_scale=F, kernel=kernel), OUTPUT)


@way
def weights():
    found = polyattn.attention_weights(Q, K, is_causal=True, head_scale=F)
    near(found @ V, OUTPUT)


@way
def vjp():
    output, pullback = attention_vjp(Q, K, V, is_causal=True, head_scale=F)
    near(output, OUTPUT)
    gradients = pullback(ALONG)
    for found, wanted in zip((*gradients[:3], gradients.head_scale), GRADIENTS, strict=True):
        near(found, wanted)


@way
def jvp():
    moved = {"query": Q, "value": V}
    of_scaled = {"query": scaled(Q, F)}
    for tangents, wanted in ((moved, moved | of_scaled), ({"head_scale": F}, of_scaled)):
        _, wanted = attention_jvp((scaled(Q, F), K, V), wanted, is_causal=True)
        near(attention_jvp((Q, K, V), tangents, is_causal=True, head_scale=F)[1], wanted)


def by_torch(call):
    q, k, v, f = (torch.tensor(x, requires_grad=True) for x in (Q, K, V, F))
    call(q, k, v, is_causal=True, head_scale=f).backward(torch.tensor(ALONG))
    for found, wanted in zip((q, k, v, f), GRADIENTS, strict=True):
        near(found.grad, wanted)


WAYS["autograd_of_torch"] = lambda: by_torch(attention)
WAYS["torch_compile"] = lambda: by_torch(
    torch.compile(attention, backend="aot_eager", fullgraph=True)
)


@way
def autograd_of_jax():
    def loss(q, k, v, f):
        return (attention(q, k, v, is_causal=True, head_scale=f) * ALONG).sum()

    found = jax.grad(loss, argnums=(0, 1, 2, 3))(*map(jnp.asarray, (Q, K, V, F)))
    for one, wanted in zip(found, GRADIENTS, strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-4)


def in_chunks():
    return (da.from_array(x, chunks=(1, 2, 2, 8)) for x in (Q, K, V))


@way
def dask():
    near(attention(*in_chunks(), is_causal=True, head_scale=F), OUTPUT)


@way
def gradients_of_dask():
    _, pullback = attention_vjp(*in_chunks(), is_causal=True, head_scale=F)
    near(pullback(da.from_array(ALONG)).query, GRADIENTS[0])


def on_two_ranks(strategy, is_gradient):
    """Compare outputs, or gradients by the query, on ranks that have half of the tokens each."""

    def on_each(ranks):
        half = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        rows = slice(None) if strategy == "decode" else half
        arrays = Q[..., rows, :], K[..., half, :], V[..., half, :]
        options = {"over": ranks, "strategy": strategy, "is_causal": True, "head_scale": F}
        if is_gradient:
            _, pullback = parallel.attention_vjp(*arrays, **options)
            near(pullback(ALONG[..., rows, :]).query, GRADIENTS[0][..., rows, :])
        else:
            near(parallel.attention(*arrays, **options), OUTPUT[..., rows, :])

    parallel.run_threads(2, on_each)


for name in parallel.choice.STRATEGIES:
    WAYS[f"parallel_{name}"] = lambda s=name: on_two_ranks(s, False)
    WAYS[f"gradients_of_parallel_{name}"] = lambda s=name: on_two_ranks(s, True)


@way
def layer():
    one = nn.MultiHeadAttention.init(8, heads=4, seed=0, like=Q)
    x = Q[:, 0]
    query, key, value = one._project((x, None, None), None, None, None)
    near(one(x, head_scale=F), one._merge(attention(scaled(query, F), key, value)))


@way
def calls_without_it():
    x = Q.astype("float32")
    polyattn.attention_jvp((x, x, x), (x, None, x), bias=x[..., :4], sinks=x[0, :, 0, 0])
    polyattn.attention_vjp(x, x, x, bias=x[..., :4], sinks=x[0, :, 0, 0])[1](x)
    y = torch.tensor(x, requires_grad=True)
    attention(y, y, y, sinks=y[0, :, 0, 0]).sum().backward()


def outcome(function):
    try:
        function()
    except AssertionError as error:
        return "WRONG " + " ".join(str(error).split())[:200]
    except Exception as error:
        by_name = "head_scale" in str(error) or "head_scale" in str(error.__cause__)
        text = " ".join(str(error).split())
        return "refused" if by_name else f"ERROR {type(error).__name__}: {text[:300]}"
    return "right"


if __name__ == "__main__":
    for name, function in WAYS.items():
        print(name, outcome(function), flush=True)
