"""Every option of TorchTitan changes the plan, or is listed with the reason."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.importing import translation
from legoai.dsl.importing.keys import KEYS, RENAMED, Key
from legoai.dsl.importing.translation import Imported
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.texts.importing import import_config

CONTEXTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicated": {"parallelism.data_parallel_replicate_degree": 8, "parallelism.data_parallel_shard_degree": 1},
    "hybrid": {"parallelism.data_parallel_replicate_degree": 2},
    "tensor parallel": {"parallelism.tensor_parallel_degree": 2},
    "tensor parallel, compiled": {
        "parallelism.tensor_parallel_degree": 2, "compile.enable": True, "activation_checkpoint.mode": "none",
    },
    "pipeline": {"parallelism.pipeline_parallel_degree": 2, "model.flavor": "8B"},
    "pipeline of a few stages": {
        "parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "parallelism.tensor_parallel_degree": 2, "model.flavor": "8B",
    },
    "context parallel": {"parallelism.context_parallel_degree": 2},
    "float8": {"model.converters": ["float8"], "compile.enable": True, "activation_checkpoint.mode": "full"},
    "mxfp8": {"model.converters": ["mx"], "activation_checkpoint.mode": "full"},
    "budget": {"activation_checkpoint.mode": "memory_budget", "compile.enable": True},
    "of published weights": {"checkpoint.enable": True, "checkpoint.initial_load_in_hf": True},
    "saved and validated": {"checkpoint.enable": True, "validation.enable": True, "validation.steps": 10},
    "decay at the end": {"lr_scheduler.decay_ratio": 0.2},
    "experts": {"model.name": "deepseek_v3", "parallelism.expert_parallel_degree": 2},
    "of 2024": {"training.warmup_steps": 100},
}  # fmt: skip
"""Configurations in which options have an effect; each lints and lowers, except for the reported losses."""

VALUES: dict[str, list[Any]] = {
    "activation_checkpoint.selective_ac_option": ["op", "3"],
    "compile.backend": ["aot_eager", "cudagraphs"],
    "compile.components": [["model"], ["loss"], []],
    "lr_scheduler.total_steps": [5000],
    "model.converters": [["float8"], ["mx"], ["other"]],
    "model.flavor": ["70B", "2B"],
    "model.name": ["llama4"],
    "parallelism.module_fqns_per_model_part": [
        [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]],
        [["tok_embeddings", *(f"layers.{number}" for number in range(32))], ["norm", "output"]],
    ],
    "parallelism.pipeline_parallel_schedule": ["GPipe", "interleaved1f1b", "other"],
    "parallelism.pipeline_parallel_layers_per_stage": [17, 5],
    "parallelism.pipeline_parallel_split_points": [["layers.4"], ["4 to 8"]],
    "quantize.linear.float8.filter_fqns": [["attention.wq"], ["layers.0."], ["auto_filter_small_kn"], ["output"]],
    "quantize.linear.mx.filter_fqns": [["feed_forward"], []],
    "training.global_batch_size": [128, 12],
}
"""Values of options that are not drawn from the type alone."""


@pytest.fixture(scope="module", autouse=True)
def _equal_plans_are_laid_out_once() -> Iterator[None]:
    """Most options have no effect in most contexts, and formatting takes nearly all of an import's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation, "format_text", functools.cache(format_text))
        yield


def written(options: dict[str, Any]) -> str:
    """A config's text."""
    lines = []
    for name, value in options.items():
        section, _, last = name.rpartition(".")
        shown = str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')
        lines += [f"[{section}]", f'{last} = "{value}"' if isinstance(value, str) else f"{last} = {shown}"]
    merged: dict[str, list[str]] = {}
    for header, entry in zip(lines[::2], lines[1::2], strict=True):
        merged.setdefault(header, []).append(entry)
    return "\n".join(line for header, entries in merged.items() for line in (header, *entries)) + "\n"


def imported(options: dict[str, Any]) -> Imported:
    return import_config(written(options), "some.toml", plan="some", cluster="h100_sxm", devices=8)


@functools.cache
def base_of(context: str) -> str | None:
    """The plan of a context."""
    return imported(CONTEXTS[context]).text


def values(name: str, key: Key) -> list[Any]:
    """Values other than the default."""
    if name in VALUES:
        return VALUES[name]
    if key.choices:
        return [choice for choice in key.choices if choice != key.default]
    if key.type == "boolean":
        return [not key.default]
    if key.type == "number":
        return [0.25]
    return {"integer": [2, 4], "text": ["other"], "texts": [["other"]], "lists of texts": [[["other"]]]}[key.type]


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_import_as_plans_that_lower(context: str):
    found = imported(CONTEXTS[context])
    assert found.text is not None, found.diagnostics
    assert not found.diagnostics
    linted = lint(found.text, "some.plan", directory=Path())
    if context != "mxfp8":  # which needs another device
        assert [item.message for item in linted.diagnostics if item.severity == "error"] == []
        assert lower(linted.analysis).text


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KEYS)
def test_an_option_changes_the_plan_or_is_listed(name: str, everywhere: bool):
    """Every value in every context; in every run of the tests, in the contexts up to the first with an effect."""
    changed: set[str] = set()
    for context, options in CONTEXTS.items():
        if changed and not everywhere:
            break
        base = base_of(context)
        for value in values(name, KEYS[name]):
            if name in options:
                continue
            found = imported({**options, name: value})
            listed = next((item for item in found.unused if item.name == name), None)
            if found.text is None:
                assert any(item.severity == "error" for item in found.diagnostics)
            elif found.text == base:
                assert listed is not None, (context, value)
                assert listed.why
            if found.text != base or (listed is not None and listed.changes):
                changed.add(context)
    if not KEYS[name].beside:
        assert changed or any(name in options for options in CONTEXTS.values()), "no context shows what it does"


MARKS = ("experimental.context_parallel_degree", "training.tensor_parallel_degree")
"""Options that only the format before March 2025 has."""


@pytest.mark.parametrize("old", RENAMED)
def test_older_option_name_is_read_as_the_current_one(old: str):
    name = RENAMED[old]
    value = values(name, KEYS[name])[0]
    mark = next(item for item in MARKS if RENAMED[item] != name)
    one, other = (imported({written_name: value, mark: 1}) for written_name in (old, name))
    assert one.text == other.text
    assert one.version == other.version
    assert {item.name for item in one.unused} - {old} == {item.name for item in other.unused} - {name}


def test_every_option_of_the_published_configs_is_translated_or_listed():
    for path in (Path(__file__).parent / "configs").glob("*.toml"):
        text = path.read_text()
        names = {f"{section}.{name}" for section, table in tomllib.loads(text).items() for name in table}
        found = import_config(text, path.name, plan="some", cluster="h100_sxm", devices=8)
        assert not [item for item in found.diagnostics if item.code == "LP022"]
        listed = {item.name for item in found.unused}
        assert {name for name in listed if name.count(".") == 1} <= names


@st.composite
def drawn_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Some options with values of their types, more of parallelism than of others."""
    often = [name for name in KEYS if name.startswith(("parallelism.", "training.", "activation_checkpoint."))]
    names = draw(st.lists(st.sampled_from([*KEYS, *often, *often]), max_size=10, unique=True))
    drawn = {name: draw(st.sampled_from(values(name, KEYS[name]))) for name in names}
    return {**drawn, "model.name": "llama3", "model.flavor": draw(st.sampled_from(["8B", "debugmodel"]))}


@given(drawn_configs(), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40)
def test_any_config_becomes_a_plan_or_an_error(config: dict[str, Any], devices: int):
    cluster = f"h100_sxm(devices = {devices})"
    found = import_config(written(config), "some.toml", plan="some", cluster=cluster, devices=devices)
    if found.text is None:
        assert any(item.severity == "error" for item in found.diagnostics)
        return
    assert format_text(found.text, "some.plan").text == found.text
    linted = lint(found.text, "some.plan", directory=Path())
    assert not any(item.code.startswith(("LP1", "LP2")) for item in linted.diagnostics), "unreadable"
    if not linted.has_errors:
        assert lower(linted.analysis).text
