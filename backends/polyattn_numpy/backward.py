"""The gradients of attention, in the pieces and tiles of the forward pass.

Pieces are computed in parallel, and add to the gradients of keys and values in a fixed order.
"""

from __future__ import annotations

import numpy as np

from polyattn.plugin import (
    Backend,
    Cotangents,
    Gradients,
    Operands,
    Problem,
    Residuals,
)
from polyattn_numpy import threads
from polyattn_numpy.backward_sweep import BackwardSweep, Results
from polyattn_numpy.blocks import pieces, useful_threads
from polyattn_numpy.gradient_sums import GradientSums, adds_across_heads
from polyattn_numpy.prepared import prepare
from polyattn_numpy.scratch import borrowed_scratch

# Products of a tile: of the scores and the weights, and the gradients of query, key and value.
PRODUCTS = 5


def gradients(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents, backend: Backend,
    tile: int,
) -> Gradients:  # fmt: skip
    """Return the gradients of a call, computed in tiles of at most `tile` scores."""
    if 0 in problem.scores:
        return _without_scores(problem, x, residuals, cotangents)
    count = useful_threads(problem, PRODUCTS)
    shared = threads.Shared()
    call = prepare(problem, x, tile, shared.check)
    share_items = call.table is None or not call.table.differs_by_item
    cut = pieces(problem, tile, count, share_items=share_items, products=PRODUCTS)
    if adds_across_heads(problem, x):
        # The order of a sum must not depend on which heads share a piece.
        cut = tuple(one for piece in cut for one in piece.single_heads())
    sums = GradientSums(problem, x, residuals.logsumexp, cut, shared.check)
    results = Results.of(problem, residuals, cotangents)

    def add(number: int) -> None:
        with borrowed_scratch() as scratch:
            BackwardSweep(call, results, sums, number, scratch, backend).run()

    threads.each(add, range(len(cut)), count, shared)
    return sums.gradients()


def _without_scores(
    problem: Problem, x: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Return the gradients of a call without rows or keys: zero, but for the sinks."""
    sums = GradientSums(problem, x, residuals.logsumexp, (), lambda: None)
    if sums.delta is not None and cotangents.logsumexp is not None:
        sums.delta -= np.reshape(cotangents.logsumexp, sums.delta.shape)
    return sums.gradients()
