"""Captures and figures of plans whose models are of other authors, kept until their files or code change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legoai import api
from legoai.cost import capture as capturing
from support.simulation.simulated import in_a_fork

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip
PLAN = """\
plan kept
model   MODEL
cluster h100_sxm(devices = 4)
batch   (global = 16, micro = MICRO, seq_len = 64)
mesh    (dp_shard = 4)
fsdp    on dp_shard { BLOCKS.* = unit, root = unit }
"""
PIPELINED = """\
plan kept
model    MODEL
cluster  h100_sxm(devices = 2)
batch    (global = 8, micro = MICRO, seq_len = 64)
mesh     (pp = 2)
pipeline on pp (schedule = 1F1B)
"""
FACTORY = """\
from torch import nn
from widths import WIDTH


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6))
        self.output = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


build = Model
"""


class Model:
    """A model in a folder, and plans of it, each of which is simulated in a process of its own."""

    def __init__(self, folder: Path, kind: str = "huggingface", cache: str = "cache") -> None:
        self.folder, self.cache = folder, str(folder / cache)
        self.names = {"MODEL": 'huggingface("config.json")', "BLOCKS": "model.layers"}
        if kind == "python":
            self.names = {"MODEL": 'python("models:build")', "BLOCKS": "layers"}
            (folder / "models.py").write_text(FACTORY)
        self.widen(64)

    def widen(self, width: int) -> None:
        (self.folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": width}))
        (self.folder / "widths.py").write_text(f"WIDTH = {width}  # features")

    def write(self, text: str, micro: str) -> Path:
        for name, value in {**self.names, "MICRO": micro}.items():
            text = text.replace(name, value)
        plan = self.folder / "kept.plan"
        plan.write_text(text)
        return plan

    def cost(self, text: str, micro: str = "4") -> tuple[float, int, int]:
        """Seconds, bytes, and how often something was captured."""
        found: tuple[float, int, int] = in_a_fork(costed, self.cache, self.write(text, micro))
        return found

    def solve(self, text: str) -> tuple[float, float]:
        found: tuple[float, float] = in_a_fork(solved, self.cache, self.write(text, "auto in [2, 4]"))
        return found


def costed(cache: str, *plans: Path) -> tuple[float, int, int]:
    os.environ["XDG_CACHE_HOME"] = cache
    captured = []
    for name in ("capture_piece", "capture_equal_ranks"):
        setattr(capturing, name, counted(getattr(capturing, name), captured))
    found = [api.estimate(plan) for plan in plans][-1]
    return found.step_time, found.peak_active, len(captured)


def counted(capture: Callable[..., Any], captured: list[None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        captured.append(None)
        return capture(*args, **kwargs)

    return call


def solved(cache: str, plan: Path) -> tuple[float, float]:
    os.environ["XDG_CACHE_HOME"] = cache
    best = api.solve(plan).best
    assert best is not None
    return best.figures.step_time, best.figures.active


@pytest.mark.parametrize("text", [PLAN, pytest.param(PIPELINED, marks=pytest.mark.slow)], ids=["piece", "pipeline"])
@pytest.mark.parametrize("kind", [pytest.param("huggingface", marks=pytest.mark.slow), "python"])
def test_what_is_captured_of_a_model_is_kept_until_that_changes(kind: str, text: str, tmp_path: Path):
    model = Model(tmp_path, kind)
    *first, captured = model.cost(text)
    assert captured > 0
    assert model.cost(text) == (*first, 0)
    model.widen(128)
    *other, captured = model.cost(text)
    assert captured > 0
    assert other != first


@pytest.mark.slow
def test_one_piece_serves_all_numbers_of_micro_batches(tmp_path: Path):
    model, more = Model(tmp_path, "python"), PLAN.replace("global = 16", "global = 32")
    first, *_ = model.cost(PLAN, "1")
    *other, captured = model.cost(more, "1")
    assert captured == 0
    assert other[0] > first
    assert Model(tmp_path, "python", cache="empty").cost(more, "1")[:2] == tuple(other)


def edited_in_one_process(folder: Path) -> None:
    """Python imports a module once, whatever becomes of its file."""
    model = Model(folder, "python")
    before = costed(model.cache, model.write(PLAN, "4"))
    model.widen(128)
    assert costed(model.cache, model.write(PLAN, "4"))[:2] == before[:2]
    solved(model.cache, model.write(PLAN, "auto in [2, 4]"))


@pytest.mark.slow
def test_nothing_is_kept_of_modules_as_they_were(tmp_path: Path):
    in_a_fork(edited_in_one_process, tmp_path)
    model, fresh = (Model(tmp_path, "python", cache) for cache in ("cache", "empty"))
    fresh.widen(128)
    assert model.cost(PLAN) == fresh.cost(PLAN)
    assert model.solve(PLAN) == fresh.solve(PLAN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["huggingface", "python"])
def test_a_search_does_not_read_figures_of_another_state_of_the_model(kind: str, tmp_path: Path):
    model = Model(tmp_path, kind)
    first = model.solve(PLAN)
    assert model.solve(PLAN) == first
    model.widen(128)
    assert model.solve(PLAN) != first


@pytest.mark.slow
def test_without_a_cache_all_is_captured(tmp_path: Path):
    model = Model(tmp_path, "python", cache="file")
    (tmp_path / "file").write_text("")
    found = model.cost(PLAN)
    assert model.cost(PLAN) == found
    assert found[2] > 0
