"""Parts of a pattern that match nothing are reported, with a suggestion."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.diagnostics.diagnostic import Diagnostic, apply_fixes
from legoai.dsl.lint import lint
from support.texts.rule_plans import BASE

HEAD = BASE.lstrip() + "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.* = unit }\n"


def found(text: str) -> list[Diagnostic]:
    return [item for item in lint(HEAD + text, "t.plan", directory=Path()).diagnostics if item.code == "LP210"]


def underlined(text: str) -> list[str]:
    whole = HEAD + text
    return [whole[item.label.span.start : item.label.span.end] for item in found(text)]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("layers.*.{attention, mlp}", "mlp"),
        ("layers.*.{mlp,attention}", "mlp"),
        ("layers.*.{ attention ,  ffn }", "ffn"),
        ("{layers, blocks}.0", "blocks"),
        ("layers.{0..40}", "0..40"),
        ("layers.{1..4}.attention", "1..4"),
        ("layers.{0, 9}", "9"),
        ("layers.*.attention.{wq, wk, wz}", "wz"),
        ("layers.{0..1}.{attention, mlp}", "mlp"),
        ("**.{w1, w9}", "w9"),
        ("layers.*.{attention, bad}_norm", "bad"),
    ],
)
def test_unmatched_pattern_part_is_underlined(path: str, part: str):
    assert underlined(f"checkpoint {{ {path} = full }}\n") == [part]


@pytest.mark.parametrize(
    "path",
    [
        "layers.*.{attention, feed_forward}",
        "layers.{0..3}",
        "layers.{2..3}.attention",
        "layers.*.{attention, ffn}_norm",
        "{layers, norm}.**",
        "layers.*.{attention, attention_norm}",
        "layers.*.feed_forward.{w, w1}*",
        "layers.{0..3}.{attention, feed_forward}",
    ],
)
def test_fully_matched_pattern_is_clean(path: str):
    assert underlined(f"checkpoint {{ {path} = none }}\n") == (["norm"] if path == "{layers, norm}.**" else [])


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("layers.0-3", "layers.{0..3}"),
        ("layers.{0..40}", "layers.{0..3}"),
        ("layers.{3..40}", "layers.{3}"),
        ("layers.-1", "layers.3"),
        ("layers.40", "layers.3"),
        ("layers.*.{attenton, feed_forward}", "layers.*.{attention, feed_forward}"),
    ],
)
def test_fix_corrects_the_path(path: str, right: str):
    text = f"checkpoint {{ {path} = full }}\n"
    [item] = found(text)
    assert item.fix is not None
    assert apply_fixes(HEAD + text, [item.fix]) == HEAD + text.replace(path, right)


@pytest.mark.parametrize(
    "path", ["layers.0..3", "layers.{0-3}", "layers.{0:3}", "layers.{0, ..., 3}", "layers.{0...3}"]
)
def test_range_syntax_of_other_tools_suggests_ours(path: str):
    [item] = lint(HEAD + f"checkpoint {{ {path} = full }}\n", "t.plan", directory=Path()).diagnostics
    assert item.code.startswith("LP1")
    assert "`layers.{0..3}`" in item.message or "`{0..3}`" in item.message


def test_computed_range_is_underlined_as_written():
    assert underlined("let n = 5\ncheckpoint { layers.{0..n - 1} = full }\n") == ["layers.{0..n - 1}"]


def test_parameter_paths_are_matched_in_shard_only():
    assert underlined("checkpoint { layers.0.attention.{wq, weight} = full }\n") == ["weight"]
