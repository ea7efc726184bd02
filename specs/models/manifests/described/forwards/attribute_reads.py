"""Attributes of modules that a forward around them reads, as `self.embedding.weight.dtype` does."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from legoai.specs.models.manifests.described.forwards.restored import attributes_restored
from legoai.specs.models.manifests.described.recorders.dispatched import Dispatched, Operator, first_difference
from legoai.specs.models.torch_internals import attributes_hidden

_CONTENTS: Final = frozenset(
    {
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
        "children",
        "named_children",
        "modules",
        "named_modules",
        "state_dict",
        "get_parameter",
        "get_buffer",
        "get_submodule",
        "__dict__",
        "_parameters",
        "_buffers",
        "_modules",
    }
)
"""Attributes of every module that hold or return others, which a placeholder lacks."""
_OF_EVERY_MODULE: Final = frozenset(dir(nn.Module())) - _CONTENTS
_FILE_OF_MODULE: Final = nn.Module.named_modules.__code__.co_filename
_MOST: Final = 8
"""Reads of one model that are looked for."""


class _Read(NamedTuple):
    reader: nn.Module
    module: nn.Module
    name: str
    at: int
    """The number of operators before it."""


class _Run(NamedTuple):
    operators: list[Operator]
    reads: list[_Read]
    """The reads that found nothing."""
    succeeded: bool = False


class AttributeReads:
    """Reads of attributes of modules by forwards around them, without which these fail or compute something else.

    A stage of a pipeline has placeholders for the modules of other stages, of another class and without attributes of
    theirs. Forward may read them with a fallback, `getattr(block, "scale", 1.0)`: it then computes the same only if its
    operators and their constants are the same.

    Args:
        model: whose forward runs.
        readers: paths of the modules whose forwards run on every stage.
    """

    def __init__(self, model: nn.Module, readers: Collection[str]) -> None:
        self.found: list[tuple[str, str, str]] = []
        """The path of the module that reads, that of the other module, and the attribute; one for equal modules."""
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._readers = frozenset(readers)
        self._replaced = {path: self._holder(path) for path in self._paths.values() if path not in self._readers}
        """The path of the module that a placeholder replaces, by that of each module in it."""
        self._entered: list[nn.Module] = []
        self._allowed: set[tuple[str, type, str]] = set()
        self._whole: list[Operator] | None = None
        self._hidden: frozenset[str] = frozenset()
        self._now = _Run([], [])
        self._is_asking = False

    def read_by(self, inputs: tuple[Any, ...]) -> None:
        """Run a forward that is known to succeed without the attributes, again with each of them that it needs."""
        by_fallback = []
        while len(self.found) < _MOST and (missed := self._missed(inputs)) is not None:
            read, fails = missed
            key = self._key(read)
            self.found.append((key[0], self._paths[read.module], read.name))
            self._allowed.add(key)
            if not fails:
                by_fallback.append((self.found[-1], key))
        for found, key in by_fallback if len(self.found) > 1 else ():
            self._allowed.remove(key)
            if self._missed(inputs) is None:  # another read made the difference
                self.found.remove(found)
            else:
                self._allowed.add(key)
        if not self.found:
            self._ask_classes(inputs)

    def _ask_classes(self, inputs: tuple[Any, ...]) -> None:
        """Note a module whose class forward asks for, by `isinstance`, and which a placeholder has not."""
        holders = {path: module for module, path in self._paths.items() if self._replaced.get(path) == path}
        if not self._asks_classes(inputs, holders):
            return
        for kind in dict.fromkeys(map(type, holders.values())):
            paths = [path for path, module in holders.items() if type(module) is kind]
            alike = {path: holders[path] for path in paths}
            if self._asks_classes(inputs, alike):
                self.found.append(("", next(iter(alike)), "__class__"))

    def _asks_classes(self, inputs: tuple[Any, ...], holders: Mapping[str, nn.Module]) -> bool:
        with _of_other_class(holders.values()):
            run = self._run(inputs, frozenset(holders))
        return not run.succeeded or first_difference(run.operators, self._whole_run(inputs), holders) is not None

    def _whole_run(self, inputs: tuple[Any, ...]) -> list[Operator]:
        """Return the operators of the forward with all attributes."""
        if self._whole is None:
            self._whole = self._run(inputs, frozenset()).operators
        return self._whole

    def _missed(self, inputs: tuple[Any, ...]) -> tuple[_Read, bool] | None:
        """Return a read without which forward fails, or has other operators than with it; and whether it fails.

        Placeholders replace some modules: all that are read here, then the first and the last of them. What these
        compute themselves is computed on other stages.
        """
        run = self._run(inputs, frozenset(self._replaced.values()))
        read = {self._replaced[self._paths[item.module]] for item in run.reads}
        if not read:
            return None
        hidden = [path for path in dict.fromkeys(self._replaced.values()) if path in read]
        half = len(hidden) // 2
        for part in (hidden, hidden[:half], hidden[half:]) if half else (hidden,):
            if part is not hidden:
                run = self._run(inputs, frozenset(part))
            at: int | None = len(run.operators)
            if run.succeeded:
                at = first_difference(run.operators, self._whole_run(inputs), part)
            before = [item for item in run.reads if at is not None and item.at <= at]
            if before:
                key = self._key(before[-1])
                return next(item for item in before if self._key(item) == key), not run.succeeded
        return None

    def _run(self, inputs: tuple[Any, ...], hidden: frozenset[str]) -> _Run:
        """Run the forward without the attributes of some modules."""
        self._hidden = hidden
        dispatched = Dispatched(self._owner)
        self._now = _Run(dispatched.operators, [])
        try:
            with (
                torch.no_grad(),
                attributes_restored(self._model),
                self._noting(),
                dispatched,
                attributes_hidden(self._hides),
            ):
                self._model(*inputs)
        except Exception:
            return self._now
        return self._now._replace(succeeded=True)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note which forwards run."""
        self._entered = []
        handles = []
        for module in self._paths:
            # Before hooks of the model's author, which may read attributes of their module.
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._entered.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._entered.pop()

    def _owner(self) -> str | None:
        """Return the path of the replaced module whose forward runs."""
        paths = (self._paths[module] for module in self._entered)
        return next((self._replaced[path] for path in paths if path in self._replaced), None)

    def _holder(self, path: str) -> str:
        """Return the path of the outermost module around one that is not on every stage."""
        names = path.split(".")
        above = (".".join(names[:count]) for count in range(1, len(names)))
        return next((item for item in above if item not in self._readers), path)

    def _key(self, read: _Read) -> tuple[str, type, str]:
        return self._paths[read.reader], type(read.module), read.name

    def _hides(self, module: nn.Module, name: str, frame: FrameType | None) -> bool:
        """Whether the frame is in a forward around the module, on a stage that may have a placeholder for that."""
        if name in _OF_EVERY_MODULE or self._is_asking or not self._entered:
            return False
        if name in _CONTENTS and (frame is None or frame.f_code.co_filename == _FILE_OF_MODULE):
            return False  # in the forward of `self.parameters()`, and of a call
        reader = self._entered[-1]
        path, above = self._paths.get(module), self._paths[reader]
        if path is None or above not in self._readers or self._replaced.get(path) not in self._hidden:
            return False
        read = _Read(reader, module, name, len(self._now.operators))
        if self._key(read) in self._allowed or not (not above or path.startswith(f"{above}.")):
            return False
        if _is_by_itself(frame, module, reader) or not self._has(module, name):
            return False
        self._now.reads.append(read)
        return True

    def _has(self, module: nn.Module, name: str) -> bool:
        self._is_asking = True
        try:
            return hasattr(module, name)
        finally:
            self._is_asking = False


@contextmanager
def _of_other_class(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules another class, but while their own forward runs."""
    own = {module: type(module) for module in modules}

    class Placeholder(nn.Module):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            object.__setattr__(self, "__class__", own[self])
            try:
                return self(*args, **keywords)
            finally:
                object.__setattr__(self, "__class__", Placeholder)

    try:
        for module in own:
            with suppress(TypeError):  # a class with slots
                object.__setattr__(module, "__class__", Placeholder)
        yield
    finally:
        for module, kind in own.items():
            object.__setattr__(module, "__class__", kind)


def _is_by_itself(frame: FrameType | None, module: nn.Module, reader: nn.Module) -> bool:
    """Whether a method of a module runs, called by the reader's forward."""
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        first = frame.f_locals.get(names[0]) if names else None
        if first is module and _is_method(frame.f_code, type(module)):
            return True
        if first is reader:
            return False
        frame = frame.f_back
    return False


def _is_method(code: CodeType, module_class: type) -> bool:
    """Whether code is that of a method, as a class states it or as it is assigned to the class."""
    if code.co_qualname.rpartition(".")[0] in {item.__qualname__ for item in module_class.__mro__}:
        return True
    return getattr(inspect.getattr_static(module_class, code.co_name, None), "__code__", None) is code
