"""16 bits against 32 on NumPy: the time of a call in float16 and bfloat16 over the same in float32.

A kernel converts tiles to float32 as it computes them. All run alternately in one process. The
error is the largest difference from the float32 result.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial

import numpy as np
import script
from cases import Case, both

import polyattn

CASES = (*both(1, 12, 1024, 64), *both(1, 4, 2048, 64), *both(1, 8, 4096, 128))
QUICK = both(1, 2, 64, 16)


def contenders(case: Case) -> dict[str, script.Call]:
    """Return the calls to compare, by dtype."""
    arrays, options = case.arguments()
    dtypes = {"float32": np.float32, "float16": np.float16}
    with contextlib.suppress(ImportError):
        import ml_dtypes

        dtypes["bfloat16"] = ml_dtypes.bfloat16
    attend = partial(polyattn.attention, **options)
    return {
        name: partial(attend, *(array.astype(dtype) for array in arrays))
        for name, dtype in dtypes.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each dtype and case."""
    parser = script.parser(__doc__, 9, "threads", "quick", "cases", "json", window=0.15)
    options = script.read(parser, arguments)
    with script.measuring(options, "16 and 32 bits") as show:
        for case in script.chosen(options, CASES, QUICK):
            show(case.title, script.compare(contenders(case), options, script.difference))
    return 0


if __name__ == "__main__":
    sys.exit(main())
