"""House rule: private names of torch, and assignments to torch's objects, are only in the folders for them.

Checked in the syntax tree of every module of the package and of the benchmarks:

- imports of a private module of torch or of a private name in one of its modules;
- attributes `torch…._name` that begin at an imported name, also through a variable (`aten = torch.ops.aten`);
- private attributes of any object that the module itself does not define, unless the table lists them;
- assignments, deletions and calls of `setattr`, `delattr`, `patched_attribute` whose target begins at an imported name
  of torch; assignments into `sys.modules`; imports of `unittest.mock`.

Not detected: public attributes set on an object of torch that came as an argument (`stage.forward_one_chunk =`),
names that are computed (`getattr(module, name)`), and accesses through a variable of another function.
Operators under `torch.ops` are no private names: their schemas are torch's serialised interface. `torch.backends` holds
settings that are documented to be set.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from legoai.runtime.torch_internals.attributes import ATTRIBUTES
from legoai.runtime.torch_internals.table import IN_PROGRAMS

ROOT = Path(__file__).resolve().parent.parent
SCANNED = ("specs", "dsl", "lowering", "runtime", "cost", "src/legoai", "benchmarks")
ALLOWED = ("runtime/torch_internals/", "specs/models/torch_internals.py")
# The arguments of an `argparse.ArgumentParser`, for which it has no public name.
NOT_OF_TORCH = {"_actions", "_fingerprint"}
SETTERS = {"setattr", "delattr", "patched_attribute"}


def modules() -> list[Path]:
    """Paths, relative to the root, of all modules that are not meant for torch's private names."""
    found: list[Path] = []
    for folder in SCANNED:
        found += (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    return sorted({path for path in found if not path.as_posix().startswith(ALLOWED)})


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


class Names(ast.NodeVisitor):
    """Finds in one module what the rule forbids, as `line: what`."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[str] = []
        self.roots: dict[str, str] = {}
        """Names of the module that stand for something of torch, and its dotted path."""
        self.own = set(vars(builtins))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                self.own.add(node.attr)
        for node in ast.walk(tree):
            self._bind(node)
        self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.partition(".")[0] == "torch":
                    self.roots[item.asname or "torch"] = item.name if item.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for item in node.names:
                self.roots[item.asname or item.name] = f"{node.module}.{item.name}"
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            path = self._path(node.value)
            if path is not None:
                self.roots[node.targets[0].id] = path

    def _path(self, node: ast.AST) -> str | None:
        """The dotted path of an expression that begins at something of torch."""
        if isinstance(node, ast.Name):
            return self.roots.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._path(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript):
            return self._path(node.value)
        return None

    def _report(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{node.lineno}: {what}")

    def visit_Import(self, node: ast.Import) -> None:
        for item in node.names:
            parts = item.name.split(".")
            if (parts[0] == "torch" and any(map(private, parts))) or item.name == "unittest.mock":
                self._report(node, f"import {item.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = (node.module or "").split(".")
        for item in node.names:
            if parts[0] == "torch" and any(map(private, (*parts, item.name))):
                self._report(node, f"from {node.module} import {item.name}")
            if parts[0] == "unittest":
                self._report(node, f"from {node.module} import {item.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None and path.startswith("torch.ops."):
            return
        if private(node.attr):
            if path is not None:
                self._report(node, path)
            elif not _is_self(node.value) and node.attr not in self.own | NOT_OF_TORCH | set(ATTRIBUTES):
                self._report(node, ast.unparse(node))
        if isinstance(node.ctx, ast.Store | ast.Del) and path is not None and not path.startswith("torch.backends."):
            self._report(node, f"{path} is set or deleted")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            path = self._path(node.value)
            own = isinstance(node.slice, ast.Constant) and not str(node.slice.value).startswith("torch")
            if path is not None or (ast.unparse(node.value) == "sys.modules" and not own):
                self._report(node, f"{path or 'sys.modules'}[…] is set or deleted")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in SETTERS and node.args and (path := self._path(node.args[0])) is not None:
            self._report(node, f"{name}({path}, …)")
        self.generic_visit(node)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def found_in(text: str) -> list[str]:
    return Names(ast.parse(text)).found


MAY_VIOLATE = re.compile(r"torch|sys\.modules|unittest|(?<!self)(?<!cls)\._[A-Za-z]")
"""Found in every text that breaks the rule, so that half of the modules need not be parsed."""


def test_no_module_patches_torch_or_uses_its_private_names():
    texts = {path.as_posix(): (ROOT / path).read_text("utf-8") for path in modules()}
    found = {path: found_in(text) if MAY_VIOLATE.search(text) else [] for path, text in texts.items()}
    assert len(found) > 200
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch._inductor",
        "from torch.distributed._tools import x",
        "from torch.distributed.pipelining.schedules import _Action",
        "import torch\ntorch.compile = None",
        "import torch\ndel torch.compile",
        "import torch\nprint(torch._C)",
        "from torch.distributed import device_mesh as d\nd.new_group = 1",
        "import torch\nsetattr(torch.Tensor, 'copy_', 1)",
        "import torch\ntensor = torch.Tensor\ntensor.copy_ = 1",
        "from torch.fx import x\nx.table['name'] = 1",
        "import torch\nfrom legoai.x import patched_attribute\npatched_attribute(torch.Tensor, 'copy_', 1)",
        "import sys\nsys.modules['torch.x'] = 1",
        "from unittest import mock",
        "def f(schedule):\n    schedule._private = 1",
        "def f(schedule):\n    import torch.distributed as dist\n    return dist.fsdp._x",
    ],
)
def test_rule_finds_violations(text: str):
    assert len(found_in(text)) == 1
    assert MAY_VIOLATE.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\naten = torch.ops.aten\naten._scaled_mm.default",
        "import torch\nx = torch.ones(2)\nx.grad = None",
        "class A:\n    def f(self, other):\n        self._x = 1\n        return other._x",
        "import sys\nsys.modules['lowered_program'] = 1",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "from unittest_like import x",
    ],
)
def test_rule_accepts_public_names(text: str):
    assert found_in(text) == []


def emitted() -> Iterator[str]:
    """Private modules of torch that emitters name in strings, from which lowered programs import."""
    for path in (ROOT / "lowering").rglob("*.py"):
        text = path.read_text("utf-8")
        if not re.search(r"torch\.[\w.]*\b_", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
                parts = node.value.split(".")
                if all(part.isidentifier() for part in parts) and any(map(private, parts)):
                    yield node.value


def test_private_names_in_programs_are_in_the_table():
    assert set(emitted()) == {path.partition(":")[0] for path in IN_PROGRAMS}
