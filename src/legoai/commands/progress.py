"""Progress of a command, on one line of a terminal."""

from __future__ import annotations

import sys


class ProgressLine:
    """A line on a terminal that the next one replaces; elsewhere nothing."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()
        self.width = 0

    def show(self, line: str) -> None:
        """Show a line instead of the last one."""
        if not self.shown:
            return
        sys.stderr.write(f"\r{line:<{self.width}}")
        sys.stderr.flush()
        self.width = max(self.width, len(line))

    def clear(self) -> None:
        """Take the line away."""
        if self.shown and self.width:
            sys.stderr.write(f"\r{'':<{self.width}}\r")
            sys.stderr.flush()


class Progress(ProgressLine):
    """A progress line with the current step of the work."""

    def __call__(self, what: str) -> None:
        """Show the current step of the work."""
        self.show(f"{what} …")
