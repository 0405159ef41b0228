"""Start the command line, so that Ctrl-C shows no traceback while polyattn is imported.

It is a package of its own because ``import polyattn.cli`` imports the whole package first.
"""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        if sys.argv[1:2] == ["run"]:  # at once: it needs nothing of polyattn
            from polyattn_command.run import main as run_program

            return run_program(sys.argv[2:])
        from polyattn.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
