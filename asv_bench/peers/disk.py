"""Shared parts of the scripts of long arrays: zarr files, and dask's processes that read them."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import zarr
from distributed import Client, LocalCluster

import polyattn

SIZE = 64
INPUTS = ("query", "key", "value")


def write(folder: Path, heads: int, rows: int, keys: int, chunk: int) -> None:
    """Write query, key, value and an empty output, a chunk at a time."""
    rng = np.random.default_rng(0)
    for name, length in {"query": rows, "key": keys, "value": keys, "output": rows}.items():
        step = min(chunk, length)
        file = zarr.create_array(
            store=str(folder / name),
            shape=(heads, length, SIZE),
            chunks=(heads, step, SIZE),
            dtype="float32",
            compressors=None,
        )
        for first in range(0, 0 if name == "output" else length, step):
            part = file[:, first : first + step].shape
            file[:, first : first + step] = rng.standard_normal(part, dtype=np.float32)


def opened(folder: Path) -> list[Any]:
    """Return query, key, value and output."""
    return [zarr.open_array(str(folder / name)) for name in (*INPUTS, "output")]


def lazy(folder: Path) -> list[da.Array]:
    """Return query, key and value as dask arrays."""
    return [da.from_zarr(str(folder / name)) for name in INPUTS]


def store(output: da.Array, folder: Path) -> None:
    """Compute the output into its file."""
    da.store(output, zarr.open_array(str(folder / "output")), lock=False)


def tasks_of(output: da.Array, inputs: list[da.Array]) -> int:
    """Return the number of tasks that are attention's own."""
    return len(output.dask) - sum(len(x.dask) for x in inputs)


def peak() -> float:
    """Return the peak memory of this process in MiB, since it began."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


@contextlib.contextmanager
def cluster(limit: str, **config: Any) -> Iterator[tuple[Path, Client]]:
    """Yield an empty folder, and a client of two processes of one thread with so much memory."""
    with (
        tempfile.TemporaryDirectory() as name,
        dask.config.set({"temporary-directory": name, **config}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit=limit,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        ) as processes,
        Client(processes) as client,
    ):
        client.run(lambda: polyattn.attention(*[np.ones((8, 8), np.float32)] * 3))  # to import
        yield Path(name), client
