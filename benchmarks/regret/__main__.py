"""Regret of the simulator's first choice on measured sweeps: `python -m benchmarks.regret FOLDER`.

FOLDER holds the files of published runs that `benchmarks.validation` reads. Rows are grouped by the values that a
search does not change: the model, the devices and the sequences of a step. In each group the regret is the measured
throughput of the configuration with the shortest predicted step, relative to the best one. The rule of thumb is listed
for comparison. A configuration that is predicted to run out of memory is not ranked.

Each row becomes the plan that `benchmarks.validation` makes of it, and is lowered and fully simulated; long pipelines
are extrapolated linearly from two shorter ones. Predictions are saved in `results/regret_SOURCE.json` with the version
of the code that made them. `--for 10` spends ten minutes on missing predictions and on those whose plan has changed;
`--anew` renews all of them, and `--contenders 0.1` those by older code that are within a tenth of the first of their
group, until the first and its near rivals are all of one version of the code. A group counts when all of its rows were
predicted; rows that cannot be stated, or have no answer within `--seconds`, are in no group, and are counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import about_machine, write_rows
from benchmarks.regret.predictions import Predictor
from benchmarks.regret.ranking import (
    Configuration,
    Summary,
    by_prediction,
    by_rule,
    grouped,
    rank_correlation,
    regret,
)
from benchmarks.validation.__main__ import code_digest
from benchmarks.validation.predict import Prediction, predict
from benchmarks.validation.rows import Row, UnstatedError, read
from benchmarks.validation.score import compare, group_of
from benchmarks.validation.sources import SOURCES

RESULTS = Path(__file__).parents[1] / "results"
GROUPED_BY = {
    "nanotron": ("model", "n_gpus"),  # all steps have 256 sequences
    "vtrain": ("n_layers", "hidden", "n_gpus", "global_batch"),
}
GOOD_TIERS = ("tier A", "tier B")
STALL = 0.2
"""Seconds of a transfer between pipeline ranks beyond which a run of nanotron's sweep is stalled; see `stall`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of published runs")
    parser.add_argument("--source", choices=sorted(GROUPED_BY), action="append", help="only this source")
    parser.add_argument("--anew", action="store_true", help="make all predictions again")
    parser.add_argument(
        "--contenders", type=float, metavar="SHARE", help="renew predictions by older code within SHARE of the first"
    )
    parser.add_argument("--for", dest="minutes", type=float, default=0.0, help="spend this many minutes on predictions")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of a row")
    parser.add_argument("--groups", action="store_true", help="print each group")
    options = parser.parse_args(arguments)
    for source in options.source or sorted(GROUPED_BY):
        try:
            rows = [row for row in read(options.folder / SOURCES[source].file) if row.dropped is None]
        except UnstatedError as error:
            print(f"regret: {error}", file=sys.stderr)
            return 2
        path = RESULTS / f"regret_{source}.json"
        saved = _saved(path) if not options.anew else {}
        if options.minutes:
            _predict(source, rows, saved, path, options)
        print(report(source, rows, saved, every_group=options.groups), "\n")
    return 0


def configuration_of(source: str, row: Row) -> Configuration:
    """A row as a configuration of its group."""
    rate = row.number("tokens_per_s_per_gpu")
    assert rate is not None, row.id
    return Configuration(
        id=row.id,
        group=", ".join(f"{name} {row.text(name)}" for name in GROUPED_BY[source]),
        tier=group_of(row),
        rate=rate,
        model_parallel=row.whole("tp", 1) * row.whole("pp", 1),
        micro_batch=row.whole("micro_batch"),
    )


def stall(row: Row) -> float:
    """Seconds for each transfer between pipeline ranks that a step takes longer than its model's operations would.

    The model's operations are taken at 35% of an H100's peak, with the pipeline's bubble; a rank with two neighbours
    has four transfers for each micro batch, one with one neighbour two. In nanotron's sweep those of pipelines across
    hosts fall into two clusters: 130 runs below 0.2 s, 61 from 0.25 to 0.55 s and one between, whatever their size.
    The README has the likely cause, a version of nanotron that sleeps. No plan determines to which cluster a run
    belongs: runs that differ in ZeRO's stage alone are in both (1368 and 0541, 38.0 and 2.5 s). Where tensor
    parallelism crosses hosts too, its collectives would count, and the result is None.
    """
    pp, seconds = row.whole("pp", 1), row.number("iter_time_s")
    parameters, micro_batches = row.number("n_params_b"), row.number("grad_accum")
    if pp == 1 or row.whole("tp", 1) > 8 or row.whole("n_gpus") <= 8 or not (seconds and parameters and micro_batches):
        return 0.0
    tokens = row.whole("global_batch") * row.whole("seq_len")
    computed = 6 * parameters * 1e9 * tokens / (0.35 * 989e12 * row.whole("n_gpus"))
    return (seconds - computed * (1 + (pp - 1) / micro_batches)) / micro_batches / (2 if pp == 2 else 4)


def _predict(
    source: str, rows: Sequence[Row], saved: dict[str, dict[str, Any]], path: Path, options: argparse.Namespace
) -> None:
    """Predict missing rows until the time is over: groups with the most trusted rows first, then in random order."""
    ends = time.monotonic() + 60.0 * options.minutes
    by_id = {row.id: row for row in rows}
    groups = grouped(configuration_of(source, row) for row in rows)
    lots = {name: hashlib.sha256(name.encode()).hexdigest() for name in groups}
    trust = {name: sum(item.tier in GOOD_TIERS for item in group) / len(group) for name, group in groups.items()}
    order = [groups[name] for name in sorted(groups, key=lambda name: (-trust[name], lots[name]))]
    trusted = [item for group in order for item in group if item.tier in GOOD_TIERS]
    others = [item for group in order for item in group if item.tier not in GOOD_TIERS]
    code, predictor = code_digest(), Predictor(options.seconds)

    def ask(item: Configuration, known: Mapping[str, Mapping[str, Any]]) -> None:
        found = _answer(source, by_id[item.id], known, predictor, code)
        if found is not None:
            saved[item.id] = found
            write_rows(path, about_machine(), list(saved.values()))
            print(item.id, found["seconds"], found["fits"], found["refused"], file=sys.stderr, flush=True)

    try:
        if options.contenders is None:
            for item in [*trusted, *others]:
                if time.monotonic() > ends:
                    break
                ask(item, saved)
        else:
            stalled = _stalled(source, rows)
            for group in [[item for item in group if item.tier in GOOD_TIERS] for group in order] + order:
                for near in (group, [item for item in group if item.id not in stalled]):
                    while time.monotonic() < ends and (old := contender(near, saved, code, options.contenders)):
                        ask(old, {})
    finally:
        predictor.close()


def contender(
    group: Sequence[Configuration], saved: Mapping[str, Mapping[str, Any]], code: str, share: float
) -> Configuration | None:
    """The first row predicted by older code within a share of the least predicted time of its group, if any."""
    seconds = _ranked(saved)
    ranked = sorted((item for item in group if item.id in seconds), key=lambda item: seconds[item.id])
    near = (item for item in ranked if seconds[item.id] <= (1 + share) * seconds[ranked[0].id])
    return next((item for item in near if saved[item.id]["code"] != code), None)


def _ranked(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Predicted seconds of the rows to rank: those that are not predicted to run out of memory."""
    return {
        name: row["seconds"] for name, row in saved.items() if row["seconds"] is not None and row["fits"] is not False
    }


def _stalled(source: str, rows: Sequence[Row]) -> set[str]:
    return {row.id for row in rows if source == "nanotron" and stall(row) > STALL}


def _answer(
    source: str, row: Row, saved: Mapping[str, Mapping[str, Any]], predictor: Predictor, code: str
) -> dict[str, Any] | None:
    """The prediction for a row; None if that of an equal plan is saved."""
    try:
        stated = SOURCES[source].convert(row, None)
    except UnstatedError as error:
        key, predicted, fits = "", Prediction(refused=f"not stated: {error}"), None
    else:
        key = hashlib.sha256(stated.text[stated.text.index("\nmodel ") :].encode()).hexdigest()[:16]
        if row.id in saved and saved[row.id]["key"] == key:
            return None
        predicted = predictor(stated.text)
        fits = compare(row, stated, predicted).fits
        if fits == (True, False) and stated.for_memory:  # the plan for its time holds more than the framework does
            fits = compare(row, stated, predict(stated.for_memory, seconds=300, memory_only=True)).fits
    return {
        "id": row.id,
        "key": key,
        "code": code,
        "seconds": predicted.seconds,
        "fits": None if fits is None else fits[1],
        "refused": predicted.refused,
    }


def _saved(path: Path) -> dict[str, dict[str, Any]]:
    """Predictions of an earlier run by row, without those that exceeded the time limit."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except OSError:
        return {}
    return {row["id"]: row for row in rows if not row["refused"].startswith("no answer")}


def report(
    source: str, rows: Sequence[Row], saved: Mapping[str, Mapping[str, Any]], *, every_group: bool = False
) -> str:
    """The table of a source: regrets of the predicted best and of the rule of thumb, in the same groups."""
    every = [configuration_of(source, row) for row in rows]
    seconds = _ranked(saved)
    answered = {name for name, row in saved.items() if row["seconds"] is not None or row["fits"] is False}
    lines = [
        f"| {source} | groups | ranked by | mean regret | p90 | within 5% | Spearman, mean | median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    published = [regret(group, by_rule(group)[:1]) for group in grouped(every).values()]
    lines.append(_line("all rows", "rule of thumb, as published", published))
    tiers = {item.tier for item in every}
    trusted = [item for item in every if item.tier in GOOD_TIERS]
    stalled = _stalled(source, rows)
    for name, chosen in {
        "tier A and B": trusted,
        "tier A and B, none stalled": [item for item in trusted if item.id not in stalled],
        "all": every,
    }.items():
        whole = [group for group in grouped(chosen).values() if all(item.id in saved for item in group)]
        groups = grouped(item for group in whole for item in group if item.id in answered)
        if not groups or (name != "all" and not tiers & set(GOOD_TIERS)):
            continue
        found = [rank_correlation(group, seconds) for group in groups.values()]
        ours = [regret(group, by_prediction(group, seconds)) for group in groups.values()]
        lines.append(_line(name, "prediction", ours, [value for value in found if value is not None]))
        lines.append(_line(name, "rule of thumb", [regret(group, by_rule(group)[:1]) for group in groups.values()]))
        lines.append(_line(name, "rule, mean of ties", [regret(group, by_rule(group)) for group in groups.values()]))
        if every_group:
            lines += ["", *(_group_line(label, group, seconds) for label, group in groups.items()), ""]
    refused = Counter(row["refused"].split(":")[0] for row in saved.values() if row["refused"])
    missing = sum(item.id not in saved for group in grouped(every).values() for item in group)
    beyond = sum(row["fits"] is False for row in saved.values())
    lines.append("")
    lines.append(
        f"{len(answered)} rows have a prediction, {beyond} of them out of memory; {missing} are missing; "
        f"without a prediction: {dict(refused) or 'none'}."
    )
    return "\n".join(lines)


def _line(rows: str, ranked_by: str, regrets: Sequence[float], correlations: Sequence[float] = ()) -> str:
    found = Summary.of(regrets)
    spearman = (
        f"{statistics.fmean(correlations):.2f} | {statistics.median(correlations):.2f}" if correlations else " | "
    )
    figures = f"{found.mean:.1%} | {found.p90:.1%} | {found.good:.0%}"
    return f"| {rows} | {found.groups} | {ranked_by} | {figures} | {spearman} |"


def _group_line(label: str, group: Sequence[Configuration], seconds: Mapping[str, float]) -> str:
    best = max(group, key=lambda item: item.rate)
    chosen = by_prediction(group, seconds)
    names = ", ".join(item.id.rpartition("-")[2] for item in chosen)
    correlation = rank_correlation(group, seconds)
    return (
        f"- {label}: {len(group)} rows, best {best.id.rpartition('-')[2]}, chosen {names or 'none'} "
        f"(-{regret(group, chosen):.1%}), rule -{regret(group, by_rule(group)[:1]):.1%}, "
        f"Spearman {'' if correlation is None else f'{correlation:.2f}'}"
    )


if __name__ == "__main__":
    sys.exit(main())
