"""Programs of the worked plans: golden texts, in the formatter's layout."""

import subprocess
import sys
from pathlib import Path

import pytest

import legoai
from legoai.dsl.frontend.resolve import resolve
from support import ROOT

PLANS = ROOT / "plans"


def worked() -> list:
    found = []
    for path in sorted(PLANS.glob("*.plan")):
        variants = resolve(path.read_text(encoding="utf-8"), path.name, directory=PLANS).variants
        found += [pytest.param(path, variant, id=f"{path.stem}-{variant or 'base'}") for variant in (None, *variants)]
    return found


@pytest.mark.parametrize(("path", "variant"), worked())
def test_worked_plan_lowers_to_its_golden_program(path: Path, variant: str | None, golden):
    program = legoai.lower(path, variant=variant)
    golden(f"worked/{path.stem}{f'_{variant}' if variant else ''}", program)
    assert len(program.text.splitlines()) <= 320, "too long to review in one sitting"
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, "format", "--isolated", "--line-length", "120", "--diff", "-"],
        input=program.text, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
