"""The gradients on dask arrays: each visible pair of chunks once, and sums of their shares.

The logsumexp is that of whole rows, so the shares of the chunks of keys add up.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from polyattn.plugin import OPTIONS, Cotangents, Gradients, Operands, Problem, Residuals
from polyattn_dask.cut import Cut, cut
from polyattn_dask.grid import Axes, Index
from polyattn_dask.layer import Key, Layer
from polyattn_dask.pullback import Nothing, Pick, PullBack, PullBackUnseen, add
from polyattn_dask.sizes import BYTES

RESULTS = ("output", "logsumexp", "output_gradient", "logsumexp_gradient")

#: A task that adds to a block of a gradient, and which part of its result that is.
Share = tuple[Key, Pick]


class Target(NamedTuple):
    """A gradient: its name, the axes of its argument, and the chunks of the argument."""

    name: str
    axes: Axes = ()
    chunks: tuple[tuple[int, ...], ...] = ()

    @property
    def along_keys(self) -> int | None:
        """The axis of the keys, counted from the last."""
        return self.axes.index("S") - len(self.axes) if "S" in self.axes else None


def gradients(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Return the gradients of a call, as dask arrays."""
    results = dict(zip(RESULTS, (*residuals, *cotangents), strict=True))
    call = cut(problem, x, **results)
    targets = _targets(call)
    layer = Layer("attention-gradient", call.inputs, problem, call.template)
    shares = _shares(call, layer, targets)
    # All tasks of all sums, before the arrays that depend on them.
    last = {target: _blocks(call, layer, target, shares[target]) for target in targets}
    query = call.arrays["query"][1]
    found: dict[str, Any] = {o.name: [] for o in OPTIONS.values() if o.gradient == "carried"}
    for target, tasks in last.items():
        array = layer.array(target.name, target.chunks, problem.accumulator, query, tasks)
        option, _, number = target.name.partition(".")
        if number:
            found[option].append(array)
        else:
            found[option] = array
    return Gradients(**found)


def _targets(call: Cut) -> list[Target]:
    """Return the gradients of a call."""
    found = []
    for name in ("query", "key", "value"):
        axes, array = call.arrays[name]
        found.append(Target(name, axes, array.chunks))
    for option in OPTIONS.values():
        leaves = [x for x in call.leaves if x.option == option.name]
        given = call.template.given.get(option.name)
        if option.gradient == "array":
            found += [Target(option.name, x.axes, x.array.chunks) for x in leaves]
        elif option.gradient == "carried":
            named = [(f"{option.name}.{n}", x) for n, x in enumerate(leaves)]
            found += [Target(name, x.axes, x.array.chunks) for name, x in named]
        elif option.gradient == "number" and isinstance(given, float):
            found.append(Target(option.name))
    return found


def _shares(
    call: Cut, layer: Layer, targets: list[Target]
) -> dict[Target, dict[tuple[int, ...], list[Share]]]:
    """Add the tasks of all pairs; return the shares in each block of each gradient."""
    found: dict[Target, dict[tuple[int, ...], list[Share]]] = {t: {} for t in targets}
    along = {t.name: t.along_keys for t in targets if t.along_keys is not None}

    def note(key: Key, target: Target, at: Index, group: list[int]) -> None:
        follows = target.along_keys is not None
        for n, column in enumerate(group if follows else [0]):
            place = call.grid.place(target.axes, at._replace(column=column))
            pick = Pick(target.name, n if follows else None)
            found[target].setdefault(place, []).append((key, pick))

    for at in call.grid.row_blocks():
        where, query = (*at.items, at.head, at.row), call.block("query", at)
        results, sinks = [call.block(name, at) for name in RESULTS], call.sinks(at)
        groups = call.groups(at)
        for n, group in enumerate(groups):
            step = PullBack(call.pieces(at, group, n == 0), along)
            key = layer.add((*where, n), step, query, *call.blocks(at, group), results)
            for target in targets:
                if target.name != "sinks" or n == 0:
                    note(key, target, at, group)
        if sinks and not groups:
            part = call.grid.part(call.problem, at, call.grid.columns[0])
            unseen = PullBackUnseen(call.pieces(at, []), part)
            key = layer.add((*where, 0), unseen, query, sinks[0], results)
            note(key, next(t for t in targets if t.name == "sinks"), at, [])
    return found


def _blocks(
    call: Cut, layer: Layer, target: Target, shares: dict[tuple[int, ...], list[Share]]
) -> dict[tuple[int, ...], Any]:
    """Return the last task of each block of a gradient."""
    found: dict[tuple[int, ...], Any] = {}
    for place in itertools.product(*(range(len(cuts)) for cuts in target.chunks)):
        shape = tuple([cuts[n] for cuts, n in zip(target.chunks, place, strict=True)])
        given, dtype = shares.get(place, []), call.problem.accumulator
        if not given:
            first = next(call.grid.row_blocks())
            found[place] = (Nothing(dtype, shape), call.block("query", first))
        elif len(given) == 1:
            found[place] = (given[0][1], given[0][0])
        else:
            name, size = target.name, math.prod(shape) * BYTES[dtype]
            picks = [
                layer.add(("share", name, *place, n), pick, key)
                for n, (key, pick) in enumerate(given)
            ]
            found[place] = (add, layer.tree(("sum", name, *place), picks, size, add))
    return found
