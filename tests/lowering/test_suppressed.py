"""Plans with errors that comments accept: they lower, or are refused for what no program supports."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.parsing.suppress import suppressible
from legoai.dsl.lint import Linted, lint
from legoai.lowering.program import LoweringError, lower

INVALID = Path(__file__).parents[1] / "dsl" / "invalid"
UNITS = re.compile(r"(fsdp +on [a-z_, ]+?) *\{")
LEAVING_NOTHING = ("LP309", "LP406", "LP408", "LP410", "LP604", "LP624")
"""Errors for which emitters have no program, or whose program no step can run."""


def traced(text: str) -> str:
    return UNITS.sub(r"\1 (backend = graph) {", text)


def errors_of(linted: Linted) -> list[Diagnostic]:
    return [item for item in linted.diagnostics if item.severity == "error"]


def accepted(change: Callable[[str], str]) -> Iterator[Linted]:
    """Invalid plans of the corpus, changed, with a known model, all of whose errors a comment may suppress."""
    for path in sorted(INVALID.glob("*/*.plan")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if change(text) == text and change is not str:
            continue
        linted = lint(change(text), path.name, directory=path.parent, variants=False)
        known = linted.analysis is not None and linted.analysis.manifest is not None
        if known and errors_of(linted) and all(map(suppressible, errors_of(linted))):
            yield linted


@pytest.mark.parametrize("change", [str, pytest.param(traced, marks=pytest.mark.slow)], ids=["as it is", "traced"])
def test_suppressed_error_never_breaks_lowering(change: Callable[[str], str]):
    """Emitters rely on no error that can be suppressed: an assertion that fails is an error of ours, and fails here."""
    lowered, refused = 0, set()
    for linted in accepted(change):
        try:
            compile(lower(linted.analysis).text, linted.resolution.file.name, "exec")
            lowered += 1
        except LoweringError as error:
            refused |= {item.code for item in error.diagnostics}
    assert lowered > 20, "the corpus has many such plans"
    assert refused <= {"LP010", "LP011"}


def test_error_that_leaves_no_program_cannot_be_suppressed():
    for code in LEAVING_NOTHING:
        for path in sorted((INVALID / code).glob("*.plan")):
            lines = path.read_text(encoding="utf-8").splitlines()
            found = lint("\n".join(lines), path.name, directory=path.parent).diagnostics
            for line in {item.label.span.line for item in found if item.code == code}:
                lines[line - 1] += f"  # legoai: ignore[{code}]"
            linted = lint("\n".join(lines), path.name, directory=path.parent)
            codes = [item.code for item in linted.diagnostics]
            assert code in codes and "LP903" in codes and not linted.suppressed, path.name


UNUSED = """\
plan unused
model   llama3("tiny")
cluster cpu(devices = 8)
batch   (global = 8, micro = 2, seq_len = 64)
mesh    (pp = 2, cp = 2, dp_shard = 2)  # legoai: ignore[LP306]
fsdp on dp_shard { layers.* = unit, root = unit }
pipeline on pp (schedule = 1F1B)
"""


@pytest.mark.parametrize("change", [str, traced], ids=["as it is", "traced"])
def test_stages_of_an_unused_axis_of_sequences_see_whole_sequences(change: Callable[[str], str]):
    linted = lint(change(UNUSED), "unused.plan", directory=Path())
    assert not linted.has_errors and {item.code for item in linted.suppressed} == {"LP306"}
    text = lower(linted.analysis).text
    assert "(2, 64, 128)" in text and "positions" not in text


def test_times_of_hosts_without_a_fabric_are_refused():
    text = """\
plan apart
model   llama3("tiny")
cluster h100_sxm(hosts = 2)
batch   (global = 32, micro = 1, seq_len = 64)
mesh    (dp_shard = 16)
fsdp on dp_shard (backend = graph) { layers.* = unit }
comm (reorder = by_time)
"""
    assert {item.code for item in errors_of(lint(text, "apart.plan", directory=Path()))} == {"LP010", "LP302"}
    linted = lint(text.replace("hosts = 2)", "hosts = 2)  # legoai: ignore[LP302]"), "apart.plan", directory=Path())
    assert [item.code for item in errors_of(linted)] == ["LP010"]
    with pytest.raises(LoweringError, match="without a fabric"):
        lower(linted.analysis)
