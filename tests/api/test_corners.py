"""The corners of the semantics that no case of the conformance suite shows: bits, and merging.

On every library and on both array-API kernels, the tiled one also with tiles so small that every
corner lies on an edge.
"""

import math
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from libraries import LIBRARIES, NUMPY, STRICT, TORCH, tiles_of
from optional import array_api_strict

from polyattn import (
    Partial,
    attention,
    attention_jvp,
    attention_partial,
    attention_vjp,
    attention_weights,
    merge,
)
from polyattn.conformance import CASES, ESSENTIAL, assert_accurate, make_case
from polyattn.conformance.cases.generators import alibi

B, H, G, L, S, D = 2, 4, 2, 9, 9, 8
PLAIN = make_case("corner", H=H, G=G, L=L, S=S, D=D)
KERNELS = {"dense": "dense", "tiled": "tiled", "tiles": tiles_of(8), "default": None}


def each(*pairs):
    """Run a test with these kernels, each on a library."""
    pairs = [pytest.param(KERNELS[name], x, id=f"{name}-{x}") for name, x in pairs]
    return pytest.mark.parametrize(("kernel", "library"), pairs)


# One tile of all scores, as "tiled" is here, is what "dense" computes.
each_kernel = each(("dense", TORCH), ("tiles", NUMPY), ("tiles", STRICT))
any_kernel = each(
    ("dense", NUMPY), ("tiles", TORCH), ("tiles", STRICT), ("tiled", NUMPY), ("default", NUMPY),
    ("default", TORCH),
)  # fmt: skip
each_library = pytest.mark.parametrize("library", LIBRARIES, ids=str)


@pytest.fixture(autouse=True)
def strictest():
    with array_api_strict.ArrayAPIStrictFlags(
        api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False
    ):
        yield


def bits(x):
    return np.ascontiguousarray(x).tobytes()


# A row with no visible key


@each_kernel
def test_an_empty_row_leaves_the_others_alone(kernel, library):
    mask = np.ones((L, S), bool)
    whole = library.back(library.call(attention, PLAIN, kernel=kernel, mask=library.to(mask)))
    mask[3] = False
    holed = library.back(library.call(attention, PLAIN, kernel=kernel, mask=library.to(mask)))
    assert not holed[..., 3, :].any()
    assert bits(np.delete(holed, 3, -2)) == bits(np.delete(whole, 3, -2))


# Nothing to compute


@pytest.mark.parametrize(
    ("heads", "groups", "keys", "sizes"),
    [(0, 0, 5, (4, 3)), (0, 1, 5, (4, 3)), (4, 2, 0, (4, 3)), (4, 2, 5, (0, 3)), (4, 2, 5, (4, 0))],
    ids=["no heads", "no query heads", "no keys", "no head size", "no value size"],
)
@any_kernel
def test_an_axis_without_entries(heads, groups, keys, sizes, kernel, library):
    for with_sinks in (False, True):
        check_empty(heads, groups, keys, *sizes, with_sinks, kernel, library)


def check_empty(heads, groups, keys, size, value_size, with_sinks, kernel, library):
    shapes = (2, heads, 3, size), (2, groups, keys, size), (2, groups, keys, value_size)
    arrays = [
        library.to(np.full(shape, n)) for n, shape in zip((0.0, 1.0, 1.0), shapes, strict=True)
    ]
    options = {"sinks": library.to(np.zeros(heads))} if with_sinks else {}
    output, pullback = attention_vjp(*arrays, kernel=kernel, **options)
    gradients = pullback(output)
    assert tuple(output.shape) == (2, heads, 3, value_size)
    # All scores are 0, and so is the sink: the weights are equal.
    mean = keys / max(1, keys + with_sinks)
    np.testing.assert_allclose(library.back(output), mean, rtol=1e-12)
    assert [tuple(x.shape) for x in gradients[:3]] == list(shapes)
    assert not with_sinks or tuple(gradients.sinks.shape) == (heads,)
    tangent, _ = attention_jvp(arrays, arrays, kernel=kernel, **options)
    assert tangent.shape == output.shape
    top = attention_weights(*arrays[:2], top=2, **options)
    assert tuple(top.keys.shape) == (2, heads, 3, min(2, keys))


# Poison

KEY = 5
rows, keys = np.arange(L)[:, None], np.arange(S)
HIDDEN = {
    "causal": ({"is_causal": True}, keys <= rows),
    "causal, alibi": ({"is_causal": True, "score_mod": alibi}, keys <= rows),
    "causal, softcap": ({"is_causal": True, "softcap": 5.0}, keys <= rows),
    "window": ({"window": (2, 1)}, (rows - 2 <= keys) & (keys <= rows + 1)),
    "mask": ({"mask": (rows + keys) % 3 != 0}, (rows + keys) % 3 != 0),
    "mask function": ({"mask": lambda b, h, i, j: (i + j) % 3 != 0}, (rows + keys) % 3 != 0),
    "bias": (
        {"bias": np.where((rows + keys) % 3 != 0, 0.5, -np.inf).astype(np.float32)},
        (rows + keys) % 3 != 0,
    ),
    "mask of all rows": (
        {"mask": np.broadcast_to(keys != KEY, (L, S)).copy()},
        keys != KEY + 0 * rows,
    ),
}
POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def run_poisoned(library, kernel, options, place, poison, element=slice(None)):
    """Output and logsumexp with the poison in one key or value of the first key/value head."""
    arrays, _ = PLAIN.arguments()
    arrays = dict(zip(("query", "key", "value"), arrays, strict=True))
    if place is not None:
        arrays[place][0, 0, KEY, element] = poison
    options = {n: library.to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    partial = attention_partial(*map(library.to, arrays.values()), **options, kernel=kernel)
    return tuple(map(library.back, partial))


def reached(visible):
    """The rows (B, H, L) that see the poisoned key: of the heads that read its head, some."""
    where = np.zeros((B, H, L), bool)
    where[0, : H // G] = visible[:, KEY]
    return where


@each_kernel
@pytest.mark.parametrize("way", HIDDEN)
def test_a_hidden_poison_changes_no_bit(way, kernel, library):
    options, visible = HIDDEN[way]
    clean = run_poisoned(library, kernel, options, None, None)
    assert all(np.isfinite(a).all() for a in clean)
    spared = ~reached(visible)
    for name, place in product(POISON, ("key", "value")):
        poisoned = run_poisoned(library, kernel, options, place, POISON[name])
        for a, b in zip(clean, poisoned, strict=True):
            assert bits(a[spared]) == bits(b[spared]), (name, place)


@each_kernel
def test_a_nan_in_one_element_of_a_value_stays_in_its_column(kernel, library):
    options, visible = HIDDEN["causal"]
    clean, _ = run_poisoned(library, kernel, options, None, None)
    output, _ = run_poisoned(library, kernel, options, "value", math.nan, element=2)
    assert np.array_equal(np.isnan(output[..., 2]), reached(visible))
    assert np.isfinite(np.delete(output, 2, -1)).all()
    np.testing.assert_allclose(np.delete(output, 2, -1), np.delete(clean, 2, -1), rtol=1e-5)


@each_kernel
def test_the_bias_of_a_hidden_key_is_not_seen(kernel, library):
    mask = (rows + keys) % 3 != 0
    bias = np.where(mask, 0.5, 0.25).astype(np.float32)
    clean = run_poisoned(library, kernel, {"mask": mask, "bias": bias}, None, None)
    for poison in POISON.values():
        bias = np.where(mask, 0.5, poison).astype(np.float32)
        poisoned = run_poisoned(library, kernel, {"mask": mask, "bias": bias}, None, None)
        assert all(bits(a) == bits(b) for a, b in zip(clean, poisoned, strict=True))


# Functions of score and mask, as users of FlexAttention write them


@each(("dense", NUMPY), ("tiles", TORCH))
def test_a_function_may_mix_indices_and_scores(library, kernel):
    """Outside the standard, NumPy makes float64 of it, and torch float32: both must serve."""
    case = make_case("mixed", score_mod=lambda s, b, h, i, j: s - 0.125 * (i - j) / (h + 1))
    output, logsumexp = map(library.back, library.call(attention_partial, case, kernel=kernel))
    assert output.dtype == logsumexp.dtype == "float32"
    assert_accurate(output, case, logsumexp)


@each_kernel
def test_a_function_may_look_up_arrays(library, kernel):
    documents = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]])
    slopes = np.array([0.5, 0.25], np.float32)

    def options(to):
        document, slope = to(documents), to(slopes)
        return {
            "mask": lambda b, h, i, j: document[b, i] == document[b, j],
            "score_mod": lambda s, b, h, i, j: s * slope[h],
        }

    arrays, _ = CASES["plain"].arguments()
    case = make_case("plain", **options(np.asarray))
    output, logsumexp = map(
        library.back,
        attention_partial(*map(library.to, arrays), **options(library.to), kernel=kernel),
    )
    assert_accurate(output, case, logsumexp)


# No warning, whatever the caller has set


@pytest.mark.parametrize("name", ["tiles", "default"])
def test_a_caller_who_raises_on_every_floating_point_event(name):
    loud = {}
    for case in ESSENTIAL.values():
        arrays, options = case.arguments()
        whole_rows = {"normalizer", "score_norm"}
        kernel = "dense" if case.features & whole_rows else KERNELS[name]
        function = attention if "normalizer" in case.features else attention_partial
        with np.errstate(all="raise"):
            before = np.geterr()
            try:
                function(*arrays, **options, kernel=kernel)
            except FloatingPointError as error:
                loud[case.name] = str(error)
            assert np.geterr() == before
    assert not loud


# Partials


def partials_of(case, library, kernel, cuts):
    """The partials over pieces of the keys; the sinks belong to no key and go with the first."""
    (query, key, value), options = case.arguments()
    offset = options.pop("query_offset", case.S - case.L)
    edges = (0, *cuts, case.S)
    for first, last in pairwise(edges):
        own = {n: x[..., first:last] if n in ("mask", "bias") else x for n, x in options.items()}
        options.pop("sinks", None)
        own = {n: library.to(x) if isinstance(x, np.ndarray) else x for n, x in own.items()}
        arrays = (query, key[..., first:last, :], value[..., first:last, :])
        yield attention_partial(
            *map(library.to, arrays), **own, query_offset=offset - first, kernel=kernel
        )


MERGED = ["plain", "causal", "window", "mask array", "bias as mask", "sinks", "causal x sinks"]
MERGED += ["softcap x grouped heads", "causal x L > S", "mask hides some rows", "rank 2", "rank 5"]


@pytest.mark.parametrize(
    ("name", "which", "library"),
    [(name, ("dense", "tiles")[turn % 2], LIBRARIES[turn % 3]) for turn, name in enumerate(MERGED)],
    ids=str,
)
def test_partials_merge_to_the_whole(name, which, library):
    """In any order and any grouping; so `merge` is associative and commutative up to rounding."""
    parts = list(partials_of(CASES[name], library, KERNELS[which], (3, 4)))
    wholes = [merge(*some) for some in permutations(parts)]
    a, b, c = parts
    wholes += [merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)]
    for whole in wholes:
        assert isinstance(whole, Partial)
        assert_accurate(library.back(whole.output), CASES[name], library.back(whole.logsumexp))


@each_library
def test_a_partial_for_every_key(library):
    for case in (CASES["causal"], CASES["causal, float64"]):
        whole = merge(*partials_of(case, library, "dense", range(1, case.S)))
        assert_accurate(library.back(whole.output), case, library.back(whole.logsumexp))


@pytest.mark.parametrize("library", [NUMPY, TORCH], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_partials_of_16_bits_merge_to_the_whole(dtype, library):
    case = CASES[f"causal, {dtype}"]
    whole = merge(*partials_of(case, library, "dense", (4, 7)))
    assert library.back(whole.output).dtype == dtype
    assert_accurate(library.back(whole.output), case, library.back(whole.logsumexp))


@each_kernel
@pytest.mark.parametrize(
    "name", ["plain", "causal x L > S", "high sinks", "nan seen by later rows"]
)
def test_the_identity_of_merge_changes_no_bit(name, library, kernel):
    partial = library.call(attention_partial, CASES[name], kernel=kernel)
    output, logsumexp = map(library.back, partial)
    nothing = Partial(
        library.to(np.zeros_like(output)), library.to(np.full_like(logsumexp, -np.inf))
    )
    for merged in (merge(partial), merge(partial, nothing), merge(nothing, partial, nothing)):
        assert np.array_equal(library.back(merged.output), output, equal_nan=True)
        assert np.array_equal(library.back(merged.logsumexp), logsumexp, equal_nan=True)


@each_kernel
def test_nothing_merged_with_nothing_is_nothing(library, kernel):
    empty = library.call(attention_partial, CASES["S = 0"], kernel=kernel)
    with np.errstate(all="raise"):
        output, logsumexp = map(library.back, merge(empty, empty, empty))
    assert not output.any()
    assert (logsumexp == -np.inf).all()


@each_library
def test_a_nan_merges_into_its_own_rows_only(library):
    a, b = partials_of(CASES["plain"], library, "dense", (4,))
    clean = library.back(merge(a, b).output)
    output, logsumexp = (np.array(library.back(x)) for x in b)
    output[1, 1, 2], logsumexp[1, 1, 2] = math.nan, math.nan
    merged = merge(a, Partial(library.to(output), library.to(logsumexp))).output
    merged = np.array(library.back(merged))
    assert np.isnan(merged[1, 1, 2]).all()
    merged[1, 1, 2] = clean[1, 1, 2]
    assert bits(merged) == bits(clean)
