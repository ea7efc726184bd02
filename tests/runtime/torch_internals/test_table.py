"""The table of patches: every entry exists in the installed torch, has the listed kind, and names a test."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest
import torch

from legoai.runtime.torch_internals.attributes import ATTRIBUTES, Attribute
from legoai.runtime.torch_internals.patch_record import TRIED, Patch
from legoai.runtime.torch_internals.patching import locate, override, patched, patched_item, restored_items
from legoai.runtime.torch_internals.table import IN_PROGRAMS, PATCHES
from support import ROOT

HERE = Path(__file__).parent

KINDS = {
    "function": types.FunctionType,
    "static": staticmethod,
    "class method": classmethod,
    "property": property,
    "class": type,
    "mapping": dict,
    "module": types.ModuleType,
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_patched_names_exist_as_listed(patch: Patch):
    if patch.kind == "module":
        importlib.import_module(patch.path.replace(":", "."))
    owner, name = locate(patch)
    if patch.kind == "setting":
        assert isinstance(getattr(owner, name), bool | None)
        return
    found = inspect.getattr_static(owner, name)
    while hasattr(found, "__wrapped__") and not isinstance(found, staticmethod | classmethod):
        found = found.__wrapped__  # of a cache
    if patch.kind == "builtin":
        assert callable(found) and not isinstance(found, types.FunctionType)
        return
    assert isinstance(found, KINDS[patch.kind])
    if patch.kind in ("function", "static", "class method", "class"):
        function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        expected = re.findall(r"\w+", patch.parameters)
        assert list(inspect.signature(function).parameters)[: len(expected)] == expected


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_every_patch_has_a_reason_and_a_test(patch: Patch):
    file, _, function = patch.test.partition("::")
    tests = {
        node.name for node in ast.parse((HERE / file).read_text("utf-8")).body if isinstance(node, ast.FunctionDef)
    }
    assert function in tests
    assert patch.why


def test_every_patch_is_used_and_every_used_patch_is_listed():
    texts: dict[Path, str] = {}
    for folder in ("cost", "runtime", "lowering", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            own = "torch_internals" in path.relative_to(ROOT).parts
            if not own or path.name in ("overlap_scheduling.py", "process_groups.py"):
                texts[path.parent] = texts.get(path.parent, "") + _strings(path)
    used = {name for text in texts.values() for name in _named(text)}
    placed = {patch.path for patch in PATCHES.values() if patch.kind in ("module", "setting")}
    assert {path for path in PATCHES if path not in used} == placed


def _strings(path: Path) -> str:
    """The texts in a module, a line each."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    found = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return "".join(f"{value}\n" for value in found)


def _named(text: str) -> set[str]:
    """Entries of the table that the modules of a folder name whole, or in two texts, of which one is the last name."""
    named = set()
    for name in PATCHES:
        owner, last = re.fullmatch(r"(.*[.:])(\w+)", name).groups()
        if name in text or (owner.rstrip(".:").partition(":")[0] in text and re.search(rf"(?m)(^|[.:]){last}$", text)):
            named.add(name)
    return named


@pytest.mark.parametrize(("name", "attribute"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_listed_private_attributes_exist(name: str, attribute: Attribute):
    assert attribute.why
    for path in attribute.owners:
        module, _, owner = path.partition(":")
        classes = inspect.getmro(getattr(importlib.import_module(module), owner))
        assert any(name in vars(item) or name in vars(item).get("__annotations__", {}) for item in classes) or any(
            f"self.{name}" in inspect.getsource(item) for item in classes if item.__module__ != builtins.__name__
        )


@pytest.mark.parametrize("path", IN_PROGRAMS)
def test_private_names_in_lowered_programs_exist(path: str):
    module, _, name = path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_supported_torch_versions_were_tried():
    declared = (ROOT / "pyproject.toml").read_text("utf-8")
    oldest, newest = re.search(r'"torch>=([\d.]+),<=([\d.]+)"', declared).groups()
    assert TRIED[0].startswith(oldest) and TRIED[-1] == newest
    assert torch.__version__.partition("+")[0] in TRIED


def test_only_listed_names_can_be_patched():
    with pytest.raises(KeyError), patched("torch:ones", None):
        pass
    with pytest.raises(TypeError, match="is no method of Linear"):
        override(torch.nn.Linear(1, 1), "torch.distributed.pipelining.schedules:_PipelineSchedule.step", None)


def test_patched_mapping_items_are_restored():
    meta = torch.fx.traceback.current_meta
    with patched_item("torch.fx.traceback:current_meta", "new", 1):
        assert meta["new"] == 1
        with patched_item("torch.fx.traceback:current_meta", "new", 2):
            assert meta["new"] == 2
        with restored_items("torch.fx.traceback:current_meta", "new", "newer"):
            meta["new"] = meta["newer"] = 3
        assert meta == {"new": 1}
    assert "new" not in meta
