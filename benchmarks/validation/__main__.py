"""Published training runs against the simulator: `python -m benchmarks.validation FOLDER --source torchtitan`.

FOLDER holds files of published runs, as CSV with the columns that `sources` reads; `--file` reads another file with the
columns of the source. Each row becomes a plan that states what its framework does; the plan is linted, lowered and
simulated, and its step time and memory are compared with the measurements. Nothing is tuned to a row. Rows that cannot
be written as a plan, and plans that cannot be simulated, are counted with the reason; rows that the file itself marks
as suspect or as duplicates are dropped.

`--sample` draws rows by a fixed seed, from each kind of configuration in turn. The result is written
after each row, so that an interrupted run can be resumed by `--resume`; it holds each row's plan, so that its
assumptions can be checked. `--memory` predicts no time, which is several times faster.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.machine import write_document
from benchmarks.validation.predict import Prediction, as_json, predict, with_memory_of
from benchmarks.validation.rows import Row, UnstatedError, read
from benchmarks.validation.sample import drawn
from benchmarks.validation.score import compare
from benchmarks.validation.sources import SOURCES
from benchmarks.validation.statements import Stated
from benchmarks.validation.table import summary, table

import legoai
from legoai.cost.profiles import profile_names


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    source = SOURCES[options.source]
    path = options.file or options.folder / source.file
    try:
        rows = read(path)
    except UnstatedError as error:
        print(f"validation: {error}", file=sys.stderr)
        return 2
    ranks = _of_every_rank(options.folder / source.by_rank) if source.by_rank and options.file is None else []
    good = [row for row in rows if row.dropped is None]
    chosen = drawn([row for row in good if options.only in row.id], options.sample)
    output: Path = options.output or Path(f"{options.source}.json")
    known = _known(output) if options.resume else {}
    code = code_digest()
    _import_once()
    results: list[dict[str, Any]] = []
    for index, row in enumerate(chosen, 1):
        results.append(_of_row(row, ranks, options, known, code))
        _write(output, _document(options, path, rows, results))
        print(f"{index}/{len(chosen)} {row.id} {results[-1]['outcome']}", file=sys.stderr, flush=True)
    print(table(_document(options, path, rows, results)))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of published runs")
    parser.add_argument("--source", required=True, choices=sorted(SOURCES))
    parser.add_argument("--file", type=Path, help="read another file with the source's columns")
    parser.add_argument("--profile", choices=profile_names(), help="profile to use in place of the rows' own devices")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N rows, from each kind of configuration in turn")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose id contains TEXT")
    parser.add_argument("--memory", action="store_true", help="predict memory only")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a row, in seconds (default: 300)")
    parser.add_argument(
        "--resume", choices=("equal", "older"), nargs="?", const="equal",
        help="reuse the output's predictions of equal plans, by equal code (the default) or also by older code",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    return parser.parse_args(arguments)


def _import_once() -> None:
    """Import the modules that every row's process needs, before these are forked."""
    import legoai.api
    import legoai.cost.estimate  # noqa: F401


def _of_every_rank(path: Path) -> list[Row]:
    """Rows of the source's file of every rank's memory; empty where it is missing."""
    try:
        return read(path)
    except UnstatedError as error:
        print(f"validation: {error}", file=sys.stderr)
        return []


def _of_row(
    row: Row, ranks: Sequence[Row], options: argparse.Namespace, known: dict[str, Any], code: str
) -> dict[str, Any]:
    try:
        stated = SOURCES[options.source].convert(row, options.profile)
    except UnstatedError as error:
        return {"id": row.id, "outcome": f"not stated: {error}"}
    ask = functools.partial(_answer, options=options, known=known, code=code)
    if options.memory or stated.untimed:
        predicted, key, made_by = ask(stated.for_memory or stated.text, memory_only=True)
    else:
        predicted, key, made_by = ask(stated.text, memory_only=False)
        if stated.for_memory and not predicted.refused:
            held, *_ = ask(stated.for_memory, memory_only=True)
            predicted = with_memory_of(predicted, held)
    return {
        "id": row.id,
        "key": key,
        "code": made_by,
        "said": as_json(predicted),
        **_compared(row, ranks, stated, predicted),
    }


def _answer(
    text: str, *, memory_only: bool, options: argparse.Namespace, known: dict[str, Any], code: str
) -> tuple[Prediction, str, str]:
    """The prediction of a plan, new or saved, its key, and the version of the code that made it."""
    statements = text[text.index("\nmodel ") :]  # rows that differ in name and source are one plan
    key = hashlib.sha256((statements + "memory" * memory_only).encode()).hexdigest()
    saved, made_by = known.get(key, (None, code))
    if made_by != code and options.resume != "older":
        saved, made_by = None, code
    predicted = Prediction(**saved) if saved else predict(text, seconds=options.seconds, memory_only=memory_only)
    known[key] = as_json(predicted), made_by
    return predicted, key, made_by


def _compared(row: Row, ranks: Sequence[Row], stated: Stated, predicted: Prediction) -> dict[str, Any]:
    found = compare(row, stated, predicted, ranks)
    words = [f"refused: {predicted.refused}"] if predicted.refused else []
    for name, pair, unit in (("step", found.seconds, 1.0), (found.kind, found.memory, 2**30)):
        if pair is not None:
            words.append(f"{name} {pair[1] / unit:.4g} of {pair[0] / unit:.4g} ({pair[1] / pair[0] - 1:+.1%})")
    return {
        **({"untimed": stated.untimed} if stated.untimed else {}),
        "outcome": "; ".join(words) or "nothing to compare with",
        "group": found.group,
        "seconds": found.seconds,
        "memory": found.memory,
        "kind": found.kind,
        "fits": found.fits,
        "peer seconds": found.peer_seconds,
        "peer memory": found.peer_memory,
        "ranks": found.ranks,
        "plan": stated.text,
        **({"plan that is asked for memory": stated.for_memory} if stated.for_memory else {}),
        "beside": {**stated.beside, **stated.beside_reserved},
    }


def _document(options: argparse.Namespace, path: Path, rows: Sequence[Row], results: list[Any]) -> dict[str, Any]:
    return {
        "source": options.source,
        "file": path.name,
        "fitted": SOURCES[options.source].fitted,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": version("torch"), "legoai": legoai.__version__},
        "asked for": "memory" if options.memory else "time and memory",
        "rows": {"in the file": len(rows), "taken": len(results), "sample": options.sample},
        "dropped": dict(Counter(row.dropped for row in rows if row.dropped)),
        "summary": summary(results),
        "results": results,
    }


def _lasts(refused: str) -> bool:
    """Whether a prediction is final: it has figures, or a diagnostic of the linter."""
    return not refused or refused.startswith("lint")


def _known(output: Path) -> dict[str, Any]:
    """Predictions of earlier runs in the output's folder, and the code that made them, by their key."""
    found: dict[str, Any] = {}
    for path in (*sorted(output.parent.glob("*.json")), output):  # the output's own predictions take precedence
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        given = document.get("results", []) if isinstance(document, dict) else []
        found |= {
            item["key"]: (item["said"], item["code"])
            for item in given
            if isinstance(item, dict) and "code" in item and _lasts(item["said"]["refused"])
        }
    return found


def code_digest() -> str:
    """A digest of all code that a prediction depends on, so that predictions of other code are not reused."""
    root = Path(legoai.__file__).parent
    digest = hashlib.sha256()
    for folder in ("specs", "dsl", "lowering", "cost", "runtime"):
        for path in sorted((root / folder).resolve().rglob("*")):
            if path.suffix in (".py", ".toml", ".gz", ".lark"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write the results, in a folder that is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_document(path, document)


if __name__ == "__main__":
    sys.exit(main())
