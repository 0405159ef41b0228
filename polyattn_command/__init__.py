"""Start the command line, so that Ctrl-C shows no traceback, whenever it comes.

It is a package of its own because ``import polyattn.cli`` imports the whole package first. So does
``python -m polyattn``, before any code of ours runs: the package imports this one first.
"""

import _thread
import os
import sys
from typing import Any

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        import signal

        sys.unraisablehook = _unraisable
        if signal.getsignal(signal.SIGINT) is _stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            from polyattn.cli import main as run

            return run()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    except KeyboardInterrupt:  # during an import, or the second one
        return 130


def _unraisable(error: "sys.UnraisableHookArgs") -> None:
    """Let Ctrl-C that came inside a callback, where Python only prints it, come again soon."""
    import threading

    if error.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(error)


def _stop(*_: Any) -> None:
    os._exit(130)


def _watch() -> None:
    """Stop quietly at Ctrl-C while ``python -m polyattn`` imports the package."""
    words = sys.orig_argv
    named = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    if getattr(sys, "argv", [])[:1] == ["-m"] and named == ["polyattn"]:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _stop)


_watch()
