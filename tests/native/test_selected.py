"""Selected keys on the compiled kernel: the results of dense masks, whatever goes beside them."""

import numpy as np
import pytest
from arrays import close, draw
from optional import jnp, torch

from polyattn import (
    UnsupportedError,
    attention,
    attention_partial,
    attention_vjp,
    masks,
    scores,
    use_threads,
)
from polyattn_native import selected

RESTS = ("none", "causal", "window and prefix", "padding", "dilated", "array by head", "function")
WITH = ("nothing", "softcap", "sinks", "offset", "offsets", "bias")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Read keys by their numbers, however many are selected."""
    monkeypatch.setattr(selected, "TIMES", 0)
    monkeypatch.setattr(selected, "FEW_ROWS", 2**30)


class Drawn:
    """A random call."""

    def __init__(self, seed, dtype, rest="none", beside="nothing"):
        rng = self.rng = np.random.default_rng(seed)
        self.items, groups = rng.integers(1, 4, 2).tolist()
        self.heads = groups * int(rng.integers(1, 4))
        self.rows, self.keys, head, value = rng.integers(1, 73, 4).tolist()
        if seed % 2:  # whole vectors
            head, value = 16 * (1 + head // 16), 16 * (1 + value // 16)
        shapes = (
            (self.items, self.heads, self.rows, head),
            (int(rng.choice([1, self.items])), groups, self.keys, head),
            (self.items, groups, self.keys, value),
        )
        self.arrays = [self.strided(shape).astype(dtype, order="K") for shape in shapes]
        self.mask = self.selection()
        if rest != "none":
            self.mask &= self.rest(rest)
        self.options = {
            "nothing": {},
            "softcap": {"softcap": 2.0, "scale": 0.7},
            "sinks": {"sinks": rng.standard_normal(self.heads).astype(dtype)},
            "offset": {"query_offset": int(rng.integers(-5, 40)), "is_causal": True},
            "offsets": {"query_offset": rng.integers(-5, 40, self.items), "window": (9, 2)},
            "bias": {"bias": rng.standard_normal((self.heads, self.rows, 1)).astype(dtype)[None]},
        }[beside]

    def strided(self, shape):
        """Return numbers with rows first, within longer rows, or contiguous."""
        b, h, n, d = shape
        made = self.rng.standard_normal
        kind = self.rng.integers(3)
        if kind == 0:
            return made((b, n, h, d)).swapaxes(1, 2)
        return made((b, h, n + 3, d + 1))[..., :n, :d] if kind == 1 else made(shape)

    def selection(self):
        rng, many = self.rng, int(self.rng.integers(1, 20))
        lead = ((), (1, 1), (self.items, 1), (1, self.heads), (self.items, self.heads))
        of = lead[rng.integers(5)]
        if rng.random() < 0.5:
            rows = int(rng.choice([1, self.rows]))
            return masks.selected(rng.integers(-1, self.keys + 3, (*of, rows, many)))
        down, across = rng.integers(1, 20, 2).tolist()
        table = rng.integers(-1, -(-self.keys // across) + 1, (*of, -(-self.rows // down), many))
        return masks.blocks(table, (down, across))

    def rest(self, name):
        rng = self.rng
        return {
            "causal": masks.causal,
            "window and prefix": lambda: masks.window(9, 4) | masks.prefix(3),
            "padding": lambda: masks.padding(rng.integers(0, self.keys + 1, self.items)),
            "dilated": lambda: ~masks.dilated(3),
            "array by head": lambda: masks.dense(
                rng.random((self.items, self.heads, self.rows, self.keys)) < 0.7
            ),
            "function": lambda: masks.rule(lambda b, h, i, j: (i + j + h) % 3 != b),
        }[name]()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rest", RESTS)
def test_results_and_gradients_are_those_of_a_dense_mask(rest, seed):
    for number, beside in enumerate(WITH):
        # Gradients of single keys in float32 are added up by ranges of the memory.
        dtype = ("float32", "float64")[number % 2]
        x = Drawn((2 * seed + number) % 8, dtype, rest, beside)
        rows, size = selected.selection_of(x.mask)[0].sizes
        if beside == "bias" and (rows or x.rows, size) != (1, 1):
            continue
        agrees_with_a_dense_mask(x, dtype, beside)


def test_one_key_head_lies_anywhere_in_memory():
    agrees_with_a_dense_mask(Drawn(12, "float64", "array by head", "offset"), "float64", "offset")


def agrees_with_a_dense_mask(x, dtype, beside):
    """Hold results and gradients of the kernel against those of `dense`."""
    options = {"mask": x.mask, **x.options}
    found, wanted = (
        attention_partial(*x.arrays, kernel=kernel, **options) for kernel in ("native", "dense")
    )
    close(found, wanted, 200)
    if beside != "bias":
        gradient = x.rng.standard_normal(found.output.shape).astype(dtype)
        found, wanted = (
            attention_vjp(*x.arrays, kernel=kernel, **options)[1](gradient)
            for kernel in ("native", "dense")
        )
        for name in ("query", "key", "value", *(["sinks"] if beside == "sinks" else [])):
            close(getattr(found, name), getattr(wanted, name), 200)


@pytest.mark.parametrize("dtype", ["int8", "uint64"])
def test_numbers_are_integers_of_any_dtype(dtype):
    (x,) = draw((2, 600, 16))
    numbers = np.random.default_rng(1).integers(0, 38, (38, 3))
    for seen in (lambda t: masks.selected(t[:1]), lambda t: masks.blocks(t, 16)):
        found = attention(x, x, x, mask=seen(numbers.astype(dtype)), kernel="native")
        close(found, attention(x, x, x, mask=seen(numbers), kernel="dense"), 200)


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_tensors(is_compiled):
    x = Drawn(3, "float32", "causal")
    numbers = [torch.from_numpy(one.copy()).bfloat16() for one in x.arrays]
    mask = masks.selected(torch.from_numpy(x.rng.integers(-1, x.keys, (x.rows, 5))))

    def loss(*tensors, kernel="native"):
        output = attention(*tensors, mask=mask & masks.causal(), kernel=kernel)
        return output.float().square().sum()

    tensors = [one.requires_grad_() for one in numbers]
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if is_compiled else loss
    found = torch.autograd.grad(run(*tensors), tensors)
    wide = [one.detach().double().requires_grad_() for one in tensors]
    close(found, torch.autograd.grad(loss(*wide, kernel="dense"), wide), 20)


def test_pages_are_read_where_they_lie():
    rng = np.random.default_rng(0)
    pools = [rng.standard_normal((40, 2, 8, 16)).astype(np.float32) for _ in range(2)]
    table = rng.permutation(40)[:36].reshape(3, 12)
    lengths = np.array([96, 50, 0])
    table[1, 7:], table[2] = -1, 99
    query = rng.standard_normal((3, 4, 2, 16)).astype(np.float32)
    for mask in (
        masks.selected(rng.integers(0, 96, (3, 1, 2, 20))),
        masks.blocks(rng.integers(0, 24, (3, 4, 1, 9)), (2, 4)),
    ):
        options = {"block_table": table, "key_lengths": lengths, "is_causal": True, "mask": mask}
        found = attention(query, *pools, kernel="native", **options)
        expected = attention(query, *pools, kernel="dense", **options | {"block_table": table % 40})
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    table[0, 3] = 40
    tensors = map(torch.from_numpy, (query, *pools))
    options |= {"block_table": torch.from_numpy(table), "key_lengths": torch.from_numpy(lengths)}
    with pytest.raises(IndexError, match="names page 40 of a pool of 40 pages"):
        attention(*tensors, kernel="native", **options)


@pytest.mark.parametrize("kernel", ["native", "gathered"])
@pytest.mark.parametrize("to", [np.asarray, torch.asarray], ids=["numpy", "torch"])
def test_gradients_of_pools_are_those_of_a_dense_mask(to, kernel):
    rng = np.random.default_rng(0)
    pools = [to(rng.standard_normal((60, 2, 8, 16))) for _ in range(2)]
    query = to(rng.standard_normal((2, 4, 3, 16)))
    table, lengths = to(rng.permutation(60)[:48].reshape(2, 24)), to(np.array([190, 101]))
    for mask in (
        masks.selected(to(rng.integers(0, 192, (2, 4, 3, 5)))),
        masks.blocks(to(rng.integers(0, 48, (2, 4, 1, 1))), (3, 4)),
    ):
        options = {"block_table": table, "key_lengths": lengths, "mask": mask}
        found, expected = (
            attention_vjp(query, *pools, kernel=one, **options)[1](query)
            for one in (kernel, "dense")
        )
        for name in ("query", "key", "value"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-12)


def test_what_is_not_selected_reaches_no_row():
    rng = np.random.default_rng(1)
    query, key, value = rng.standard_normal((3, 2, 40, 32)).astype(np.float32)
    lists = rng.integers(0, 39, (40, 6))
    expected = attention(query, key, value, mask=masks.selected(lists), kernel="native")
    key[:, 39], value[:, 39] = np.nan, np.inf
    np.testing.assert_array_equal(
        attention(query, key, value, mask=masks.selected(lists), kernel="native"), expected
    )
    lists[7, 0] = 39
    spoilt = attention(query, key, value, mask=masks.selected(lists), kernel="native")
    np.testing.assert_array_equal(np.isnan(spoilt).any((0, 2)), np.arange(40) == 7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dropout": (0.5, 1)}, "it does not compute dropout"),
        ({"score_mod": scores.alibi(2)}, "it does not compute score_expression"),
        ({"bias": np.zeros((40, 40)), "mask": masks.blocks(np.zeros((5, 1), int), 8)}, "bias"),
    ],
    ids=["dropout", "scores", "bias of blocks"],
)
def test_what_is_not_computed_is_refused_by_name(options, said):
    x = np.ones((2, 40, 8))
    given = {"mask": masks.selected(np.zeros((40, 2), int))} | options
    with pytest.raises(UnsupportedError, match=said):
        attention(x, x, x, kernel="native", **given)
    if "score_mod" not in options:
        attention(x, x, x, **given)
    with pytest.raises(UnsupportedError, match="NumPy and torch only"):
        attention(*[jnp.asarray(x)] * 3, kernel="native", **given)


def test_threads_change_no_bits():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 2, 4, 300, 32)).astype(np.float32)
    mask = masks.selected(rng.integers(0, 300, (300, 40)))
    found = []
    for threads in (1, 3):
        with use_threads(threads):
            output, pullback = attention_vjp(*x, mask=mask, kernel="native")
            found.append([output, *pullback(output)[:3]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
