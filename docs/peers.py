"""Write docs/peers.md: where other attention functions differ from ours, and by how much."""

import functools
import math
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.reference
import onnxruntime
import torch
import transformers
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from onnx import helper
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from polyattn import attention
from polyattn.conformance import CASES, Target
from polyattn.conformance.cases.cache_cases import CACHES
from polyattn.conformance.functions.check import (
    AGREES,
    DIFFERS,
    NO_ARGUMENT,
    RAISES,
    Finding,
    NoArgumentError,
    arguments_for,
    check_callable,
)
from polyattn.conformance.functions.report import Row, summarise

PAGE = Path(__file__).with_name("peers.md")


# ---- the peers: names, layouts and types translated, and no meaning ----------------------------


def jax_attention(
    query,
    key,
    value,
    *,
    mask=None,
    bias=None,
    is_causal=False,
    scale=None,
    window=None,
    layout="...HLD",
):
    """Call jax.nn.dot_product_attention, whose arrays have heads after length."""
    if callable(mask):
        raise NoArgumentError("mask as a function")
    swap = layout == "...HLD" and query.ndim > 2

    def run(arrays, masks):
        arrays = [jnp.swapaxes(x, -3, -2) for x in arrays] if swap else arrays
        output = jax.nn.dot_product_attention(
            *arrays, **masks, is_causal=is_causal, scale=scale, local_window_size=radii
        )
        return jnp.swapaxes(output, -3, -2) if swap else output

    # It has no word for a side without a bound; no row is further from any key than this.
    far = query.size + key.size
    radii = None if window is None else tuple(far if end is None else end for end in window)
    with jax.enable_x64(True):
        return jax.jit(run)((query, key, value), {"mask": mask, "bias": bias})


def node_model(kind, feeds, outputs, opset, names=None, domain="", **attributes):
    """Return a model of one node for inputs of these arrays' dtypes; an empty name is no input."""
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feeds.items()}
    attributes = {name: x for name, x in attributes.items() if x is not None}
    node = helper.make_node(kind, names or list(feeds), outputs, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()],
        [helper.make_tensor_value_info(name, next(iter(types.values())), None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", opset), *[helper.make_opsetid(domain, 1)] * bool(domain)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def attention_model(opset, query, key, value, attn_mask, **attributes):
    """Return a model of the operator Attention, and its inputs."""
    given = {"Q": query, "K": key, "V": value, "attn_mask": attn_mask}
    feeds = {name: x for name, x in given.items() if x is not None}
    return node_model("Attention", feeds, ["Y"], opset, **attributes), feeds


class CrashError(Exception):
    """The process that made a call is gone."""


# A process of its own, for some calls end it.
SERVER = """
import pickle, sys
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 4
while True:
    model, feeds = pickle.load(sys.stdin.buffer)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        reply = session.run(None, feeds)[0]
    except Exception as error:
        reply = str(error)
    pickle.dump(reply, sys.stdout.buffer)
    sys.stdout.flush()
"""


@functools.cache
def server():
    """Return a process that runs models."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-P", "-c", SERVER], **pipes)


def run_in_server(model, feeds):
    """Return the output of a model, by ONNX Runtime."""
    process = server()
    pickle.dump((model.SerializeToString(), feeds), process.stdin)
    process.stdin.flush()
    try:
        reply = pickle.load(process.stdout)
    except EOFError:
        server.cache_clear()
        raise CrashError(f"the process ended by {signal.Signals(-process.wait()).name}") from None
    if isinstance(reply, str):
        raise RuntimeError(reply)
    return reply


def onnxruntime_attention(
    query, key, value, *, attn_mask=None, is_causal=False, scale=None, softcap=None
):
    """Run the operator Attention of opset 24 in ONNX Runtime, on the CPU."""
    attributes = {"is_causal": int(is_causal) or None, "scale": scale, "softcap": softcap}
    return run_in_server(*attention_model(24, query, key, value, attn_mask, **attributes))


def onnx_reference_attention(
    query, key, value, *, attn_mask=None, is_causal=False, scale=None, softcap=None, window=None
):
    """Run the operator Attention of opset 25 in ONNX's reference evaluator."""
    attributes = {"is_causal": int(is_causal) or None, "scale": scale, "softcap": softcap}
    if window is not None:
        left, right = (-1 if end is None else end for end in window)
        attributes |= {"left_window_size": left, "right_window_size": right}
    model, feeds = attention_model(25, query, key, value, attn_mask, **attributes)
    return onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0]


# ---- caches and pages --------------------------------------------------------------------------

#: The inputs of the operator, in its order.
INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"),
    *("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink"),
)


def group_query_attention(
    query, key, value, past_key, past_value, seqlens_k, total_sequence_length, *,
    attention_bias=None, head_sink=None, **attributes,
):  # fmt: skip
    """Run the operator GroupQueryAttention in ONNX Runtime, on the CPU."""
    feeds = {name: x for name, x in locals().items() if name in INPUTS and x is not None}
    given = [name if name in feeds else "" for name in INPUTS]
    while not given[-1]:
        given.pop()
    outputs = ["output", "present_key", "present_value"]
    model = node_model(
        "GroupQueryAttention", feeds, outputs, 24, given, "com.microsoft", **attributes
    )
    return run_in_server(model, feeds)


def pallas_attention(
    q, k_pages, v_pages, lengths, page_indices, *, attn_logits_soft_cap, pages_per_compute_block
):
    """Call `paged_attention` of Pallas, a kernel for TPUs, interpreted on the CPU."""
    with pltpu.force_tpu_interpret_mode():
        return paged_attention(
            q, k_pages, v_pages, lengths, page_indices,
            attn_logits_soft_cap=attn_logits_soft_cap,
            pages_per_compute_block=pages_per_compute_block,
        )  # fmt: skip


@functools.cache
def servers():
    """Return the functions over caches and pages, and the dtype of their cases."""
    there = Target("torch")
    return {
        "GroupQueryAttention": (group_query_attention, np.array, np.asarray, "float32"),
        "Pallas `paged_attention`": (pallas_attention, to_jax, np.asarray, "bfloat16"),
        "`sdpa_attention_forward`": (sdpa_attention_forward, there.to, there.back, "float32"),
    }


def serving_column(name: str) -> dict[str, str]:
    """Return what a function over caches and pages does in each case."""
    function, to, back, dtype = servers()[name]
    cells = {}
    for case in CACHES:
        of_dtype = replace(CASES[case], name=f"{case}, {dtype}", dtype=dtype)
        finding = check_callable(function, of_dtype, to, back)
        is_asked, agrees = finding.status != NO_ARGUMENT, finding.status == AGREES
        said = outcome(finding) + share([finding], [finding]) if is_asked else "–"
        cells[case] = said if agrees or not is_asked else f"**{said}**"
    return cells


def to_jax(x):
    """Return a JAX array of the same dtype."""
    with jax.enable_x64(True):
        return jnp.asarray(x)


class Peer(NamedTuple):
    """Another attention function, and how arrays go there and back."""

    name: str
    short: str
    how: str
    function: Callable[..., Any]
    to: Callable[[Any], Any]
    back: Callable[[Any], Any]


@functools.cache
def peers():
    """Return the peers by the names of their libraries."""
    there = Target("torch")
    return {
        "torch": Peer(
            "torch.nn.functional.scaled_dot_product_attention",
            f"torch {torch.__version__.partition('+')[0]}",
            "called as it is; on the CPU it chooses among its own kernels.",
            torch.nn.functional.scaled_dot_product_attention,
            there.to,
            there.back,
        ),
        "jax": Peer(
            "jax.nn.dot_product_attention",
            f"jax {jax.__version__}",
            "called under `jax.jit`, with 64-bit types allowed, on the CPU. Heads and length are"
            " swapped on the way; `window` is `local_window_size`.",
            jax_attention,
            to_jax,
            np.asarray,
        ),
        "onnxruntime": Peer(
            "ONNX Runtime, Attention of opset 24",
            f"onnxruntime {onnxruntime.__version__}",
            "a model of one node, on the CPU.",
            onnxruntime_attention,
            np.array,
            np.asarray,
        ),
        "onnx": Peer(
            "onnx.reference, Attention of opset 25",
            f"onnx {onnx.__version__}",
            "a model of one node; `window` is `left_window_size` and `right_window_size`.",
            onnx_reference_attention,
            np.array,
            np.asarray,
        ),
    }


# ---- the table ---------------------------------------------------------------------------------

#: What a cell calls each interpretation.
SHORT = {
    "rows count from the first key (query_offset=0)": "top-left",
    "a row without keys is the mean of the values": "mean",
    "a row without keys is NaN": "NaN row",
    "a hidden NaN or infinity reaches the row": "leaks",
    "the last axis of a mask is padded rather than broadcast": "padded",
    "the scale is rounded to float32": "float32 scale",
    "the root of the scale is rounded to float32": "float32 scale",
    "computed in float32": "float32 inside",
    "computed in float16": "float16 inside",
    "computed in bfloat16": "bfloat16 inside",
    "a row whose query is NaN is 0": "NaN is 0",
    "every row is NaN": "all NaN",
    "": "unexplained",
}

#: How many outcomes a cell has room for, beside those that agree.
MOST = 2

GROUPS = {
    "feature": "One feature at a time",
    "arrays": "Other arrays",
    "dtype": "A plain call in each dtype",
    "topic": "Corners",
    "parts": "Parts of a call",
}
LABELS = {
    "batch_broadcast": "batch axes broadcast",
    "causal": "`is_causal`",
    "grouped_heads": "grouped heads",
    "mask": "`mask` array",
    "mask_mod": "`mask` function",
    "query_offset_array": "`query_offset` array",
    "value_size": "E other than D",
    "rank": "rank other than 4",
    "layout": "heads after length",
}


@functools.cache
def rows_of(peer: str, names: tuple[str, ...] = tuple(CASES)) -> dict[str, Row]:
    """Return what was found of a peer on the cases of these names, by the rows' labels."""
    there = peers()[peer]
    rows = summarise(there.function, [CASES[name] for name in names], there.to, there.back)
    return {label(row): row for row in rows}


def label(row: Row) -> str:
    """Return what a row is called."""
    return LABELS.get(row.name, f"`{row.name}`" if row.kind == "feature" else row.name)


def figure(units: float) -> str:
    """Return a number in two digits."""
    if math.isinf(units):
        return "∞"
    digits = f"{units:.1e}"
    if units == 0 or 0.01 <= units < 1e4:
        return f"{float(digits):g}"
    return re.sub(r"e\+?(-?)0*", r"e\1", digits)


def outcome(finding: Finding) -> str:
    """Return what a cell says of a finding."""
    if finding.status == DIFFERS:
        return SHORT.get(finding.interpretation, finding.interpretation)
    return "crashes" if finding.error.startswith(CrashError.__name__) else finding.status


def cell(row: Row) -> str:
    """Return what a peer does with the cases of a row, figures in parentheses."""
    asked = [f for f in row.findings.values() if f.status != NO_ARGUMENT]
    outcomes = defaultdict(list)
    for finding in asked:
        outcomes[outcome(finding)].append(finding)
    well = outcomes.pop(AGREES, None)
    order = sorted(outcomes, key=lambda what: (-len(outcomes[what]), what))
    said = [f"**{what}**{share(outcomes[what], asked)}" for what in order]
    said = [*said[:MOST], "…"] if len(said) > MOST else said
    if well is not None:
        bits = ", other bits" * any(finding.remark for finding in well)
        said.append(f"{AGREES}{share(well, asked)}{bits}")
    return "; ".join(said) or "–"


def share(found: list[Finding], asked: list[Finding]) -> str:
    """Return how many findings there are, if not all, and the largest error of those that ran."""
    units = [f.deviation.units for f in found if f.deviation is not None]
    number = f" {len(found)}/{len(asked)}" if len(found) < len(asked) else ""
    return number + (f" ({figure(max(units))})" if units else "")


def table(columns: dict[str, dict[str, str]], first: str = "") -> str:
    """Return a table in Markdown, of columns of cells by their labels."""
    lines = [f"| {first} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in next(iter(columns.values())):
        lines.append(f"| {name} | " + " | ".join(c[name] for c in columns.values()) + " |")
    return "\n".join(lines)


def column(rows: dict[str, Row]) -> dict[str, str]:
    """Return the cells of a peer by their labels, groups of rows with empty ones before them."""
    cells: dict[str, str] = {}
    for name, row in rows.items():
        cells.setdefault(f"**{GROUPS[row.kind]}**", "")
        cells[name] = cell(row)
    return cells


# ---- questions by hand -------------------------------------------------------------------------


def ask(peer: Peer, arrays, **options):
    """Return a peer's output as a NumPy array, or what it raised."""
    try:
        given = arguments_for(peer.function, options)
        given = {n: peer.to(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        return np.asarray(peer.back(peer.function(*map(peer.to, arrays), **given)))
    except Exception as error:
        return error


def draw(*shapes, dtype="float32"):
    """Return arrays of normal numbers, the same ones each time."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def says(output, meanings: dict[str, Any]) -> str:
    """Return the name of the meaning that an output is of."""
    if isinstance(output, Exception):
        return "refused" if not isinstance(output, CrashError) else "crashes"
    for name, expected in meanings.items():
        if output.shape == np.shape(expected) and np.allclose(
            output, expected, rtol=1e-4, atol=1e-5, equal_nan=True
        ):
            return name
    return "something else"


def third_axis(peer: Peer) -> str:
    """Return how a mask (2, L, S) is read where both batch and heads are 2."""
    arrays = draw((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    mask = np.arange(5) < np.array([5, 2])[:, None, None]
    mask = np.broadcast_to(mask, (2, 3, 5))
    meanings = {
        "one per head": attention(*arrays, mask=mask[None]),
        "one per batch item": attention(*arrays, mask=mask[:, None]),
    }
    return says(ask(peer, arrays, mask=mask), meanings)


def rank_two(peer: Peer) -> str:
    """Return how arrays (L, D) are read."""
    arrays = draw((3, 4), (3, 4), (3, 4))
    meanings = {"one head": attention(*arrays), "L heads of one row": arrays[2]}
    return says(ask(peer, arrays), meanings)


def no_keys(peer: Peer) -> str:
    """Return what a row is where S = 0."""
    arrays = draw((1, 2, 3, 4), (1, 2, 0, 4), (1, 2, 0, 4))
    meanings = {"0": np.zeros((1, 2, 3, 4)), "NaN": np.full((1, 2, 3, 4), np.nan)}
    return says(ask(peer, arrays), meanings)


def hidden_row(peer: Peer, **hiding) -> str:
    """Return what a row is whose keys are all hidden, the other rows being right."""
    arrays = draw((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    hidden = (np.arange(3) == 1)[:, None] & np.ones(5, bool)
    (name, value), *_ = hiding.items()
    option = ~hidden if name == "mask" else np.where(hidden, value, 0).astype("float32")
    right = attention(*arrays, mask=~hidden)
    mean = np.mean(arrays[2], axis=-2, keepdims=True)
    row = (np.arange(3) == 1)[:, None]
    meanings = {
        name: np.where(row, x, right) for name, x in (("0", 0), ("mean", mean), ("NaN", np.nan))
    }
    return says(ask(peer, arrays, **{name: option}), meanings)


def float16(peer: Peer) -> str:
    """Return what becomes of a plain call in float16 where no function is compiled."""
    with jax.disable_jit():
        finding = check_callable(peer.function, CASES["plain, float16"], peer.to, peer.back)
    return outcome(finding) + share([finding], [finding])


QUESTIONS = {
    "a bool mask (2, L, S) where batch and heads are both 2": third_axis,
    "arrays (L, D)": rank_two,
    "a row where S = 0": no_keys,
    "a row hidden by False in a mask": functools.partial(hidden_row, mask=False),
    "a row hidden by a bias of −inf": functools.partial(hidden_row, bias=-np.inf),
    "a row hidden by a bias of `finfo.min`": functools.partial(
        hidden_row, bias=float(np.finfo("float32").min)
    ),
    "float16, without `jax.jit`": float16,
}


# ---- the page ----------------------------------------------------------------------------------


def counts(rows: dict[str, Row]) -> dict[str, str]:
    """Return how many cases end in what way, and the arguments that are missing."""
    found = [finding for row in rows.values() for finding in row.findings.values()]
    ended = Counter(finding.status for finding in found)
    missing = {n for f in found if f.status == NO_ARGUMENT for n in f.missing.split(", ")}
    return {
        "agree": str(ended[AGREES]),
        "differ": str(ended[DIFFERS]),
        "raise an error": str(ended[RAISES]),
        "need an argument that it does not have": str(ended[NO_ARGUMENT]),
        "it has no argument for": ", ".join(sorted(missing)),
    }


INTRODUCTION = """\
# How other attention functions differ

`python docs/peers.py` writes this page. It ran on a CPU with
{versions}.

Each function is run on the cases of `polyattn.conformance`, one feature, dtype or corner at a
time. The results are compared with [what attention means here](semantics.md). A difference is not
always a bug: most are another meaning, and the cell names it.
`polyattn.conformance.functions.check` does the same for any function.

A cell counts only the cases that the function has arguments for. *2/3* means two of three cases.
The number in parentheses is their largest error in units of `eps · Σ w|v|`, the rounding of a
weight; in float32, about 10⁷ units are as large as the values themselves. A result agrees if it is
within the limit of its case, which is wide where scores are large.

- *∞*: not exact where it must be, such as at a 0, or NaN instead of a number.
- *–*: the function has no argument for any of the cases.
- *raises*: an error.
- *other bits*: by themselves, parts of a call agree, and not bit for bit with the whole.
- *crashes*: the process ended.

The figures come from one machine. A test checks that the words in the cells of torch and jax are
still true.
"""


SERVING = """\
## Caches and pages

The same for functions over caches and pages, one case in a row: GroupQueryAttention of ONNX Runtime
(`com.microsoft`); `paged_attention` of JAX's Pallas kernels for TPUs, interpreted, in bfloat16, to
which it rounds keys and values; and `sdpa_attention_forward` of transformers {transformers}, whose
mask says where keys end. A cache is one page of each item for `paged_attention`.

torch's `varlen_attn`, FlashAttention and FlashInfer run on CUDA only, and were not run. Where there
is a GPU, `polyattn check --callable torch.nn.attention.varlen:varlen_attn --library torch:cuda`
checks one of them.
"""


def main() -> None:
    """Write the page."""
    found = {name: rows_of(name) for name in peers()}
    heads = [peer.short for peer in peers().values()]
    columns = dict(zip(heads, map(column, found.values()), strict=True))
    interpretations = {
        name for rows in found.values() for row in rows.values() for name in row.interpretations
    }
    meant = {name: name or "no other meaning that was tried" for name in interpretations}
    legend = [f"- *{short}*: {meant[name]}." for name, short in SHORT.items() if name in meant]
    totals = dict(zip(heads, map(counts, found.values()), strict=True))
    answers = {
        head: {question: answer(peer) for question, answer in QUESTIONS.items()}
        for head, peer in zip(heads, peers().values(), strict=True)
    }
    parts = [
        INTRODUCTION.format(versions=", ".join(heads)),
        table(columns),
        "",
        *legend,
        "",
        "## Single calls",
        "",
        table(answers),
        "",
        "## In all",
        "",
        table(totals, f"of {sum(len(row.findings) for row in found['torch'].values())} cases"),
        "",
        *[f"- **{peer.name}**: {peer.how}" for peer in peers().values()],
    ]
    parts += ["", SERVING.format(transformers=transformers.__version__)]
    parts += [table({name: serving_column(name) for name in servers()})]
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
