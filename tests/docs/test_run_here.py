"""The imports of projects in the table of `docs/how-to/run-here.md` resolve."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "run-here.md"
ROWS = re.findall(
    r"^\| ([^|]+) \| `((?:import|from) [^|]+)` \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.M
)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("names", sorted({names for _, _, names in ROWS}))
def test_the_imports_of_projects_resolve(names):
    lines = [line for _, line, of in ROWS if of == names]
    options = shlex.split(found[0]) if (found := re.findall(r"`(--as [^`]+)`", names)) else []
    code = "\n".join(lines)
    command = [
        sys.executable,
        "-m",
        "polyattn",
        "run",
        *options,
        sys.executable,
        "-c",
        code,
    ]
    assert subprocess.run(command, check=False).returncode == 0, code
