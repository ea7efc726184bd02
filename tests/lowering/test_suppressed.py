"""Plans with suppressed errors lower, or are refused for these errors only."""

from pathlib import Path

import pytest

from legoai.dsl.frontend.suppress import suppressible
from legoai.dsl.lint import Linted, lint
from legoai.lowering.program import LoweringError, lower

INVALID = Path(__file__).parents[1] / "dsl" / "invalid"


def accepted() -> list[Linted]:
    """Invalid plans of the corpus with a model, all of whose errors a comment may suppress."""
    found = []
    for path in sorted(INVALID.glob("*/*.plan")):
        linted = lint(path.read_text(encoding="utf-8", errors="replace"), path.name, directory=path.parent)
        errors = [item for item in linted.diagnostics if item.severity == "error"]
        known = linted.analysis is not None and linted.analysis.manifest is not None
        if known and errors and all(map(suppressible, errors)):
            found.append(linted)
    return found


def test_suppressed_error_never_breaks_lowering():
    plans = accepted()
    assert len(plans) > 50, "the corpus has many such plans"
    refused = 0
    for linted in plans:
        errors = tuple(item for item in linted.diagnostics if item.severity == "error")
        try:
            compile(lower(linted.analysis, suppressed=errors).text, linted.resolution.file.name, "exec")
        except LoweringError as error:
            refused += 1
            unsupported = {item.code for item in error.diagnostics} <= {"LP010", "LP011"}
            assert unsupported or set(error.diagnostics) <= set(errors), linted.resolution.file.name
    assert 0 < refused < len(plans), "some of these errors leave a program, and some do not"


def test_lowering_error_is_the_suppressed_diagnostic():
    path = INVALID / "LP408" / "placement_misplaced.plan"
    lines = path.read_text().splitlines()
    for item in lint("\n".join(lines), path.name, directory=path.parent).diagnostics:
        if item.severity == "error":
            lines[item.label.span.line - 1] += f"  # legoai: ignore[{item.code}]"
    linted = lint("\n".join(lines), path.name, directory=path.parent)
    assert {item.code for item in linted.suppressed} == {"LP408"}
    assert not linted.has_errors
    with pytest.raises(LoweringError) as caught:
        lower(linted.analysis, suppressed=linted.suppressed)
    assert {item.code for item in caught.value.diagnostics} == {"LP408"}
