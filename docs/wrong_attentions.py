"""Write wrong-attentions.md: which check finds which of the wrong attentions of `pool`.

``python docs/wrong_attentions.py`` runs every check on every function, on all processors, and
writes docs/pool/found.json, the page and its picture. ``--help`` says how to run a part of it.
"""

import argparse
import json
import os
import tomllib
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from pictures import drawn, write
from pool.functions import CONTROLS, MODULES, WRONG
from pool.rules import RULES, finds
from tqdm import tqdm

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
FOUND, PAGE = FOLDER / "pool" / "found.json", FOLDER / "wrong-attentions.md"
PICTURE = FOLDER / "images" / "wrong-attentions.png"
GITHUB = "https://github.com/"
#: The checks that are not polyattn's own.
OTHERS = [rule for rule in RULES if not rule.startswith("check")]


def row(name):
    """Return which checks find a function."""
    function = (CONTROLS | WRONG)[name]
    found = {}
    for rule in RULES:  # the whole form has all of the quick one
        found[rule] = (rule == "check" and found["check --quick"]) or bool(finds(rule, function))
    return name, found


def keep(names):
    """Write to found.json which checks find the functions of some names, as each is found."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, checks in tqdm(pool.map(row, names), total=len(names), unit="function"):
            found = read() | {name: checks}
            found = {name: found[name] for name in (*CONTROLS, *WRONG) if name in found}
            FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read():
    """Return which checks found each function."""
    return json.loads(FOUND.read_text(encoding="utf-8"))


def about():
    """Return the row of pool.toml of each function."""
    table = tomllib.loads((FOLDER / "pool" / "pool.toml").read_text(encoding="utf-8"))
    return {name: data for rows in table.values() for name, data in rows.items()}


def linked(reports):
    """Return public reports as links."""

    def link(report):
        where, _, number = report.partition("#")
        return f"[{report}]({GITHUB}{where}/issues/{number})" if number else report

    return ", ".join(map(link, filter(None, reports.split(", "))))


def page(found):
    """Return the text of the page."""
    data, checks, ours, others = about(), [], [], defaultdict(list)
    for rule in RULES:
        checks.append(f"| {rule} | {sum(found[name][rule] for name in WRONG)} |")
    for module in MODULES:
        ours += ["", f"**{module.__name__.partition('.')[2].capitalize()}**", ""]
        for name in (n for n in WRONG if WRONG[n] in vars(module).values()):
            reports = linked(data[name].get("report", ""))
            if any(found[name][rule] for rule in OTHERS):
                marks = "".join("+" if found[name][rule] else "-" for rule in OTHERS)
                others[marks].append(f"`{name}`" + f" ({reports})" * bool(reports))
            else:
                what = WRONG[name].__doc__.strip().partition("\n")[0]
                ours.append(" ".join(filter(None, (f"- `{name}`: {what}", reports))))
    rows = sorted(others.items(), key=lambda row: (row[0].count("+"), row[0]))
    text = (FOLDER / "pool" / "page.txt").read_text(encoding="utf-8")
    tables = {"checks": "\n".join(checks), "ours": "\n".join(ours)}
    tables["others"] = "\n".join(f"| `{marks}` | {', '.join(names)} |" for marks, names in rows)
    return text.format(count=len(WRONG), **tables)


def figure(found):
    """Draw the share that each check finds of each class."""
    data = about()
    classes = Counter(one["class"] for one in data.values())
    shares = [
        [sum(found[n][r] for n, x in data.items() if x["class"] == c) / classes[c] for c in classes]
        for r in RULES
    ]
    drawing = Figure((8, 4.2), layout="constrained")
    axes = drawing.add_subplot()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    labels = [f"{name}\n({n})".replace(" ", "\n", 1) for name, n in classes.items()]
    axes.set_xticks(range(len(classes)), labels)
    axes.set_yticks(range(len(RULES)), list(RULES))
    for i, shown in enumerate(shares):
        for j, share in enumerate(shown):
            colour = "white" if share > 0.6 else "black"
            axes.text(j, i, f"{share:.0%}", ha="center", va="center", color=colour)
    return drawing


def main():
    """Run the checks unless only the page is asked for, and write the page and the picture."""
    parser = argparse.ArgumentParser(description="Run each check on each wrong attention.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="functions of pool; default: all")
    parser.add_argument("--page", action="store_true", help="write the page and the picture only")
    args = parser.parse_args()
    every = [*CONTROLS, *WRONG]
    if unknown := [name for name in args.names if name not in every]:
        parser.error(f"the pool has no function named {', '.join(unknown)}")
    if not args.page:
        keep(args.names or every)
    PAGE.write_text(page(read()), encoding="utf-8")
    write(drawn(figure(read())), PICTURE)


if __name__ == "__main__":
    main()
