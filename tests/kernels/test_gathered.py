"""The kernel that gathers named keys: where it is chosen, in what pieces, and its derivatives."""

import numpy as np
import pytest
from arrays import close
from optional import jax, torch

import polyattn
from polyattn import attention, attention_vjp, explain, masks
from polyattn._base.slices import Slice
from polyattn._core.expressions.parts import Part
from polyattn._kernels.gathered import Gathered

RNG = np.random.default_rng(7)
H, L, S, D = 4, 21, 400, 8
QUERY, KEY, VALUE = (RNG.normal(size=(2, H, n, D)) for n in (L, S, S))
KEYS = RNG.integers(-1, S, (H, L, 6))[None]
#: Selections of few keys.
SELECTIONS = {
    "each head": masks.selected(KEYS),
    "all heads, some twice": masks.selected(KEYS[0, 0] % 4),
    "all rows": masks.selected(KEYS[:, :, :1]),
    "no list": masks.selected(KEYS[..., :0]),
    "blocks": masks.blocks(RNG.integers(-1, 80, (2, 1, 6, 3)), (4, 5)),
    "blocks of all rows": masks.blocks([[3, 1]], (30, 7)),
    "blocks of one row": masks.blocks(KEYS[..., :2] // 5, (1, 5)),
    "with others": masks.selected(KEYS) & masks.causal() & masks.prefix(np.array([40, 400])),
}


def chosen(mask, shape=(2, H, L, D), keys=S, **options):
    key = (2, H, keys, D)
    return explain(shape, key, key, mask=mask, backend="array-api", **options).chosen.kernel


def in_tiles(numbers):
    kernel = Gathered()
    kernel.tile = numbers
    return kernel


@pytest.mark.parametrize("name", SELECTIONS)
def test_few_named_keys_are_gathered_and_the_gradients_are_those_of_a_dense_mask(name):
    mask, gradient = SELECTIONS[name], RNG.normal(size=(2, H, L, D))
    assert chosen(mask) == "gathered"
    output, pullback = attention_vjp(QUERY, KEY, VALUE, mask=mask, kernel="dense")
    for kernel in (in_tiles(1), in_tiles(3000), "gathered"):
        found, back = attention_vjp(QUERY, KEY, VALUE, mask=mask, kernel=kernel)
        close((found, *back(gradient)[:3]), (output, *pullback(gradient)[:3]), 4000)


def test_many_named_keys_are_a_mask_and_no_selection_is_not_listed():
    many = masks.selected(RNG.integers(0, S, (L, 17)))
    assert chosen(many) == "dense"
    assert chosen(masks.blocks(RNG.integers(0, 80, (1, 26)), (L, 5))) == "gathered"
    why = str(explain((2, H, L, D), (2, H, S, D), (2, H, S, D), mask=many, backend="array-api"))
    assert "17 of 400 keys are named for a row: a mask takes less time" in why
    for mask in (masks.causal(), ~masks.selected(KEYS), masks.selected(KEYS) | masks.prefix(1)):
        assert "gathered" not in str(explain(QUERY, KEY, VALUE, mask=mask, backend="array-api"))
    with pytest.raises(polyattn.UnsupportedError, match=r"gathered .*its mask names no keys"):
        attention(QUERY, KEY, VALUE, is_causal=True, kernel="gathered", backend="array-api")


@pytest.mark.parametrize("name", ["blocks", "blocks of one row"])
def test_a_part_may_begin_inside_of_a_block(name):
    """As the parts of dask and of `polyattn.parallel` may."""
    part = Part((2,), (Slice(0, 2),), Slice(0, H), Slice(3, 11), Slice(20, 380))
    mask = SELECTIONS[name].part(part)
    arrays = QUERY[..., 3:14, :], KEY[..., 20:, :], VALUE[..., 20:, :]
    expected = attention(*arrays, mask=mask, kernel="dense")
    for numbers in (1, 2000):
        close(attention(*arrays, mask=mask, kernel=in_tiles(numbers)), expected, 4000)


@pytest.mark.needs("jax")
def test_gradients_of_jax():
    mask = SELECTIONS["blocks"]

    @jax.jit
    def gradients(*x):  # in parts, which are a loop
        output, pull = jax.vjp(lambda *x: attention(*x, mask=mask, kernel=in_tiles(9000)), *x)
        return pull(output)

    output, pullback = attention_vjp(QUERY, KEY, VALUE, mask=mask, kernel="dense")
    found = gradients(*(x.astype("float32") for x in (QUERY, KEY, VALUE)))
    close(found, pullback(output)[:3], 400)


@pytest.mark.needs("torch")
def test_traced_calls_of_torch():
    def named(query, key, indices):
        mask = masks.selected(indices) & masks.causal()
        return attention(query, key, key, mask=mask, kernel="gathered")

    indices = np.broadcast_to(KEYS, (2, *KEYS.shape[1:])).copy()
    mask = masks.selected(indices) & masks.causal()
    expected = attention(QUERY, KEY, KEY, mask=mask, kernel="dense")
    given = [torch.from_numpy(x) for x in (QUERY, KEY, indices)]
    for traced in (torch.compile(named, backend="eager", fullgraph=True), torch.func.vmap(named)):
        close(traced(*given), expected, 4000)


@pytest.mark.slow
def test_one_program_of_torch_for_lists_and_batches_of_any_size():
    @torch.compile(backend="eager", fullgraph=True)
    def run(query, key, indices):
        return attention(query, key, key, mask=masks.selected(indices), kernel="gathered")

    for batch, count in ((2, 4), (3, 5)):
        given = torch.ones(batch, 2, 3, 4), torch.rand(batch, 2, 6, 4)
        keys = torch.arange(count).expand(batch, 2, 3, count).contiguous()
        expected = given[1][:, :, :count].mean(-2, keepdim=True).expand(batch, 2, 3, 4)
        found = run(torch.zeros_like(given[0]), given[1], keys)
        torch.testing.assert_close(found, expected)
