"""Start the command line, so that Ctrl-C shows no traceback while polyattn is imported.

It is a package of its own because ``import polyattn.cli`` imports the whole package first.
"""

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from polyattn.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
