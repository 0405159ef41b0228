"""Dropout, distances and sigmoid beside the plain kernel, `torch.cdist` and the textbook.

Each round makes every call once, and the ratios are of the processor time of the same round, on one
thread. `torch.cdist` computes differences, as polyattn does, and once more by a product of
matrices, which loses the distance of vectors that are close together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import script
import torch

from polyattn import attention, scores
from polyattn.bench import timing

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


def main() -> int:
    """Print the table."""
    options = script.read(script.parser(__doc__, 7, "quick", cpu_time=True, window=0.0))
    length = 256 if options.quick else LENGTH
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    shape = (1, HEADS, length, SIZE)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]
    with script.measuring(options, "float32; processor time"), torch.no_grad():
        rows = {row.name: row for row in script.compare(calls(arrays), options)}
    print(f"{HEADS} heads of {SIZE}, {length} tokens\n")
    print(f"{'call':22} {'ms':>8} {'ratio':>6}  to")
    for library in ("numpy", "torch"):
        for option, others in RATIOS.items():
            own = rows[f"{library}, {option}"]
            for other in (name.format(library) for name in others):
                times = {"": own.times, other: rows[other].times}
                ratio = timing.ratios(times, other)[""].median
                print(f"{own.name:22} {own.seconds * 1e3:8.1f} {ratio:6.2f}  {other}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
