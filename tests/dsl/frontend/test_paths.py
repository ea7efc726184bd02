"""Path patterns and their specificity, against a matcher of a few lines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.dsl.frontend.paths import PathError, Paths, assign, pattern
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Every, Full, KeepAll

MODULES = (
    ["", "tok_embeddings", "layers"]
    + [f"layers.{index}" for index in range(12)]
    + [
        f"layers.{index}.{part}"
        for index in range(12)
        for part in ("attention", "attention_norm", "feed_forward", "ffn_norm")
    ]
    + [f"layers.{index}.{part}" for index in range(12) for part in ("attention.wq", "attention.wk", "feed_forward.w1")]
    + ["norm", "output"]
)
PATHS = Paths(MODULES)


def brute(text: str, path: str) -> bool:
    """Whether a pattern matches, decided segment by segment without a regular expression for the whole."""
    if text == "root":
        return path == ""
    if path == "":
        return False
    wanted = re.findall(r"(?:\{[^}]*\}|[^.{}])+", text)
    return _matches(wanted, path.split("."))


def _matches(wanted: list[str], segments: list[str]) -> bool:
    if not wanted:
        return not segments
    if wanted[0] == "**":
        last = len(wanted) == 1
        return any(_matches(wanted[1:], segments[count:]) for count in range(1 if last else 0, len(segments) + 1))
    return bool(segments) and _one(wanted[0], segments[0]) and _matches(wanted[1:], segments[1:])


def _one(wanted: str, segment: str) -> bool:
    if not wanted:
        return not segment
    if wanted[0] == "*":
        return any(_one(wanted[1:], segment[count:]) for count in range(len(segment) + 1))
    if wanted[0] == "{":
        body, _, rest = wanted[1:].partition("}")
        first, dots, last = body.partition("..")
        if dots:
            words = [str(number) for number in range(int(first), int(last) + 1)]
        else:
            words = [word.strip() for word in body.split(",")]
        return any(segment.startswith(word) and _one(rest, segment[len(word) :]) for word in words)
    return segment[:1] == wanted[0] and _one(wanted[1:], segment[1:])


pieces = st.sampled_from(
    ["layers", "attention", "feed_forward", "*", "**", "{0..9}", "{3..11}", "{attention, feed_forward}", "*_norm", "w*",
     "{wq, wk}", "0", "1{0..1}", "{attention, ffn}_norm", "norm", "output", "*e*o*"]
)  # fmt: skip
patterns = st.lists(pieces, min_size=1, max_size=4).map(".".join) | st.just("root")


@given(patterns)
@settings(max_examples=400)
def test_pattern_matches_equal_brute_force(text: str):
    expected = [path for path in MODULES if brute(text, path)]
    assert PATHS.matching(pattern(text)) == expected
    assert [path for path in MODULES if pattern(text).matches(path)] == expected


def test_many_stars_are_as_quick_as_one():
    many = ".".join(["**"] * 200)
    assert [path for path in MODULES if pattern(f"{many}.wq").matches(path)] == [
        path for path in MODULES if pattern("**.wq").matches(path)
    ]
    assert not any(pattern(f"layers.{many}.missing").matches(path) for path in MODULES)
    assert PATHS.matching(pattern(f"layers.{many}")) == PATHS.matching(pattern("layers.**"))


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("layers..attention", 7), (".layers", 0), ("layers.", 6), ("layers.**x", 7), ("layers.{5..2}", 7),
        ("layers.{}", 7), ("layers.{a,,b}", 7), ("layers.{a b}", 7), ("a{0..999999}", 1), ("layers.{a.b}", 7),
    ],
)  # fmt: skip
def test_invalid_pattern_reports_its_offset(text: str, offset: int):
    with pytest.raises(PathError) as error:
        pattern(text)
    assert error.value.offset == offset
    assert str(error.value)


def test_alternatives_of_several_segments_are_two_rules():
    with pytest.raises(PathError, match=r"`visual\.blocks` is no name; alternatives are single segments"):
        pattern("{visual.blocks, resblocks}.*")


@given(st.text("abl*{}.,0129 _-", max_size=14))
@settings(max_examples=500)
def test_any_text_is_a_pattern_or_a_path_error(text: str):
    try:
        found = pattern(text)
    except PathError as error:
        assert 0 <= error.offset <= len(text)
        return
    re.compile(found.regex)


def test_regex_metacharacters_are_literal():
    assert pattern("a-b").matches("a-b")
    assert not pattern("a.b").matches("axb")
    assert not pattern("layers").matches("layers\n")


def rule(path: str, treatment: object) -> PathRule[object]:
    return PathRule(path=path, treatment=treatment)


@pytest.mark.parametrize(
    ("weaker", "stronger", "path"),
    [
        ("**", "layers.*", "layers.0"),
        ("layers.*", "layers.{0..9}", "layers.3"),
        ("layers.{0..9}", "layers.3", "layers.3"),
        ("layers.**", "layers.*.attention", "layers.3.attention"),
        ("layers.*.*", "layers.*.attention", "layers.3.attention"),
        ("*.*.attention", "layers.*.attention", "layers.3.attention"),
        ("layers.*.{attention, feed_forward}", "layers.{0..3}.attention", "layers.3.attention"),
        ("layers.*.a*", "layers.*.attention", "layers.3.attention"),
        ("**", "root", ""),
    ],
)
def test_the_more_specific_path_wins_in_either_order(weaker: str, stronger: str, path: str):
    for rules in ([rule(weaker, KeepAll()), rule(stronger, Full())], [rule(stronger, Full()), rule(weaker, KeepAll())]):
        if not pattern(weaker).matches(path):
            continue
        result = assign(rules, PATHS)
        assert result.by_path[path].treatment == Full()
        assert result.conflicts == []


def test_equally_specific_rules_conflict_only_if_they_differ():
    first, second = rule("layers.{0..5}", Full()), rule("layers.{4..9}", KeepAll())
    assert assign([first, second], PATHS).conflicts == [("layers.4", first, second)]
    assert assign([first, rule("layers.{4..9}", Full())], PATHS).conflicts == []


def test_more_specific_rule_settles_a_conflict():
    rules = [rule("layers.{0..4}", Full()), rule("layers.{4..9}", KeepAll()), rule("layers.4", Every(n=2))]
    assert assign(rules, PATHS).conflicts == []
    general, other, decides = rule("layers.{0..4}", Full()), rule("layers.{3..9}", KeepAll()), rule("layers.3", Full())
    assert assign([general, other, decides], PATHS).conflicts == [("layers.4", general, other)]


def test_shadowed_and_unmatched_rules_are_listed():
    general, all_layers, nothing = rule("layers.*", Full()), rule("layers.{0..11}", KeepAll()), rule("heads.*", Full())
    result = assign([general, all_layers, nothing], PATHS)
    assert result.shadowed == [(general, all_layers)]
    assert result.unmatched == [nothing]


@given(st.lists(st.tuples(patterns, st.sampled_from([Full(), KeepAll(), Every(n=2)])), max_size=5))
@settings(max_examples=150)
def test_assignment_equals_brute_force(given_rules: list[tuple[str, object]]):
    rules = [rule(path, treatment) for path, treatment in given_rules]
    result = assign(rules, PATHS)
    for path in MODULES:
        hits = [item for item in rules if brute(item.path, path)]
        if not hits:
            assert path not in result.by_path
            continue
        best = min(pattern(item.path).specificity for item in hits)
        winners = [item for item in hits if pattern(item.path).specificity == best]
        assert result.by_path[path] in winners
        disagree = any(item.treatment != winners[0].treatment for item in winners)
        found = any(winners[0] is first for where, first, _ in result.conflicts if brute(first.path, path))
        assert not disagree or found
    assert result.unmatched == [item for item in rules if not any(brute(item.path, path) for path in MODULES)]
