"""Imports of the scripts in `benchmarks/`, and what their README states about them."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

from support.simulation.simulated import in_a_fork

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

README = (BENCHMARKS / "README.md").read_text(encoding="utf-8")


def test_every_script_has_a_row():
    cells = "".join(re.findall(r"^\| (`.*?) \|", README, re.MULTILINE))
    files = {path.name for path in BENCHMARKS.glob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", cells)) == files - {"machine.py"}
    packages = {path.parent.name for path in BENCHMARKS.glob("*/__main__.py")}
    assert all(f"`{name}/`" in README for name in packages)


def test_rows_say_how_scripts_are_run():
    """Those that import each other by the package's name are run as its modules."""
    modules = set()
    for path in BENCHMARKS.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        if _start(tree) is not None and any(name.split(".")[0] == "benchmarks" for name in imported):
            modules.add(".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts).removesuffix(".__main__"))
    pages = "".join(path.read_text(encoding="utf-8") for path in BENCHMARKS.rglob("README.md"))
    assert set(re.findall(r"`python -m ([\w.]+)", pages)) == modules


def test_scripts_without_a_limit_are_named():
    [named] = re.findall(r"when the limit is missed\. (.*?)\s+compare, and have no limit", README, re.DOTALL)
    unlimited = set()
    for path in BENCHMARKS.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if (start := _start(tree)) is not None:
            [main] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
            returned = [node.value for node in ast.walk(main) if isinstance(node, ast.Return)]
            passed_on = ast.unparse(start) in ("sys.exit(main())", "raise SystemExit(main())")
            if not passed_on or all(value is None or ast.unparse(value) == "0" for value in returned):
                unlimited.add(path.name)
    assert set(re.findall(r"`(\w+\.py)`", named)) == unlimited


def _start(tree: ast.Module) -> ast.stmt | None:
    """What a file does as a script."""
    found = [node.body[-1] for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    return found[-1] if found else None


def imported(names: list[str]) -> list[str]:
    """What modules of the folder say when they are imported, with their names.

    The fits need the extra `fit` of `pyproject.toml`, which the tests' environment may lack.
    """
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]
    failed = []
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or str(error.name).partition(".")[0] not in EXTRA:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


EXTRA = ("scipy", "sklearn")


def test_every_script_is_imported():
    """In one process of its own, in which nothing is measured."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "joint_memory" in names
    assert in_a_fork(imported, names) == []
