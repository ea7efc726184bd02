"""Python files of which functions are read, and where the names of each come from."""

from __future__ import annotations

import ast
import contextlib
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from legoai.dsl.frontend.files.sources import UnreadableError, read_source
from legoai.dsl.frontend.text import Lines
from legoai.specs.span import Span

_MOST_FILES: Final = 64
_MOST_IMPORTS: Final = 40
"""Imports that a name is followed through."""

SAY_ALL: Final = frozenset({"model_registry", "default_adamw"})
"""Functions whose arguments say all, so that they are not followed."""


@dataclass(slots=True)
class Module:
    """A Python file.

    Attributes:
        lines: its text.
        path: None for a text without a file.
        functions: at its top level.
        constants: expressions that are assigned at its top level.
        imports: module, level and name there of what it imports, anywhere in it; without a name for a whole module.
        stars: module and level of what it imports all names of.
        classes: at its top level.
        changed: names whose values another statement at its top level decides or may change.
    """

    lines: Lines
    path: Path | None
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    stars: list[tuple[str, int]] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)

    @property
    def is_of_torchtitan(self) -> bool:
        """Whether the file belongs to TorchTitan, whose classes are known."""
        return self.path is not None and "torchtitan" in self.path.absolute().parent.parts

    @staticmethod
    def of(text: str, name: str, path: Path | None) -> Module:
        """Read a file's text.

        Raises:
            SyntaxError: it is not Python.
            ValueError: the same.
        """
        # A lone carriage return ends a line of Python too.
        found = Module(Lines(re.sub(r"\r(?!\n)", "\n", text), name), path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the text, such as unknown escapes
            tree = ast.parse(text)
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=where, names=[ast.alias(name="*")], level=level):
                    found.stars.append((where or "", level))
                case ast.ImportFrom(module=where, names=names, level=level):
                    found.imports |= {one.asname or one.name: (where or "", level, one.name) for one in names}
                case ast.Import(names=names):
                    found.imports |= {one.asname or one.name: (one.name, 0, "") for one in names}
        for statement in tree.body:
            found._define(statement)
        return found

    def _define(self, statement: ast.stmt) -> None:
        """Note what a statement at the top level defines; the last one that does decides."""
        match statement:
            case ast.FunctionDef(name=name):
                self._forget(name)
                self.functions[name] = statement
            case ast.ClassDef(name=name):
                self._forget(name)
                self.classes.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._forget(name)
                self.constants[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._forget(name)
                self.constants[name] = value
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass() | ast.AnnAssign():
                pass
            case _:
                for node in ast.walk(statement):
                    if isinstance(node, ast.FunctionDef | ast.ClassDef):
                        self.changed.add(node.name)
                    elif isinstance(node, ast.Name) and (
                        not isinstance(node.ctx, ast.Load) or _may_change(self.constants.get(node.id))
                    ):
                        self.changed.add(node.id)

    def _forget(self, name: str) -> None:
        """Take away what a name meant before."""
        self.functions.pop(name, None)
        self.constants.pop(name, None)
        self.imports.pop(name, None)
        self.classes.discard(name)

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> Span:
        """The span of a node; columns of the syntax tree are bytes."""
        start, end = (
            self._offset(line, column)
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        return self.lines.span(start, end)

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        before = self.lines.line(line).encode()[:column].decode(errors="ignore")
        return self.lines.offset(line) + len(before)


def _may_change(value: ast.expr | None) -> bool:
    """Whether the value of an expression is one that a statement may change without an assignment."""
    unchanged = ast.Constant | ast.UnaryOp | ast.BinOp | ast.Compare | ast.BoolOp | ast.JoinedStr
    return value is not None and not isinstance(value, unchanged)


class Modules:
    """A file and those around it that it imports from; nothing of them is run.

    Attributes:
        first: the file.
        files: texts of all that were read, by name.
    """

    def __init__(self, first: Module) -> None:
        self.first = first
        self.files = {first.lines.name: first.lines.text}
        self._read: dict[Path, Module | None] = {}

    def of(self, span: Span) -> Module:
        """The file in which a span lies."""
        others = (module for module in self._read.values() if module is not None)
        return next((one for one in [self.first, *others] if one.lines.name == span.file), self.first)

    def function(self, module: Module, name: str) -> tuple[ast.FunctionDef, Module] | None:
        """The function that a name, which may have dots, means in a file."""
        found = self._defining(module, name)
        return None if found is None or found[1] not in found[0].functions else (found[0].functions[found[1]], found[0])

    def constant(self, module: Module, name: str) -> tuple[ast.expr, Module] | None:
        """The expression of a constant that a name means in a file."""
        found = self._defining(module, name)
        return None if found is None or found[1] not in found[0].constants else (found[0].constants[found[1]], found[0])

    def is_own_class(self, module: Module, name: str) -> bool:
        """Whether a name means a class, or something of one, that is not TorchTitan's."""
        while name:
            found = self._defining(module, name)
            if found is not None and found[1] in found[0].classes:
                return not found[0].is_of_torchtitan
            name = name.rpartition(".")[0]
        return False

    def is_changed(self, module: Module, name: str) -> bool:
        """Whether statements decide the value of a constant that are not followed."""
        found = self._defining(module, name)
        return found is not None and found[1] in found[0].changed

    def origin(self, module: Module, name: str) -> str:
        """The whole name of what a file imports by a name, which may have dots; the name itself if it imports none."""
        first, _, rest = name.partition(".")
        where, _, there = module.imports.get(first, (first, 0, ""))
        return ".".join(part for part in (where, there, rest) if part)

    def _defining(self, module: Module, name: str) -> tuple[Module, str] | None:
        """The file that defines what a name means in another one, and its name there."""
        for _ in range(_MOST_IMPORTS):
            if any(name in defined for defined in (module.functions, module.constants, module.classes, module.changed)):
                return module, name
            prefix, _, last = name.rpartition(".")
            where, level, there = module.imports.get(prefix or name, ("", 0, ""))
            if prefix:  # a name of a module that is imported as a whole
                where, there = ".".join(part for part in (where, there) if part), last
            if there in SAY_ALL:
                return None
            if not there:
                found = [self._imported(module, *star) for star in module.stars if not prefix]
                others = [one for one in found if one is not None]
                defining = (self._defining(one, name) for one in others if one is not module)
                return next((one for one in defining if one is not None), None)
            other = self._imported(module, where, level)
            if other is None:
                return None
            module, name = other, there
        return None

    def _imported(self, module: Module, where: str, level: int) -> Module | None:
        """The module of an import that lies in a folder around the file's; None where there is none."""
        if module.path is None:
            return None
        around = module.path.absolute().parents
        parts = [part for part in where.split(".") if part]
        for folder in around[level - 1 : level] if level else around:
            base = folder.joinpath(*parts)
            for path in (*([base.with_name(f"{base.name}.py")] if parts else []), base / "__init__.py"):
                if path.is_file():
                    return self._module(path)
        return None

    def _module(self, path: Path) -> Module | None:
        if path not in self._read:
            self._read[path] = None
            if len(self._read) <= _MOST_FILES:
                with contextlib.suppress(UnreadableError, SyntaxError, ValueError, RecursionError):
                    source = read_source(str(path))
                    self._read[path] = Module.of(source.text, source.name, path)
                    self.files[source.name] = source.text
        return self._read[path]
