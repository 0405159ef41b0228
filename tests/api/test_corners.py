"""The corners of the semantics that no case of the conformance suite shows.

The tiled kernel has tiles so small that every corner lies on an edge.
"""

import numpy as np
import pytest
from arrays import NUMPY, STRICT, TORCH, close, tiles_of
from optional import array_api_strict

from polyattn import attention, attention_jvp, attention_partial, attention_vjp, attention_weights
from polyattn.conformance import ESSENTIAL, assert_accurate, make_case

KERNELS = {"dense": "dense", "tiles": tiles_of(8), "default": None}


def each(*pairs):
    """Run a test with these kernels, each on a library."""
    pairs = [pytest.param(KERNELS[name], x, id=f"{name}-{x}") for name, x in pairs]
    return pytest.mark.parametrize(("kernel", "library"), pairs)


@pytest.fixture(autouse=True)
def strictest():
    with array_api_strict.ArrayAPIStrictFlags(
        api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False
    ):
        yield


@pytest.mark.parametrize(
    ("heads", "groups", "rows", "keys", "sizes"),
    [
        pytest.param(0, 1, 3, 5, (4, 3), id="no query heads"),
        pytest.param(4, 2, 0, 5, (4, 3), id="no rows"),
        pytest.param(4, 2, 3, 0, (4, 3), id="no keys"),
        pytest.param(4, 2, 3, 5, (0, 3), id="no head size"),
        pytest.param(4, 2, 3, 5, (4, 0), id="no value size"),
    ],
)
@each(("dense", NUMPY), ("tiles", STRICT), ("default", NUMPY), ("default", TORCH))
def test_an_axis_without_entries(heads, groups, rows, keys, sizes, kernel, library):
    shapes = (2, heads, rows, sizes[0]), (2, groups, keys, sizes[0]), (2, groups, keys, sizes[1])
    arrays = [library.to(np.zeros(shapes[0])), *(library.to(np.ones(x)) for x in shapes[1:])]
    for options in ({}, {"sinks": library.to(np.zeros(heads))}):
        output, pullback = attention_vjp(*arrays, kernel=kernel, **options)
        gradients = pullback(output)
        assert tuple(output.shape) == (2, heads, rows, sizes[1])
        # All scores are 0, and so is the sink: the weights are equal.
        total = max(1, keys + len(options))
        np.testing.assert_allclose(library.back(output), keys / total, rtol=1e-12)
        assert [tuple(x.shape) for x in gradients[:3]] == list(shapes)
        assert not options or tuple(gradients.sinks.shape) == (heads,)
        tangent, _ = attention_jvp(arrays, arrays, kernel=kernel, **options)
        assert tangent.shape == output.shape
        top = attention_weights(*arrays[:2], top=2, **options)
        assert tuple(top.keys.shape) == (2, heads, rows, min(2, keys))
        sums = attention_weights(*arrays[:2], per_key=True, **options)
        close(library.back(sums), np.full((2, heads, keys), rows / total))


@each(("dense", NUMPY), ("tiles", TORCH))
def test_a_function_may_mix_indices_and_scores(library, kernel):
    """Outside the standard, NumPy makes float64 of it, and torch float32: both must serve."""
    case = make_case("mixed", score_mod=lambda s, b, h, i, j: s - 0.125 * (i - j) / (h + 1))
    output, logsumexp = map(library.back, library.call(attention_partial, case, kernel=kernel))
    assert output.dtype == logsumexp.dtype == "float32"
    assert_accurate(output, case, logsumexp)


def test_a_caller_who_raises_on_every_floating_point_event():
    loud = {}
    for case in ESSENTIAL.values():
        arrays, options = case.arguments()
        with np.errstate(all="raise"):
            before = np.geterr()
            try:
                attention(*arrays, **options)
            except FloatingPointError as error:
                loud[case.name] = str(error)
            assert np.geterr() == before
    assert not loud
