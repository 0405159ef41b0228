"""Start the command line, so that Ctrl-C shows no traceback, whenever it comes.

It is a package of its own because ``import polyattn.cli`` imports the whole package first.
"""

import _thread
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        import signal

        sys.unraisablehook = _unraisable
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
