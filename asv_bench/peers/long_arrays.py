"""Attention with a window over arrays on disk: dask on two processes, and a loop by hand.

Query, key, value and output are zarr files. The loop reads a chunk of queries and the keys that it
sees, calls `polyattn.attention` on all cores, and writes the result. Its times and those of dask
alternate; the ratio is of medians.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import script
import zarr
from distributed import Client, LocalCluster

import polyattn

SIZE = 64


def write(folder: Path, heads: int, tokens: int, chunk: int) -> None:
    """Write query, key and value, a chunk at a time."""
    rng = np.random.default_rng(0)
    for name in ("query", "key", "value", "output"):
        file = zarr.create_array(
            store=str(folder / name),
            shape=(heads, tokens, SIZE),
            chunks=(heads, chunk, SIZE),
            dtype="float32",
            compressors=None,
        )
        for first in range(0, tokens if name != "output" else 0, chunk):
            part = file[:, first : first + chunk].shape
            file[:, first : first + chunk] = rng.standard_normal(part, dtype=np.float32)


def loop(folder: Path, chunk: int, window: int) -> None:
    """Compute attention by hand, a chunk of queries at a time."""
    query, key, value, output = (
        zarr.open_array(str(folder / name)) for name in ("query", "key", "value", "output")
    )
    for first in range(0, query.shape[1], chunk):
        start, stop = max(0, first - window), min(query.shape[1], first + chunk)
        near: list[Any] = [x[:, start:stop] for x in (key, value)]
        output[:, first:stop] = polyattn.attention(query[:, first:stop], *near, window=(window, 0))


def by_dask(folder: Path, window: int) -> tuple[float, int]:
    """Compute attention on the cluster; return the seconds to build the graph, and its tasks."""
    query, key, value = (da.from_zarr(str(folder / name)) for name in ("query", "key", "value"))
    start = time.perf_counter()
    output = polyattn.attention(query, key, value, window=(window, 0))
    built = time.perf_counter() - start
    tasks = len(output.dask) - sum(len(x.dask) for x in (query, key, value))
    da.store(output, zarr.open_array(str(folder / "output")), lock=False)
    return built, tasks


def peak() -> float:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(function: Any, *arguments: Any) -> tuple[float, Any]:
    """Return how long a call takes, and its result."""
    start = time.perf_counter()
    found = function(*arguments)
    return time.perf_counter() - start, found


def main() -> None:
    """Print the times, their ratio, the graph, and the peak memory of the workers."""
    parser = script.parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--quick", action="store_true", help="one round of small arrays: a check")
    add("--tokens", type=int, default=2**20, help="default: %(default)s")
    add("--heads", type=int, default=8, help="default: %(default)s")
    add("--chunk", type=int, default=4096, help="tokens of a chunk (default: %(default)s)")
    add("--window", type=int, default=1023, help="default: %(default)s")
    add("--limit", default="600MB", help="memory of a worker (default: %(default)s)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tokens, options.chunk, options.window = 1, 4096, 1024, 255
    with (
        tempfile.TemporaryDirectory() as name,
        dask.config.set({"temporary-directory": name}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit=options.limit,
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        folder = Path(name)
        write(folder, options.heads, options.tokens, options.chunk)
        print(script.machine(script.all_threads()))
        ours, by_hand = [], []
        for _ in range(options.rounds):
            taken, (built, tasks) = seconds(by_dask, folder, options.window)
            ours.append(taken)
            by_hand.append(seconds(loop, folder, options.chunk, options.window)[0])
        print(f"{options.heads} heads, {options.tokens} tokens, window {options.window}")
        print(f"graph: {tasks} tasks, built in {built:.2f} s")
        print(f"dask {statistics.median(ours):.1f} s, loop {statistics.median(by_hand):.1f} s")
        print(f"ratio {statistics.median(ours) / statistics.median(by_hand):.2f}")
        print(f"peak of the workers: {max(client.run(peak).values()):.0f} MiB")


if __name__ == "__main__":
    main()
