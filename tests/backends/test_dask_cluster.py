"""Dask's backend on a cluster of two processes under a memory limit, from zarr to zarr."""

import resource

import dask
import dask.array as da
import numpy as np
import pytest

from polyattn import attention

# What distributed itself warns of: ports, clocks, and the memory of its workers.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LENGTH, CHUNK, WINDOW = 32768, 4096, 1023


def peak():
    """Return the peak memory of a process in MiB, with what attention needs imported."""
    import zarr  # noqa: F401

    import polyattn  # noqa: F401

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture
def stored(tmp_path):
    import zarr

    rng, shape = np.random.default_rng(0), (8, LENGTH, 64)
    for name in "qkv":
        array = zarr.create_array(
            store=str(tmp_path / name), shape=shape, chunks=(8, CHUNK, 64), dtype="float32"
        )
        array[:] = rng.standard_normal(shape, dtype=np.float32)
    return tmp_path


def test_a_window_from_zarr_to_zarr(stored):
    import zarr
    from distributed import Client, LocalCluster

    settings = {"temporary-directory": str(stored)}
    with (
        dask.config.set(settings),
        LocalCluster(2, threads_per_worker=1, memory_limit="512MB", dashboard_address=None) as c,
        Client(c) as client,
    ):
        before = max(client.run(peak).values())
        q, k, v = (da.from_zarr(str(stored / name)) for name in "qkv")
        output = attention(q, k, v, window=(WINDOW, 0))
        assert len(output.dask) - sum(len(x.dask) for x in (q, k, v)) == LENGTH // CHUNK
        da.to_zarr(output, str(stored / "output"))
        # Query and two chunks of keys and values, 40 MiB; the output; and what is read ahead.
        assert max(client.run(peak).values()) - before < 200
    q, k, v, output = (zarr.open_array(str(stored / name)) for name in (*"qkv", "output"))
    for row in (0, CHUNK + 5, LENGTH - 1):
        first = max(0, row - WINDOW)
        near = (x[:, first : row + 1] for x in (k, v))
        expected = attention(q[:, row : row + 1], *near)
        np.testing.assert_allclose(output[:, row : row + 1], expected, atol=2e-6)
