"""Imports of the scripts in `benchmarks/`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# The fits need the extra `fit` of `pyproject.toml`, which the tests' environment may lack.
IMPORT = """
import sys
from importlib import import_module

directory, *names = sys.argv[1:]
sys.path[:0] = [directory + "/benchmarks", directory]
for name in names:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("scipy", "sklearn"):
            raise
"""


def test_every_script_is_imported():
    """In one process of its own, in which nothing is measured."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "joint_memory" in names
    command = [sys.executable, "-c", IMPORT, str(BENCHMARKS.parent), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
