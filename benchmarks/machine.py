"""Command line of a benchmark, the machine on which it ran, commands that it times, and the file of its rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
TIMEOUT_SECONDS: Final = 3600


def about_machine() -> dict[str, str | float]:
    """Date, processor, versions and the load before a measurement, as printed and written."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average": round(os.getloadavg()[0], 1),
    }


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole whenever it is read."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write results as JSON."""
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def write_rows(path: Path, about: Mapping[str, object], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write measured rows."""
    write_document(path, {**about, "rows": rows})


def write_page(path: Path, document: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write results as JSON, and lines of Markdown beside them."""
    write_document(path, document)
    write_atomically(path.with_suffix(".md"), "\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class Asked:
    """The parsed command line of a benchmark, and the machine."""

    options: argparse.Namespace
    about: Mapping[str, str | float]
    results: Path

    def has(self, name: str) -> bool:
        """Whether a case is to be measured."""
        return not self.options.names or any(part in name for part in self.options.names)

    def save(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows under `--write`."""
        if self.options.write:
            write_rows(self.results, self.about, rows)


def ask(description: str | None, results: Path, **others: tuple[int | bool, str]) -> Asked:
    """Parse the command line, with names of cases and `--write`, and print the machine.

    Args:
        description: the script's docstring.
        results: the file that `--write` writes.
        others: other options, with their defaults and help; one whose default is False takes no number.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only cases whose name contains NAME")
    for name, (default, text) in others.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=int, default=default, metavar="N", help=text)
    parser.add_argument("--write", action="store_true", help=f"write {results.relative_to(ROOT)}")
    options, about = parser.parse_args(), about_machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()), "\n", sep="")
    return Asked(options, about, results)


def legoai(*arguments: str, cache: str | None = None) -> dict[str, Any]:
    """The JSON output of a `legoai` command that runs in a process of its own.

    Args:
        arguments: arguments of `legoai`, without `--json`.
        cache: the cache folder; by default the user's.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if cache is not None:
        environment["XDG_CACHE_HOME"] = cache
    done = subprocess.run(
        [sys.executable, "-m", "legoai", *arguments, "--json"], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"legoai {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
