"""Command line of a benchmark, the machine on which it ran, and the file that its rows are written to."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def about_machine() -> dict[str, str | float]:
    """Date, processor, versions and the load before a measurement, in words that are printed and written."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average": round(os.getloadavg()[0], 1),
    }


def write_rows(path: Path, about: Mapping[str, object], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what was measured, as a whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a benchmark was asked for on the command line, and the machine."""

    options: argparse.Namespace
    about: Mapping[str, str | float]

    def has(self, name: str) -> bool:
        """Whether a case is to be measured."""
        return not self.options.names or any(part in name for part in self.options.names)


def ask(description: str | None, results: Path, **numbers: tuple[int, str]) -> Asked:
    """Read the command line, names of cases and `--write`, and print what the machine is.

    Args:
        description: the script's docstring.
        results: the file that `--write` writes.
        numbers: other options, with their defaults and help.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only cases whose name has this in it")
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--write", action="store_true", help=f"write {results.relative_to(Path(__file__).parents[1])}")
    options, about = parser.parse_args(), about_machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()), "\n", sep="")
    return Asked(options, about)
