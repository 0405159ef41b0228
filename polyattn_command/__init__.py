"""Start the command line, so that Ctrl-C shows no traceback while it is imported or ends.

It is a package of its own because ``import polyattn.cli`` imports the whole package first.
"""

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        import signal

        try:
            from polyattn.cli import main as run

            return run()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    except KeyboardInterrupt:  # during an import, or the second one
        return 130
