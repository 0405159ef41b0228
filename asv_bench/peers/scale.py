"""Hold attention over dask arrays against bounds: memory of a worker, tasks, time to build a graph.

Each row runs on a cluster of its own, two processes with a limit of memory, from zarr files to a
zarr file; the row "graph" builds a graph of a million tokens and runs nothing. A pair is a chunk of
queries and a chunk of keys. Bounds are in brackets. Memory and counts hold on a busy machine, times
do not.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any, NamedTuple

import dask.array as da
import disk
import script

import polyattn


class Row(NamedTuple):
    """A problem, and its bounds."""

    heads: int
    rows: int
    keys: int
    chunk: int
    options: dict[str, Any]
    limit: str = ""  # of a worker's memory; "" to build the graph only
    peak: float = math.inf  # MiB of a worker
    tasks: float = math.inf
    built: float = math.inf  # seconds
    group: str = "64 MiB"  # of keys and values in a task


WINDOW = {"window": (1023, 0)}
ROWS = {
    "window": Row(8, 204_800, 204_800, 4096, WINDOW, "512MB", peak=330, tasks=60, built=0.5),
    "graph": Row(8, 2**20, 2**20, 8192, WINDOW, tasks=200, built=0.5),
    "causal": Row(32, 16_384, 16_384, 1024, {"is_causal": True}, "330MB", peak=300, group="32 MiB"),
    "decode": Row(8, 256, 524_288, 4096, {}, "600MB"),
}
QUICK = Row(2, 4096, 4096, 1024, {"window": (255, 0)}, "512MB")


def pairs_seen(row: Row) -> int:
    """Return the number of pairs of chunks of which some row sees a key, by arithmetic."""
    left, right = row.options.get("window", (row.keys, row.keys))
    right = 0 if "is_causal" in row.options else right
    step, shift = min(row.chunk, row.rows), row.keys - row.rows
    return sum(
        first - left <= keys + row.chunk - 1 and keys <= first + step - 1 + right
        for first in range(shift, shift + row.rows, step)
        for keys in range(0, row.keys, row.chunk)
    )


def built(row: Row, arrays: list[da.Array]) -> tuple[da.Array, list[str]]:
    """Return the output as a dask array, and what its graph is held against."""
    output, seconds = script.timed(lambda: polyattn.attention(*arrays, **row.options))
    tasks = disk.tasks_of(output, arrays)
    computed = sum(
        isinstance(needed, tuple) and needed[0] == arrays[1].name
        for all_needed in output.dask.get_all_dependencies().values()
        for needed in all_needed
    )
    every = output.numblocks[1] * arrays[1].numblocks[1]
    found = [f"{computed} of {every:,} pairs {bound(computed, pairs_seen(row))}"]
    found += [f"{tasks} tasks {bound(tasks, row.tasks)}"]
    return output, [*found, f"built in {seconds:.2f} s {bound(seconds, row.built)}"]


def bound(found: float, most: float) -> str:
    """Return a bound, and whether it is kept."""
    return "" if most == math.inf else f"[<= {most:g}: {'kept' if found <= most else 'BROKEN'}]"


def run(row: Row) -> list[str]:
    """Run a row from files to a file, and return what is held against bounds."""
    with disk.cluster(row.limit, **{"polyattn.group-size": row.group}) as (folder, client):
        idle, processes = max(client.run(disk.peak).values()), client.run(os.getpid)
        disk.write(folder, row.heads, row.rows, row.keys, row.chunk)
        output, found = built(row, disk.lazy(folder))
        _, seconds = script.timed(lambda: disk.store(output, folder))
        found.append(f"ran {seconds:.0f} s")
        most, same = max(client.run(disk.peak).values()), client.run(os.getpid) == processes
        check(row, *disk.opened(folder))
    found.append(f"peak {most:.0f} MiB a worker {bound(most, row.peak)}")
    found.append(f"{idle:.0f} MiB idle, limit {row.limit}")
    return found if same else [*found, "BROKEN: a worker was restarted"]


def check(row: Row, query: Any, key: Any, value: Any, output: Any) -> None:
    """Compare the last rows of the output with one call in memory."""
    expected = polyattn.attention(query[:1, -64:], key[:1], value[:1], **row.options)
    off = abs(output[:1, -64:] - expected).max()
    if not off < 1e-5:
        raise AssertionError(f"the last rows are off by {off}")


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a small row: a check")
    options = parser.parse_args()
    names = options.rows or list(ROWS)
    if unknown := set(names) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}")
    print(script.machine(script.all_threads()))
    for name, row in {"quick": QUICK}.items() if options.quick else ((n, ROWS[n]) for n in names):
        if row.limit:
            found = run(row)
        else:
            shape, chunks = (row.heads, row.keys, disk.SIZE), (row.heads, row.chunk, disk.SIZE)
            arrays = [da.zeros(shape, chunks=chunks, dtype="float32", name=x) for x in "qkv"]
            _, found = built(row, arrays)
        print(f"{name}: " + "; ".join(found), flush=True)


if __name__ == "__main__":
    main()
