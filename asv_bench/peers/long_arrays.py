"""Attention with a window over arrays on disk: dask on two processes, and a loop by hand.

Query, key, value and output are zarr files. The loop reads a chunk of queries and the keys that it
sees, calls `polyattn.attention` on all cores, and writes the result. Its times and those of dask
alternate; the ratio is of medians.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import disk
import script

import polyattn


def loop(folder: Path, chunk: int, window: int) -> None:
    """Compute attention by hand, a chunk of queries at a time."""
    query, key, value, output = disk.opened(folder)
    for first in range(0, query.shape[1], chunk):
        start, stop = max(0, first - window), min(query.shape[1], first + chunk)
        near: list[Any] = [x[:, start:stop] for x in (key, value)]
        output[:, first:stop] = polyattn.attention(query[:, first:stop], *near, window=(window, 0))


def by_dask(folder: Path, window: int) -> tuple[float, int]:
    """Compute attention on the cluster; return the seconds to build the graph, and its tasks."""
    inputs = disk.lazy(folder)
    output, built = script.timed(lambda: polyattn.attention(*inputs, window=(window, 0)))
    disk.store(output, folder)
    return built, disk.tasks_of(output, inputs)


def main() -> None:
    """Print the times, their ratio, the graph, and the peak memory of the workers."""
    parser = script.parser(__doc__, 3, "quick")
    add = parser.add_argument
    add("--tokens", type=int, default=2**20, help="default: %(default)s")
    add("--heads", type=int, default=8, help="default: %(default)s")
    add("--chunk", type=int, default=4096, help="tokens of a chunk (default: %(default)s)")
    add("--window", type=int, default=1023, help="default: %(default)s")
    add("--limit", default="600MB", help="memory of a worker (default: %(default)s)")
    options = script.read(parser)
    if options.quick:
        options.tokens, options.chunk, options.window = 4096, 1024, 255
    with disk.cluster(options.limit) as (folder, client):
        disk.write(folder, options.heads, options.tokens, options.tokens, options.chunk)
        print(script.machine(options.threads))
        ours, by_hand = [], []
        for _ in range(options.rounds):
            (built, tasks), taken = script.timed(lambda: by_dask(folder, options.window))
            ours.append(taken)
            by_hand.append(script.timed(lambda: loop(folder, options.chunk, options.window))[1])
        print(f"{options.heads} heads, {options.tokens} tokens, window {options.window}")
        print(f"graph: {tasks} tasks, built in {built:.2f} s")
        print(f"dask {statistics.median(ours):.1f} s, loop {statistics.median(by_hand):.1f} s")
        print(f"ratio {statistics.median(ours) / statistics.median(by_hand):.2f}")
        print(f"peak of the workers: {max(client.run(disk.peak).values()):.0f} MiB")


if __name__ == "__main__":
    main()
