"""Dropout, distances and sigmoid beside the plain kernel, `torch.cdist` and the textbook.

Each round makes every call once, and the ratios are of the processor time of the same round, on one
thread. `torch.cdist` computes differences, as polyattn does, and once more by a product of
matrices, which loses the distance of vectors that are close together.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import script
import torch

import polyattn
from polyattn import attention, scores

HEADS, SIZE, LENGTH = 8, 64, 1024
DIFFERENCES = "donot_use_mm_for_euclid_dist"


def calls(arrays: list[np.ndarray]) -> dict[str, Callable[[], Any]]:
    """Return the calls by name."""
    query, key, value = (torch.from_numpy(x) for x in arrays)
    scale = SIZE**-0.5

    def by_cdist(**options: Any) -> torch.Tensor:
        return torch.softmax(-torch.cdist(query, key, **options), -1) @ value

    def by_sigmoid(query: Any, key: Any, value: Any) -> Any:
        s = scale * (query @ key.swapaxes(-1, -2))
        return (torch.sigmoid(s) if isinstance(s, torch.Tensor) else 1 / (1 + np.exp(-s))) @ value

    found: dict[str, Callable[[], Any]] = {
        "torch.cdist, p=1": lambda: by_cdist(p=1.0),
        "torch.cdist": lambda: by_cdist(compute_mode=DIFFERENCES),
        "torch.cdist by a product": by_cdist,
    }
    for library, given in (("numpy", arrays), ("torch", [query, key, value])):

        def call(given: Any = given, **options: Any) -> Callable[[], Any]:
            return lambda: attention(*given, **options)

        found |= {
            f"{library}, tiled": call(kernel="tiled"),
            f"{library}, dropout": call(kernel="tiled", dropout=(0.1, 1)),
            f"{library}, textbook sigmoid": lambda given=given: by_sigmoid(*given),
            f"{library}, sigmoid": call(normalizer=scores.sigmoid()),
            f"{library}, distance(1)": call(similarity=scores.distance(1)),
            f"{library}, distance()": call(similarity=scores.distance()),
        }
    return found


#: What is compared with what, on each library.
RATIOS = {
    "dropout": ["{}, tiled"],
    "sigmoid": ["{}, textbook sigmoid"],
    "distance(1)": ["torch.cdist, p=1"],
    "distance()": ["torch.cdist", "torch.cdist by a product"],
}


def measure(length: int, rounds: int) -> dict[str, list[float]]:
    """Return the processor time of each call in each round."""
    rng = np.random.default_rng(0)
    shape = (1, HEADS, length, SIZE)
    given = calls([rng.standard_normal(shape, dtype=np.float32) for _ in range(3)])
    times: dict[str, list[float]] = {name: [] for name in given}
    for number in range(rounds + 1):
        for name, call in given.items():
            start = time.process_time()
            call()
            if number:  # the first round warms up
                times[name].append(time.process_time() - start)
    return times


def main() -> int:
    """Print the table."""
    parser = script.parser(__doc__, 7)
    script.add_quick(parser.add_argument)
    options = parser.parse_args()
    length, rounds = (256, 1) if options.quick else (LENGTH, options.rounds)
    torch.set_num_threads(1)
    with polyattn.use_threads(1), torch.no_grad():
        times = measure(length, rounds)
    print(script.machine(1))
    print(f"{HEADS} heads of {SIZE}, {length} tokens; processor time\n")
    print(f"{'call':22} {'ms':>8} {'ratio':>6}  to")
    for library in ("numpy", "torch"):
        for option, others in RATIOS.items():
            own = times[f"{library}, {option}"]
            for other in (name.format(library) for name in others):
                ratio = statistics.median(a / b for a, b in zip(own, times[other], strict=True))
                ms = statistics.median(own) * 1e3
                print(f"{library + ', ' + option:22} {ms:8.1f} {ratio:6.2f}  {other}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
