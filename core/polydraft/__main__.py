"""Makes `python -m polydraft` run the command `polydraft`."""

from polydraft.cli import main

if __name__ == "__main__":
    main()
