"""The same result in memory for one tile of scores, for any L and S.

`combine` folds over blocks of keys, for one block of rows at a time. Empty tiles are skipped and
full tiles are not masked, as far as static facts and readable arrays show.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array, facts_of, is_array
from polyattn._base.span import Span
from polyattn._base.tracing import is_compiling
from polyattn._core.call.operands import Operands
from polyattn._core.call.options import GRADIENT_ARRAYS, GRADIENT_EXPRESSIONS, OPTIONS
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression
from polyattn._core.tiles.axes import scaled
from polyattn._core.tiles.band import band, column_span
from polyattn._core.tiles.online_softmax import SoftmaxState, combine, initial_state, normalize
from polyattn._kernels.dense import COMPUTED, attend
from polyattn._kernels.dense_kernel import Dense
from polyattn._kernels.visible import visible_tiles
from polyattn.plugin import Backend

# The least scores of a tile per head, for any number of heads.
SMALLEST = 2**12
# The rows of a tile in a narrow band, at least; and with dropout, at most, so that what its hash
# computes stays in the caches.
FEW_ROWS = 128
# The most scores of a tile on a CPU, over all heads: 4 MiB of float32 and a few copies, enough work
# to make calls into the array library cheap beside it.
ON_CPU = 2**20
# The kinds of device where starting an operation takes longer than to compute so few scores.
ACCELERATORS = frozenset({"cuda", "gpu", "mps", "rocm", "tpu", "xpu"})


class Tiled(Dense):
    """The formula, one tile of scores at a time, with memory for one tile beside the output."""

    name = "tiled"
    # A norm and a normalizer need a whole row at once.
    features = COMPUTED - {"normalizer", "score_norm"}
    # On an accelerator; and in a program of torch.compile, where each tile is compiled by itself,
    # and by its lengths: those of `dense` may become symbols.
    tile = 2**24

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the scores cannot be cut into tiles."""
        if all(isinstance(length, int) for length in problem.scores):
            return []
        return ["its tiles need lengths that are known"]  # in torch.jit.trace they are tensors

    def only_on_request(self, problem: Problem) -> str | None:
        """Return why `dense` is preferred: with one tile it does the same with less overhead."""
        if math.prod(problem.scores) <= most_scores(problem, self.tile):
            return "one tile holds all the scores: dense does the same"
        return None

    def block_sizes(self, problem: Problem) -> tuple[int, int]:
        """Return the rows and keys of a tile: about square, wider where rows are few."""
        heads = max(1, math.prod(problem.batch) * problem.heads)
        tile = most_scores(problem, self.tile)
        area = max(tile // heads, min(tile, SMALLEST))
        rows = min(problem.query_length, int(area**0.5))
        return max(1, rows), area // max(1, rows)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        xp = backend.xp
        if 0 in problem.scores:
            empty = initial_state(problem, operands, xp, Span(0, problem.query_length))
            return normalize(problem, empty, operands.query.dtype, xp)
        operands = widened(problem, operands, xp)
        row_block, column_block = self.block_sizes(problem)
        if backend.is_eager(operands.query):
            row_block = min(row_block, _most_rows(problem))
        blocks = (
            normalize(
                problem,
                _attend_rows(problem, operands, backend, rows, column_block),
                operands.query.dtype,
                xp,
            )
            for rows in Span(0, problem.query_length).split(row_block)
        )
        return backend.stack_rows(problem, operands.query, blocks)


def most_scores(problem: Problem, tile: int) -> int:
    """Return the most scores of a tile of a kernel, which are fewer on a CPU."""
    if problem.device_kind in ACCELERATORS or is_compiling():
        return tile
    return min(tile, ON_CPU)


def widened(problem: Problem, x: Operands, xp: Any) -> Operands:
    """Put 16-bit operands that tiles share into float32, where a library may differentiate.

    It accumulates the gradients of tiles in the dtype of the array that they are cut from.
    """
    if not problem.may_be_differentiated:
        return x

    def wide(_: str, thing: Any) -> Any:
        narrow = is_array(thing) and facts_of(thing).dtype in ("float16", "bfloat16")
        return xp.astype(thing, xp.float32) if narrow else thing

    shared = [name for name in GRADIENT_ARRAYS[1:] if _is_shared(name, getattr(x, name))]
    fields = {name: wide(name, getattr(x, name)) for name in shared}
    for name in GRADIENT_EXPRESSIONS:
        expression = getattr(x, name)
        if isinstance(expression, Expression):
            fields[name] = expression.map(wide)
    return x._replace(**fields)


def _is_shared(name: str, array: Array | None) -> bool:
    """Return whether more than one tile may be given the same entry of an array."""
    by_tile = name in OPTIONS and str(OPTIONS[name].axes).endswith("LS")
    return array is not None and not (by_tile and 1 not in (1, 1, *array.shape)[-2:])


def _most_rows(problem: Problem) -> int:
    """Return the rows above which a tile takes more time; the gradients prefer few tiles."""
    low, high = band(problem)
    if problem.dropout:
        return FEW_ROWS
    if low is None or high is None:
        return problem.query_length
    return max(FEW_ROWS, high - low)  # Most scores of a taller tile would be hidden.


def _attend_rows(
    problem: Problem, x: Operands, backend: Backend, rows: Span, column_block: int
) -> SoftmaxState:
    xp: Any = backend.xp
    query = scaled(problem, x.query[..., rows.start : rows.stop, :], xp)
    state = initial_state(problem, x, xp, rows)
    tiles = column_span(problem, rows).split(column_block)
    for columns, masked in visible_tiles(problem, x, backend, rows, tiles):
        tile = attend(problem, x, backend, query, rows, columns, masked=masked)
        state = combine(xp, state, tile)
    return state
