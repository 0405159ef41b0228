"""The gradients on dask arrays: each visible pair of chunks once, and sums of their shares.

The logsumexp is that of whole rows, so the shares of the chunks of keys add up. For the call that
`forward` draws, with o the output, its logsumexp and the gradients of both::

    q0 [k0 k1] [v0 v1] o0 ─ PullBackStep ─ (0, 0, 0) ─┬ ("query", None) ─────── query 0
    q1 [k0 k1] [v0 v1] o1 ─ PullBackStep ─ (0, 1, 0) ─┤
    q1 [k2]    [v2]    o1 ─ PullBackStep ─ (0, 1, 1) ─┤
                                                      ├ ("query", None) twice ─ add ─ query 1
                                                      ├ ("key", 0) twice ────── add ─ key 0
                                                      └ ("key", 0) of the last ────── key 2

A step returns a dict: the share of each gradient that has an axis of keys by the chunk's number in
the step, of the others by None. An `itemgetter` takes each share out, and `Layer.sums` adds them.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from polyattn._core.call.options import OPTIONS
from polyattn.plugin import Cotangents, Gradients, Operands, Problem, Residuals
from polyattn_dask.cut import Cut, cut
from polyattn_dask.grid import Axes, Chunks, key_axis
from polyattn_dask.layer import Layer, Place, Task
from polyattn_dask.worker_steps import PullBackStep

RESULTS = ("output", "logsumexp", "output_gradient", "logsumexp_gradient")


class GradientTarget(NamedTuple):
    """A gradient: its name, the axes of its argument, and the chunks of the argument."""

    name: str
    axes: Axes = ()
    chunks: Chunks = ()


def gradients(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Return the gradients of a call, as dask arrays."""
    results = dict(zip(RESULTS, (*residuals, *cotangents), strict=True))
    call = cut(problem, x, **results)
    targets, layer = _targets(call), call.layer("attention-gradient")
    shares = _shares(call, layer, targets)
    # All tasks of all sums, before the arrays that depend on them.
    dtype = problem.accumulator
    last = {t: layer.sums(t.name, t.chunks, dtype, shares[t]) for t in targets}
    by_name: dict[str, Any] = {o.name: [] for o in OPTIONS.values() if o.gradient == "carried"}
    for target, tasks in last.items():
        array = layer.array(target.name, target.chunks, dtype, tasks)
        option, _, number = target.name.partition(".")
        if number:
            by_name[option].append(array)
        else:
            by_name[option] = array
    return Gradients(**by_name)


def _targets(call: Cut) -> list[GradientTarget]:
    """Return the gradients of a call."""
    targets = []
    for name in ("query", "key", "value"):
        axes, array = call.arrays[name]
        targets.append(GradientTarget(name, axes, array.chunks))
    for option in OPTIONS.values():
        if option.gradient == "number" and isinstance(call.options.get(option.name), float):
            targets.append(GradientTarget(option.name))
        elif option.gradient in ("array", "carried"):
            arrays = [x for x in call.option_arrays if x.option == option.name]
            end = ".{}" if option.gradient == "carried" else ""
            targets += [
                GradientTarget(option.name + end.format(n), x.axes, x.array.chunks)
                for n, x in enumerate(arrays)
            ]
    return targets


def _shares(
    call: Cut, layer: Layer, targets: list[GradientTarget]
) -> dict[GradientTarget, dict[Place, list[Task]]]:
    """Add the tasks of all pairs; return the shares in each block of each gradient."""
    shares: dict[GradientTarget, dict[Place, list[Task]]] = {t: {} for t in targets}
    along = {t.name: axis for t in targets if (axis := key_axis(t.axes)) is not None}
    has_sinks = any(x.option == "sinks" for x in call.option_arrays)
    for at in call.grid.row_blocks():
        results = [call.block(name, at) for name in RESULTS]
        # The sinks get one share of each row: in the first group, or without keys if there is none.
        for n, group in enumerate(call.groups(at) or [[]] * has_sinks):
            step = PullBackStep(call.calls(at, group, n == 0), along)
            key = layer.add((*at.where, n), *call.task(at, group, step, results))
            for target in targets:
                if not (n == 0 if target.name == "sinks" else group):
                    continue
                follows = target.name in along
                for m, column in enumerate(group if follows else [0]):
                    place = call.grid.place(target.axes, at._replace(column=column))
                    share = operator.itemgetter((target.name, m if follows else None)), key
                    shares[target].setdefault(place, []).append(share)
    return shares
