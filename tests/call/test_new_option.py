"""An option that is added step by step, as docs say, is right or refused by name at each step.

Each step edits a copy of the package. Then `new_option.py` calls the copy in each way there is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CALL, KERNELS, API = "polyattn/_core/call/", "polyattn/_kernels/", "polyattn/_api/"

#: A row of the table, that of its feature, and fields for an array.
DECLARED = [
    (CALL + "options.py", '        Option("sinks", axes="H", gradient="array"),\n',
     '        Option("sinks", axes="H", gradient="array"),\n'
     '        Option("head_scale", axes="H", gradient="array"),\n'),
    (CALL + "features.py", '    "logsumexp": Feature(\n',
     '    "head_scale": Feature("head_scale=", lambda c, p: c.head_scale is not None),\n'
     '    "logsumexp": Feature(\n'),
    (CALL + "facts.py", "    sinks: ArrayFacts | None = None\n",
     "    sinks: ArrayFacts | None = None\n    head_scale: ArrayFacts | None = None\n"),
    (CALL + "operands.py", "    sinks: Array | None = None  #: (H,)\n",
     "    sinks: Array | None = None  #: (H,)\n    head_scale: Array | None = None  #: (H,)\n"),
    (API + "attention.py", "    sinks: Array | None = None,\n",
     "    sinks: Array | None = None,\n    head_scale: Array | None = None,\n"),
    (API + "attention.py", '        "normalizer": normalizer,\n',
     '        "normalizer": normalizer, "head_scale": head_scale,\n'),
]  # fmt: skip
#: The step of the formula.
FORWARD = [
    (KERNELS + "dense.py", '"grouped_heads", "logsumexp"',
     '"grouped_heads", "head_scale", "logsumexp"'),
    (KERNELS + "dense.py", "    visible = list(at.visible()) if masked else []\n",
     "    unscaled = product\n    if x.head_scale is not None:\n"
     "        product = product * per_head(xp, x.head_scale, product)\n"
     "    visible = list(at.visible()) if masked else []\n"),
    (KERNELS + "dense.py", "def attend(\n",
     "def per_head(xp, numbers, like):\n"
     "    numbers = xp.reshape(cast(xp, numbers, like.dtype), (-1, 1, 1))\n"
     "    return with_rank(numbers, len(like.shape))\n\n\ndef attend(\n"),
    (KERNELS + "dense.py", "    product: Array  # 1\n",
     "    product: Array  # 1\n    unscaled: Array\n"),
    (KERNELS + "dense.py", "    return Scores(similar, product, normed,",
     "    return Scores(similar, product, unscaled, normed,"),
    ("backends/polyattn_dask/backend.py", '"grouped_heads", "logsumexp"',
     '"grouped_heads", "head_scale", "logsumexp"'),
]  # fmt: skip
#: Its derivative in reverse mode.
BACKWARD = [
    (KERNELS + "backward.py", '"grouped_heads", "mask"', '"grouped_heads", "head_scale", "mask"'),
    (KERNELS + "backward.py", "        if self.x.similarity is None:  # 1\n",
     "        if self.x.head_scale is not None:\n"
     "            of_heads = xp.sum(ds * tile.scores.unscaled, axis=(-2, -1))\n"
     "            self._add('head_scale', of_heads)\n"
     "            ds = ds * per_head(xp, self.x.head_scale, ds)\n"
     "        if self.x.similarity is None:  # 1\n"),
    (KERNELS + "backward.py", "from polyattn._kernels.dense import dropped\n",
     "from polyattn._kernels.dense import dropped, per_head\n"),
    (CALL + "gradients.py", "    sinks: Array | None = None\n",
     "    sinks: Array | None = None\n    head_scale: Array | None = None\n"),
]  # fmt: skip


PARALLEL = ("decode", "gather", "heads", "ring")
OTHER_CALLS = {"calls_without_it"}
COMPUTED = {"forward", "weights", "dask", "layer", *(f"parallel_{name}" for name in PARALLEL)}
IN_REVERSE = {"vjp", "gradients_of_dask", *(f"gradients_of_parallel_{name}" for name in PARALLEL)}


def outcomes(folder, *stages):
    """Return what each way to call gives with a copy of the package that has these edits."""
    for name in ("polyattn", "backends"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    for file, old, new in (edit for stage in stages for edit in stage):
        path = folder / file
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{file} has no {old!r}: the edits no longer fit"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "backends")]),
        "POLYATTN_NATIVE": "0",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(Path(__file__).with_name("new_option.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("stages", "right", "refused"),
    [
        ([DECLARED, FORWARD], OTHER_CALLS | COMPUTED, IN_REVERSE | {"jvp"}),
        ([DECLARED, FORWARD, BACKWARD], OTHER_CALLS | COMPUTED | IN_REVERSE, {"jvp"}),
        ([DECLARED], OTHER_CALLS, COMPUTED | IN_REVERSE | {"jvp"}),
    ],
    ids=["the formula", "its derivative in reverse mode", "a row of the table"],
)
def test_an_option_of_some_steps_is_right_or_refused_by_name(tmp_path, stages, right, refused):
    found = outcomes(tmp_path, *stages)
    assert set(found.values()) == {"right", "refused"}, found
    assert {name for name in right if found[name] != "right"} == set()
    assert {name for name in refused if found[name] != "refused"} == set()
