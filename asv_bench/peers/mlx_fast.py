"""MLX's kernel ``fast`` over the bare `mx.fast.scaled_dot_product_attention` that it calls.

Both alternate in one process, on MLX's default device, at 1024 tokens.
"""

from __future__ import annotations

import sys
from functools import partial

import mlx.core as mx
import script
from cases import Case, both

import polyattn

CASES = (*both(1, 12, 1024, 64), Case(1, 12, 4, 1024, 1024, 64))
QUICK = both(1, 4, 128, 64)


def contenders(case: Case) -> dict[str, script.Call]:
    """Return the bare call and polyattn's, which evaluate their result."""
    arrays, options = case.arguments()
    given = [mx.array(array) for array in arrays]
    mx.eval(given)
    bare = partial(
        mx.fast.scaled_dot_product_attention,
        *given,
        scale=case.size**-0.5,
        mask="causal" if case.is_causal else None,
    )
    ours = partial(polyattn.attention, *given, kernel="fast", **options)
    return {"bare": partial(evaluated, bare), "polyattn": partial(evaluated, ours)}


def evaluated(call: script.Call) -> mx.array:
    """Return the result of a call, computed."""
    result = call()
    mx.eval(result)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if the results differ."""
    options = script.read(script.parser(__doc__, 15, "quick", "cases", "json"), arguments)
    differ = False
    device = mx.default_device().type.name
    with script.measuring(options, f"float32; mlx {mx.__version__} on {device}") as show:
        for case in script.chosen(options, CASES, QUICK):
            rows = script.compare(contenders(case), options, script.difference)
            differ |= any((row.error or 0.0) > 1e-5 for row in rows)
            show(case.title, rows)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
