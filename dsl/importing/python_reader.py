"""Values that a Python function builds a config from, found without importing or running anything.

Functions of TorchTitan's config registries call config classes and each other, and assign to fields of what these
return. This part of Python is evaluated: constants and arithmetic, local names, fields, calls, conditions and loops
over what is known, and functions of other files that lie where an import says. Anything else is an :class:`Unread`
value.
"""

from __future__ import annotations

import ast
import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from legoai.dsl.importing.python_modules import SAY_ALL, Module, Modules
from legoai.dsl.importing.python_values import (
    ARITHMETIC,
    COMPARED,
    MOST_ITEMS,
    Made,
    Unread,
    Value,
    combined,
    computed,
    copied,
    dotted,
    is_config,
    items,
    loaded,
)
from legoai.specs.span import Span

_MOST_STEPS: Final = 100_000
_MOST_DEPTH: Final = 40
_BUILTINS: Final[Mapping[str, Callable[..., Any]]] = {
    "len": len, "min": min, "max": max, "int": int, "float": float, "bool": bool, "list": list, "tuple": tuple,
    "dict": dict, "round": round, "abs": abs,
}  # fmt: skip
_HARMLESS: Final = frozenset({
    "print", "isinstance", "issubclass", "hasattr", "type", "repr", "str", "id", "logger", "logging", "warnings",
})  # fmt: skip
"""What a config is given to without a change; for a module, its functions."""
_DECORATORS: Final = frozenset({"functools.cache", "functools.lru_cache"})


_CODE: Final = Unread("code of its own")
"""A function or class that is defined inside of a function."""


class NotFollowedError(Exception):
    """A function contains what is not evaluated."""

    def __init__(self, span: Span, why: str) -> None:
        super().__init__(why)
        self.span = span


class Reader:
    """Evaluates functions of a file, and of those that it imports.

    Attributes:
        modules: the files.
        skipped: statements that may change a config and that were not evaluated.
    """

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.skipped: list[tuple[Span, str]] = []
        self._constants: dict[int, Value] = {}
        """Values by the expressions of the syntax trees, which live as long."""
        self._steps = 0
        self._depth = 0

    def call(self, name: str) -> Value:
        """What a function of the file returns without arguments.

        Raises:
            NotFollowedError: it contains what is not evaluated.
        """
        module = self.modules.first
        found = self.modules.function(module, name)
        assert found is not None
        return self._run(*found, [], {})

    def _run(self, function: ast.FunctionDef, module: Module, given: list[Value], named: dict[str, Value]) -> Value:
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if self.modules.origin(module, dotted(called) or "") not in _DECORATORS:
                why = f"`{function.name}` is decorated by `{ast.unparse(decorator)}`"
                raise NotFollowedError(module.span(function), why)
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NotFollowedError(module.span(function), f"`{function.name}` calls itself, or too many others")
        try:
            return _Call(self, module, self._bound(function, module, given, named)).returned(function.body)
        finally:
            self._depth -= 1

    def _bound(
        self, function: ast.FunctionDef, module: Module, given: list[Value], named: dict[str, Value]
    ) -> dict[str, Value]:
        """The values of a function's parameters."""
        takes = function.args
        plain = [*takes.posonlyargs, *takes.args]
        defaults = dict(zip((one.arg for one in reversed(plain)), reversed(takes.defaults), strict=False))
        defaults |= {
            one.arg: value for one, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if value is not None
        }
        found: dict[str, Value] = dict(zip((one.arg for one in plain), given, strict=False))
        every = [*plain, *takes.kwonlyargs]
        own = {one.arg for one in every}
        found |= {name: value for name, value in named.items() if name in own}
        if takes.vararg is not None:
            found[takes.vararg.arg] = given[len(plain) :]
        if takes.kwarg is not None:
            found[takes.kwarg.arg] = {name: value for name, value in named.items() if name not in own}
        for one in every:
            if one.arg not in found and one.arg in defaults:
                found[one.arg] = self.constant(defaults[one.arg], module)
        missing = [one.arg for one in every if one.arg not in found]
        if missing:
            raise NotFollowedError(module.span(function), f"`{function.name}` has the argument `{missing[0]}`")
        return found

    def step(self, span: Span) -> None:
        """Count an evaluation.

        Raises:
            NotFollowedError: there are too many.
        """
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise NotFollowedError(span, "it takes too many steps")

    def called(self, found: tuple[ast.FunctionDef, Module], call: Made) -> Value:
        """What a function returns; unread where it contains what is not evaluated."""
        try:
            return self._run(*found, call.arguments, call.options)
        except NotFollowedError as error:
            if self._steps > _MOST_STEPS:
                raise
            if any(map(is_config, (*call.arguments, *call.options.values()))):
                self.skipped.append((call.span, f"{call.name}(…)"))
            return Unread(f"made by `{found[0].name}`, which is not followed: {error} ({error.span})")

    def constant(self, value: ast.expr, module: Module) -> Value:
        """The value of a constant of a file, or of a default, which is the same for every use.

        Raises:
            NotFollowedError: it is defined by itself.
        """
        if id(value) in self._constants:
            return self._constants[id(value)]
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NotFollowedError(module.span(value), "a constant is defined by itself")
        try:
            found = self._constants[id(value)] = _Call(self, module, {}).value(value)
            return found
        finally:
            self._depth -= 1


class _Call:
    """One call of a function, with its local names."""

    def __init__(self, reader: Reader, module: Module, names: dict[str, Value]) -> None:
        self.reader = reader
        self.module = module
        self.names = names

    def returned(self, body: list[ast.stmt]) -> Value:
        """What the statements return."""
        return next(self._executed(body), None)

    def _executed(self, body: list[ast.stmt]) -> Iterator[Value]:
        """Execute statements, up to the first that returns; yield what it does."""
        for statement in body:
            self.reader.step(self.module.span(statement))
            match statement:
                case ast.Return(value=value):
                    yield None if value is None else self.value(value)
                    return
                case ast.Assign(targets=targets, value=value):
                    assigned = self.value(value)
                    for target in targets:
                        self._assign(target, assigned, statement)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, self.value(value), statement)
                case ast.AugAssign(target=target, op=op, value=value):
                    before, more = self.value(loaded(target)), self.value(value)
                    if isinstance(before, list) and isinstance(op, ast.Add) and isinstance(more, list):
                        before += more  # in place: other names of the list have them too
                        self._limit(before, statement)
                    else:
                        self._assign(target, self._computed(op, before, more), statement)
                case ast.Expr(value=ast.Call() as call):
                    self._apply(call, statement)
                case ast.If(test=test, body=then, orelse=otherwise):
                    yield from self._executed(then if self._known(test) else otherwise)
                case ast.For(target=target, iter=many, body=inner, orelse=[]):
                    for item in self._known(many):
                        self._assign(target, item, statement)
                        yield from self._executed(inner)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self.names[name] = _CODE
                case ast.Assert() | ast.Pass() | ast.Import() | ast.ImportFrom() | ast.AnnAssign() | ast.Expr():
                    pass
                case _:
                    what = type(statement).__name__.lower()
                    raise NotFollowedError(self.module.span(statement), f"a statement `{what}` is not evaluated")

    def _known(self, test: ast.expr) -> Any:
        """A value on which it depends what is executed."""
        found = self.value(test)
        if isinstance(found, Unread | Made):
            why = found.why if isinstance(found, Unread) else found.unread.why
            raise NotFollowedError(self.module.span(test), f"`{ast.unparse(test)}` is {why}")
        return found

    def _assign(self, target: ast.expr, value: Value, statement: ast.stmt) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Attribute(value=holder, attr=name):
                held = self.value(holder, create=True)
                if isinstance(held, Made):
                    held.put(name, value, self.module.span(statement))
                else:
                    self._skip(statement)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) if isinstance(value, list) and len(value) == len(parts):
                for part, item in zip(parts, value, strict=True):
                    self._assign(part, item, statement)
            case _:
                self._skip(statement)

    def _apply(self, call: ast.Call, statement: ast.stmt) -> None:
        """A call for its effects: of another function with the config, or of a list's method."""
        skipped = len(self.reader.skipped)
        found = self.value(call)
        if isinstance(found, Unread | Made) and len(self.reader.skipped) == skipped:
            if (dotted(call.func) or "").partition(".")[0] in _HARMLESS:
                return
            touched = (self.names.get(node.id) for node in ast.walk(call) if isinstance(node, ast.Name))
            if any(isinstance(one, Made | list | dict) for one in touched):
                self._skip(statement)

    def _skip(self, statement: ast.stmt) -> None:
        self.reader.skipped.append((self.module.span(statement), ast.unparse(statement)))

    def value(self, node: ast.expr, *, create: bool = False) -> Value:
        """The value of an expression; with ``create``, fields that are not there yet are made."""
        self.reader.step(self.module.span(node))
        try:
            return self._value(node, create=create)
        except (ArithmeticError, TypeError, ValueError, LookupError) as error:
            return Unread(f"not computed: {error}")

    def _value(self, node: ast.expr, *, create: bool) -> Value:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as found):
                return found
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute():
                return self._field(node, create=create)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                listed = self._listed(parts)
                self._limit(listed, node)
                return listed
            case ast.Dict(keys=keys, values=values):
                made = self._dictionary(keys, values)
                self._limit(made, node)
                return made
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return combined(operator.neg, self.value(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return combined(operator.not_, self.value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._computed(op, self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                one, other = self.value(left), self.value(right)
                if isinstance(op, ast.Is | ast.IsNot):  # of a config too, which is itself and no other value
                    unread = next((each for each in (one, other) if isinstance(each, Unread)), None)
                    return unread or (one is other) == isinstance(op, ast.Is)
                return combined(COMPARED[type(op)], one, other)
            case ast.BoolOp(op=op, values=parts):
                return self._joined(parts, until=isinstance(op, ast.Or))
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                chosen = self.value(test)
                return chosen if isinstance(chosen, Unread) else self.value(then if chosen else otherwise)
            case ast.Subscript(value=held, slice=index):
                return combined(operator.getitem, self.value(held), self.value(index))
            case ast.JoinedStr(values=parts) if all(isinstance(part, ast.Constant) for part in parts):
                return "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            case ast.Call():
                return self._called(node)
        return Unread(f"`{ast.unparse(node)}`, which is not evaluated")

    def _computed(self, op: ast.operator, left: Value, right: Value) -> Value:
        if type(op) not in ARITHMETIC:
            return Unread("arithmetic that is not evaluated")
        return combined(computed, op, left, right)

    def _limit(self, found: Value, node: ast.expr | ast.stmt, *, last: Value = None) -> None:
        """Raise where a list has more items than a config has reason to have, with those of the lists in it.

        ``last`` is an item that was added to it, if it was within the limit before; a number or text adds no others.
        """
        is_nested = last is None or isinstance(last, list | dict)
        count = sum(1 for _ in itertools.islice(items(found), MOST_ITEMS + 1)) if is_nested else 0
        if count > MOST_ITEMS or (isinstance(found, list | dict) and len(found) > MOST_ITEMS):
            raise NotFollowedError(self.module.span(node), "a list that is too long")

    def _named(self, name: str) -> Value:
        if name in self.names:
            return self.names[name]
        if self.reader.modules.is_changed(self.module, name):
            return Unread(f"`{name}`, which the file changes by a statement that is not followed")
        constant = self.reader.modules.constant(self.module, name)
        if constant is not None:
            return self.reader.constant(*constant)
        return Unread(f"`{name}`, which is not evaluated")

    def _field(self, node: ast.Attribute, *, create: bool) -> Value:
        name = dotted(node)
        if name is not None and name.partition(".")[0] not in self.names:
            constant = self.reader.modules.constant(self.module, name)
            if constant is not None:
                return self.reader.constant(*constant)
        held = self.value(node.value, create=create)
        if not isinstance(held, Made):
            return Unread(f"`{ast.unparse(node)}`, which is not evaluated")
        if node.attr not in held.options:
            if not create:
                return Unread(f"`{ast.unparse(node)}`, which has its default")
            span = self.module.span(node)
            held.put(node.attr, Made("", span), span)
        return held.options[node.attr]

    def _listed(self, parts: list[ast.expr]) -> list[Value]:
        found: list[Value] = []
        if len(parts) > MOST_ITEMS:
            raise NotFollowedError(self.module.span(parts[0]), "a list that is too long")
        for part in parts:
            if isinstance(part, ast.Starred):
                many = self.value(part.value)
                found += many if isinstance(many, list) else [Unread(f"`{ast.unparse(part)}`, which is not evaluated")]
            else:
                found.append(self.value(part))
        return found

    def _dictionary(self, keys: list[ast.expr | None], values: list[ast.expr]) -> Value:
        found: dict[Any, Value] = {}
        for key, value in zip(keys, values, strict=True):
            held = self.value(value)
            if key is None:
                if not isinstance(held, dict):
                    return Unread(f"made of `{ast.unparse(value)}`, which is not evaluated")
                found |= held
            else:
                found[self.value(key)] = held
        return found

    def _joined(self, parts: list[ast.expr], *, until: bool) -> Value:
        found: Value = None
        for part in parts:
            found = self.value(part)
            if isinstance(found, Unread) or bool(found) == until:
                return found
        return found

    def _called(self, node: ast.Call) -> Value:
        given = self._listed(node.args)
        named: dict[str, Value] = {}
        spans: dict[str, Span] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg], spans[keyword.arg] = value, self.module.span(keyword)
            elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
                named |= value
            else:
                return Unread(f"called with `{ast.unparse(keyword)}`, which is not evaluated")
        name = dotted(node.func)
        first, dot, _ = (name or "").partition(".")
        if name is None or first in self.names or (dot and self.reader.modules.constant(self.module, first)):
            return self._method(node, given, named)
        made = Made(name, self.module.span(node), given, named=named)
        for option, value in named.items():
            made.put(option, value, spans.get(option, made.span))
        return self._of_function(made)

    def _of_function(self, call: Made) -> Value:
        """What a function or class returns that has no local name."""
        modules, given = self.reader.modules, call.arguments
        found = modules.function(self.module, call.name)
        if found is not None:
            return self.reader.called(found, call)
        match modules.origin(self.module, call.name):
            case "copy.deepcopy" if len(given) == 1:
                whole: Value = copy.deepcopy(given[0])
                return whole
            case "copy.copy" if len(given) == 1:
                return copied(given[0])
            case "typing.cast" if len(given) == 2:
                return given[1]
            case "dataclasses.replace" if len(given) == 1 and isinstance(given[0], Made):
                changed = copied(given[0])
                assert isinstance(changed, Made)
                for option, value in call.options.items():
                    changed.put(option, value, call.spans[option])
                return changed
            case "range" if all(isinstance(one, int) and abs(one) <= MOST_ITEMS for one in given):
                return list(range(*given))  # type: ignore[arg-type]
            case name if name in _BUILTINS and "." not in call.name:
                return combined(_BUILTINS[name], *given, **call.options)
        if modules.constant(self.module, call.name) is not None or modules.is_changed(self.module, call.name):
            return Unread(f"what `{call.name}` returns, which is not followed")
        if modules.is_own_class(self.module, call.name):
            return Unread(f"of `{call.name}`, a class whose defaults are not read")
        is_class = call.name.endswith("Config") or modules.origin(self.module, call.name).rpartition(".")[2] in SAY_ALL
        is_known = is_class or call.name.partition(".")[0] in _HARMLESS
        if not is_known and any(map(is_config, (*given, *call.options.values()))):
            self.reader.skipped.append((call.span, f"{call.name}(…)"))
        return call

    def _method(self, node: ast.Call, given: list[Value], named: dict[str, Value]) -> Value:
        """A call of a method: of a list, where it is known what it does."""
        if isinstance(node.func, ast.Name) and self.names.get(node.func.id) is _CODE:
            raise NotFollowedError(self.module.span(node), f"`{node.func.id}` is defined inside of a function")
        if isinstance(node.func, ast.Attribute):
            held, name = self.value(node.func.value), node.func.attr
            if isinstance(held, list) and name in ("append", "extend", "insert", "remove"):
                getattr(held, name)(*given)
                self._limit(held, node, last=given[-1])
                return None
            if isinstance(held, dict) and name in ("get", "update"):
                found: Value = getattr(held, name)(*given, **named)
                self._limit(held, node)
                return found
        return Unread(f"`{ast.unparse(node)}`, which is not evaluated")
