"""ONNX Runtime as the engine ``backend="onnxruntime"``, and its operator against the formula.

Three tables, each of calls that alternate in one process. The engine against torch, as ratios. What
a repeated call adds to a run of the bare session, in microseconds. And an exported call that is one
node, Attention, against the same call written out in primitive operators, both in ONNX Runtime.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial

import script
from cases import REFERENCE, Case, both, contenders, onnx_session
from script import Call

import polyattn
from polyattn.export import onnx
from polyattn_onnx.operator import Node
from polyattn_onnxruntime.backend import session_of

ENGINE = "onnxruntime"
CASES = (*both(1, 12, 128, 64), *both(1, 12, 512, 64))
QUICK = both(1, 4, 128, 64)
EXPORTED = {
    length: [
        *both(1, 12, length, 64),
        *(Case(1, 12, 12, length, length, 64, kind) for kind in ("alibi", "sinks")),
    ]
    for length in (512, 2048)
}
TINY = Case(1, 1, 1, 16, 16, 16)


def engines(case: Case, threads: int) -> dict[str, Call]:
    """Return torch, a bare session, and the engine."""
    arrays, options = case.arguments()
    peers = dict(contenders(case, threads))
    return {
        REFERENCE: peers[REFERENCE],
        "bare session": peers[ENGINE],
        "polyattn": partial(polyattn.attention, *arrays, backend=ENGINE, **options),
    }


def exported(case: Case, threads: int) -> dict[str, Call]:
    """Return sessions of a call that is one node, and of the same call written out."""
    arrays, options = case.arguments()
    shapes = {n: x.shape for n, x in zip(("query", "key", "value"), arrays, strict=True)}
    kernels = {"one node": "native", "written out": "dense"}
    models = {
        name: onnx(polyattn.attention, shapes, options=options | {"kernel": kernel})
        for name, kernel in kernels.items()
    }
    return {name: onnx_session(model, arrays, threads) for name, model in models.items()}


def repeated() -> dict[str, Call]:
    """Return a run of the session that a repeated call keeps, and that call, on one thread."""
    arrays, _ = TINY.arguments()
    size = TINY.size
    node = Node(
        *(24, "float32", TINY.heads, TINY.groups, size, size),
        *(False, (-1, -1), size**-0.5, 0.0, None, False),
    )
    session, names = session_of(node, "cpu", 1)
    return {
        "bare session": partial(session.run, None, dict(zip(names, arrays, strict=True))),
        "polyattn": partial(polyattn.attention, *arrays, backend=ENGINE),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = script.parser(__doc__, 15, "quick", "threads", "cases", "json", threads=2)
    options = script.read(parser, arguments)
    written = [case for cases in EXPORTED.values() for case in cases]
    with script.measuring(options) as show:

        def table(about: str, cases: Iterable[Case], made: Callable[..., dict[str, Call]]) -> None:
            print(f"\n{about}")
            for case in cases:
                arrays, given = case.arguments()
                exact = polyattn.attention(*arrays, backend="numpy", **given)
                calls = made(case, options.threads)
                rows = script.compare(calls, options, script.difference, exact)
                show(case.title, rows, about={"table": about})

        table("the engine, over torch", script.chosen(options, CASES, QUICK), engines)
        print("\na repeated call")
        with polyattn.use_threads(1):
            short = argparse.Namespace(**{**vars(options), "window": options.window / 5})
            print(TINY.shape, script.added(script.compare(repeated(), short)))
        chosen = script.chosen(options, written, EXPORTED[512])
        table("an exported call, over one node", chosen, exported)
    return 0


if __name__ == "__main__":
    sys.exit(main())
