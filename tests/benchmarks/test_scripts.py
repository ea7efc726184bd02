"""Imports of the scripts in `benchmarks/`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FITTING = {"fit_gpu", "fit_kernels", "fit_network", "fit_profiles"}


def test_every_script_is_imported():
    """In one process of its own, in which nothing is measured."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    if not all(map(find_spec, ("scipy", "sklearn"))):
        names = [name for name in names if name not in FITTING]
    assert "joint_memory" in names
    imports = "\n".join(f"import {name}" for name in names)
    path = f"import sys; sys.path[:0] = [{str(BENCHMARKS)!r}, {str(BENCHMARKS.parent)!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + imports], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
