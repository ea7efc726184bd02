"""Shared helpers of the tests: plans, programs, models and process pools.

pytest puts `tests/` on the path (`pythonpath` in pyproject.toml) and `tests/conftest.py` gives it to child processes.
"""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
"""The checkout."""

WORKED_PLANS = sorted(ROOT.glob("plans/*.plan"))
VALID_PLANS = sorted(TESTS.glob("dsl/valid/*.plan"))
"""Plans without a diagnostic that use every form of the language."""
