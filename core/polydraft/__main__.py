"""The command `polydraft`, also as `python -m polydraft`: Ctrl-C is a sentence before anything else is imported."""

import sys


def main() -> None:
    """Run the command."""
    try:
        from polydraft.cli import main as run
    except KeyboardInterrupt:  # as `polydraft.cli` tells it
        print("polydraft: interrupted before there was a result", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
