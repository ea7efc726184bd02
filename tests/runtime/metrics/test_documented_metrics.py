"""Fields of `metrics.jsonl` are those that `docs/run-output.md` defines."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from legoai.cost.report.run import Measured, Predicted, note, note_cluster
from legoai.lowering.graph.measurement import rounds
from legoai.runtime import RunOptions
from legoai.runtime.metrics.log import METRICS
from legoai.runtime.metrics.records import read_records
from legoai.specs.directives.cluster import ClusterUse
from support import ROOT
from support.training import corpus, programs

data, own_cache = corpus.data, corpus.own_cache

PAGE = (ROOT / "docs" / "run-output.md").read_text(encoding="utf-8")
OPTIONAL = {
    "step": {"mfu", "tokens_per_second_per_device"},
    "checkpoint": {"waited"},
    "weights": {"step"},
    "graph_profile": {"problem", "path", "predicted", "measured", "before", "after", "moved"},
}
"""Fields that the page calls left out, or those of one kind alone."""


def documented() -> dict[str, set[str]]:
    """The fields of each event."""
    fields: dict[str, set[str]] = {}
    event = ""
    for row in re.findall(r"^\|(.*)\|$", PAGE.partition("Fields of `predicted`")[0], re.MULTILINE):
        name, *cells = [cell.strip() for cell in row.split("|")]
        if name.startswith("`"):
            event = name.strip("`")
            fields[event] = set()
        elif event:
            fields[event] |= set(re.findall(r"`(\w+)`", cells[0]))
    return fields


def named(part: str) -> list[str]:
    """The fields of a prediction's part."""
    table = PAGE.partition(f"Fields of `{part}`")[2].partition("Fields of")[0]
    return re.findall(r"^\| `(\w+)`", table, re.MULTILINE)


def trained(**options: Any) -> None:
    """A run with some of the options."""
    program = programs.trainer(dtype=torch.float32)
    program.fit(RunOptions(device="cpu", log_every=0, data=str(options.pop("data")), **options))


def test_every_field_is_documented(gloo, data, tmp_path: Path):
    [pool], out = [gloo(1)], tmp_path / "run"
    pool(trained, steps=2, data=data, out=out, save_every=1, evaluate_every=2, evaluate_batches=1, profile_step=1)
    pool(trained, steps=3, data=data, out=out, save_async=True)
    pool(trained, steps=2, data=data, out=out, resume=str(out / "checkpoints" / "step-1"))
    pool(trained, steps=1, data=data, out=tmp_path / "new", load_weights=out)
    plan = Predicted(
        step_time_s=0.2, samples_per_step=32, tokens_per_step=None, unit="samples", devices=4, model_flops=4e14,
        peak_flops_per_s_per_device=1e15, profile="h100_sxm", of_this_machine=True, peak_memory_bytes=None,
    )  # fmt: skip
    note_cluster(out / METRICS, ClusterUse(device="cpu"), tmp_path)
    note(out / METRICS, plan, Measured(steps=3, step_time_s=0.4, peak_memory_bytes=2))
    records = [record for folder in (out, tmp_path / "new") for record in read_records(folder / METRICS)]
    fields = documented()
    for record in records:
        event = record.pop("event")
        optional = OPTIONAL.get(event, set())
        assert fields[event] - optional <= record.keys() <= fields[event], event
    log = (out / METRICS).read_text(encoding="utf-8") + (tmp_path / "new" / METRICS).read_text(encoding="utf-8")
    unseen = {event for event in fields if f'"event": "{event}"' not in log}
    assert unseen == {"stopped", "graph_profile"}


def test_parts_of_a_prediction_are_documented():
    assert named("predicted") == [field.name for field in dataclasses.fields(Predicted)]
    assert named("measured") == [field.name for field in dataclasses.fields(Measured)]
    change = rounds.Change({"nodes": 1}, {"nodes": 1}, 0)
    notice = rounds._notice(rounds.Totals(1.0, 1.0, 1), rounds.Totals(1.0, 1.0, 1), change, None)
    problem = rounds.read_notice("", mock.Mock(profile=None), mock.Mock())
    assert documented()[rounds.EVENT] == {"step", *notice.values, *problem.values}
    for name in rounds.Totals(1.0, 1.0, 1).values():
        assert f"`{name}`" in PAGE
