"""The record of an optimizer's constants by parameter."""

from __future__ import annotations

from legoai.runtime.training.group_constants import compact, expanded, listed_changes, merged, record_of

NAMES = [f"layers.{layer}.experts.{expert}.w1" for layer in (0, 1, 2, 5) for expert in range(12)]
NAMES += [
    "layers.5.experts.12.w1",
    "layers.07.w",
    "norm.weight",
    "[own].w",
    *(f"layers.{layer}.norm" for layer in (1, 0, 3)),
]


def test_names_are_compact_and_can_be_expanded():
    short = ["layers.07.w", "layers.5.experts.[0-12].w1", "layers.[0-1,3].norm", "layers.[0-2].experts.[0-11].w1"]
    assert compact(NAMES) == ["[own].w", *short, "norm.weight"]
    assert sorted(expanded(compact(NAMES))) == sorted(NAMES)
    assert compact([]) == expanded([]) == []


def test_records_of_ranks_merge_into_one():
    stages = [[([f"layers.{layer}.w"], {"lr": 0.1}), ([f"layers.{layer}.b"], {"lr": 0.2})] for layer in range(3)]
    whole = record_of(group for stage in stages for group in stage)
    assert merged(record_of(stage) for stage in [*stages, *stages]) == whole
    assert [(entry["parameters"], entry["constants"]["lr"]) for entry in whole] == [
        (["layers.[0-2].b"], 0.2),
        (["layers.[0-2].w"], 0.1),
    ]
    assert record_of([([], {"lr": 0.1})]) == []


def test_changes_name_parameters_unless_all_are_concerned():
    before = record_of([(["a", "b.0", "b.1"], {"lr": 0.1, "decay": 0.0})])
    assert listed_changes(before, before) == []
    assert listed_changes(before, record_of([(["a", "b.0", "b.1"], {"lr": 0.2, "decay": 0.0})])) == ["lr 0.1 → 0.2"]
    split = record_of([(["a"], {"lr": 0.1, "decay": 0.0}), (["b.0", "b.1"], {"lr": 0.1})])
    assert listed_changes(before, split) == ["decay 0.0 → none for b.[0-1]"]
    frozen = record_of([(["b.0", "b.1"], {"lr": 0.2, "decay": 0.0})])
    assert listed_changes(before, frozen) == ["trained yes → no for a", "lr 0.1 → 0.2"]
