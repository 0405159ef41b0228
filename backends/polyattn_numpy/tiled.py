"""Attention in NumPy at the speed of a compiled kernel, in memory for a few tiles a thread.

A call is cut into pieces of rows and heads (`blocks`), which threads take in turn (`threads`); each
piece is a pass over tiles of keys (`sweep`).
"""

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from polyattn.plugin import FEATURES, Array, Backend, Kernel, Operands, Problem, thread_count
from polyattn_numpy import threads
from polyattn_numpy.blocks import TASK, Piece, pieces
from polyattn_numpy.online_softmax import Running, join
from polyattn_numpy.prepared import Call, call_of
from polyattn_numpy.scratch import Memory, borrowed_memory
from polyattn_numpy.sweep import Sweep

__all__ = ["Tiled"]

# Scores of an item up to which the array-API kernel's few calls are the faster ones.
TINY = 2**12
# OpenBLAS starts no threads of its own for products of fewer multiply-adds.
UNTHREADED = 2**18


class Tiled(Kernel):
    """Tiles of the scores by BLAS, on threads."""

    name = "tiled"
    # Of which a norm, and a normalizer, want a whole row at once.
    features = frozenset(FEATURES) - {"normalizer", "score_norm"}
    batch_invariant = True
    tile = 2**18

    def only_on_request(self, problem: Problem) -> str | None:
        """Little work goes faster with less around it."""
        # By the shape of one item, so that a batch of many is computed as each of them is.
        if problem.heads * problem.query_length * problem.key_length <= TINY:
            return "an item has so few scores that dense, with less around it, is faster"
        return None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        output = np.empty((*problem.scores[:-1], problem.value_size), operands.query.dtype)
        logsumexp = None
        if "logsumexp" in problem.features:
            logsumexp = np.empty(problem.scores[:-1], problem.accumulator)
        if 0 in problem.scores:
            output[...] = 0
            if logsumexp is not None:
                logsumexp[...] = -math.inf if operands.sinks is None else operands.sinks[:, None]
            return output, logsumexp
        result = Result(problem, output, logsumexp)
        work = math.prod(problem.scores) * (problem.head_size + problem.value_size)
        count = min(thread_count(threads.default), work // TASK) if work >= 2 * TASK else 1
        state = threads.Shared()
        call = call_of(problem, operands, backend.xp, self.tile, state.check)
        table = call.table
        cut = pieces(problem, self.tile, count, pooled=table is None or not table.differs_by_item)
        if table is not None:
            cut = tuple(sorted(cut, key=table.visible, reverse=True))

        def attend_to(piece: Piece) -> None:
            with borrowed_memory() as memory:
                attend(call, result, piece, memory)

        if len(cut) == 1 and work < UNTHREADED:
            attend_to(cut[0])
        else:
            threads.each(attend_to, cut, count, state)
        result.join_parts()
        return output, logsumexp


def attend(call: Call, result: Result, piece: Piece, memory: Memory) -> None:
    """Compute a piece: the plain way, and where that proves wrong, with more care."""
    sweep = Sweep(call, piece, memory)
    running = sweep.run()
    proven = sweep.proven(running)
    if proven is not True and piece.units > 1:
        for unit in piece.alone():
            attend(call, result, unit, memory)
        return
    if proven is not True and not sweep.hides_only_numbers():
        sweep = Sweep(call, piece, memory, clean=True)
        running = sweep.run()
        proven = sweep.proven(running)
    if not np.all(proven):
        kept = Running(*map(np.array, running))
        careful = Sweep(call, piece, memory, clean=True, careful=True).run()
        running = Running(*(np.where(proven, *both) for both in zip(kept, careful, strict=True)))
    result.write(piece, running)


class Result:
    """Where the pieces write what they found."""

    def __init__(self, problem: Problem, output: Array, logsumexp: Array | None) -> None:
        batch = problem.batch or (1,)
        split = (*batch, problem.key_heads, problem.heads // problem.key_heads)
        self.kept = 1 - problem.dropout
        self.output = output.reshape(*split, *output.shape[-2:])
        self.logsumexp = None
        if logsumexp is not None:
            self.logsumexp = logsumexp.reshape(*split, logsumexp.shape[-1])
        self.parts: dict[Piece, Running] = {}

    def write(self, piece: Piece, running: Running) -> None:
        """Divide, and write; keep what is only a part."""
        if piece.parts > 1:
            # Of its own, for the scratch memory will be written to again.
            self.parts[piece] = Running(*(np.array(array) for array in running))
            return
        index = (*piece.outer, slice(*piece.batch), slice(*piece.heads), slice(None))
        output = self.output[(*index, slice(*piece.rows))].swapaxes(-2, -3)
        by_head = (*output.shape[:-1], 1)
        total = running.total.reshape(by_head)
        if self.logsumexp is not None:
            logsumexp = np.log(running.total) + running.reference
            rows = self.logsumexp[(*index, slice(*piece.rows))].swapaxes(-1, -2)
            rows[...] = logsumexp.reshape(rows.shape)
        # A row that sees no key has 0 of 0.
        np.copyto(total, 1, where=total == 0)
        if self.kept != 1:
            total *= self.kept
        weighted = running.output.reshape(output.shape)
        if output.dtype != total.dtype:
            np.divide(weighted, total, out=output, dtype=total.dtype, casting="unsafe")
        else:
            np.divide(weighted, total, out=output)

    def join_parts(self) -> None:
        """Join the parts of the same rows, in the order of their keys."""
        rows: dict[Piece, list[tuple[int, Running]]] = {}
        for piece, running in self.parts.items():
            whole = piece._replace(columns=piece.rows, part=0, parts=1)
            rows.setdefault(whole, []).append((piece.part, running))
        for whole, parts in rows.items():
            in_order = sorted(parts, key=lambda part: part[0])
            self.write(whole, reduce(join, (running for _, running in in_order)))
