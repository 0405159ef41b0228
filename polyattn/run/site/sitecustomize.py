"""Start each Python of `polyattn run`, which has this folder in its path."""

import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 -- it starts at once
    sys.path[:] = [folder for folder in sys.path if folder != here]
    try:
        from polyattn.run.stand_ins import VARIABLE, names_of, start
    except ImportError:  # another Python, which has no polyattn
        pass
    else:
        start(names_of(os.environ.get(VARIABLE, "")))


def _run_hidden() -> None:
    """Run the module of this name that this one hides."""
    own = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    sys.modules.setdefault(__name__, own)


if __name__ == "sitecustomize":
    try:
        _start()
    finally:
        _run_hidden()
