"""Owns `python -m polydraft`, which is the command `polydraft`."""

from polydraft.cli import main

if __name__ == "__main__":
    main()
