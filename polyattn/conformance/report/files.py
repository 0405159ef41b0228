"""Print the results of a check, and write the script of a failure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyattn._base.files import write_file
from polyattn._base.streams import complain, show

#: Returns the script of a failure, or None if no failure is one call of arrays.
MakeScript = Callable[[], str | None]


def as_json(value: Any) -> str:
    """Return JSON, with null for infinite errors, which JSON lacks."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(y) for name, y in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(value), indent=2, allow_nan=False)


def give(text: object, file: Path | None, make_script: MakeScript | None) -> None:
    """Print the results; even if that fails, write the script of a failure to a file."""
    try:
        show(text)
    finally:
        if file is not None and make_script is not None:
            if (script := make_script()) is not None:
                write_file(file, script)
            else:
                complain(f"polyattn check: no failure is one call of arrays: {file} is not made")
