"""Placeholder of `torch._dynamo`, torch's compiler, until something really needs it.

Hooks of `fully_shard`, checkpoints and optimizers call `torch._dynamo.disable` and `torch._dynamo.graph_break`, since
dynamo might be tracing them; fake tensors read its settings; pipelines know its modules. In a simulation it never
traces, and importing it takes half a second. While a simulation runs, a placeholder answers these calls and has the
settings; whatever else is asked of it, or imported from it, brings the real one.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

import torch

NAME: Final = "torch._dynamo"
SETTINGS: Final = "torch._dynamo.config"
"""A part that needs no other."""
SOURCES: Final = "torch._dynamo.source"
"""A part that needs all others, by which fake tensors that are made of real ones are named."""


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep dynamo from being imported until something needs it; where it is there already, nothing changes."""
    if NAME in sys.modules:
        yield
        return
    placeholder = _Placeholder(NAME)
    sys.modules[NAME], sys.modules[SOURCES] = placeholder, placeholder.sources
    torch._dynamo = placeholder
    sys.meta_path.insert(0, placeholder.finder)
    try:
        yield
    finally:
        placeholder.leave()


def import_dynamo() -> None:
    """Import dynamo now: before processes are forked, each of which would else import it by itself."""
    importlib.import_module(NAME)


class _Named:
    """Where a fake tensor is from, of which only an error would tell."""

    def __init__(self, source_name: str) -> None:
        self.source_name = self.name = source_name


class _Drawn(_Named):
    """That it is a value which dynamo drew, as none is here."""


class _OfReal(type):
    """Asks the real dynamo, where it is there; until then nothing is an instance of its classes."""

    def __instancecheck__(cls, instance: object) -> bool:
        real = sys.modules.get(f"{NAME}.eval_frame")
        return real is not None and isinstance(instance, real.OptimizedModule)


class _OptimizedModule(metaclass=_OfReal):
    """A compiled module, to one who imported this name while the real dynamo was not there."""


class _Placeholder(types.ModuleType):
    """The module that stands in `sys.modules` under dynamo's name."""

    OptimizedModule = _OptimizedModule

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        self.finder = _Finder(self)
        self.kept: list[Any] = []
        self.sources = types.ModuleType(SOURCES)
        vars(self.sources).update(ConstantSource=_Named, RandomValueSource=_Drawn, __getattr__=self.source)

    def source(self, name: str) -> Any:
        """Return another kind of source, from the real dynamo."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.real()
        return getattr(importlib.import_module(SOURCES), name)

    def disable(self, function: Callable[..., Any], *rest: Any, **options: Any) -> Callable[..., Any]:
        """Return a function as it is: nobody traces it."""
        if sys.modules.get(NAME) is not self:
            return self.real().disable(function, *rest, **options)  # type: ignore[no-any-return]
        self.kept.append(function)
        return function

    def graph_break(self, msg: str = "") -> None:
        """Break no graph."""
        if sys.modules.get(NAME) is not self:
            self.real().graph_break(msg)

    class trace_rules:  # noqa: N801
        """What process groups ask when they are made."""

        @staticmethod
        def clear_lru_cache() -> None:
            """Forget nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "config":
            return importlib.import_module(SETTINGS)
        return getattr(self.real(), name)

    def real(self) -> types.ModuleType:
        """Give dynamo its place, and import it."""
        self.leave()
        return importlib.import_module(NAME)

    def leave(self) -> None:
        """Leave no trace; what was not traced may be in a real run."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            del torch._dynamo
            for part in (SETTINGS, SOURCES):
                sys.modules.pop(part, None)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        for function in self.kept:
            function.__dict__.pop("__dynamo_disable", None)
        self.kept.clear()


class _Finder(MetaPathFinder, Loader):
    """Finds parts of dynamo in the real one."""

    def __init__(self, placeholder: _Placeholder) -> None:
        self.placeholder = placeholder
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Bring the real one, which may import the part by itself."""
        if not name.startswith(f"{NAME}.") or name == SETTINGS:
            return None
        self.placeholder.real()
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return the real part, which is imported only once."""
        module = importlib.import_module(spec.name)
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Let it be as it was imported."""
        module.__spec__ = self.specs.pop(module.__name__)
