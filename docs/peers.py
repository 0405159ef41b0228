"""Write docs/peers.md and docs/peers/: where other attention functions differ from ours.

``python docs/peers.py NAME…`` measures subjects of `polyattn check --subject`, with the versions
that the running Python has, into docs/peers/data; without a name the pages are written from it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from polyattn.conformance import ESSENTIAL
from polyattn.conformance.functions.check import AGREES, DIFFERS, NO_ARGUMENT, RAISES, Finding
from polyattn.conformance.functions.report import all_sizes
from polyattn.conformance.functions.subjects import SUBJECTS, measure

DOCS = Path(__file__).parent
DATA = DOCS / "peers" / "data"
WORDS, ASKED = (
    tomllib.loads((DOCS / "peers" / f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("words", "questions")
)

#: The areas of the front table, by the rows of the check; gradients of sizes are in "sizes".
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
    "caches, pages": ("caches and pages",),
    "same bits": ("items by themselves", "rows by themselves"),
}
SIZES = {case.name: case for case in all_sizes()}
AREA_OF = {row: area for area, rows in AREAS.items() for row in rows}
CRASHES = "crashes"

#: What a cell calls each finding, with what it means for a user; and the names of meanings.
MEANS, SHORT = ASKED["means"], ASKED["short"]


# ---- measure -----------------------------------------------------------------------------------


def outcome(finding: Finding) -> str:
    """Return what a cell calls a finding."""
    if finding.status == DIFFERS:
        return SHORT.get(finding.interpretation, "wrong")
    if finding.error.startswith("the process ended"):
        return CRASHES
    return "other bits" if finding.remark.startswith("other bits") else finding.status


def areas_of(name: str) -> dict[str, dict[str, Any]]:
    """Return how many cases of each area end in what way, the largest error and one of them."""
    areas: dict[str, dict[str, Any]] = defaultdict(dict)
    rows = measure(SUBJECTS[name], list(ESSENTIAL.values()))
    forward = {
        case: finding
        for row in rows
        if row.kind != "parts" or row.name == "sizes"
        for case, finding in row.findings.items()
    }
    for row in rows:
        for case, finding in row.findings.items():
            area, asked = AREA_OF.get(row.name), ESSENTIAL.get(case)
            area = "sizes" if case in SIZES else area
            if area is None or finding.status == NO_ARGUMENT:
                continue
            if asked is not None and asked.full_batch == ():
                continue  # arrays of another rank are not in the table
            what = outcome(finding)
            if row.name == "gradients" and finding.status == DIFFERS and case in forward:
                what = outcome(forward[case]) if forward[case].status == DIFFERS else what
            causal = asked is not None and "causal" in asked.features and asked.L != asked.S
            if what == "top left" and asked is not None and asked.poison is not None:
                what = "leaks"  # either makes the same rows NaN
            if what == "top left" or (causal and what == "wrong"):
                area = "causal, L ≠ S"
            by = "gradients of " if area == "sizes" and row.name == "gradients" else ""
            count, units, example = areas[area].get(what, (0, 0.0, by + case))
            own = finding.deviation.units if finding.deviation is not None else 0.0
            areas[area][what] = (count + 1, max(units, float(own)), example)
    return areas


def words_of(name: str) -> dict[str, Any]:
    """Return how a subject is called in the lines of its page."""
    words = WORDS[name]
    arrays = WORDS["arrays"][SUBJECTS[name].arrays]
    imports = "\n".join(x.strip("\n") for x in (arrays["import"], words.get("import", "")) if x)
    call = "attend(q, k, v{causal}{mask}{bias}{window}{grouped}{scale})"
    return {"call": call, "size": 4, **arrays, **words, "imports": imports}


def call_of(words: dict[str, Any], asks: set[str]) -> str:
    """Return the call that has what is asked, in the subject's words."""
    slots = {x: words[x] if x in asks else words.get(f"no_{x}", "") for x in OPTIONS}
    neither = asks.isdisjoint(("mask", "bias"))
    return words["call"].format(**slots, none="None" if neither else "")


OPTIONS = ("causal", "mask", "bias", "window", "grouped", "scale")


def setup_of(name: str) -> str:
    """Return the code before the lines: what the subject is, and how its arrays are made."""
    words = words_of(name)
    swap = ".swapaxes(1, 2)" if words.get("length_first") else ""
    axes = "(B, L, H, D)" if swap else "(B, H, L, D)"
    prelude = ASKED["prelude"].strip("\n")
    for place, text in (
        *(("{imports}", words["imports"]), ("{to}", words["to"]), ("{size}", str(words["size"]))),
        *(("{first}", swap), ("{last}", swap), ("{axes}", axes)),
    ):
        prelude = prelude.replace(place, text)
    environment = "".join(
        f"os.environ[{n!r}] = {x!r}\n" for n, x in SUBJECTS[name].environment.items()
    )
    first = f"import os\n\n{environment}\n" if environment else ""
    return first + SUBJECTS[name].setup.strip("\n") + "\n\n\n" + prelude + "\n"


def lines_of(name: str) -> list[dict[str, Any]]:
    """Return the lines that put each question to a subject."""
    words, lines = words_of(name), []
    general = [] if "only" in words else ASKED["questions"]
    for question in [*general, *words.get("questions", [])]:
        asks = set(question.get("asks", "").split())
        gradient = "{gradient}" in question.get("show", "")
        if (
            not asks <= words.keys()
            or question["name"] in words.get("skip", [])
            or (gradient and "gradient" not in words)
        ):
            continue
        call, of = call_of(words, asks), question.get("of", "")
        filled = {
            "{call}": call,
            "{plain}": call_of(words, asks - {"causal"}),
            "{gradient}": words.get("gradient", "").replace("{0}", of),
        }
        filled["{size}"] = str(words["size"])
        code, show = question["code"].strip("\n"), question.get("show", "row({call})")
        if gradient:
            code += f"\nf = lambda {of}: {call}"
        for place, text in filled.items():
            code, show = code.replace(place, text), show.replace(place, text)
        lines.append({**question, "code": f"{code}\nshow(lambda: {show})\n"})
    return lines


def lines_of_case(name: str, example: str) -> str | None:
    """Return lines for arrays of the shapes of a case, or None if the call has other options."""
    case = (ESSENTIAL | SIZES)[example.removeprefix("gradients of ")]
    words, (arrays, options) = words_of(name), case.arguments()
    asks = {"causal" if option == "is_causal" else option for option in options}
    asks |= {"grouped"} if "grouped_heads" in case.features else set()
    if not asks <= words.keys() or arrays[0].ndim != 4 or callable(options.get("mask")):
        return None
    shapes = ", ".join(str(x.shape) for x in arrays)
    lines = [f'q, k, v = (arrange(np.ones(x), "{case.dtype}") for x in ({shapes}))']
    for option, dtype in (("mask", "bool"), ("bias", case.dtype)):
        if option in options:
            shape = np.shape(options[option])
            lines.append(f'{option} = to(np.ones({(1,) * (4 - len(shape)) + shape}), "{dtype}")')
    shown = call_of(words, asks)
    if example != case.name:
        lines.append(f"f = lambda v: {shown}")
        shown = words["gradient"].replace("{0}", "v")
    return "\n".join([*lines, f"show(lambda: row({shown}))\n"])


# A process that runs lines one after another, and prints what they print as JSON.
RUNNER = """
import contextlib, io, json, sys
setup, blocks = json.load(sys.stdin)
names = {}
exec(setup, names)
for block in blocks:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block, names)
    print(json.dumps(printed.getvalue()), file=sys.stderr, flush=True)
"""


def printed_by(setup: str, blocks: list[str]) -> list[str | None]:
    """Return what each block of lines prints; None for one that ends the process."""
    done: list[str | None] = []
    while len(done) < len(blocks):
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUNNER],
            input=json.dumps([setup, blocks[len(done) :]]),
            **{"capture_output": True, "text": True, "check": False, "timeout": 3600},
        )
        lines = [x for x in ran.stderr.splitlines() if x[:1] == '"']
        done += map(json.loads, lines)
        if len(done) < len(blocks):
            assert ran.returncode < 0, ran.stderr
            print(f"  {signal.Signals(-ran.returncode).name}: {blocks[len(done)]}")
            done.append(None)
    return done


def answered(name: str, areas: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a subject with what they print, and what that means."""
    lines = lines_of(name)
    setup = setup_of(name)
    for line, text in zip(lines, printed_by(setup, [x["code"] for x in lines]), strict=True):
        line["printed"], line["outcome"] = text, meaning_of(text, line["answers"])
    # Errors and crashes that no question met.
    more = []
    for area, found in areas.items():
        met = {line["outcome"] for line in lines if line["area"] == area}
        for what in {RAISES, CRASHES} & found.keys() - met:
            example = found[what][2]
            code = lines_of_case(name, example)
            if code is not None and "only" not in WORDS[name]:
                more.append({"area": area, "name": f"case {example}", "code": code})
    for line, text in zip(more, printed_by(setup, [x["code"] for x in more]), strict=True):
        line["printed"], line["outcome"] = text, meaning_of(text, {})
    kept = ("area", "name", "code", "printed", "outcome")
    return [{key: line[key] for key in kept} for line in lines + more]


def meaning_of(text: str | None, answers: dict[str, str]) -> str:
    """Return the meaning of what lines print."""
    if text is None:
        return CRASHES
    text = text.strip()
    raised = re.fullmatch(r"[A-Z]\w+", text) and text not in ("True", "False")
    return answers.get(text, RAISES if raised else "wrong")


def write_data(name: str, anew: bool) -> None:
    """Measure a subject and write what was found."""
    began, subject = os.times(), SUBJECTS[name]
    os.environ.update(subject.environment)
    version = next(iter(subject.versions.values())).partition("+")[0]
    file = DATA / f"{name}-{version}.json"
    data = {} if anew else json.loads(file.read_text(encoding="utf-8"))
    if anew:
        data = {"name": name, "versions": subject.versions, "areas": areas_of(name)}
        data["seconds"] = round(sum(os.times()[:4]) - sum(began[:4]))  # of the processor
    data["lines"] = answered(name, data["areas"])
    text = json.dumps(data, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+(\d+),\s+(\S+),\s+(\".*\")\s+\]", r"[\1, \2, \3]", text)
    file.write_text(text + "\n", encoding="utf-8")
    print(name, version, f"{data['seconds']} s", flush=True)


# ---- the pages ---------------------------------------------------------------------------------

FRONT = """\
# How other attention functions differ

Each function ran on a CPU, on the cases of `polyattn.conformance` that it has arguments for, and
was compared with [what attention means here](semantics.md); `polyattn check --subject NAME --quick`
repeats it. Most differences are not bugs but another meaning, which the cell names. The page of a
function repeats each in code of its own library.

{table}

A cell lists what was found in the cases of the area, most frequent first; *agrees* means that all
cases agree, *–* that the function has no arguments for any of them. *sizes* are vectors of 1
to 72 numbers, half with values of another size, over 1 to 130 tokens, forward and backward; *not
swept*: not tried.

{legend}

FlashAttention, xFormers, FlashInfer and torch's `varlen_attn` need a GPU:
`polyattn check --callable torch.nn.attention.varlen:varlen_attn --library torch:cuda` checks one.

## What changed between versions

A + is found in the newer version only, a − in the older only.

{history}

```{{toctree}}
:hidden:
:glob:

peers/*
```
"""

PAGE = """\
# {title}

{versions}. `polyattn check --subject {name} --quick` repeats this{more}, in
{seconds} seconds of processor time.

| | agree | otherwise |
|---|---|---|
{table}

The lines below need this first:

```python
{setup}```

{findings}
"""


def loaded() -> dict[str, list[dict[str, Any]]]:
    """Return the data of each subject, the newest version first."""
    found = defaultdict(list)
    for file in DATA.glob("*.json"):
        data = json.loads(file.read_text(encoding="utf-8"))
        found[data["name"]].append(data)
    for of_name in found.values():
        of_name.sort(key=lambda data: [int(x) for x in version_of(data).split(".")], reverse=True)
    return {name: found[name] for name in SUBJECTS if name in found}


def version_of(data: dict[str, Any]) -> str:
    """Return the version of the library that was measured."""
    return str(next(iter(data["versions"].values()))).partition("+")[0]


def differing(data: dict[str, Any], area: str) -> list[str]:
    """Return what was found in an area beside agreement, most frequent first."""
    counts = {what: found[0] for what, found in data["areas"].get(area, {}).items()}
    for line in data["lines"]:
        if line["area"] == area:
            counts.setdefault(line["outcome"], 0)
    return sorted(counts.keys() - {AGREES}, key=lambda x: (x == RAISES, -counts[x], x))


def is_swept(data: dict[str, Any]) -> bool:
    """Return whether all sizes were tried, if it has plain calls."""
    return "sizes" in data["areas"] or "plain" not in data["areas"]


def cell(data: dict[str, Any], area: str) -> str:
    """Return what the front table says of a function in an area."""
    if area == "sizes" and not is_swept(data):
        return "not swept"
    asked = data["areas"].get(area) or [line for line in data["lines"] if line["area"] == area]
    said = ", ".join(f"**{x}**" if x != RAISES else x for x in differing(data, area))
    return said or (AGREES if asked else "–")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def findings(data: dict[str, Any]) -> str:
    """Return the lines that repeat what was found, area by area."""
    parts, met = [], defaultdict(set)
    for line in data["lines"]:
        what = line["outcome"]
        if what != AGREES and (what not in met[line["area"]] or what != RAISES):
            said = f"**{what}**: {MEANS[what]}" if what not in met["said"] else f"**{what}**"
            met[line["area"]].add(what)
            met["said"].add(what)
            parts.append(f"## {line['area']}: {line['name']}\n\n{said}\n\n{shown(line)}")
    for area in AREAS:
        for what in set(differing(data, area)) - met[area]:
            by_other = what == "wrong" and met[area] - {RAISES}  # its lines show another effect
            assert by_other or what in met["said"], (
                f"{data['name']}: no lines repeat {what} of {area}"
            )
    return "\n\n".join(parts)


def shown(line: dict[str, Any]) -> str:
    """Return lines with what they print; those that end the process are no Python to run."""
    if line["printed"] is None:
        return f"These lines end the process:\n\n```text\n{line['code']}```"
    return f"```python\n{line['code']}```\n\n```text\n{line['printed']}```"


def page_of(data: dict[str, Any]) -> str:
    """Return the page of a subject."""
    rows = []
    for area in AREAS:
        found = dict(data["areas"].get(area, {}))
        agree, others = found.pop(AGREES, [0])[0], sum(x[0] for x in found.values())
        if agree + others:
            said = ", ".join(f"{what} {count}" for what, (count, *_) in found.items())
            rows.append(f"| {area} | {agree} of {agree + others} | {said} |")
    versions = ", ".join(f"{name} {x.partition('+')[0]}" for name, x in data["versions"].items())
    title, more = SUBJECTS[data["name"]].title, "" if is_swept(data) else " with more sizes"
    return PAGE.format(
        **{"title": title, "more": more},
        **{"versions": versions, "name": data["name"], "seconds": data["seconds"]},
        **{"table": "\n".join(rows), "setup": setup_of(data["name"]), "findings": findings(data)},
    )


def history(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return what differs between two versions of a subject."""
    rows = []
    for name, (newest, *older) in found.items():
        for data in older:
            changes = []
            for area in AREAS:
                if area == "same bits" or (area == "sizes" and not is_swept(data)):
                    continue  # the bits are those of processors
                was, now = differing(data, area), differing(newest, area)
                signs = [f"−{x}" for x in was if x not in now]
                signs += [f"+{x}" for x in now if x not in was]
                changes += [f"{area}: {', '.join(signs)}"] if signs else []
            versions = f"{version_of(data)} → {version_of(newest)}"
            rows.append([f"`{name}`", versions, "; ".join(changes) or "nothing"])
    return table(["", "versions", "what changed"], rows)


def pages() -> dict[str, str]:
    """Return the front page and a page for each subject, by their places in docs/."""
    found, texts = loaded(), dict[str, str]()
    rows, used = [], set()
    for name, (data, *_) in found.items():
        page = f"peers/{re.sub(r'[._]', '-', name)}.md"
        texts[page] = page_of(data)
        rows.append([f"[{name}]({page}) {version_of(data)}", *(cell(data, x) for x in AREAS)])
        used |= {x for area in AREAS for x in differing(data, area)}
    legend = "\n".join(f"- *{what}*: {says}" for what, says in MEANS.items() if what in used)
    text = FRONT.format(table=table(["", *AREAS], rows), legend=legend, history=history(found))
    return {"peers.md": text} | texts


if __name__ == "__main__":
    for subject_name in sys.argv[1:]:
        write_data(subject_name.removeprefix("lines:"), not subject_name.startswith("lines:"))
    for file, written in pages().items() if not sys.argv[1:] else ():
        (DOCS / file).write_text(written, encoding="utf-8")
