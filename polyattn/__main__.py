"""Start the command line, so that Ctrl-C shows no traceback while its modules are imported."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        if sys.argv[1:2] == ["run"]:  # at once: it needs no kernel
            from polyattn.run.command import main as run_program

            return run_program(sys.argv[2:])
        from polyattn.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
