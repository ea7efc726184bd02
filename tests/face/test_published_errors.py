"""The README's errors on published runs are those of the results, of which none is left out."""

import json
import re

import pytest

from support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def stated(quantity: str) -> list[tuple[str, ...]]:
    """Rows, mean, median and worst error of each table of published runs in the README, in order."""
    _, _, section = README.partition(f"\n**Error of predicted {quantity}")
    table, _, _ = section.partition("\n**")
    return sorted(re.findall(r"\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| \[validation\]", table))


def scored(quantity: str) -> list[tuple[str, ...]]:
    """The same of the results; figures of two kinds of memory are those of all rows."""
    found = []
    for path in sorted(RESULTS.glob("validation_*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        kinds = [one for name, one in document["summary"][quantity].items() if name == "all" or name.startswith("all ")]
        if kinds:
            rows = sum(one["rows"] for one in kinds)
            mean = sum(one["mean"] * one["rows"] for one in kinds) / rows
            median = max(kinds, key=lambda one: one["rows"])["median"]
            worst = max(one["worst"] for one in kinds)
            found.append((str(rows), *(f"{100 * share:.1f}" for share in (mean, median, worst))))
    return sorted(found)


@pytest.mark.parametrize(("title", "quantity"), [("peak memory", "memory"), ("step time", "step time")])
def test_every_source_is_stated_as_it_was_scored(title, quantity):
    assert stated(title) == scored(quantity)
