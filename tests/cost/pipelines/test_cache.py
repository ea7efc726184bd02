"""The cache of simulated pipelines on disk, and its keys."""

from __future__ import annotations

import pickle
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from legoai.api import estimate
from legoai.cost.machine.cluster import machine_of
from legoai.cost.pipelines.cache import cached_or_simulated
from legoai.cost.trace.records import Mark
from legoai.dsl.analysis.analysis import Analysis
from legoai.specs.cache import private_cache, refreshed, with_digest, without_digest
from support.texts.plans import lowered, manifest_of, resolved

TEXT = """\
plan small
model     llama3("tiny", n_layers = 8)
cluster   h100_sxm(devices = 4)
batch     (global = 32, micro = 1, seq_len = 32)
mesh      (pp = 4)
pipeline on pp (schedule = 1F1B)
optimizer adamw(lr = 1e-3)
schedule  cosine(warmup = 10, steps = 100, floor = 0.1)
"""


@pytest.fixture
def simulated(tmp_path, monkeypatch) -> list[str]:
    """Texts of the simulated plans, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return []


def cost(text: str, simulated: list[str], profile: str | None = None) -> Mark:
    """Return the new or cached simulation of a plan."""
    plan = resolved(text)
    machine = machine_of(plan.cluster, plan.mesh.world_size, directory=Path(), override=profile)

    def simulate() -> Mark:
        simulated.append(text)
        return Mark(f"simulation {len(simulated)}")

    return cached_or_simulated(
        lowered(text), Analysis(plan, manifest_of(plan.model.source()), Path()), machine, simulate
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lr = 1e-3", "lr = 3e-4"),
        ("floor = 0.1", "floor = 0.2"),
        ("warmup = 10", "warmup = 20"),
        ("plan small", "# a comment\n\nplan other"),
        ("plan small\n", "plan small\nrequire peak_memory <= 70GiB\n"),
    ],
)
def test_learning_rates_and_names_are_not_in_the_key(old, new, simulated):
    first = cost(TEXT, simulated)
    assert old in TEXT
    assert cost(TEXT.replace(old, new), simulated) == first == Mark("simulation 1")
    assert simulated == [TEXT]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("global = 32", "global = 64"),
        ("micro = 1", "micro = 2"),
        ("n_layers = 8", "n_layers = 12"),
        ("1F1B", "GPipe"),
        ("h100_sxm(devices = 4)", "h200(devices = 4)"),
        ("plan small\n", "plan small\nallocator (expandable_segments = true)\n"),
        ("h100_sxm(devices = 4)", "h100_sxm(hosts = 2, devices = 2, fabric = infiniband_ndr)"),
    ],
)
def test_changed_inputs_are_simulated_again(old, new, simulated):
    cost(TEXT, simulated)
    assert old in TEXT
    assert cost(TEXT.replace(old, new), simulated) == Mark("simulation 2")


def test_changed_profile_is_simulated_again(simulated):
    cost(TEXT, simulated)
    assert cost(TEXT, simulated, "h200") == Mark("simulation 2")


def test_damaged_file_is_ignored_and_rewritten(simulated):
    cost(TEXT, simulated)
    folder = private_cache("pipelines")
    assert folder is not None
    [file] = folder.iterdir()
    whole = file.read_bytes()
    for held in (b"", whole[:-1], whole[:-1] + b"?", without_digest(whole)):
        file.write_bytes(held)
        count = len(simulated)
        assert cost(TEXT, simulated) == cost(TEXT, simulated) == Mark(f"simulation {count + 1}")


def test_cached_pipeline_is_simulated_again_in_a_refresh(simulated):
    cost(TEXT, simulated)
    with refreshed():
        assert cost(TEXT, simulated) == cost(TEXT, simulated) == Mark("simulation 2")
    assert cost(TEXT, simulated) == Mark("simulation 2")


class Writes:
    """Pickled as a call of a function that writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return Path.write_text, (self.path, "written")


def test_foreign_pickle_is_not_executed(simulated, tmp_path):
    cost(TEXT, simulated)
    folder = private_cache("pipelines")
    assert folder is not None
    [file] = folder.iterdir()
    packed = zlib.compress(pickle.dumps(Writes(tmp_path / "foreign")))
    file.write_bytes(with_digest(packed))
    assert cost(TEXT, simulated) == cost(TEXT, simulated) == Mark("simulation 2")
    assert not (tmp_path / "foreign").exists()


def test_file_that_cannot_be_unpickled_here_is_ignored_and_rewritten(simulated, monkeypatch):
    cost(TEXT, simulated)
    folder = private_cache("pipelines")
    assert folder is not None
    [file] = folder.iterdir()
    packed = zlib.compress(pickle.dumps(np.zeros(1), protocol=pickle.HIGHEST_PROTOCOL))
    file.write_bytes(with_digest(packed))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numpy._core.numeric", None)  # as in a numpy that names its modules otherwise
        assert cost(TEXT, simulated) == Mark("simulation 2")
    assert cost(TEXT, simulated) == Mark("simulation 2")


def test_cached_pipeline_equals_the_simulated_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = tmp_path / "small.plan"
    plan.write_text(TEXT)
    first, again = estimate(plan), estimate(plan)
    assert len(list((tmp_path / "legoai" / "pipelines").iterdir())) == 1
    assert first.step_time == again.step_time
    assert [rank.memory for rank in first.ranks] == [rank.memory for rank in again.ranks]
    assert [rank.actions for rank in first.ranks] == [rank.actions for rank in again.ranks]
