"""One planted mistake at a time: each must fail a case of the conformance suite.

The mistakes in the code of gradients are in ``gradient_mutations.py``, and must fail a case of the
suite's gradients or directional derivatives. Those that the suite cannot see are in
``other_mutations.py``, each with the test that must fail.

``python tests/mutations.py`` plants them in copies of the package, and exits with 1 if one is not
found, with 2 if one no longer fits the code. It first runs the case that found the mistake last
time, as ``mutations_found.json`` says, and all cases only if that one passes now. What finds the
mistake then goes into the file.
"""

import argparse
import builtins
import dis
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import gradient_mutations
import other_mutations

ROOT = Path(__file__).resolve().parents[1]
FORMULA, TILED = "polyattn/_kernels/dense.py", "polyattn/_kernels/tiled.py"
VISIBLE = "polyattn/_kernels/visible_tiles.py"
BAND, GROUPS = "polyattn/_core/tiles/band.py", "polyattn/_core/tiles/grouped_heads.py"
SPAN = "polyattn/_base/span.py"
MASKS, REPLACEMENTS = (
    "polyattn/_core/expressions/masks.py",
    "polyattn/_core/expressions/replacements.py",
)
RUNNING, ABSENT = "polyattn/_core/tiles/online_softmax.py", "polyattn/_kernels/masked_sum.py"
NUMPY, INDICES = "backends/polyattn_numpy/backend.py", "polyattn/_core/tiles/indices.py"
BLOCKS, SWEEP = "backends/polyattn_numpy/blocks.py", "backends/polyattn_numpy/sweep.py"
PATTERNS, TILES = "polyattn/_core/expressions/patterns.py", "polyattn/_core/tiles/coverage.py"
PLACES = "polyattn/_core/expressions/indices.py"
STEPS, DROPOUT = "polyattn/_core/expressions/scores.py", "polyattn/_core/tiles/dropout.py"
TILE_SCORES = "backends/polyattn_numpy/tile_scores.py"
NUMPY_TILED = "backends/polyattn_numpy/tiled.py"
NUMPY_SOFTMAX = "backends/polyattn_numpy/online_softmax.py"
NUMPY_SMALL = "backends/polyattn_numpy/small.py"
AT_ONCE = "backends/polyattn_numpy/at_once.py"
VISIBILITY = "backends/polyattn_numpy/visibility.py"
PREPARED = "backends/polyattn_numpy/prepared.py"
MASK_TABLE = "backends/polyattn_numpy/mask_table.py"


class Mutation(NamedTuple):
    """A mistake: what it is, the file, and each text to replace with what replaces it."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    in_gradients: bool = False
    test: str = ""  # the test that finds it, in place of a case


def mutation(name, file, *changes, **more):
    return Mutation(name, file, tuple(zip(changes[::2], changes[1::2], strict=True)), **more)


SOFTCAP = """    if problem.softcap is not None:
        capped = problem.softcap * xp.tanh(normed / problem.softcap)  # 2
"""
CAP_LATE = """    if problem.softcap is not None:
        s = problem.softcap * xp.tanh(s / problem.softcap)
"""
SCORE_MOD = "    s = at.modified(capped)  # 3\n"
BIAS = """    if x.bias is not None:
        bias = cast(xp, at.of_scores(x.bias), s.dtype)
        s = hide(xp, s + bias, bias != -math.inf)  # 4
"""
SINKS = """        if x.sinks is not None:
            state = combine(xp, initial_state(problem, x, xp, rows), state)  # 6
"""
TO_GROUPS = "array = xp.reshape(array, (*batch, groups, members, rows, size))"
FROM_GROUPS = "return xp.reshape(array, (*batch, groups * members, folded // members, size))"

MUTATIONS = (
    # dense.py, line by line
    mutation("sign of the scale", GROUPS, "query * problem.scale", "query * -problem.scale"),
    mutation("scale left out", GROUPS, "query * problem.scale", "query * 1.0"),
    mutation(
        "16-bit scores", GROUPS, "query = cast(xp, query, getattr(xp, problem.accumulator))\n", "\n"
    ),
    mutation("key not transposed with its rows", FORMULA, "xp.matrix_transpose(key)",
             "xp.matrix_transpose(xp.flip(key, axis=-2))"),
    mutation("softcap after bias", FORMULA, SOFTCAP, "", BIAS, BIAS + CAP_LATE),
    mutation("softcap left out", FORMULA, SOFTCAP, ""),
    mutation("softcap not divided by", FORMULA, "tanh(normed / problem.softcap)", "tanh(normed)"),
    mutation("softcap after score_mod", FORMULA, SOFTCAP, "", SCORE_MOD, SCORE_MOD + CAP_LATE),
    mutation("score_mod after bias", FORMULA, SCORE_MOD, "    s = capped\n", BIAS,
             BIAS + "    s = at.modified(s)\n"),
    mutation("score_mod left out", FORMULA, SCORE_MOD, "    s = capped\n"),
    mutation("sign of the bias", FORMULA, "s + bias, bias", "s - bias, bias"),
    mutation("bias of -inf does not mask", FORMULA, "hide(xp, s + bias, bias != -math.inf)",
             "s + bias"),
    mutation("bias left out", FORMULA, BIAS, ""),
    mutation("mask turned round", FORMULA, "hide(xp, s, seen)", "hide(xp, s, ~seen)"),
    mutation("mask left out", FORMULA, "s = hide(xp, s, seen)  # 5", "pass"),
    mutation("sink left out", FORMULA, SINKS, ""),
    mutation("positions left out", FORMULA, "list(at.visible())",
             "list(at.visible(banded=False))"),
    mutation("value of the wrong keys", FORMULA, "part_of(problem, x.value,",
             "part_of(problem, xp.flip(x.value, axis=-2),"),
    mutation("no keys not thought of", FORMULA, "if 0 in problem.scores:", "if False:"),
    # tiled.py, line by line
    mutation("tile too wide by one", SPAN, "yield Span(first, min(first + size,",
             "yield Span(first, min(first + size + 1,"),
    mutation("tile too narrow by one", SPAN, "yield Span(first, min(first + size,",
             "yield Span(first, min(first + max(size - 1, 1),"),
    mutation("last tile left out", SPAN, "range(self.start, self.stop, size)",
             "range(self.start, max(self.stop - size, self.start + 1), size)"),
    mutation("tiles not joined", TILED, "state = combine(xp, state, tile)", "state = tile"),
    mutation("all tiles taken for full", VISIBLE, "yield columns, not answer.all_visible",
             "yield columns, False"),
    mutation("rows of the query off by one", TILED, "x.query[..., rows.start : rows.stop, :]",
             "xp.roll(x.query, 1, axis=-2)[..., rows.start : rows.stop, :]"),
    mutation("sink counted in every tile", TILED, "state = combine(xp, state, tile)",
             "state = combine(xp, combine(xp, state, tile), initial_state(problem, x, xp, rows))"),
    mutation("keys from the first on", TILED, "= column_span(problem, rows).split(column_block)",
             "= Span(0, column_span(problem, rows).length).split(column_block)"),
    mutation("no rows not thought of", TILED, "if 0 in problem.scores:", "if False:"),
    mutation("empty tiles taken for those that are seen", VISIBLE, "if answer.any_visible:",
             "if not answer.any_visible:"),
    mutation("similarity not scaled", FORMULA, "product = problem.scale * similar",
             "product = 1.0 * similar"),
    mutation("dropped weights not made up for", FORMULA, "weights / (1 - problem.dropout)",
             "weights"),
    mutation("the kept dropped", FORMULA, "at.keep_mask(), weights", "~at.keep_mask(), weights"),
    mutation("a normalizer's weights divided", FORMULA, "total = xp.ones_like(s[..., :1])",
             "total = xp.sum(weights, axis=-1, keepdims=True)"),
    # masks and scores as values
    mutation("& for | in what tiles hold", MASKS,
             "Coverage(self._reduced(some), self._reduced(every))",
             "Coverage(*[functools.reduce(operator.and_, each) for each in (some, every)])"),
    mutation("& for | in what keys are seen", MASKS,
             "self._reduced([part.seen(at)",
             "functools.reduce(operator.and_, [part.seen(at)"),
    mutation("not of what is surely seen", MASKS,
             "Coverage(logical_not(every), logical_not(some))",
             "Coverage(logical_not(some), logical_not(every))"),
    mutation("a tile of a band that ends too early", PATTERNS,
             "first <= block.last(self.right)", "first < block.last(self.right)"),
    mutation("a tile of padding taken for full", PATTERNS, "every & (stop <= length)",
             "every & (first < length)"),
    mutation("segments that meet taken for the same", PATTERNS,
             "meet & (low == high) & (least == most)", "meet"),
    mutation("a window turned round", PATTERNS, "at.column >= at.position(-self.left)",
             "at.column >= at.position(self.left)"),
    mutation("dilated from the first key", PATTERNS,
             "at.away_from_row(min(self.step, INDEX_LIMIT))",
             "at.column % min(self.step, INDEX_LIMIT)"),
    mutation("global tokens are seen and do not see", PATTERNS,
             "(at.column == token) | (at.position() == token)", "at.column == token"),
    mutation("padded rows see", PATTERNS, "return rows if seen is None else seen & rows",
             "return rows if seen is None else seen"),
    mutation("part of a mask array's tile looked at", TILES,
             "return self._xp.any(seen), self._xp.all(seen)",
             "return self._xp.any(seen[..., :1]), self._xp.all(seen[..., :1])"),
    mutation("lengths of other items", INDICES,
             "self._as_index(numbers)[..., None, None, None]",
             "self._as_index(self.xp.flip(numbers))[..., None, None, None]"),
    mutation("positions without the offset", INDICES,
             "row + saturating_sum(self._offset(), shift, self.xp, row.dtype)", "row + shift"),
    mutation("an offset limited before it is shifted", PLACES,
             "low, high = -INDEX_LIMIT - shift, INDEX_LIMIT - shift",
             "low, high = -INDEX_LIMIT, INDEX_LIMIT"),
    mutation("slopes of other heads", STEPS, "head * (-8 / whole) - 8 / whole,",
             "head * (-8 / whole),"),
    mutation("far keys share no bucket", STEPS, "for k in range(1, spread):",
             "for k in range(1, spread - 1):"),
    mutation("keys before and after share buckets", STEPS, "found + each, found)",
             "found, found)"),
    mutation("a softcap in a chain not divided by", STEPS, "tanh(scores / self.cap)",
             "tanh(scores)"),
    mutation("temperature turned round", STEPS, "scores / self.t", "scores * self.t"),
    mutation("keys not of length one", REPLACEMENTS, "xp.matrix_transpose(unit(key, backend))",
             "xp.matrix_transpose(key)"),
    mutation("the farther the larger", REPLACEMENTS, "return -distances(query, key, backend)",
             "return distances(query, key, backend)"),
    mutation("hidden keys count in the norm", REPLACEMENTS,
             "counted = backend.xp.where(one, counted, 0.0)",
             "pass"),
    mutation("sparsemax over all keys", REPLACEMENTS,
             "within = cast(xp, 1 + count * ordered > total",
             "within = cast(xp, 1 + 0 * ordered > 0"),
    mutation("words of other keys", DROPOUT, "[word >= threshold for word in words]",
             "[word >= threshold for word in words[::-1]]"),
    mutation("a key that stays the same", DROPOUT, "_raised(key[0], _WEYL[0], a)", "key[0]"),
    # what both are made of
    mutation("< for <= in a band", PATTERNS, "at.column <= at.position(self.right)",
             "at.column < at.position(self.right)"),
    mutation("window off by one, left", PATTERNS, "at.column >= at.position(-self.left)",
             "at.column > at.position(-self.left)"),
    mutation("window counts itself", BAND, "min(offset - left, problem",
             "min(offset - left + 1, problem"),
    mutation("span of keys ends one early", BAND, "rows.stop + high)", "rows.stop + high - 1)"),
    mutation("span of keys begins one late", BAND, "max(0, rows.start + low)",
             "max(0, rows.start + low + 1)"),
    mutation("a mixed tile taken for full, right", BAND, "columns.stop <= full.stop",
             "columns.stop - 1 <= full.stop"),
    mutation("a mixed tile taken for full, left", BAND, "full.start <= columns.start",
             "full.start - 1 <= columns.start"),
    mutation("head order tiled in place of grouped", GROUPS,
             TO_GROUPS, "array = xp.moveaxis(xp.reshape(array, (*batch, members, groups, rows,"
             " size)), -3, -4)",
             FROM_GROUPS, "return xp.reshape(xp.moveaxis(array, -4, -3), (*batch, groups * members,"
             " folded // members, size))"),
    mutation("maximum of one side", RUNNING, "xp.maximum(one.maximum, other.maximum)",
             "one.maximum"),
    mutation("a sum not shrunk", RUNNING, "one.total * shrink_one", "one.total"),
    mutation("an output not shrunk", RUNNING, "other.output * shrink_other", "other.output"),
    mutation("empty rows divided", RUNNING,
             "xp.where(empty, xp.ones_like(state.total), state.total)", "state.total"),
    mutation("logsumexp without its maximum", RUNNING,
             "or_zero(xp, state.maximum) + xp.log(total)", "xp.log(total)"),
    mutation("logsumexp of empty rows", RUNNING,
             "xp.where(empty, xp.full_like(logsumexp, -math.inf), logsumexp)", "logsumexp"),
    mutation("logsumexp to base 2", RUNNING, "xp.log(total)", "xp.log2(total)"),
    mutation("hidden values take part", ABSENT, "if not problem.masks:\n        return unfold",
             "if True:\n        return unfold"),
    mutation("maximum not subtracted", NUMPY, "np.where(maximum == -np.inf, 0, maximum)",
             "np.zeros_like(maximum)"),
    mutation("mask cut in the wrong rows", INDICES, "array[..., rows.start : rows.stop, :]",
             "array[..., : rows.stop - rows.start, :]"),
    mutation("row indices from 0", INDICES, "self._along(self._rows, self._x.query, -1, 1)",
             "self._along(Span(0, self._rows.length), self._x.query, -1, 1)"),
    # NumPy's own kernels
    mutation("small: a logsumexp without the maximum", NUMPY_SMALL, "np.log(total) + maximum",
             "np.log(total)"),
    mutation("small: a causal row that sees all keys", NUMPY_SMALL,
             "offset < problem.key_length - 1", "offset < 0"),
    mutation("at once: hidden keys seen", AT_ONCE, "by_head[where] *= seen", "pass"),
    mutation("at once: no division", AT_ONCE, "weighted /= total", "pass"),
    mutation("keys skipped at a tile's edge", SPAN, "yield Span(first, min(first + size,",
             "yield Span(first + (first > self.start), min(first + size,"),
    mutation("a hidden key taken for seen by all", BLOCKS, "-(-start // 16) * 16",
             "start // 16 * 16"),
    mutation("a common key counted twice", BLOCKS, "Span(common.stop, stop)]",
             "Span(common.stop - 1, stop)]"),
    mutation("sums of a tile replace those before", SWEEP, "np.add(total, sums, total)",
             "np.copyto(total, sums)"),
    mutation("products of a tile replace those before", SWEEP, "np.add(output, product, output)",
             "np.copyto(output, product)"),
    mutation("a sink in every part", SWEEP, "self.piece.part == 0", "True"),
    mutation("small sums trusted", SWEEP, "LEAST = 2.0**-20", "LEAST = 0.0"),
    mutation("overflowing sums trusted", SWEEP, "total.min() >= LEAST and total.max() < math.inf:",
             "total.min() >= LEAST:", "enough & (total <= most) &", "enough &"),
    mutation("an output of a running maximum not shrunk", SWEEP, "output *= shrink", "pass"),
    mutation("a total of a running maximum not shrunk", SWEEP, "total *= shrink", "pass"),
    mutation("a part of nothing counts", NUMPY_SOFTMAX,
             "np.where(x.total == 0, -math.inf, x.reference)", "x.reference"),
    mutation("hidden values spoil", SWEEP, "seen is not None and not", "False and not"),
    mutation("band edges left on", VISIBILITY, "masks += self._of_band(tile)", "pass"),
    mutation("a mask left out of a fast pass", SWEEP, "by_head[where] *= seen", "pass"),
    mutation("regions of rows from the first on", VISIBILITY, "slice(rows.start - first, rows.stop",
             "slice(0, rows.stop - rows.start) if first else slice(rows.start - first, rows.stop"),
    mutation("masks of heads that differ, kept", VISIBILITY,
             "key if table.same_for_all_heads else None", "key"),
    mutation("dropout in the denominator", SWEEP, "weights *= self.call.by_row(",
             "weights *= 0.5 * self.call.by_row("),
    mutation("heads looked at one by one taken for alike", MASK_TABLE,
             "problem.heads == 1 or", "True or"),
    mutation("heads of a function from its group", PREPARED,
             "Span(heads.start * group_size, heads.stop * group_size)", "heads"),
    mutation("a block of rows that sees no key not thought of", MASK_TABLE, "if not len(flags):",
             "if False:"),
    mutation("mixed cells taken for empty", MASK_TABLE, "seen = kinds != EMPTY",
             "seen = kinds == 2"),
    mutation("mixed cells taken for full", MASK_TABLE, "block_kinds == MIXED",
             "block_kinds > 2"),
    mutation("cells of the first row of them", MASK_TABLE, "kinds[number : number + 1], first",
             "kinds[:1], first"),
    mutation("a table of the first item", MASK_TABLE, "piece.view(self.kinds,",
             "piece.view(self.kinds[:1],"),
    mutation("softcap not divided by, in tiles", TILE_SCORES,
             "self.problem.scale / cap", "self.problem.scale"),
    mutation("rows of nothing divided", NUMPY_TILED,
             "np.copyto(total, 1, where=total == 0)", "pass"),
    mutation("rows kept that are not reliable", NUMPY_TILED, "partial(np.where, reliable)",
             "partial(np.where, True)"),
    mutation("parts of keys forgotten", NUMPY_TILED,
             "reduce(partial(combine, self.call.exp), states)", "states[0]"),
    *(mutation(*one, in_gradients=True) for one in gradient_mutations.MUTATIONS),
    *(mutation(*one, test=test) for test, *one in other_mutations.MUTATIONS),
)  # fmt: skip

FOUND = Path(__file__).with_name("mutations_found.json")
SEARCH = Path(__file__).with_name("mutation_search.py")
# pytest, once it is sure that it tests the copy.
PYTEST = """
import sys, pathlib, polyattn, pytest
if pathlib.Path.cwd() not in pathlib.Path(polyattn.__file__).resolve().parents:
    sys.exit(2)
sys.exit(pytest.main(sys.argv[1:]))
"""


def plant(mutation, folder):
    """Copy the package into a folder, with the mistake in it."""
    for package in ("polyattn", "backends"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    (folder / mutation.file).write_text(with_mistake(mutation), encoding="utf-8")


def with_mistake(mutation):
    """Return the text of the file with the mistake in it."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    for old, new in mutation.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mutation.name}: {mutation.file} has {text.count(old)} of {old!r}")
        text = text.replace(old, new)
    # A name that does not exist would fail any case, and show nothing.
    if unknown := unknown_names(text):
        raise ValueError(f"{mutation.name}: {mutation.file} has no {', '.join(sorted(unknown))}")
    return text


def unknown_names(text):
    """Return the names that a module reads and that neither it nor Python has."""
    known, read = {*dir(builtins), "__annotations__", "__file__", "__name__"}, set()
    codes = [compile(text, "mistake", "exec")]
    for code in codes:
        codes += [part for part in code.co_consts if hasattr(part, "co_code")]
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
                known.add(step.argval)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                read.add(step.argval)
    return read - known


def outdated(mutations):
    """Yield what is wrong with each mistake that does not fit the code as it is now."""
    for mutation in mutations:
        try:
            with_mistake(mutation)
        except (OSError, ValueError) as error:
            yield str(error)


def found_by(mutation, hint):
    """Return the name of a case or test that finds the mistake, or None if all pass."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mutation, folder)
        run = run_test if mutation.test else run_cases
        return run(mutation, folder, hint)


def run_cases(mutation, folder, hint):
    """Return the first case that fails in the package in a folder, or None."""
    # NumPy's plugin has kernels of its own, and what all plugins share serves those too.
    backends = ["numpy"] if "numpy" in mutation.file else ["array-api", "numpy"]
    options = ["--hint", hint] + ["--gradients"] * mutation.in_gradients
    done = run_in(folder, SEARCH, *backends, *options)
    if done.returncode != 0:
        raise RuntimeError(f"{mutation.name}: the cases did not run\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run_test(mutation, folder, _):
    """Return the test of a mistake if it fails with the package in a folder, or None."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    done = run_in(folder, "-c", PYTEST, *options, str(ROOT / mutation.test))
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: the test did not run\n{done.stdout}{done.stderr}")
    return mutation.test if done.returncode else None


def run_in(folder, *arguments):
    """Run Python with the package in a folder."""
    return subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'backends'}",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", help="only the mistakes with one of these in their name"
    )
    options = parser.parse_args()
    warnings.simplefilter("error", SyntaxWarning)  # of a mistake that would fail any case
    chosen = [m for m in MUTATIONS if not options.words or any(w in m.name for w in options.words)]
    if wrong := list(outdated(chosen)):
        print(*wrong, sep="\n")
        return 2
    hints = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {pool.submit(found_by, m, hints.get(m.name, "")): m.name for m in chosen}
        for number, run in enumerate(as_completed(runs), start=1):
            name, found[name] = runs[run], run.result()
            print(f"[{number}/{len(chosen)}] {name}: {found[name] or 'NOT FOUND'}", flush=True)
    escaped = sum(case is None for case in found.values())
    print(f"{len(chosen) - escaped} of {len(chosen)} mistakes are found")
    known = hints | {name: case for name, case in found.items() if case}
    ordered = {m.name: known[m.name] for m in MUTATIONS if m.name in known}
    if ordered != hints:
        FOUND.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
