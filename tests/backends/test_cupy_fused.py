"""CuPy's fused kernel without a GPU: all of it runs, on stand-ins that read the same memory."""

import types

import ml_dtypes
import numpy as np
import pytest
from test_cupy_fused_host import DTYPES, compiled, put_in_place
from test_cupy_host import cases

from polyattn import attention, attention_partial, explain
from polyattn._dispatch import registry
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn_cupy import blocks, products, rows
from polyattn_cupy.fused import Fused

RNG = np.random.default_rng(0)


def test_the_record_is_the_struct():
    library, _ = compiled()
    assert rows.ROWS.itemsize == library.size_of_rows()


@pytest.fixture
def on_host(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return what cuBLAS was asked."""
    return put_in_place(monkeypatch)


# ---- it computes what it says ------------------------------------------------------------------

RUNS = [pytest.param(*x.values, False, marks=x.marks) for x in cases(Fused.features, 24)]
RUNS += [pytest.param(*x.values, True, marks=x.marks) for x in cases(Fused.features, 10**6)]


@pytest.mark.parametrize(("name", "small_tiles"), RUNS)
def test_it_keeps_to_the_conformance_cases(name, small_tiles, on_host):
    case = CASES[name]
    target = Target("host", "numpy")
    outcome = checks.check_case(
        target, KernelVariant(registry.loaded("host").kernels[0], small_tiles), case
    )
    refused = 0 in (*case.score_shape, case.D, case.E) or dict(case.options).get("scale") == 0
    assert (outcome.output is None) == refused
    assert bool(on_host.calls) != refused


@pytest.mark.usefixtures("on_host")
def test_what_it_declares_is_needed_by_some_case():
    promises.check_declarations(
        Target("host", "numpy"), KernelVariant(registry.loaded("host").kernels[0]), CASES
    )


def randn(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(dtype)


def both(*arrays, **options):
    """Return output and logsumexp of the kernel, and of the formula in NumPy."""
    mine = attention_partial(*arrays, backend="host", kernel="fused", **options)
    formula = attention_partial(*arrays, kernel="dense", **options)
    return mine, formula


def agree(mine, formula, dtype="float32"):
    eps = float(ml_dtypes.finfo(dtype).eps)
    for one, other in zip(mine, formula, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, "float64"), np.asarray(other, "float64"), rtol=8 * eps, atol=8 * eps
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 8])
def test_the_threads_of_a_block_share_a_row(threads, dtype, on_host):
    on_host.threads = threads
    q, k, v = randn(2, 4, 5, 8, dtype=dtype), randn(2, 2, 37, 8, dtype=dtype), randn(2, 2, 37, 6)
    mask = RNG.random((5, 37)) > 0.4
    mask[2] = False
    agree(
        *both(q, k, v.astype(dtype), mask=mask, window=(30, 1), sinks=randn(4), softcap=2.0),
        dtype=dtype,
    )


@pytest.mark.parametrize("threads", [1, 8])
def test_what_is_no_number_stays_in_its_row(threads, on_host):
    on_host.threads = threads
    q, k, v = randn(1, 1, 6, 4), randn(1, 1, 20, 4), randn(1, 1, 20, 4)
    q[0, 0, 1], q[0, 0, 3] = np.nan, np.inf
    mine, formula = both(q, k, v)
    agree(mine, formula)
    assert list(np.isnan(mine.output).any((0, 1, 3))) == [False, True, False, True, False, False]
    mine, formula = both(q, k, v, bias=np.where(RNG.random((6, 20)) > 0.5, 0, -np.inf))
    assert np.isnan(mine.logsumexp[0, 0, 1])
    bias = np.zeros((6, 20))
    bias[1] = bias[2] = -np.inf
    agree(*both(q, k, v, bias=bias))  # NaN that is masked everywhere is absent


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (2, 3), ()])
@pytest.mark.usefixtures("on_host")
def test_offsets_that_broadcast(shape):
    q, k, v = randn(2, 3, 2, 4, 8), randn(2, 3, 2, 9, 8), randn(2, 3, 2, 9, 8)
    offset = np.array(RNG.integers(-3, 9, shape))
    agree(*both(q, k, v, is_causal=True, query_offset=offset))


@pytest.mark.usefixtures("on_host")
def test_long_rows_of_float16_keep_their_digits():
    q = np.zeros((1, 1, 1, 8), "float16")
    k, v = np.zeros((1, 1, 120_000, 8), "float16"), np.full((1, 1, 120_000, 8), 1.5, "float16")
    # By less than one spacing of float16, where weights of two digits would be off by two.
    np.testing.assert_allclose(attention(q, k, v, backend="host"), 1.5, rtol=8e-4)


# ---- what the host asks for --------------------------------------------------------------------


def test_keys_of_a_group_are_read_once_and_where_they_are(on_host, monkeypatch):
    monkeypatch.setattr(blocks.cupy, "ascontiguousarray", None)
    q, k, v = randn(2, 8, 5, 16), randn(2, 2, 11, 24)[..., 3:19], randn(2, 2, 33, 6)[:, :, ::3]
    agree(*both(q, k, v))
    assert on_host.calls == 1 * [(11, 20, 16, 4), (6, 20, 11, 4)]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., ::-1],
        lambda x: x[..., ::2],
        lambda x: x[:, :, ::-1],
        lambda x: x[:, ::-1],
        lambda x: x.swapaxes(-1, -2),
        lambda x: x.swapaxes(1, 2),
        lambda x: np.broadcast_to(x[:, :, :1], x.shape),
        lambda x: np.broadcast_to(x[:, :1], x.shape),
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.broadcast_to(x[..., :1], x.shape),
    ],
)
@pytest.mark.usefixtures("on_host")
def test_views_of_every_kind(view):
    q, k, v = (view(randn(2, 8, 8, 8)) for _ in range(3))
    agree(*both(q, k, v))
    agree(*both(q, k[:, :2], v[:, :2]))


def test_a_band_skips_keys(on_host):
    q, k, v = (randn(1, 2, 1024, 8) for _ in range(3))
    agree(*both(q, k, v, is_causal=True))
    first = [call for call in on_host.calls if call[2] == 8 and call[0] != 8]
    assert first == [(512, 512, 8, 2), (1024, 512, 8, 2)]
    on_host.calls.clear()
    agree(*both(q, k, v, window=(10, 10)))
    assert [call[0] for call in on_host.calls[::2]] == [522, 522]


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("tile", [1, 7, 64, 1000, 4000, 10**6])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 3)}])
def test_blocks_cover_each_row_once_within_the_tile(options, tile, members):
    shapes = (3, 2 * members, 13, 8), (3, 2, 40, 8), (3, 2, 40, 8)
    problem = explain(*shapes, library="numpy", device="cpu", **options).problem
    seen = np.zeros((6, 13 * members), int)
    for block in blocks.blocks(problem, tile):
        seen[slice(*block.pairs), slice(*block.rows)] += 1
        assert block.pairs.length * block.rows.length * block.columns.length <= max(
            tile, block.columns.length
        )
        heads = {row // 13 for row in range(*block.rows)}
        assert len(heads) == 1 or block.rows.length % 13 == 0
    assert (seen == 1).all()


def test_the_handle_is_left_as_it_was(on_host):
    on_host.mode = 3
    attention(randn(2, 3), randn(4, 3), randn(4, 3), backend="host")
    assert on_host.mode == 3

    def fail(*args):
        raise RuntimeError("cuBLAS")

    on_host.gemmStridedBatchedEx = fail
    with pytest.raises(RuntimeError, match="cuBLAS"):
        attention(randn(2, 3), randn(4, 3), randn(4, 3), backend="host", kernel="fused")
    assert on_host.mode == 3


def test_without_cublas_it_says_so(monkeypatch):
    def missing():
        raise ImportError("Failure finding libcublas.so.13\nand more")

    monkeypatch.setattr(products, "_cublas", missing)
    problem = explain((2, 3), (4, 3), (4, 3), library="numpy", device="cpu").problem
    assert Fused().reasons_against(problem) == [
        "cuBLAS cannot be loaded: Failure finding libcublas.so.13"
    ]


# ---- NVIDIA's own compiler ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
def test_nvrtc_compiles_every_kernel(architecture):
    from cupy.cuda.compiler import _NVRTCProgram

    names = tuple(compiled()[1])
    program = _NVRTCProgram(rows.SOURCE, "softmax.cu", name_expressions=names, method="cubin")
    binary, mangled = program.compile((*rows.OPTIONS, f"-arch={architecture}"))
    assert binary[:4] == b"\x7fELF"
    assert set(mangled) == set(names)


def test_launch_gives_cupy_what_the_source_takes(monkeypatch):
    launched = []

    class RawModule:
        def __init__(self, code, options, name_expressions):
            assert code == rows.SOURCE
            assert options == rows.OPTIONS
            self.names = name_expressions

        def get_function(self, name):
            assert name in self.names
            return lambda grid, block, args: launched.append((name, grid, block, args))

    runtime = types.SimpleNamespace(getDevice=lambda: 7)
    here = types.SimpleNamespace(RawModule=RawModule, cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(rows, "cupy", here)
    record = np.zeros((), rows.ROWS)
    for keys in (1, 64, 1000, 4096, 10**6):
        record["keys"] = keys
        rows.launch(record, 6, rows.name_of("bfloat16", "float64"))
        name, grid, (threads,), args = launched.pop()
        assert name == "softmax<bfloat16, float, double>"
        assert grid == (6,)
        assert args[0] is record
        assert 32 <= threads <= rows.MOST_THREADS
        assert threads & (threads - 1) == 0
    rows._kernel.cache_clear()
