"""Placeholder for `torch._dynamo`, torch's compiler, until it is really needed.

Hooks of `fully_shard`, checkpoints and optimizers call `torch._dynamo.disable` and `torch._dynamo.graph_break`, since
dynamo might be tracing them; fake tensors read its settings; pipelines know its modules. In a simulation it never
traces, and importing it takes half a second. While a simulation runs, a placeholder serves these calls and settings;
accessing or importing anything else loads the real one.
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
from torch.overrides import BaseTorchFunctionMode

NAME: Final = "torch._dynamo"
SETTINGS: Final = "torch._dynamo.config"
"""A part that needs no other."""
SOURCES: Final = "torch._dynamo.source"
"""A submodule that needs all others; fake tensors derived from real ones import it for names."""

_OF_ONE_BACKEND: Final = 8
"""Compilations of a code object that dynamo allows by default."""


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Prevent the import of dynamo until it is needed; no effect if it is imported already."""
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


@contextlib.contextmanager
def compiled_run_eagerly() -> Iterator[None]:
    """Run what dynamo has compiled as it was written, also within a trace; no effect if it is not imported."""
    if f"{NAME}.eval_frame" not in sys.modules:
        yield
        return
    from torch._dynamo import config

    with torch.compiler.set_stance("force_eager"), config.patch(error_on_nested_fx_trace=False):
        yield


def import_dynamo() -> None:
    """Import dynamo now: before processes are forked, each of which would otherwise import it."""
    importlib.import_module(NAME)


def allow_backends(count: int) -> None:
    """Let dynamo compile the same code for so many backends: its limit is one for all of them."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _OF_ONE_BACKEND * count)


def backend_of(name: str) -> Callable[..., Any]:
    """Return a backend of `torch.compile`; imports dynamo."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def allow_function_modes_in_checkpoints() -> None:
    """Let a traced checkpoint enter and leave torch function modes from here on; no effect unless dynamo traces it.

    To dynamo the stack of modes is a variable from outside of the checkpoint, which must not change there, though the
    stack is as before once the modes are left (PyTorch 2.13). It checks the first change only, which is made here with
    the check off.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(_enter_and_leave_a_mode)


def _enter_and_leave_a_mode() -> None:
    with BaseTorchFunctionMode():
        pass


class _Named:
    """Source of a fake tensor, used only in error messages."""

    def __init__(self, source_name: str) -> None:
        self.source_name = self.name = source_name


class _Drawn(_Named):
    """Whether dynamo has drawn the value; never here."""


class _OfReal(type):
    """Delegates to the real dynamo's class, once it is imported; until then nothing is an instance of it."""

    def __instancecheck__(cls, instance: object) -> bool:
        real = sys.modules.get(f"{NAME}.eval_frame")
        return real is not None and isinstance(instance, real.OptimizedModule)


class _OptimizedModule(metaclass=_OfReal):
    """A compiled module, to one who imported this name while the real dynamo was not there."""


class _Placeholder(types.ModuleType):
    """The module in `sys.modules` under dynamo's name."""

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
        """Return a function unchanged: nothing traces it."""
        if sys.modules.get(NAME) is not self:
            return self.real().disable(function, *rest, **options)  # type: ignore[no-any-return]
        self.kept.append(function)
        return function

    def graph_break(self, msg: str = "") -> None:
        """Break no graph."""
        if sys.modules.get(NAME) is not self:
            self.real().graph_break(msg)

    class trace_rules:  # noqa: N801
        """Whether dynamo is compiling, as process groups query on creation."""

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
        """Restore dynamo's place, and import it."""
        self.leave()
        return importlib.import_module(NAME)

    def leave(self) -> None:
        """Reset everything; code that was not traced here may be traced in a real run."""
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
    """Finds submodules of dynamo in the real one."""

    def __init__(self, placeholder: _Placeholder) -> None:
        self.placeholder = placeholder
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Import the real one, which may import the submodule itself."""
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
        """Leave the submodule as imported."""
        module.__spec__ = self.specs.pop(module.__name__)
