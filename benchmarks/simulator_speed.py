"""Wall-clock time and memory of `legoai cost` in a cold process.

The time is that of a whole process, from its start to its exit: the interpreter, the imports, lint, lowering, capture,
timeline, memory and the summary. Compiled Python files and the parser tables are kept between processes; captured
programs are cached only in repeated cases. A first process, which may write these files, is excluded.

The figure is the best processor time of several processes, user and system, because it hardly depends on other load of
the machine; the simulator waits for nothing and uses one core, so on an idle machine the elapsed time is the same. The
elapsed time is printed too; it is the limited time of a pipeline, whose ranks are simulated by a process for each core.
The memory is the largest resident set of the process and of those that it starts.

    python benchmarks/simulator_speed.py [--runs N] [--write] [NAME ...]
"""

from __future__ import annotations

import operator
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import ask

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "simulator_speed.json"
LIMIT_BYTES = 4 * 2**30
TIMEOUT_SECONDS = 1200

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Environment with compiled files, even where the caller disables them: without, a process takes longer."""


@dataclass(frozen=True, slots=True)
class Case:
    """A command, its limit in seconds, or None, and whether the limit is on elapsed time.

    With ``again`` it is repeated, and reuses the cached captures of the first run.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float | None = None
    elapsed: bool = False
    again: bool = False


PAGE = str(Path(tempfile.gettempdir()) / "legoai_simulator_speed.html")

CASES = (
    Case("one process that imports the simulator", ("-c", "import legoai.cost.capture")),
    Case("tiny, 4 ranks", ("-m", "legoai", "cost", "plans/tiny.plan")),
    Case("Llama 3 8B, 8 ranks", ("-m", "legoai", "cost", "plans/llama3_8b_8.plan")),
    Case("Llama 3 8B, 8 ranks, again", ("-m", "legoai", "cost", "plans/llama3_8b_8.plan"), again=True),
    Case("Llama 3 8B, 128 ranks", ("-m", "legoai", "cost", "plans/llama3_8b_128.plan")),
    Case("Mixtral 8x7B, 64 ranks", ("-m", "legoai", "cost", "plans/mixtral_8x7b_64.plan")),
    Case("Llama 3 70B, 128 ranks", ("-m", "legoai", "cost", "plans/llama3_70b_256.plan", "--set", "hosts=16"), 5.0),
    Case("Llama 3 70B, 16384 ranks", ("-m", "legoai", "cost", "plans/llama3_70b_256.plan", "--set", "hosts=2048"), 5.0),
    Case("Llama 3.1 405B, 512 ranks", ("-m", "legoai", "cost", "plans/llama3_405b_512.plan"), 10.0, elapsed=True),
    Case(
        "Llama 3.1 405B, 512 ranks, with --html",
        ("-m", "legoai", "cost", "plans/llama3_405b_512.plan", "--html", PAGE),
    ),
    Case("GPT-3 175B, 384 ranks", ("-m", "legoai", "cost", "plans/gpt3_175b_384.plan"), elapsed=True),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Measurement of one process: processor time and elapsed time in seconds, and peak resident set in bytes."""

    busy: float
    elapsed: float
    resident: int


def measure(case: Case, cache: Path) -> Figure:
    """Run one process and wait for it.

    Args:
        case: the command.
        cache: the cache folder.
    """
    arguments = case.arguments
    if not case.again:
        for kept in ("pieces", "pipelines"):
            shutil.rmtree(cache / "legoai" / kept, ignore_errors=True)
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT | {"XDG_CACHE_HOME": str(cache)}, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
        elapsed = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(
                f"{' '.join(arguments)} ended with {process.returncode}:\n{output.read().decode()[-2000:]}"
            )
    return Figure(used.ru_utime + used.ru_stime, elapsed, used.ru_maxrss * 1024)


def main() -> int:
    """Measure and print; the exit status is 0 where the limits are met."""
    with tempfile.TemporaryDirectory() as cache:
        return _measured(Path(cache))


def _measured(cache: Path) -> int:
    asked = ask(__doc__, RESULTS, runs=(3, "processes of each case; the best counts"))
    rows, kept = [], True
    for case in CASES:
        if not asked.has(case.name):
            continue
        measure(case, cache)
        counts = operator.attrgetter("elapsed" if case.elapsed else "busy")
        best = min((measure(case, cache) for _ in range(asked.options.runs)), key=counts)
        within = best.resident <= LIMIT_BYTES and (case.limit is None or counts(best) <= case.limit)
        kept = kept and within
        limit = "" if case.limit is None else f"  (limit {case.limit:.0f} s{'' if within else ', MISSED'})"
        print(
            f"{case.name:<40} {best.busy:6.2f} s busy, {best.elapsed:7.2f} s elapsed, "
            f"{best.resident / 2**20:6.0f} MiB{limit}",
            flush=True,
        )
        rows.append({"case": case.name, "limit": case.limit, **asdict(best)})
    asked.save(rows)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
