"""Ablations of the SimpleFSDP paper (Zhang et al. 2024), as pairs of plans.

With tensor parallelism the compiled runs of the paper, SimpleFSDP's and FSDP2's, had AsyncTP, which is not possible in
regions between collectives. Neither plan of a pair has it, so that the two differ in the backend alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.ablations.claims import Claim, Metric, Pair, Unstated
from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources.simplefsdp import Setting, fsdp2, setting_of, traced

FILE: Final = "seeds/simplefsdp.csv"
_METRICS: Final[dict[str, Metric]] = {"throughput_total": "throughput", "peak_memory": "memory"}
_MODEL: Final = "the traced model has no rotations of complex numbers and no repeated keys and values"
_NO_ASYNC_TP: Final = "AsyncTP, which the compiled runs of the paper have, and neither of these plans"
_LOSS: Final = "the graph holds the parallel loss, whose buffers end with their last reader; SimpleFSDP's is eager"
_VANILLA: Final = "vanilla"


def claims(rows: Sequence[Row]) -> Iterator[Claim | Unstated]:
    """Every ratio of the tables and of the text, in the file's order."""
    by_table: dict[str, list[Row]] = {}
    for row in rows:
        by_table.setdefault(row.text("table"), []).append(row)
    yield from _eager(by_table.get("3", []))
    for row in by_table.get("4", []):
        yield Unstated((row.id,), f"table 4: {row.text('metric')}", "seconds of a compiler on another machine")
    yield from _reorder_and_bucket(by_table.get("5", []))
    yield from _places(by_table.get("6", []))
    for row in by_table.get("text", []):
        yield _of_text(row)


def _eager(rows: Sequence[Row]) -> Iterator[Claim]:
    """Table 3: SimpleFSDP by FSDP2 in eager mode, with one model on both sides."""
    for row in rows:
        if row.text("system") == "FSDP2-eager":
            continue
        other = _like(rows, row, "ac", system="FSDP2-eager")
        setting = setting_of(row)
        yield Claim(
            rows=(row.id, other.id),
            of="SimpleFSDP, table 3",
            what=f"SimpleFSDP by FSDP2, eager, checkpointing {row.text('ac').lower()}",
            metric=_METRICS[row.text("metric")],
            published=(_value(row) / _value(other),),
            pairs=(
                Pair(
                    "8 GPUs, batch 1",
                    traced(setting).text,
                    fsdp2(setting, built_in=True).text,
                ),
            ),
            differs=("both run the built-in model, which has norms in one kernel and no repeated keys and values",),
        )


def _reorder_and_bucket(rows: Sequence[Row]) -> Iterator[Claim]:
    """Table 5: each setting by `vanilla`."""
    for row in rows:
        if row.text("setting") == _VANILLA:
            continue
        other = _like(rows, row, "gpus", setting=_VANILLA)
        yield Claim(
            rows=(row.id, other.id),
            of="SimpleFSDP, table 5",
            what=f"{row.text('setting')} by vanilla on {row.text('gpus')} GPUs",
            metric=_METRICS[row.text("metric")],
            published=(_value(row) / _value(other),),
            pairs=(
                Pair(f"{row.text('gpus')} GPUs, batch 1", traced(setting_of(row)).text, traced(setting_of(other)).text),
            ),
            differs=(_MODEL,),
        )


def _places(rows: Sequence[Row]) -> Iterator[Unstated]:
    """Table 6: one of its positions of gathers is that of `reorder`, which table 5 has too."""
    for row in rows:
        try:
            setting_of(row)
            why = "the base of the table, the same run as the last of table 5"
        except UnstatedError as error:
            why = str(error)
        yield Unstated((row.id,), f"table 6: {row.text('setting')}, {row.text('metric')}", why)


def _of_text(row: Row) -> Claim | Unstated:
    """The claim of a row of sections 5.1 to 5.3, or the reason why there is none."""
    what = " ".join(filter(None, (row.text("model"), row.text("parallelism"), row.text("system"))))
    unstated = _no_claim(row)
    if unstated:
        return Unstated((row.id,), f"text: {what} {row.text('metric')}".replace("  ", " "), unstated)
    size = row.text("model").split()[-1].lower()
    tensor = "TP" in row.text("parallelism")
    gpus = {"8b": (32, 64, 128), "70b": (32, 64, 128), "405b": (128,)}[size] if row.whole("pp", 1) == 1 else (128,)
    base = Setting(
        size=size,
        gpus=8,
        tp=8 if tensor else 1,
        pp=row.whole("pp", 1),
        batch=row.whole("batch_size", 1),
        ac="full" if tensor else "none",
    )
    compiled = row.text("baseline") == "FSDP2-compile"
    metric: Metric = "throughput" if row.text("metric").startswith("throughput") else "memory"
    change = float(row.text("value")) / 100
    return Claim(
        rows=(row.id,),
        of=f"SimpleFSDP, section {5.2 if tensor else 5.1}",
        what=f"{row.text('model')} {row.text('parallelism')}, SimpleFSDP by {row.text('baseline')}",
        metric=metric,
        published=(1 + change if metric == "throughput" else 1 - change,),
        qualifier=row.text("qualifier"),
        pairs=tuple(
            Pair(
                f"{count} GPUs, batch {base.batch}",
                traced(setting := replace(base, gpus=count)).text,
                fsdp2(replace(setting, compiled=compiled)).text,
            )
            for count in gpus
        ),
        differs=(_MODEL, *((_NO_ASYNC_TP, _LOSS) if tensor else ())),
    )


def _no_claim(row: Row) -> str:
    """The reason why a row of the text is no ratio of two plans; empty for a ratio."""
    if row.text("unit") not in ("%", "GiB"):
        return "no ratio"
    if not row.text("model"):
        return "the best of the paper's figures, which are stated by themselves"
    if row.text("system") == "SimpleFSDP-Auto":
        return "what automatic wrapping hides are collectives that AsyncTP leaves, and regions do without AsyncTP"
    if "PP" in row.text("parallelism"):
        ranks = row.whole("tp") * row.whole("pp")
        if ranks == 128:
            return "all 128 GPUs hold one replica, and no rank is left to shard over"
    if row.text("unit") == "GiB":
        return "a difference of less than 1 GiB, and no peak of which it is one"
    return ""


def _like(rows: Sequence[Row], row: Row, *same: str, **other: str) -> Row:
    """The row with the same metric and fields, and other values of some fields."""
    return next(
        item
        for item in rows
        if all(item.text(name) == row.text(name) for name in (*same, "metric"))
        and all(item.text(name) == value for name, value in other.items())
    )


def _value(row: Row) -> float:
    value = row.number("value")
    assert value, row.id
    return value
