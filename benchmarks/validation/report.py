"""Page of several results: `python -m benchmarks.validation.report RESULTS.json… > validation.md`.

The page also lists errors of other tools on the same data, run unmodified or as stated by their authors, and
explanations of large errors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.validation.explained import EXPLAINED, PEERS
from benchmarks.validation.score import Comparison, out_of_memory
from benchmarks.validation.table import table

_MISS = 0.1

INTRODUCTION = """Each row of a published table became a plan that states what its framework does; the plan was linted,
lowered and simulated (`benchmarks/validation/README.md` describes how). Errors are |predicted - measured| / measured.

**Rows used in a fit: none.** The device profiles rest on measurements of single kernels and collectives (each profile
names them), and on datasheets. No time and no memory of any training run below was used, so that the figures with and
without fitted rows are the same."""


def page(documents: Sequence[Mapping[str, Any]]) -> str:
    """The whole page: an overview, and the table of each source with its file, date and versions."""
    parts = ["# Published runs against the simulator", INTRODUCTION, _overview(documents), *_what_fits(documents)]
    for document in documents:
        name, versions, rows = document["source"], document["versions"], document["rows"]
        whole = rows["taken"] + sum(document["dropped"].values()) == rows["in the file"]
        sample = "" if whole else ", a seeded sample" if rows.get("sample") else "; the others exceeded the time limit"
        asked = ", memory only" if document.get("asked for") == "memory" else ""
        made = (
            f"{document['file']}: {rows['taken']} rows of {rows['in the file']}{sample}{asked}, {document['date']}, on "
            f"{document['machine']}, torch {versions['torch']}, Python {versions['python']}."
        )
        states = len({item["code"] for item in document["results"] if "code" in item})
        if states > 1:
            made += (
                f" Predictions are by {states} versions of the code, the last of that day; each row names its version."
            )
        fitted = f"Fitted to it: {document['fitted']}." if document["fitted"] else ""
        about = [made, fitted, PEERS.get(name, "")]
        parts += [f"## {_title(document)}", " ".join(line for line in about if line), table(document)]
        misses = list(_misses(document))
        if misses:
            parts += [f"Beyond {_MISS:.0%}: " + "; ".join(misses) + "."]
        if name in EXPLAINED:
            parts += ["\n".join(f"- {line}" for line in EXPLAINED[name])]
    return "\n\n".join(parts) + "\n"


def _title(document: Mapping[str, Any]) -> str:
    return document["source"] + (", memory" if document.get("asked for") == "memory" else "")


def _overview(documents: Sequence[Mapping[str, Any]]) -> str:
    """One line for each source."""
    lines = [
        "| source | memory: rows | mean | worst | step time: rows | mean | median | worst | the source's estimator |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for document in documents:
        summary = document["summary"]
        memory = [known for name, known in summary["memory"].items() if name.startswith("all ")]
        count = sum(known["rows"] for known in memory)
        mean = sum(known["mean"] * known["rows"] for known in memory) / count if count else None
        worst = max((known["worst"] for known in memory), default=None)
        times = summary["step time"].get("all")
        own = [
            f"{what} {known['mean']:.1%}"
            for what in ("step time", "memory")
            for known in summary.get(f"its own estimator, {what}", {}).values()
        ]
        cells = [
            _title(document), str(count or ""), _share(mean), _share(worst), str(times["rows"]) if times else "",
            *(_share(times[name] if times else None) for name in ("mean", "median", "worst")), ", ".join(own),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _what_fits(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The out-of-memory classifier on nanotron's sweep: rows that ran, and rows that failed."""
    sweep = {
        item["id"]: item
        for document in documents
        if document["source"] in ("nanotron", "nanotron_failed")
        for item in document["results"]
        if item.get("fits")
    }
    ran = [item for item in sweep.values() if item["fits"][0]]
    failed = [item for item in sweep.values() if not item["fits"][0]]
    if not ran or not failed:
        return
    counts = out_of_memory(Comparison(id=name, group="", fits=tuple(item["fits"])) for name, item in sweep.items())
    away = [item for item in failed if item["fits"][1] and not _near(item)]
    could = len(failed) - len(away)
    caught = counts["failed and said not to fit"]
    yield "## Out of memory"
    caught_share = caught / could if could else None
    fitting = _share(counts["rows that ran and were said to fit"])
    yield (
        f"nanotron's sweep on H100s of 80 GB, {len(ran)} rows that ran and {len(failed)} that failed, of 408 and 394 "
        f"in the files. Of the rows predicted to run out of memory {_share(counts['precision'])} failed (precision). "
        f"Of the rows that failed {_share(counts['recall'])} are predicted to run out of memory (recall, a lower "
        f"bound: causes are not published). Of the rows that ran {fitting} are predicted to fit. {len(away)} of the "
        f"failed rows are predicted to need less than {_NEAR:.0%} of the device: if those failed for other reasons, "
        f"recall is {_share(caught_share)}."
    )


_NEAR = 0.75
"""Share of the device's memory below which a failed row probably failed for another reason."""


def _near(item: Mapping[str, Any]) -> bool:
    predicted = item["said"]
    if predicted["refused"] or not predicted["capacity"]:
        return True
    beside = sum(item["beside"].values())
    return max(predicted["reserved"]) + predicted["outside"] + beside >= _NEAR * predicted["capacity"]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _misses(document: Mapping[str, Any]) -> Iterator[str]:
    for item in document["results"]:
        for name, field in (("step", "seconds"), ("memory", "memory")):
            if item.get(field) and abs(error := item[field][1] / item[field][0] - 1) > _MISS:
                yield f"{item['id'].rpartition('-')[2]} {name} {error:+.0%}"


def main(paths: Sequence[str]) -> int:
    """Print the page for the results in ``paths``."""
    try:
        documents = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(page(documents), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
