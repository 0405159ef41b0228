"""Time torch's processes over a ring against one process with as many threads.

``python asv_bench/peers/ring.py`` runs one process of 2 threads, then 2 processes of 1 thread each,
by turns, and prints ratios of medians: of the time that passed, and of the CPU time of all
processes, which other work on the machine changes less. It also prints pairs and bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import script

STRATEGIES = ("ring", "gather", "heads")


def main() -> None:
    """Time each strategy and print a table."""
    parser = script.parser(__doc__, 3)
    parser.add_argument("--length", type=int, default=8192, help="tokens in all")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--calls", type=int, default=3, help="of each round")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--backward", action="store_true", help="with gradients")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a process of ours runs
    given = parser.parse_args()
    if given.one is not None:
        run_one(given)
        return
    seconds: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for strategy in ("", *given.strategies.split(",")):
            count = given.processes if strategy else 1
            seconds.setdefault(strategy, []).append(
                launched(strategy, count, given.processes // count)
            )
    show(given, seconds)


def show(given: argparse.Namespace, seconds: dict[str, list[tuple[float, float]]]) -> None:
    """Print the table."""
    from polyattn import parallel

    shape = (1, given.heads, given.length // given.processes, 64)
    whole, cpu = map(statistics.median, zip(*seconds.pop(""), strict=True))
    kind = "full" if given.full else "causal"
    print(f"{shape}, {kind}, {given.layout}: one process {whole:.3f} s, of CPU {cpu:.3f} s")
    print("| strategy | seconds | ratio | ratio of CPU | pairs of a rank | visible / n | MB sent |")
    for strategy, times in seconds.items():
        said = parallel.explain(
            shape, shape, shape, over=given.processes, strategy=strategy, layout=given.layout,
            is_causal=not given.full,
        )  # fmt: skip
        assert said.chosen is not None
        median, of_cpu = map(statistics.median, zip(*times, strict=True))
        pairs = f"{max(said.chosen.pairs):g} | {said.visible_pairs / given.processes:g}"
        print(
            f"| {strategy} | {median:.3f} | {median / whole:.2f} | {of_cpu / cpu:.2f} | {pairs} |"
            f" {said.chosen.bytes_sent / 1e6:.1f} |"
        )


def launched(strategy: str, count: int, threads: int) -> tuple[float, float]:
    """Return the seconds of a call by processes of its own, and those of CPU of all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--one", strategy],
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    printed = [process.communicate()[0] for process in started]
    wall, cpu = zip(*[json.loads(text) for text in printed], strict=True)
    print(f"{strategy or 'one process'}: {max(wall):.3f} s", file=sys.stderr, flush=True)
    return float(max(wall)), float(sum(cpu))


def run_one(given: argparse.Namespace) -> None:
    """Time calls in this process, and print the median."""
    import torch
    import torch.distributed as dist

    from polyattn import attention, parallel

    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape = (1, given.heads, given.length // ranks, 64)
    arrays = [torch.randn(shape, requires_grad=given.backward) for _ in range(3)]
    how: dict[str, Any] = {"is_causal": not given.full}
    attend: Any = attention
    if given.one:
        dist.init_process_group("gloo")
        how |= {"over": dist.group.WORLD, "strategy": given.one, "layout": given.layout}
        attend = parallel.attention
    times = []
    for _ in range(given.calls + 1):
        if given.one:
            dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        output = attend(*arrays, **how)
        if given.backward:
            output.backward(output.detach())
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    print(json.dumps([statistics.median(each) for each in zip(*times[1:], strict=True)]))
    if given.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
