"""Profiles measured in the first steps of a run: their use in passes, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from legoai.cost.assumptions import of_profile
from legoai.lowering.graph import MeasuredProfile, StepGraph
from legoai.lowering.graph.measurement.profile import digest_of as digest_of_graph
from legoai.lowering.graph.measurement.profile import fitting, hardware_of, ratio_at
from legoai.lowering.graph.passes import schedule_overlap
from legoai.lowering.profile import (
    Profile,
    ProfileKey,
    Times,
    Transfer,
    UnusableProfileError,
    digest_of,
    keep_profile,
    saved_profile,
)
from legoai.specs.cache import with_digest
from support.simulation.simulated import in_a_fork
from support.simulation.step_graphs import after_each_pass
from support.texts.plans import HEAD, lowered, resolved
from support.training.meshed import text_of
from support.training.profiled import train_measured

TWO_LAYERS = HEAD.replace('"tiny"', '"tiny", n_layers = 2')
BODY = """\
mesh (dp_shard = 2)
fsdp on dp_shard (backend = graph) { layers.* = unit }
precision (param = bf16, reduce = fp32)
comm (reorder = true, prefetch = proactive(limit = 1MiB), unshard = selective, profile = measured)
require peak_memory <= 7MiB
"""
PROFILE = Profile(
    hardware="a device",
    graph="a digest",
    operators={"aten.mm": Times(2.0, 1.0)},
    collectives={"all_gather 1": (Transfer(1024, 3.0, 1.0), Transfer(4096, 4.0, 2.0))},
    memory={"mm": -512, "mm_1": 2048},
)


@pytest.mark.slow
def test_passes_are_reapplied_with_measured_times(gloo, tmp_path: Path):
    data, cache = tmp_path / "data.txt", tmp_path / "cache"
    data.write_text("what is measured changes no number; " * 400)

    def run(body: str, steps: int = 5) -> list[dict]:
        return gloo(2)(train_measured, text_of(body, TWO_LAYERS), str(data), str(cache), steps=steps, beyond=2**20)

    [simulated, _], measured = run(BODY.replace(", profile = measured", "")), run(BODY)
    again = run(BODY, steps=1)
    for rank in measured:
        assert rank["loss"] == simulated["loss"]
    assert all(map(torch.equal, measured[0]["parameters"], simulated["parameters"]))
    assert again[0]["loss"] == simulated["loss"][:1]

    [(before, order), (after, new_order)] = measured[0]["graphs"]
    assert order == simulated["graphs"][0][1] and new_order != order
    # The additional memory of the last rank leaves no room for all units to stay, and all ranks take it into account.
    assert before["gathers again"] == 0 < after["gathers again"] <= 4
    assert measured[1]["graphs"] == measured[0]["graphs"]
    first, told = measured[0]["events"]
    assert (first["source"], told["source"]) == ("predicted", "measured")
    assert told["measured"]["peak_bytes"] == told["predicted"]["peak_bytes"] + 2**20
    assert (told["before"], told["after"]) == (before, after) and told["moved"] > 0

    [file] = (cache / "legoai" / "graph_profiles").iterdir()
    assert str(file) == told["path"]
    assert [event["source"] for event in again[0]["events"]] == ["cache"]
    for rank in again:
        assert [found for _, found in rank["graphs"]] == [new_order, new_order]


PLAN = f"{HEAD}batch (global = 4, micro = 2, seq_len = 32)\n{BODY}"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileKey:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ProfileKey.of_plan(resolved(PLAN), device="cpu")


def test_profile_is_cached_under_its_key(key: ProfileKey):
    plan = resolved(PLAN)
    assert saved_profile(key) is None and not digest_of(key)
    assert "traced alike, has measured a profile" in next(of_profile(plan, "cpu"))
    path = keep_profile(key, PROFILE)
    assert path is not None and saved_profile(key) == PROFILE and digest_of(key)
    assert list(path.parent.iterdir()) == [path]
    assert next(of_profile(plan, "cpu")).endswith("what a run measured on a device")
    assert saved_profile(ProfileKey.of(key.traced, ranks=4, device="cpu")) is None


RATE = "optimizer adamw(lr = 1e-3) { norm.weight = group(weight_decay = 0) }\n"
OTHERWISE = (
    f"{PLAN}{RATE}clip (norm = 1.0)\nschedule cosine(warmup = 2, steps = 9, floor = 0.1)\n",
    PLAN.replace("plan tiny", "plan other").replace("7MiB", "8MiB"),
    PLAN.replace("limit = 1MiB", "limit = 2MiB") + "offload (optimizer = bytes(1MiB))\n",
)
"""Plans whose steps are traced alike."""


@pytest.mark.parametrize("other", OTHERWISE)
def test_profile_serves_plans_that_are_traced_alike(other: str, key: ProfileKey):
    keep_profile(key, PROFILE)
    assert resolved(other).digest != resolved(PLAN).digest
    assert next(of_profile(resolved(other), "cpu")).endswith("what a run measured on a device")
    assert f'traced="{key.traced}"' in lowered(other).text


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("micro = 2", "micro = 1"),
        ("param = bf16", "param = fp32"),
        ("require", "checkpoint { layers.* = full }\nrequire"),
        ("require", "optimizer sgd(lr = 1e-3)\nrequire"),
        ("require", "optimizer adamw() { layers.*.attention.wq.weight = muon(lr = 0.02) }\nrequire"),
    ],
)
def test_profile_is_of_what_is_traced_and_of_the_state(part: str, instead: str, key: ProfileKey):
    assert ProfileKey.of_plan(resolved(PLAN.replace(part, instead)), device="cpu") != key


@pytest.mark.slow
def test_plans_with_one_profile_have_one_graph():
    graphs = {in_a_fork(after_each_pass, lowered(text).text, digest_of_graph)["trace"] for text in (PLAN, *OTHERWISE)}
    assert len(graphs) == 1


def sealed(body: object) -> str:
    """Return a file with the digest of this content."""
    return with_digest(json.dumps(body).encode()).decode()


def test_profile_without_a_digest_is_measured_again(key: ProfileKey):
    """Earlier versions wrote none."""
    path = keep_profile(key, PROFILE)
    assert path is not None
    path.write_text(path.read_text().partition("\n")[2])
    assert saved_profile(key) is None and not digest_of(key)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("2.0", "NaN"),
        lambda text: text.replace("2.0", "-2.0"),
        lambda text: text.replace("2048", "true"),
        lambda text: text.replace('"hardware"', '"software"'),
        lambda text: text.replace("2.0", "3.0"),
        lambda text: sealed({**json.loads(text.partition("\n")[2]), "collectives": {"all_gather 1": []}}),
        lambda text: sealed([]),
        lambda text: sealed(json.loads(text.partition("\n")[2].replace('"ranks": 2', '"ranks": 3'))),
        lambda text: text.replace('"ranks": 2', '"ranks": 3'),
        lambda text: text.replace('"torch": "', '"torch": "0'),
    ],
)
def test_damaged_or_stale_profile_is_reported_and_ignored(damage, key: ProfileKey):
    path = keep_profile(key, PROFILE)
    assert path is not None
    path.write_text(damage(path.read_text()))
    with pytest.raises(UnusableProfileError, match=r"is damaged|is stale"):
        saved_profile(key)
    assert not digest_of(key)
    plan = resolved(PLAN)
    assert " [RUN047]: the passes over the graph decide by predicted times" in next(of_profile(plan, "cpu"))


def test_a_profile_of_another_device_or_graph_is_stale(key: ProfileKey):
    graph, value = fx.Graph(), torch.empty(4)
    weight = graph.placeholder("weight")
    weight.meta["val"] = value
    graph.output([weight])
    model = nn.Linear(4, 1, bias=False)
    step = StepGraph(model, fx.GraphModule({}, graph), parameters=("weight",), units=())
    here = replace(PROFILE, hardware=hardware_of(value.device), graph=digest_of_graph(step))
    for profile, problem in (
        (here, ""),
        (replace(here, hardware="another"), "measured on another"),
        (replace(here, graph="another"), "traced graph of the step has changed"),
    ):
        keep_profile(key, profile)
        found, told = fitting(key, step)
        assert (found == profile, problem in told) == (not problem, True)


def test_transfer_ratio_is_interpolated_between_sizes():
    known = PROFILE.collectives["all_gather 1"]
    assert [ratio_at(known, size) for size in (1, 1024, 2048, 4096, 10**9)] == [3.0, 3.0, 2.5, 2.0, 2.0]


def scheduled(text: str, times: float) -> list[str]:
    """The order of a step's nodes where operators take other times than are predicted."""
    measured: list[MeasuredProfile] = []
    made = MeasuredProfile.__init__

    def noted(self: MeasuredProfile, *given, **options) -> None:
        made(self, *given, **options)
        profile = Profile(hardware="", graph="", operators={"": Times(times, 1.0)}, collectives={}, memory={})
        self.set(profile)
        measured.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeasuredProfile, "__init__", noted)
        patch.setattr(schedule_overlap, "_LEAST", 0.5)
        patch.setattr(schedule_overlap, "_MOST", 0.5)
        patch.setattr(MeasuredProfile, "read", lambda *_: "")
        shown = after_each_pass(text, lambda graph: "\n".join(node.name for node in graph.graph.nodes))
    assert measured
    return shown["schedule_overlap"].split("\n")


@pytest.mark.slow
def test_torch_scheduler_uses_measured_times():
    body = "mesh (dp_shard = 2)\nfsdp on dp_shard (backend = graph) { layers.* = unit }\n"
    plan = HEAD + "batch (global = 8, micro = 2, seq_len = 16)\n" + body
    text = lowered(plan + "comm (profile = measured) { layers.* = bucket(compiler) }\n").text
    usual, slow = (in_a_fork(scheduled, text, times) for times in (1.0, 1000.0))
    assert usual != slow
