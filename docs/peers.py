"""Measure the attention functions of other libraries, and write docs/peers.md from the data.

``python docs/peers.py NAME…`` checks subjects of `polyattn check --subject`, or `all`, and puts
what was found into docs/peers.json; then, and without a name, it writes the page.
"""

import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from polyattn.conformance import ESSENTIAL
from polyattn.conformance.functions.check import AGREES, DIFFERS, NO_ARGUMENT, RAISES, Finding
from polyattn.conformance.functions.report import Row
from polyattn.conformance.functions.subjects import SUBJECTS, measure

DATA, WORDS, PAGE = (Path(__file__).with_suffix(x) for x in (".json", ".toml", ".md"))

#: The columns of the table, by the rows of the check.
AREAS = {
    "plain": ("grouped_heads", "scale", "value_size", "float32", "float64", "memory layouts"),
    "masks": (
        *("mask", "mask_mod", "bias", "window", "score_mod", "softcap", "sinks"),
        *("order of the steps", "options together"),
    ),
    "causal, L ≠ S": ("causal",),
    "empty rows": ("rows without a visible key",),
    "NaN hidden": ("NaN and infinity",),
    "16 bits": ("float16", "bfloat16"),
    "extreme values": ("extreme values",),
    "gradients": ("gradients",),
    "lengths": ("lengths", "nothing to compute"),
    "sizes": ("sizes",),
}
AREA_OF = {row: area for area, rows in AREAS.items() for row in rows}
CRASHES = "crashes"
#: The word of each interpretation in a cell, and what each word means for a user.
WORD_OF, MEANS = tomllib.loads(WORDS.read_text(encoding="utf-8")).values()


def word(finding: Finding) -> str:
    """Return what a cell calls a finding."""
    if finding.status == DIFFERS:
        return WORD_OF.get(finding.interpretation, "wrong")
    return CRASHES if finding.error.startswith("the process ended") else finding.status


def counted(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Return how many cases of each area end in what way."""
    areas: dict[str, Counter[str]] = defaultdict(Counter)
    outputs: dict[str, Finding] = {}
    for row in reversed(rows):  # those of other checks of a case are last
        outputs |= row.findings if row.name != "gradients" else {}
    for row in rows:
        for name, finding in row.findings.items():
            case, what = ESSENTIAL.get(name), word(finding)
            area = AREA_OF.get(row.name) if case else "sizes"
            if area is None or finding.status == NO_ARGUMENT or (case and case.full_batch == ()):
                continue  # arrays of another rank are not in the table
            if row.name == "gradients" and {finding.status, outputs[name].status} == {DIFFERS}:
                what = word(outputs[name])  # a wrong gradient of a wrong output
            if case and what == "top left" and case.poison is not None:
                what = "leaks"  # either makes the same rows NaN
            is_causal = case and "causal" in case.features and case.L != case.S
            if what == "top left" or (is_causal and what == "wrong"):
                area = "causal, L ≠ S"
            areas[area][what] += 1
    return {area: dict(areas[area]) for area in AREAS if area in areas}


def measured(name: str) -> dict[str, Any]:
    """Return the version of a subject, and what was found."""
    version, *_ = SUBJECTS[name].versions.values()
    found = counted(measure(SUBJECTS[name], list(ESSENTIAL.values())))
    return {"version": version.partition("+")[0], "found": found}


TEXT = """\
# How other attention functions differ

Each function ran on a CPU, on the cases of `polyattn.conformance` that it has arguments for, and
was compared with [what attention means here](semantics.md); `polyattn check --subject NAME --quick`
repeats it. Most differences are not bugs but another meaning, which the cell names. Few cases have
a mask, a window and causality together. [Which bits differ](same-bits.md#how-others-fail) is
measured apart.

{table}

A cell lists what was found in the cases of the area, most frequent first; *agrees* means that all
cases agree, *–* that the function has no arguments for any of them, or that they were not tried.
*sizes* are vectors of 1 to 72 numbers, half with values of another size, over 1 to 130 tokens,
forward and backward.

{words}

The functions:

{titles}

FlashAttention, xFormers, FlashInfer and torch's `varlen_attn` need a GPU:
`polyattn check --callable torch.nn.attention.varlen:varlen_attn --library torch:cuda` checks one.
"""


def data() -> dict[str, Any]:
    """Return what was found, by the subject's name."""
    found = json.loads(DATA.read_text(encoding="utf-8"))
    return {name: found[name] for name in SUBJECTS if name in found}


def write(found: dict[str, Any]) -> None:
    """Write the data, each area on a line."""
    text = json.dumps(found, indent=1, ensure_ascii=False)
    text = re.sub(r"\{[^{}]*\}", lambda inner: " ".join(inner[0].split()), text)
    DATA.write_text(text + "\n", encoding="utf-8")


def cell(counts: dict[str, int]) -> str:
    """Return what the table says of an area."""
    others = sorted(counts.keys() - {AGREES}, key=lambda x: (x == RAISES, -counts[x], x))
    said = ", ".join(x if x == RAISES else f"**{x}**" for x in others)
    return said or (AGREES if counts else "–")


def page() -> str:
    """Return the text of the page."""
    lines = [["", *AREAS], ["---"] * (len(AREAS) + 1)]
    for name, of in data().items():
        cells = (cell(of["found"].get(area, {})) for area in AREAS)
        lines.append([f"`{name}` {of['version']}", *cells])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    used = {what for of in data().values() for counts in of["found"].values() for what in counts}
    words = "\n".join(f"- *{what}*: {says}" for what, says in MEANS.items() if what in used)
    titles = "\n".join(f"- `{name}`: {SUBJECTS[name].title}" for name in data())
    return TEXT.format(table=table, words=words, titles=titles)


if __name__ == "__main__":
    for subject in SUBJECTS if sys.argv[1:] == ["all"] else sys.argv[1:]:
        print(subject, flush=True)
        write({**data(), subject: measured(subject)})
    PAGE.write_text(page(), encoding="utf-8")
