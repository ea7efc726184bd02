"""Runs the command line as ``python -m legoai``."""

from legoai.cli import entry

if __name__ == "__main__":
    entry()
