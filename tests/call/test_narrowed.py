"""Problems of some of the keys; mask expressions as causal and window over these, for engines."""

import numpy as np
import pytest
from arrays import close, draw

from polyattn import attention, explain, masks
from polyattn._core.call.narrowed import banded
from polyattn.conformance.reference.expressions import CallRows, plainly

L, S = 4, 8


def problem_of(mask=None, lengths=(L, S), **options):
    shapes = [(2, 3, length, 8) for length in (*lengths, lengths[1])]
    return explain(*shapes, library="numpy", mask=mask, **options).problem


#: A mask with options; the keys that it leaves, the ends of the band, and its offset among them.
BANDS = {
    "square causal": (masks.causal() & masks.padding(5), {"query_offset": 0}, (0, 4), (None, 0), 0),
    "prefix": (masks.prefix(3), {}, (0, 3), (None, None), -1),
    "lengths": (None, {"key_lengths": 6, "is_causal": True}, (0, 6), (None, 0), 2),
    "right": (masks.causal() | masks.window(9, 2), {"query_offset": 0}, (0, 6), (None, 2), 0),
    "between": (masks.window(1, 0) & ~masks.prefix(2) & masks.padding(6), {}, (3, 6), (1, 0), 1),
    "after": (~masks.causal(), {"query_offset": 2}, (3, 8), (0, None), 0),
    "compiled": (masks.compile(masks.prefix(3), L, S), {}, (0, 3), (None, None), -1),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_mask_of_numbers_is_a_band_over_some_keys(name):
    mask, options, keys, ends, offset = BANDS[name]
    problem, found = banded(problem_of(mask, **options))
    left, right = problem.window
    assert (found, problem.query_offset) == (keys, offset)
    assert (left, 0 if problem.is_causal else right) == ends
    given = {"is_causal": problem.is_causal, "window": problem.window, "query_offset": offset}
    assert problem == problem_of(None, (L, found.length), **given)


def check(problem):
    """Compare the band of a problem with its mask; return whether it has one."""
    if (found := banded(problem)) is None:
        return False
    changed, keys = found
    (heads, rows, _), offset = shape = problem.scores[-3:], problem.query_offset
    part = CallRows(problem.batch, (heads, rows, keys.length), changed.query_offset)
    band = masks.prefix(keys.length) if changed.band is None else changed.band
    seen = np.zeros(problem.scores, bool)
    seen[..., slice(*keys)] = plainly(band, None, part)[0]
    mask = problem.mask_spec if problem.band is None else problem.band & problem.mask_spec
    expected, _ = plainly(mask, None, CallRows(problem.batch, shape[0], offset))
    np.testing.assert_array_equal(seen, expected, str(mask))
    return True


def test_bands_show_what_random_compositions_do():
    rng, bands = np.random.default_rng(0), 0
    for _ in range(80):
        rows, keys, *numbers = (int(n) for n in rng.integers(1, 9, 6))
        parts = [masks.prefix(numbers[0]), ~masks.prefix(numbers[1]), masks.padding(numbers[2])]
        parts += [masks.window(numbers[0], numbers[1]), masks.causal(), ~masks.causal()]
        one, two, three = (parts[n] for n in rng.integers(0, 6, 3))
        made = (one & two) | three, one & two & three, one | two, masks.prefix(numbers[3])
        window = ((None, None), (numbers[1] - 1, None), (numbers[1], 1))[rng.integers(3)]
        options = {"query_offset": int(rng.integers(-3, keys + 1)), "window": window}
        bands += check(problem_of(made[rng.integers(4)], (rows, keys), **options))
    assert bands > 40


ENGINES = {"torch": "sdpa", "mlx": "fast", "onnxruntime": "node"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BANDS)
def test_an_engine_gets_the_keys_of_a_band(engine, name, monkeypatch):
    mask, options, *_ = BANDS[name]
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    query, key, value = draw((2, 3, L, 8), (2, 3, S, 8), (2, 3, S, 8))
    expected = attention(query, key, value, mask=mask, kernel="dense", **options)
    # Beyond the keys of the mask: an engine that got them would multiply 0 by NaN.
    _, keys = banded(problem_of(mask, **options))
    value[:, :, : keys.start], value[:, :, keys.stop :] = np.nan, np.nan
    if "compile" not in repr(mask):
        monkeypatch.setattr("polyattn._core.expressions.patterns.FirstTokens.seen", None)
    found = attention(
        query, key, value, mask=mask, backend=engine, kernel=ENGINES[engine], **options
    )
    close(found, expected, 100)


@pytest.mark.needs("torch")
def test_explain_says_what_stands_in_for_the_mask():
    x = np.zeros((3, S, 8), np.float32)
    for mask, said in (
        (masks.prefix(5), "keys 0:5 in place of the mask"),
        (masks.causal() & masks.prefix(5), "keys 0:5 and masks.causal() in place of the mask"),
    ):
        assert said in str(explain(x[:, :L], x, x, mask=mask, query_offset=2, backend="torch"))
    assert "in place" not in str(explain(x, x, x, mask=masks.dilated(2), backend="torch"))


def test_an_operator_gets_the_number_of_keys_of_each_item():
    operator = pytest.importorskip("polyattn_onnx.operator")
    for numbers in ([3, 9], [-1, 5], np.asarray([0, 2**40], np.uint64)):
        mask = masks.prefix(np.asarray(numbers))
        assert operator._positions(problem_of(mask), 24) == operator.NodePositions(counted=True)
        assert not operator._positions(problem_of(mask), 23).counted
        x = draw((2, 3, L, 8), (2, 3, S, 8), (2, 3, S, 8))
        for options in ({}, {"is_causal": True}, {"is_causal": True, "query_offset": 0}):
            found, expected = (
                attention(*x, mask=mask, **options, **where)
                for where in ({"backend": "onnxruntime", "kernel": "node"}, {"kernel": "dense"})
            )
            close(found, expected, 100)
