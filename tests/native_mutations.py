"""Mistakes in the compiled kernel, for ``mutations.py``: random calls in C++ must find each.

Each is a name, a file of its source, texts and what replaces them. The unit of one instruction set
is compiled without optimization, in 2 s, and linked with what is the same for all.
"""

import atexit
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

NATIVE = "backends/polyattn_native"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-fno-rtti", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
UNIT = ["-O0", "-Wno-psabi", "-DPOLYATTN_UNIT=sse2", "-DPOLYATTN_BYTES=16"]
#: The other instruction sets of the interface, which stand for the one that is compiled.
OTHERS = [f"-Wl,--defsym,_ZN{name}4unitE=_ZN4sse24unitE" for name in ("4avx2", "6avx512")]
CALLS = 3000
lock = Lock()

MUTATIONS = (
    # the keys that a row sees
    ("native: causal one key short", "panel.h",
     "clamp(position + call.high + 1, 0, call.keys)", "clamp(position + call.high, 0, call.keys)"),
    ("native: a window one key short", "panel.h",
     "clamp(position + call.low, 0, call.keys)", "clamp(position + call.low + 1, 0, call.keys)"),
    ("native: the positions of items forgotten", "panel.h",
     "row + (call.positions ? call.positions[item] : 0)", "row"),
    ("native: the wider of two first keys", "panel.h",
     "max(keys.first, at<int32_t>", "min(keys.first, at<int32_t>"),
    ("native: the wider of two last keys", "panel.h",
     "min(keys.stop, at<int32_t>", "max(keys.stop, at<int32_t>"),
    ("native: the first range of a row only", "panel.h",
     "[range * call.first.column]", "[0]"),
    ("native: gaps between ranges are seen", "panel.h",
     "has_gaps = has_gaps || found.first < found.stop;", ""),
    ("native: a block between ranges ends the pass", "panel.h",
     "if (of[i].stop > from) found", "if (of[i].stop > from && of[i].first < from + size) found"),
    ("native: ranges after the second are not looked at", "scores.h",
     "i < ranges; ++i) seen |=", "i < min(ranges, 2); ++i) seen |="),
    ("native: heads by turns", "panel.h",
     "head[lane] = key_head * group + r % group;",
     "head[lane] = key_head + r % group * call.key_heads;"),
    ("native: places of items forgotten", "panel.h",
     "x.offsets ? x.offsets[item] : item * x.item", "item * x.item"),
    ("native: the key after the last", "scores.h", "(at < stop[0])", "(at <= stop[0])"),
    ("native: the first key of a mask that rows share read for all", "scores.h",
     "rows[0][key * column] * 0x01", "rows[0][0] * 0x01"),
    ("native: a square of a mask not turned", "scores.h",
     "rows[i] = next[i];", "rows[i] = rows[i] + 0;"),
    ("native: squares of half a panel one key apart", "scores.h", "i * 16 / Rows", "i"),
    ("native: the column stride of a mask", "scores.h",
     "rows[lane][key * column]", "rows[lane][key]"),
    ("native: a mask taken for one without effect", "scores.h",
     "(all[(at - key) / 8] != ones)", "(ones == 0)"),
    ("native: the values of runs taken for those of one", "forward.h",
     "(int32_t)((key - start) / CELL)", "count"),
    # scores
    ("native: -inf in a bias added", "scores.h",
     "select<T>(hides, broadcast<T>(-infinity<T>()), sum)", "sum"),
    ("native: the column stride of a bias", "scores.h",
     "rows[0][i / lanes * bias.column]", "rows[0][i / lanes]"),
    ("native: words of dropout backwards", "scores.h",
     "block * 4 + word - shift", "block * 4 + 3 - word - shift"),
    ("native: the first head of dropout", "scores.h",
     "panel.head[first + lane] + start[1]", "panel.head[first + lane]"),
    ("native: a tanh that ends too early", "vectors.h",
     "sizeof(T) == 4 ? 10 : 20", "sizeof(T) == 4 ? 2 : 20"),
    ("native: a term of exp", "vectors.h", "q = q * f + 1.01780860092397e-07;", "q = q * f;"),
    # softmax and output
    ("native: the output not scaled to a new maximum", "forward.h",
     "store<T>(factor + v * width, f);", "store<T>(factor + v * width, broadcast<T>(1));"),
    ("native: the total not scaled to a new maximum", "forward.h",
     "load(panel.total + v * width) * f", "load(panel.total + v * width)"),
    ("native: no mark of hidden keys", "forward.h",
     "broadcast<T>(hides_nonfinite ? (T)-0.0 : (T)0)", "broadcast<T>((T)0)"),
    ("native: keys that a mask hides not counted as hidden", "scores.h",
     "return !inside || !all_set ||", "return !inside ||"),
    ("native: a row that sees no key yet", "vectors.h",
     "select<T>(largest == -infinity<T>(), Vector<T>{}, largest)", "largest"),
    # the order of sums
    ("native: keys counted from the begin of a block", "scores.h",
     "left = load_ints<T>(panel.until_fold + v);",
     "left = Ints<T>{} + (Int)(FOLD - keys.first % FOLD);"),
    ("native: the sum of a block added at its end", "products.h",
     "sums[m][v] = load(out + (m * Count + v) * width) * factors[v];", "sums[m][v] = Vector<T>{};",
     "store<T>(out + (m * Count + v) * width, sums[m][v]);",
     "store<T>(out + (m * Count + v) * width, accumulate.factor ? sums[m][v] +"
     " load(out + (m * Count + v) * width) * load(accumulate.factor + v * width) : sums[m][v]);"),
    ("native: a reference that is no whole number", "forward.h",
     "return reference.weigh(s);",
     "return exp<T>(s - reference.top) * reference.weigh(reference.top);"),
    ("native: the key before which a lane folds in neither sum", "scores.h",
     "hides = is_after ? before : ~before;",
     "hides = is_after ? before | (Ints<T>{} + (Int)key == load_ints<T>(folds.at + lane))"
     " : ~before;"),
    ("native: hidden keys counted where a gradient folds", "tile.h",
     "folds[number].count(panel, block, count, p, by_scores)",
     "folds[number].count(panel, block, count, p, false)"),
    ("native: a sink without weight", "forward.h",
     "total * scaled + exponential(sink - both)", "total * scaled"),
    ("native: the output not scaled to a sink", "forward.h",
     "scaled = top == -infinity<T>() ? 0 : exponential(top - both);", "scaled = 1;"),
    ("native: weights that dropout keeps", "forward.h",
     "kept = (T)call.keep", "kept = 1"),
    # arrays
    ("native: the last number of a row", "rows.h",
     "        for (; e < size; ++e) {\n            for (int i = 0; i < width; ++i) {\n"
     "                const T number",
     "        for (; e < size - 1; ++e) {\n            for (int i = 0; i < width; ++i) {\n"
     "                const T number"),
    ("native: the wrong factor of a row's last numbers", "rows.h",
     "number / factors[i]", "number / factors[0]"),
    ("native: a float16 cut off", "rows.h",
     "(rest - 0x38000000 + 0xfff + odd) >> 13", "(rest - 0x38000000) >> 13"),
    ("native: all is finite", "rows.h", "return sum == 0;", "return sum == sum || sum != sum;"),
    ("native: the next tile", "products.h",
     "done * (order == INNER ? a.stride : 1)", "done * a.stride"),
    ("native: a hidden number added", "products.h",
     "select<T>((Ints<T>)weight == sign, sum, more)", "more"),
    # pages
    ("native: the pages of the first item for all", "products.h",
     "at<int32_t>(call.table, item, 0, 0)", "at<int32_t>(call.table, 0, 0, 0)"),
    ("native: the next page of values not looked up", "products.h",
     "a.table ? a.table[part] : part", "a.table ? a.table[0] : part"),
    ("native: values from the first slot of a page", "products.h",
     "part = 0, first = a.first;", "part = 0, first = 0;"),
    ("native: a run of keys beyond its page", "products.h",
     "min(keys - key, rest.part - rest.first)", "min(keys - key, rest.part)"),
    ("native: the slot of a key in a page that is copied", "products.h",
     "head, key % call.page)", "head, 0)"),
    ("native: a look at the values of a whole page", "products.h",
     "(first + key) / part] * part_stride", "(first + key) / part] * stride"),
    # few rows, whose lanes are elements
    ("native: the totals of few rows not added up", "few.h",
     "if (first == 0) store<T>(totals, total);", ""),
    ("native: the totals of few rows counted twice", "forward.h",
     "panel.total[lane] = before[lane] * factor[lane];", ";"),
    ("native: few rows in an order of their own in same_bits", "forward.h",
     "if (call.same_bits) {", "if (false) {"),
    ("native: a maximum of its own in each lane of a row", "forward.h",
     "if (few) top[0] = largest_of_rows<T>(top[0], few);", ""),
    ("native: scores of the last tile of few rows not hidden", "few.h",
     "scores[key * Rows + i] = -infinity<T>();", "scores[key * Rows + i] = infinity<T>();"),
    ("native: a hidden value of few rows added", "few.h",
     "if (hides_nonfinite && bit_cast<Int>(weight) == hidden) continue;", ""),
    # integers
    ("native: the steps of the first block for all keys", "products.h",
     "if (--left == 0) row += steps.row", "if (--left == 0) row += is_key ? 0 : steps.row"),
    ("native: one step for all channels", "rows.h", "steps[i * column]", "steps[0]"),
    # gradients
    ("native: delta without the logsumexp's gradient", "backward.h",
     "if (call.logsumexp_gradient.data) d -=", "if (false) d -="),
    ("native: the slope of a softcap", "tile.h",
     "share = share * slope + 0;", "share = share + 0;"),
    ("native: the gradient of a softcap", "tile.h",
     "t - load(raw + i) / (T)call.softcap * slope", "t"),
    ("native: the sums before half a panel", "backward.h",
     "{whole > 0, nullptr}", "{false, nullptr}"),
    ("native: the values' gradient with dropout", "backward.h",
     "as_columns(g, call.value_size, (T)(1 / call.keep),", "as_columns(g, call.value_size, (T)1,"),
    ("native: half a panel after whole ones in a column of one vector", "backward.h",
     "whole * lanes * Count * width", "whole * lanes * lanes"),
    ("native: gradients cleared that are added to", "backward.h",
     "if (state->part == 0 && !call.adds)", "if (state->part == 0)"),
    ("native: the sums of a part read again", "backward.h",
     ", sums += call.value_size", ""),
    ("native: a hidden number added to a gradient", "backward.h",
     "if (factor != 0 || !__builtin_signbit(factor)) sum =", "sum ="),
    ("native: the gradient of a bias after a softcap", "tile.h",
     "call.softcap != 0 ? raw : g", "g"),
    ("native: no sum over the keys that share a bias", "tile.h",
     "*rows[i] += sum[i];", "*rows[i] = sum[i];"),
    # sums of several tasks
    ("native: a position whose heads are in two parts", "backward.h",
     "* size / heads, call.rows) * heads", "* size, call.rows * heads)"),
    ("native: numbers by distance in two parts", "backward.h",
     "bias.row == 0 || Turns::is_by_distance(bias)", "bias.row == 0"),
    ("native: tasks that do not wait for the one before", "turns.h",
     "if (!distance_ || task < distance_) return true;", "return true;"),
    ("native: groups of rows that hold one position taken for one", "backward.h",
     "(heads - 1 + work_.rows - 1) / work_.rows", "0"),
    # products
    ("native: the sums of a product begin anew with each chain", "matrix.h",
     "if (k.first > 0) total += load(out + c);", ""),
    ("native: eight products of a single row added up before the others", "matrix.h",
     "sum[2] = {load(sums + c), load(sums + c + width)};", "sum[2] = {};",
     "store<T>(sums + c, sum[0]);", "store<T>(sums + c, load(sums + c) + sum[0]);"),
    ("native: columns that a panel lacks are those of the next", "matrix.h",
     "for (; c < used; ++c) {\n                if (k.first > 0) sum",
     "for (; c < min(used + 1, columns); ++c) {\n                if (k.first > 0) sum"),
)  # fmt: skip


def in_source():
    """Return the rows with the paths of their files."""
    return [(name, f"{NATIVE}/src/{file}", *texts) for name, file, *texts in MUTATIONS]


def is_possible():
    """Return whether the compiler, the linker and the processor are those that are needed."""
    return (
        sys.platform == "linux" and platform.machine() == "x86_64" and bool(shutil.which(COMPILER))
    )


def compile_to(target, *arguments):
    """Compile, or raise with what the compiler says."""
    command = [COMPILER, *FLAGS, *map(str, arguments), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


@cache
def common(root):
    """Compile what no mistake changes, and return the objects, each once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="polyattn-native-"))
    atexit.register(shutil.rmtree, folder)
    objects = []
    for source in ("fuzz/fuzz", "src/pool", "src/interface"):
        objects.append(folder / f"{source.replace('/', '_')}.o")
        compile_to(objects[-1], "-O2", "-c", root / NATIVE / f"{source}.cpp")
    return objects


def wrong_call(folder, root, hint):
    """Return what is wrong with a random call of the source in a folder, or None.

    The hint is such an answer: its call is tried before the others.
    """
    program = folder / "fuzz"
    unit = folder / NATIVE / "src" / "unit.cpp"
    with lock:
        objects = common(root)
    compile_to(program, *UNIT, unit, *objects, *OTHERS, "-pthread")
    for seed, calls in [(seed, 1) for seed in re.findall(r"seed (\d+)", hint)] + [(0, CALLS)]:
        command = [program, str(seed), str(calls), "sse2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if -done.returncode in (signal.SIGSEGV, signal.SIGBUS):  # an address outside of the arrays
            return f"{signal.Signals(-done.returncode).name} at seed {seed} or after"
        if done.returncode < 0 and not done.stdout:
            raise RuntimeError(f"the random calls ended by the signal {-done.returncode}")
        if done.returncode:
            return (done.stdout or f"status {done.returncode}").splitlines()[0]
    return None
