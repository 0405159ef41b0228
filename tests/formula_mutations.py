"""Mistakes in the code of outputs, for ``mutations.py``: a name, a file, texts and replacements."""

FORMULA, TILED = "polyattn/_kernels/dense.py", "polyattn/_kernels/tiled.py"
VISIBLE = "polyattn/_kernels/visible.py"
BAND, GROUPS = "polyattn/_core/tiles/band.py", "polyattn/_core/tiles/axes.py"
SPAN = "polyattn/_base/span.py"
MASKS = "polyattn/_core/expressions/masks.py"
COVERAGE = "polyattn/_core/expressions/coverage.py"
REPLACEMENTS = "polyattn/_core/expressions/replacements.py"
RUNNING, ABSENT = "polyattn/_core/tiles/online_softmax.py", "polyattn/_kernels/visible.py"
NUMPY, INDICES = "backends/polyattn_numpy/backend.py", "polyattn/_core/tiles/indices.py"
BLOCKS, SWEEP = "backends/polyattn_numpy/tiling.py", "backends/polyattn_numpy/forward_sweep.py"
PATTERNS, TILES = "polyattn/_core/expressions/patterns.py", "polyattn/_core/tiles/coverage.py"
PLACES = "polyattn/_core/expressions/indices.py"
STEPS, DROPOUT = "polyattn/_core/expressions/scores.py", "polyattn/_core/tiles/dropout.py"
TILE_SCORES = "backends/polyattn_numpy/tile_scores.py"
NUMPY_TILED = "backends/polyattn_numpy/tiled_kernel.py"
NUMPY_SOFTMAX = "backends/polyattn_numpy/softmax_sums.py"
NUMPY_SMALL = "backends/polyattn_numpy/small.py"
AT_ONCE = "backends/polyattn_numpy/at_once.py"
VISIBILITY = "backends/polyattn_numpy/tile_visibility.py"
PREPARED = "backends/polyattn_numpy/prepared.py"
MASK_TABLE = "backends/polyattn_numpy/mask_table.py"
LENGTHS = "polyattn/_core/call/lengths.py"

SOFTCAP, UNCAPPED = "    capped = cap(normed)  # 2\n", "    capped = normed\n"
CAP_LATE = "    s = cap(s)\n"
SCORE_MOD = "    s = at.modified(capped)  # 3\n"
BIAS = """    if x.bias is not None:
        bias = cast(xp, at.of_bias(x.bias), s.dtype)
        s = hide(xp, s + bias, bias != -math.inf)  # 4
"""
SINKS = """        if x.sinks is not None:
            state = combine(xp, initial_state(problem, x, xp, rows), state)  # 6
"""
TO_GROUPS = "array = xp.reshape(array, (*batch, groups, members, rows, size))"
FROM_GROUPS = "return xp.reshape(array, (*batch, groups * members, folded // members, size))"

MUTATIONS = (
    # dense.py, line by line
    ("sign of the scale", GROUPS, "query * problem.scale", "query * -problem.scale"),
    ("scale left out", GROUPS, "query * problem.scale", "query * 1.0"),
    ("16-bit scores", GROUPS, "query = cast(xp, query, getattr(xp, problem.accumulator))", "pass"),
    ("key not transposed with its rows", FORMULA, "xp.matrix_transpose(key)",
     "xp.matrix_transpose(xp.flip(key, axis=-2))"),
    ("softcap after bias", FORMULA, SOFTCAP, UNCAPPED, BIAS, BIAS + CAP_LATE),
    ("softcap left out", FORMULA, SOFTCAP, UNCAPPED),
    ("a similarity's scores not capped", FORMULA, "s if problem.softcap is None",
     "s if problem.softcap is None or similar is not None"),
    ("softcap not divided by", FORMULA, "tanh(s / problem.softcap)", "tanh(s)"),
    ("softcap after score_mod", FORMULA, SOFTCAP, UNCAPPED, SCORE_MOD, SCORE_MOD + CAP_LATE),
    ("score_mod after bias", FORMULA, SCORE_MOD, "    s = capped\n", BIAS,
     BIAS + "    s = at.modified(s)\n"),
    ("score_mod left out", FORMULA, SCORE_MOD, "    s = capped\n"),
    ("sign of the bias", FORMULA, "s + bias, bias", "s - bias, bias"),
    ("bias of -inf does not mask", FORMULA, "hide(xp, s + bias, bias != -math.inf)", "s + bias"),
    ("bias left out", FORMULA, BIAS, ""),
    ("mask turned round", FORMULA, "hide(xp, s, seen)", "hide(xp, s, ~seen)"),
    ("mask left out", FORMULA, "s = hide(xp, s, seen)  # 5", "pass"),
    ("sink left out", FORMULA, SINKS, ""),
    ("positions left out", FORMULA, "list(at.visible())", "list(at.visible(banded=False))"),
    ("value of the wrong keys", FORMULA, "part_of(problem, x.value,",
     "part_of(problem, xp.flip(x.value, axis=-2),"),
    ("no keys not thought of", FORMULA, "if 0 in problem.scores:", "if False:"),
    # tiled.py, line by line
    ("tile too wide by one", SPAN, "yield Span(first, min(first + size,",
     "yield Span(first, min(first + size + 1,"),
    ("tile too narrow by one", SPAN, "yield Span(first, min(first + size,",
     "yield Span(first, min(first + max(size - 1, 1),"),
    ("last tile left out", SPAN, "range(self.start, self.stop, size)",
     "range(self.start, max(self.stop - size, self.start + 1), size)"),
    ("tiles not joined", TILED, "state = combine(xp, state, tile)", "state = tile"),
    ("all tiles taken for full", VISIBLE, "yield columns, not coverage.all_visible",
     "yield columns, False"),
    ("rows of the query off by one", TILED, "x.query[..., rows.start : rows.stop, :]",
     "xp.roll(x.query, 1, axis=-2)[..., rows.start : rows.stop, :]"),
    ("sink counted in every tile", TILED, "state = combine(xp, state, tile)",
     "state = combine(xp, combine(xp, state, tile), initial_state(problem, x, xp, rows))"),
    ("keys from the first on", TILED, "= column_span(problem, rows).split(column_block)",
     "= Span(0, column_span(problem, rows).length).split(column_block)"),
    ("no rows not thought of", TILED, "if 0 in problem.scores:", "if False:"),
    ("empty tiles taken for those that are seen", VISIBLE, "if coverage.any_visible:",
     "if not coverage.any_visible:"),
    ("similarity not scaled", FORMULA, "problem.scale * product", "1.0 * product"),
    ("dropped weights not made up for", FORMULA, "one / (1 - problem.dropout)", "one"),
    ("the kept dropped", FORMULA, "xp.where(keep, one", "xp.where(~keep, one"),
    ("a normalizer's weights divided", FORMULA, "total = xp.ones_like(s[..., :1])",
     "total = xp.sum(weights, axis=-1, keepdims=True)"),
    # masks and scores as values
    ("& for | in what tiles hold", MASKS, "self._reduced([part.coverage(block)",
     "functools.reduce(operator.and_, [part.coverage(block)"),
    ("& for | in what keys are seen", MASKS, "self._reduced([part.seen(at)",
     "functools.reduce(operator.and_, [part.seen(at)"),
    ("not of what is surely seen", COVERAGE,
     "Coverage(logical_not(self.all_visible), logical_not(self.any_visible))",
     "Coverage(logical_not(self.any_visible), logical_not(self.all_visible))"),
    ("a tile of a band that ends too early", COVERAGE, "Coverage(self.least <= high,",
     "Coverage(self.least < high,"),
    ("a tile of padding taken for full", COVERAGE, "self.greatest < low)", "self.least < low)"),
    ("segments that meet taken for the same", COVERAGE,
     "some & (self.least == self.greatest) & (low == high)", "some"),
    ("a window turned round", PATTERNS, "at.column >= at.position(-self.left)",
     "at.column >= at.position(self.left)"),
    ("dilated from the first key", PATTERNS, "at.relative_position(self.step)",
     "at.column % self.step"),
    ("global tokens are seen and do not see", PATTERNS,
     "is_token(at.column) | is_token(at.position())", "is_token(at.column)"),
    ("padded rows see", PATTERNS, "seen = of_axis if seen is None else seen & of_axis",
     "seen = of_axis if seen is None else seen"),
    ("part of a mask array's tile looked at", TILES,
     "return self.xp.any(seen), self.xp.all(seen)",
     "return self.xp.any(seen[..., :1]), self.xp.all(seen[..., :1])"),
    ("lengths of other items", INDICES, "as_count(self.xp, numbers)[..., None, None, None]",
     "as_count(self.xp, self.xp.flip(numbers))[..., None, None, None]"),
    ("positions without the offset", INDICES,
     "row + saturating_sum(self._offset(), shift, self.xp, row.dtype)", "row + shift"),
    ("an offset limited before it is shifted", PLACES,
     "low, high = -limit - shift, limit - shift",
     "low, high = -limit, limit"),
    ("slopes of other heads", STEPS, "head * (-8 / whole) - 8 / whole,", "head * (-8 / whole),"),
    ("far keys share no bucket", STEPS, "for k in range(1, spread):",
     "for k in range(1, spread - 1):"),
    ("keys before and after share buckets", STEPS, "bucket + each, bucket)", "bucket, bucket)"),
    ("a softcap in a chain not divided by", STEPS, "tanh(scores / self.cap)", "tanh(scores)"),
    ("temperature turned round", STEPS, "scores / self.t", "scores * self.t"),
    ("keys not of length one", REPLACEMENTS, "xp.matrix_transpose(unit(key, backend))",
     "xp.matrix_transpose(key)"),
    ("the farther the larger", REPLACEMENTS, "return -distances(query, key, backend)",
     "return distances(query, key, backend)"),
    ("hidden keys count in the norm", REPLACEMENTS, "counted = backend.xp.where(one, counted, 0.0)",
     "pass"),
    ("sparsemax over all keys", REPLACEMENTS, "within = cast(xp, 1 + count * ordered > total",
     "within = cast(xp, 1 + 0 * ordered > 0"),
    ("words of other keys", DROPOUT, "[word >= threshold for word in words]",
     "[word >= threshold for word in words[::-1]]"),
    ("a key that stays the same", DROPOUT, "_raised(key[0], _WEYL[0], a)", "key[0]"),
    # keys that end
    ("the newest row one key early", LENGTHS, "else lengths - rows", "else lengths - rows - 1"),
    ("an offset of the caller replaced", LENGTHS, 'is_newest = "query_offset" not in values',
     "is_newest = True"),
    ("another mask dropped", LENGTHS, "padding if mask is None else as_mask(mask) & padding",
     "padding"),
    ("positions of a mask value not thought of", LENGTHS, " or isinstance(mask, Mask)", ""),
    ("heads counted as rows", LENGTHS,
     'axis = -3 if layout == "...LHD" and len(query.shape) > 2 else -2', "axis = -2"),
    # what both are made of
    ("< for <= in a band", PATTERNS, "at.column <= at.position(self.right)",
     "at.column < at.position(self.right)"),
    ("window off by one, left", PATTERNS, "at.column >= at.position(-self.left)",
     "at.column > at.position(-self.left)"),
    ("window counts itself", BAND, "min(offset - left, problem", "min(offset - left + 1, problem"),
    ("span of keys ends one early", BAND, "rows.stop + high)", "rows.stop + high - 1)"),
    ("span of keys begins one late", BAND, "max(0, rows.start + low)",
     "max(0, rows.start + low + 1)"),
    ("a mixed tile taken for full, right", BAND, "columns.stop <= full.stop",
     "columns.stop - 1 <= full.stop"),
    ("a mixed tile taken for full, left", BAND, "full.start <= columns.start",
     "full.start - 1 <= columns.start"),
    ("head order tiled in place of grouped", GROUPS,
     TO_GROUPS, "array = xp.moveaxis(xp.reshape(array, (*batch, members, groups, rows,"
     " size)), -3, -4)",
     FROM_GROUPS, "return xp.reshape(xp.moveaxis(array, -4, -3), (*batch, groups * members,"
     " folded // members, size))"),
    ("maximum of one side", RUNNING, "xp.maximum(one.maximum, other.maximum)", "one.maximum"),
    ("a sum not shrunk", RUNNING, "one.total * shrink_one", "one.total"),
    ("an output not shrunk", RUNNING, "other.output * shrink_other", "other.output"),
    ("empty rows divided", RUNNING,
     "xp.where(empty, xp.ones_like(state.total), state.total)", "state.total"),
    ("logsumexp without its maximum", RUNNING,
     "or_zero(xp, state.maximum) + xp.log(total)", "xp.log(total)"),
    ("logsumexp of empty rows", RUNNING,
     "xp.where(empty, xp.full_like(logsumexp, -math.inf), logsumexp)", "logsumexp"),
    ("logsumexp to base 2", RUNNING, "xp.log(total)", "xp.log2(total)"),
    ("hidden values take part", ABSENT, "if not problem.masks:\n        return unfold",
     "if True:\n        return unfold"),
    ("maximum not subtracted", NUMPY, "np.where(maximum == -np.inf, 0, maximum)",
     "np.zeros_like(maximum)"),
    ("mask cut in the wrong rows", INDICES, "array[..., rows.start : rows.stop, :]",
     "array[..., : rows.stop - rows.start, :]"),
    ("row indices from 0", INDICES, "self._along(self._rows, self._x.query, -1, 1)",
     "self._along(Span(0, self._rows.length), self._x.query, -1, 1)"),
    # NumPy's own kernels
    ("small: a logsumexp without the maximum", NUMPY_SMALL, "np.log(total) + maximum",
     "np.log(total)"),
    ("small: a causal row that sees all keys", NUMPY_SMALL,
     "offset < problem.key_length - 1", "offset < 0"),
    ("at once: hidden keys seen", AT_ONCE, "by_head[where] *= seen", "pass"),
    ("at once: no division", AT_ONCE, "weighted /= total", "pass"),
    ("keys skipped at a tile's edge", SPAN, "yield Span(first, min(first + size,",
     "yield Span(first + (first > self.start), min(first + size,"),
    ("a hidden key taken for seen by all", BLOCKS, "-(-start // 16) * 16", "start // 16 * 16"),
    ("a common key counted twice", BLOCKS, "Span(common.stop, stop)]",
     "Span(common.stop - 1, stop)]"),
    ("sums of a tile replace those before", SWEEP, "np.add(total, sums, total)",
     "np.copyto(total, sums)"),
    ("products of a tile replace those before", SWEEP, "np.add(output, product, output)",
     "np.copyto(output, product)"),
    ("a sink in every part", SWEEP, "self.task.part == 0", "True"),
    ("small sums trusted", SWEEP, "LEAST = 2.0**-20", "LEAST = 0.0"),
    ("overflowing sums trusted", SWEEP, "total.min() >= LEAST and total.max() < math.inf:",
     "total.min() >= LEAST:", "enough & (total <= most) &", "enough &"),
    ("an output of a running maximum not shrunk", SWEEP, "output *= shrink", "pass"),
    ("a total of a running maximum not shrunk", SWEEP, "total *= shrink", "pass"),
    ("a part of nothing counts", NUMPY_SOFTMAX,
     "np.where(x.total == 0, -math.inf, x.reference)", "x.reference"),
    ("hidden values spoil", SWEEP, "seen is not None and not", "False and not"),
    ("band edges left on", VISIBILITY, "masks += self._of_band(tile)", "pass"),
    ("a mask left out of a fast pass", SWEEP, "by_head[where] *= seen", "pass"),
    ("regions of rows from the first on", VISIBILITY, "slice(rows.start - first, rows.stop",
     "slice(0, rows.stop - rows.start) if first else slice(rows.start - first, rows.stop"),
    ("masks of heads that differ, kept", VISIBILITY,
     "key if table.same_for_all_heads else None", "key"),
    ("dropout in the denominator", SWEEP, "weights *= self.call.by_row(",
     "weights *= 0.5 * self.call.by_row("),
    ("heads looked at one by one taken for alike", MASK_TABLE, "problem.heads == 1 or", "True or"),
    ("heads of a function from its group", PREPARED,
     "Span(heads.start * group_size, heads.stop * group_size)", "heads"),
    ("a block of rows that sees no key not thought of", MASK_TABLE, "if not len(flags):",
     "if False:"),
    ("mixed cells taken for empty", MASK_TABLE, "seen = kinds != EMPTY", "seen = kinds == 2"),
    ("mixed cells taken for full", MASK_TABLE, "block_kinds == MIXED", "block_kinds > 2"),
    ("cells of the first row of them", MASK_TABLE, "kinds[number : number + 1], first",
     "kinds[:1], first"),
    ("a table of the first item", MASK_TABLE, "task.view(self.kinds,",
     "task.view(self.kinds[:1],"),
    ("softcap not divided by, in tiles", TILE_SCORES,
     "self.problem.scale / cap", "self.problem.scale"),
    ("rows of nothing divided", NUMPY_TILED, "np.copyto(total, 1, where=total == 0)", "pass"),
    ("rows kept that are not reliable", NUMPY_TILED, "partial(np.where, reliable)",
     "partial(np.where, True)"),
    ("parts of keys forgotten", NUMPY_TILED,
     "reduce(partial(combine, self.call.exp), states)", "states[0]"),
)  # fmt: skip
