"""Runs the command line as ``python -m legoai``."""

from legoai.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
