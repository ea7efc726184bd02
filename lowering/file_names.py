"""File names that a program cannot have: a module that it needs would be imported from its own file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from legoai.specs.models.manifests.cache import find_module_file
from legoai.specs.plan import Plan

_PACKAGE: Final = "legoai"
_ALWAYS: Final = frozenset({_PACKAGE, "numpy", "torch"})


def factory_module(plan: Plan) -> str:
    """Return the module of the model's Python factory; empty without one."""
    return (plan.model.target or "").partition(":")[0] if plan.model.family == "python" else ""


def is_beside(plan: Plan, folder: Path) -> bool:
    """Whether the module of the model's Python factory is in a folder."""
    module = factory_module(plan)
    return bool(module) and find_module_file(module, [str(folder)]) is not None


def program_name(plan: Plan) -> str:
    """Return a file name for the program: the plan's, unless a module has it that every program or this one needs."""
    needed = {*sys.stdlib_module_names, *_ALWAYS, factory_module(plan).partition(".")[0]}
    return f"{plan.name}_program.py" if plan.name in needed else f"{plan.name}.py"


def needed_module(name: str, plan: Plan) -> str | None:
    """Return whose module it is that has this name and that a program of the plan needs; None where there is none."""
    if name == factory_module(plan).partition(".")[0]:
        return "the model's factory"
    if name in sys.stdlib_module_names:
        return "Python's own module"
    return "the installed package" if name in _ALWAYS or name in _required() else None


def _required() -> set[str]:
    """Return the modules of the packages here that LegoAI and its extras require, directly or through others."""
    modules: dict[str, set[str]] = {}
    for module, packages in metadata.packages_distributions().items():
        for package in packages:
            modules.setdefault(_normalised(package), set()).add(module)
    found, left = set[str](), [_PACKAGE]
    while left:
        package = left.pop()
        if package not in found:
            found.add(package)
            left += _requirements(package)
    return {module for package in found for module in modules.get(package, ())}


def _requirements(package: str) -> Iterator[str]:
    """The packages that a package requires; of extras only those with which LegoAI's programs run."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:  # of an extra that is not installed
        lines = ["torch"] if package == _PACKAGE else []
    for line in lines:
        found, extra = re.match(r"[\w.-]+", line), re.search(r"""extra == ["']([^"']+)""", line)
        if found is not None and (extra is None or (package == _PACKAGE and extra[1] != "dev")):
            yield _normalised(found[0])


def _normalised(package: str) -> str:
    return re.sub("[-_.]+", "-", package).lower()
