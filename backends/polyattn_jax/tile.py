"""One tile of scores: its indices, and the steps of the formula up to the scores."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyattn._core.tiles.axes import fold_heads, unfold_heads
from polyattn.plugin import (
    Array,
    BackendPrimitives,
    Indices,
    Mask,
    Operands,
    Problem,
    Span,
    with_rank,
)
from polyattn_jax.explicit import Explicit

# Entries of vectors that a similarity sums at a time.
ENTRIES = 4
# Scores of a block over which such a sum passes once for every few entries.
BLOCK = 2**17


class TileIndices(Indices):
    """The (b, h, i, j) of a tile whose first row and key are traced."""

    def __init__(
        self, problem: Problem, x: Operands, row: Any, rows: int, column: Any, columns: int
    ) -> None:
        super().__init__(problem, jnp, x, Span(0, rows), Span(0, columns))
        self.problem, self.operands = problem, x
        self.first, self.lengths = (row, column), (rows, columns)

    def with_cut_operands(self) -> TileIndices:
        """Return indices whose operands hold only the tile's part of mask and bias."""
        x = self.operands
        if x.bias is not None:
            x = x._replace(bias=self.cut(x.bias))
        if isinstance(x.mask, Mask):

            def cut(name: str, thing: Any) -> Any:
                return self.cut(thing) if name == "array" else thing

            x = x._replace(mask=x.mask.map(cut))
        return self.replaced(**x._asdict())

    def replaced(self, **operands: Any) -> TileIndices:
        """Return the indices with some operands replaced."""
        (row, column), (rows, columns) = self.first, self.lengths
        x = self.operands._replace(**operands)
        return TileIndices(self.problem, x, row, rows, column, columns)

    @property
    def row(self) -> Array:
        """The query row, shape (..., 1, l, 1)."""
        row = super().row
        return row + jnp.asarray(self.first[0], row.dtype)

    @property
    def column(self) -> Array:
        """The key, shape (..., 1, 1, s)."""
        column = super().column
        return column + jnp.asarray(self.first[1], column.dtype)

    def cut(self, array: Array) -> Array:
        """Return the tile's part of a mask or bias, which may be cut already."""
        for axis, first, length in zip((-2, -1), self.first, self.lengths, strict=True):
            if array.ndim >= -axis and array.shape[axis] not in (1, length):
                array = lax.dynamic_slice_in_dim(array, first, length, axis=axis)
        return array

    def keep_mask(self) -> Array:
        """Return which weights dropout keeps, shape (..., H, l, s)."""
        first, columns = self.first[1] + self.dropout_start[3], self.lengths[1]
        half = -(-(columns // self.decided + 2) // 2)
        blocks = first // self.decided + jnp.arange(2 * half).reshape(2, half)

        # One number holds the bits of a block, so that the words of a hash are computed together.
        # A loop computes them once: XLA would fuse the hash with each of its uses.
        def packed(blocks: Array) -> Array:
            bits = enumerate(self.keep_mask_by_word(blocks))
            return sum((kept.astype("uint8") << place for place, kept in bits), jnp.uint8(0))

        numbers = jnp.concatenate(list(lax.map(packed, blocks)), axis=-1)
        places = with_rank(jnp.arange(self.decided, dtype="uint8"), numbers.ndim + 1)
        bits = numbers[..., None] >> places & 1
        kept = bits.reshape(*bits.shape[:-2], -1) != 0
        return lax.dynamic_slice_in_dim(kept, first % self.decided, columns, axis=-1)

    def by_rule(self, rule: Callable[..., Array]) -> Array:
        """Call a mask function."""
        if isinstance(rule, Explicit):
            return rule(self.first, self.lengths)
        return super().by_rule(rule)

    def by_score_mod(self, rule: Callable[..., Array], scores: Array) -> Array:
        """Call a score function."""
        if isinstance(rule, Explicit):
            # A value may have more batch axes than query and key.
            whole = (*self.problem.batch, self.problem.heads, *self.lengths)
            return rule(self.first, self.lengths, jnp.broadcast_to(scores, whole))
        return super().by_score_mod(rule, scores)

    def seen(self, new: Array | None) -> Array | None:
        """Return where masks, bias and `new` leave a key; None if they leave all."""
        parts = [] if new is None else [self.column >= new]
        if self.operands.bias is not None:
            parts.append(self.of_scores(self.operands.bias) != -math.inf)
        parts += self.visible()
        return functools.reduce(operator.and_, parts) if parts else None


def scaled_query(problem: Problem, query: Array) -> Array:
    """Return scale · query in at least float32, the heads of a group folded into its rows."""
    query = with_rank(query, len(problem.batch) + 3).astype(problem.accumulator)
    # Another similarity is scaled afterwards: it need not be linear in the query.
    return fold_heads(problem, query if problem.similarity_spec else query * problem.scale, jnp)


def tile_scores(indices: TileIndices, query: Array, key: Array) -> Array:
    """Return the scores of a tile, −inf where a key is masked."""
    s = modified(indices, similarity(indices, query, key))
    if indices.operands.bias is not None:
        bias = indices.of_scores(indices.operands.bias).astype(s.dtype)
        s = jnp.where(bias == -math.inf, -math.inf, s + bias)
    for visible in indices.visible():
        s = jnp.where(visible, s, -math.inf)
    return s


def similarity(
    indices: TileIndices, query: Array, key: Array, scale: float | Array | None = None
) -> Array:
    """Return scale · q·k, or the similarity that replaces q·k: the first step of the formula."""
    problem, rule = indices.problem, indices.operands.similarity
    key = with_rank(key, query.ndim).astype(query.dtype)
    if rule is None:
        return unfold_heads(problem, inner(query, key), jnp)
    scale = problem.scale if scale is None else scale
    return scale * unfold_heads(problem, rule.between(query, key, PRIMITIVES), jnp)


def similarity_tangent(
    indices: TileIndices,
    vectors: tuple[Array, Array],
    tangents: tuple[Array | None, Array | None],
) -> Array | None:
    """Return the tangent of `similarity` by queries and keys, of which None stands for 0."""
    problem, rule = indices.problem, indices.operands.similarity
    if rule is None or all(one is None for one in tangents):
        return None

    def of_rank(array: Array | None, like: Array) -> Array:
        return jnp.zeros_like(like) if array is None else with_rank(array, query.ndim)

    query, key = vectors[0], with_rank(vectors[1], vectors[0].ndim)
    both = of_rank(tangents[0], query), of_rank(tangents[1], key)
    tangent = rule.pushforward(query, key, both, PRIMITIVES)
    return problem.scale * unfold_heads(problem, tangent, jnp)


def modified(indices: TileIndices, s: Array, softcap: float | Array | None = None) -> Array:
    """Return scores with softcap and ``score_mod=`` applied: the steps before the bias."""
    softcap = indices.problem.softcap if softcap is None else softcap
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    return indices.modified(s)


def product(a: Array, b: Array) -> Array:
    """Return the matrix product, at full precision unless the caller has chosen one for JAX."""
    return jnp.matmul(a, b, precision=_precision())


def inner(a: Array, b: Array) -> Array:
    """Return a · bᵀ at the precision of `product`."""
    # For one row XLA would copy the transpose of b, and a CPU spend half of its time on that.
    return jnp.einsum("...ld,...sd->...ls", a, b, precision=_precision())


def _precision() -> Any:
    # Except on a CPU, JAX's own default would be TF32 for float32.
    chosen: Any = jax.config
    return None if chosen.jax_default_matmul_precision else lax.Precision.HIGHEST


def finite(array: Array) -> Array:
    """Return an array with 0 for what is not finite, for a matrix product to read."""
    return materialized(jnp.where(jnp.isfinite(array), array, 0))


def materialized(array: Array) -> Array:
    """Return an array for a matrix product to read: XLA fuses both into a slow loop on a CPU."""
    barrier: Any = lax.optimization_barrier
    result: Array = barrier(array)
    return result


class Primitives(BackendPrimitives):
    """The primitives that a similarity computes with."""

    def matmul(self, a: Array, b: Array) -> Array:
        """Return the matrix product of two stacks of matrices."""
        return product(a, b)

    def over_size(
        self, term: Callable[[Any, Array, Array], Array], query: Array, key: Array
    ) -> Array:
        """Sum a function of one entry of queries and keys over D, some rows at a time."""
        blocks = _blocks_of_rows(query, key)
        if blocks == 1:
            return self._over_size(term, query, key)
        *batch, rows, size = query.shape
        cut = jnp.moveaxis(query.reshape(*batch, blocks, rows // blocks, size), -3, 0)
        sums = lax.map(lambda block: self._over_size(term, block, key), cut)
        return jnp.moveaxis(sums, 0, -3).reshape(*sums.shape[1:-2], rows, sums.shape[-1])

    def _over_size(
        self, term: Callable[[Any, Array, Array], Array], query: Array, key: Array
    ) -> Array:
        if query.shape[-2] == 1 or query.shape[-1] <= ENTRIES:
            return super().over_size(term, query, key)
        # For many rows, one expression of all entries takes XLA four times as long as a loop.
        first = query.shape[-1] % ENTRIES or ENTRIES
        start = super().over_size(term, query[..., :first], key[..., :first])
        queries, keys = (jnp.moveaxis(array, -1, 0) for array in (query, key))

        def step(total: Array, d: Any) -> tuple[Array, None]:
            for n in range(ENTRIES):
                total += term(d + n, queries[d + n][..., :, None], keys[d + n][..., None, :])
            return total, None

        return lax.scan(step, start, np.arange(first, query.shape[-1], ENTRIES))[0]


def _blocks_of_rows(query: Array, key: Array) -> int:
    """Return the number of equal blocks of rows whose scores stay in the cache."""
    if not all(isinstance(n, int) for n in (*query.shape, *key.shape)):
        return 1  # of an exported program
    rows, batch = query.shape[-2], np.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    wanted = -(-math.prod(batch) * rows * key.shape[-2] // BLOCK)
    return next((n for n in range(max(1, wanted), rows) if rows % n == 0), 1)


PRIMITIVES = Primitives(jnp)
