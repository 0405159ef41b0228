"""The tiled kernel: sizes of tiles, tiles that are skipped, memory, and far positions."""

import tracemalloc

import numpy as np
import pytest
from arrays import close, draw, tiles_of, visited_tiles

import polyattn
from polyattn import attention
from polyattn._kernels.tiled import Tiled


def test_tiles_without_a_visible_key_are_not_visited(monkeypatch):
    visited, x = visited_tiles(monkeypatch), np.ones((64, 4))
    attention(x, x, x, is_causal=True, window=(24, None), kernel=tiles_of(40))
    p, j = np.ogrid[:64, :64]
    visible, computed = (j <= p) & (j >= p - 24), np.zeros((64, 64), bool)
    for rows, columns, banded in visited:
        tile = np.s_[rows.start : rows.stop, columns.start : columns.stop]
        computed[tile] = True
        assert visible[tile].any()
        assert banded == (not visible[tile].all())
    assert computed[visible].all()
    assert computed.mean() < 0.5
    assert {banded for _, _, banded in visited} == {True, False}


def problem_of(heads, rows, keys=None, **changed):
    shape = (heads, keys or rows, 64)
    return polyattn.explain((heads, rows, 64), shape, shape).problem._replace(**changed)


#: The problem, and the rows and keys of a tile; None where one tile holds all the scores.
SIZES = {
    "as many scores as a tile holds": (problem_of(1, 1024), None),
    "one row more": (problem_of(1, 1025, 1024), (1024, 1024)),
    "many heads": (problem_of(512, 4096), (64, 64)),
    "one row": (problem_of(4096, 1, 10**6), (1, 4096)),
    "as many as a tile of an accelerator": (problem_of(16, 1024, device="cuda:0"), None),
    "one key more": (problem_of(16, 1024, 1025, device="cuda:0"), (1024, 1024)),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_tile_is_about_square_and_worth_a_call(name):
    problem, sizes = SIZES[name]
    remark = Tiled().only_on_request(problem)
    assert remark == (None if sizes else "one tile holds all the scores: dense does the same")
    assert sizes is None or Tiled().block_sizes(problem) == sizes


def peak(function):
    """Return the most memory that a call held beyond what there was before, and its result."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = function()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


def test_memory_of_a_long_call_is_bounded():
    x = np.ones((1, 1, 8192, 16), np.float32)  # scores of 268 MB
    for backend, most in (("array-api", 64e6), ("numpy", 24e6)):
        held, output = peak(lambda backend=backend: attention(x, x, x, backend=backend))
        assert held - output.nbytes < most


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_memory_of_a_trained_bias_of_keys_on_torch_is_bounded(run_python):
    """With what a first call imports."""
    held = run_python("""
import resource, torch
from polyattn import attention
torch.set_num_threads(1)
bias = torch.randn(1, 1, 8192, requires_grad=True)
q, k, v = (torch.randn(1, 1, 8192, 64) for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention(q, k, v, is_causal=True, bias=bias).sum().backward()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(1024 * (after - before))
""")
    assert float(held) < 200e6


def test_keys_of_grouped_heads_are_not_repeated():
    query, key = np.ones((1, 32, 1, 64), np.float32), np.ones((1, 2, 4096, 64), np.float32)
    held, _ = peak(lambda: attention(query, key, key, kernel="dense"))
    assert held < 2 * key.nbytes


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
@pytest.mark.parametrize("axes", [(7,), (2, 1, 5, 1), ()])
def test_a_score_function_may_return_an_array_of_the_callers_with_fewer_axes(kernel, axes):
    q, k, v, scores = draw((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3), axes)
    before = scores.copy()
    output = attention(q, k, v, score_mod=lambda s, b, h, i, j: scores, kernel=kernel)
    np.testing.assert_array_equal(scores, before)
    bias = scores[(None,) * (4 - scores.ndim)]
    close(output, attention(q, k, v, scale=0.0, bias=bias, kernel=kernel))


@pytest.mark.parametrize(
    ("dtype", "backend"), [("uint8", "numpy"), ("uint64", "numpy"), ("uint64", "torch")]
)
def test_query_offsets_of_any_integer_kind(dtype, backend):
    (x,) = draw((2, 3, 6, 4))
    offsets = np.array([0, 2])
    output = attention(x, x, x, is_causal=True, query_offset=offsets.astype(dtype), backend=backend)
    close(output, attention(x, x, x, is_causal=True, query_offset=offsets))
