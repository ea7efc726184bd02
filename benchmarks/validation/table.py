"""Summary table of many results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from benchmarks.validation.score import Comparison, errors, out_of_memory

_NAMES: Final = {
    "its own estimator, step time": "the source's own estimator, step time",
    "its own estimator, memory": "the source's own estimator, memory",
    "failed and said not to fit": "failed, predicted to run out of memory",
    "failed and said to fit": "failed, predicted to fit",
    "ran and said not to fit": "ran, predicted to run out of memory",
    "ran and said to fit": "ran, predicted to fit",
    "rows that ran and were said to fit": "of the rows that ran, predicted to fit",
}
"""Names in the table of fields of the summary, where they differ."""


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of time and memory by group and over all, refusals by reason, and the out-of-memory classifier."""
    compared = [item for item in results if "said" in item]
    groups = sorted({str(item["group"]) for item in compared})
    found: dict[str, Any] = {"step time": {}, "memory": {}}
    for name, field in (("step time", "seconds"), ("memory", "memory")):
        for group in ["all", *(groups if len(groups) > 1 else [])]:
            for kind in ("active", "reserved") if name == "memory" else ("",):
                pairs = [
                    (item["id"], tuple(item[field]))
                    for item in compared
                    if item[field] and group in ("all", item["group"]) and kind in ("", item["kind"])
                ]
                known = errors(pairs)
                if known is not None:
                    found[name][f"{group or 'other'} {kind}".strip()] = asdict(known)
    for name, field in (("its own estimator, step time", "peer seconds"), ("its own estimator, memory", "peer memory")):
        known = errors([(item["id"], tuple(item[field])) for item in compared if item.get(field)])
        if known is not None:
            found[name] = {"the same rows": asdict(known)}
    for kind, place in (("active", 1), ("reserved", 2)):
        known = errors(
            [
                (f"{item['id']} rank {rank[0]}", tuple(rank[place]))
                for item in compared
                for rank in item.get("ranks", ())
            ]
        )
        if known is not None:
            found["memory"][f"every rank {kind}"] = asdict(known)
    found["compared in memory alone"] = dict(Counter(item["untimed"] for item in compared if "untimed" in item))
    found["refused"] = dict(
        Counter(item["outcome"] for item in results if item["outcome"].startswith(("not stated", "refused")))
    )
    found["warned"] = dict(Counter(code for item in compared for code in item["said"]["diagnostics"]))
    if any(item["fits"] for item in compared):
        found["out of memory"] = out_of_memory(
            Comparison(id=item["id"], group="", fits=tuple(item["fits"])) for item in compared if item["fits"]
        )
    return found


def table(document: Mapping[str, Any]) -> str:
    """The summary as a table in Markdown."""
    lines = [
        f"| {document['source']} | rows | mean | median | worst | bias |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("step time", "memory", "its own estimator, step time", "its own estimator, memory"):
        for group, known in document["summary"].get(name, {}).items():
            title = f"{_NAMES.get(name, name)}, {group}"
            lines.append(
                f"| {title} | {known['rows']} | {known['mean']:.1%} | {known['median']:.1%} | "
                f"{known['worst']:.1%} ({known['worst_id']}) | {known['bias']:+.1%} |"
            )
    for name, value in document["summary"].get("out of memory", {}).items():
        if value is None or value == 0:
            continue
        lines.append(f"| {_NAMES.get(name, name)} | {value if isinstance(value, int) else f'{value:.1%}'} | | | | |")
    for reason, count in document["summary"].get("compared in memory alone", {}).items():
        lines.append(f"| compared in memory alone: {reason} | {count} | | | | |")
    for reason, count in document["summary"]["refused"].items():
        lines.append(f"| {reason} | {count} | | | | |")
    return "\n".join(lines)
