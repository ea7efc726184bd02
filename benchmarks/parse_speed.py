"""Lines of plans that are parsed, formatted and linted per second.

The time is that of a warm process on the worked plans of `plans/`, one after another, after all imports and one round.
The figure is the best of ten rounds, since other load only makes a round longer. The parser's cache of recent texts is
cleared before each round. Formatting includes the check that the result resolves to the same plan.
Linting includes every check; manifests are computed again each time. Plans whose model would have to be inspected in
another process are left out of linting.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.lint import lint
from legoai.specs.directives.model import FOREIGN

LIMIT_LINES_PER_SECOND = 10_000
ROUNDS = 10
PLANS = sorted((Path(__file__).parents[1] / "plans").glob("*.plan"))


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    work()
    times = []
    for _ in range(ROUNDS):
        parse.cache_clear()
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def is_built_in(text: str, path: Path) -> bool:
    """Whether linting the plan starts no process."""
    plan = lint(text, path.name, directory=path.parent).plan
    assert plan is not None
    return plan.model.family not in FOREIGN


def main() -> int:
    """Measure and print; the exit status is 0 where the limit is met."""
    texts = {path: path.read_text(encoding="utf-8") for path in PLANS}
    built_in = {path: text for path, text in texts.items() if is_built_in(text, path)}
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end=""
    )
    print(f"Python {platform.python_version()}, lark {version('lark')}, legoai {version('legoai')}\n")

    def lines(of: dict[Path, str]) -> int:
        return sum(text.count("\n") for text in of.values())

    parsing = lines(texts) / best(lambda: [parse(text, path.name) for path, text in texts.items()])
    formatting = lines(texts) / best(lambda: [format_text(text, path.name) for path, text in texts.items()])
    linting = best(lambda: [lint(text, path.name, directory=path.parent) for path, text in built_in.items()])
    print(f"parsed     {parsing:9,.0f} lines per second")
    print(f"formatted  {formatting:9,.0f} lines per second, with proof")
    print(
        f"linted     {lines(built_in) / linting:9,.0f} lines per second, {linting / len(built_in) * 1e3:.0f} ms a plan"
    )
    kept = parsing >= LIMIT_LINES_PER_SECOND
    print(f"\nparsing is {'within' if kept else 'BEYOND'} the limit of {LIMIT_LINES_PER_SECOND:,} lines per second")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
