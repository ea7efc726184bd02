"""Construction of the model that a plan names, from any source."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from legoai.specs.models.families import FAMILIES
from legoai.specs.models.manifests.cache import find_module_file
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.models.source import ModelSource


def build_model(source: ModelSource, base_directory: str | Path) -> nn.Module:
    """Build a model; call it under `torch.device("meta")`.

    Args:
        source: the model. A factory's module must be found on `sys.path`.
        base_directory: the plan's, to which a config file is relative.

    Raises:
        ConfigError: a built-in model's preset or fields are wrong.
        ManifestError: it cannot be built.
    """
    if source.kind == "builtin":
        family = FAMILIES[source.target]
        model: nn.Module = getattr(importlib.import_module(family.module), family.class_name)(source.config())
        return model
    if source.kind == "python":
        return _call_factory(source, Path(base_directory))
    from legoai.specs.models import huggingface

    return huggingface.build(Path(base_directory) / source.target, **source.arguments)


def _call_factory(source: ModelSource, base_directory: Path) -> nn.Module:
    module_name, _, attribute = source.target.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            factory = getattr(factory, name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _raised(source, error) from error
        hidden = _hidden_by_library(module_name, base_directory)
        raise ManifestError(
            "factory_not_found",
            f"there is no module {error.name!r} for {source}",
            hidden or "modules are looked for beside the plan, and then among those installed",
        ) from error
    except AttributeError as error:
        if module_name in sys.modules:  # else its own import has failed
            raise ManifestError(
                "factory_not_found",
                f"module {module_name!r} has no {attribute!r}, which {source} names",
                _hidden_by_library(module_name, base_directory) or _defined_in(module_name, attribute),
            ) from error
        raise _raised(source, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(source, error) from error
    try:
        model = factory(**source.arguments)
    except (Exception, SystemExit) as error:
        is_of_the_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
        detail = _arguments_of(factory) if isinstance(error, TypeError) and is_of_the_call else ""
        raise _raised(source, error, detail) from error
    if not isinstance(model, nn.Module):
        raise ManifestError(
            "not_a_module",
            f"{source} returned {type(model).__qualname__}, not a torch.nn.Module",
            "name a function that returns the model, or the model's own class"
            if isinstance(factory, type)
            else f"let `{attribute}` end with `return` and the model, or name another function",
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ManifestError(
                "not_a_module",
                f"{source} has scripted or traced {f'`{path}`' if path else 'the model'}, which no plan can change",
                "return the module itself, without `torch.jit`; a plan's `compile` compiles modules",
            )
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) for tensor in tensors):
            raise ManifestError(
                "not_a_module",
                f"{source} leaves the shapes of `{path or 'root'}` open, a `{type(module).__name__}`",
                "call the model once in the factory, which gives its lazy modules their shapes",
            )
    return model


def _hidden_by_library(module: str, base_directory: Path) -> str:
    """Advice where a module of the factory's name beside the plan is not imported, since Python's library has one."""
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return ""
    if find_module_file(package, [str(base_directory)]) is None:
        return f"`{package}` is a module of Python's own library"
    return f"`{package}` is a module of Python's own library, which comes before the one beside the plan: rename yours"


_MOST_NAMES: Final = 8
"""Names that an error lists."""


def _defined_in(module_name: str, attribute: str) -> str:
    """Return what a plan may have meant that names something a module does not have."""
    module = sys.modules[module_name]
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module_name and not name.startswith("_")
    ]  # fmt: skip
    if close := get_close_matches(attribute, own, 1):
        return f"did you mean `{module_name}:{close[0]}`?"
    listed = ", ".join(f"`{name}`" for name in own[:_MOST_NAMES])
    return f"it defines {listed}{', …' if own[_MOST_NAMES:] else ''}" if own else "it defines no function and no class"


def _arguments_of(factory: Any) -> str:
    """Return what a factory takes that was not called as it must be."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ""
    named = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    shown = ", ".join(f"{item.name} = …" if item.default is item.empty else item.name for item in named)
    return f"the plan gives arguments by name, and the factory takes ({shown}); those with `…` have no default"


def _raised(source: ModelSource, error: BaseException, detail: str = "") -> ManifestError:
    text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    return ManifestError("factory_raised", f"{source} raised {text}", detail or raised_at(error))


def raised_at(error: BaseException) -> str:
    """Return where an exception was raised: in the innermost function outside installed packages and LegoAI.

    Empty where there is none.
    """
    ours = Path(__file__).parent.resolve()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        installed = {"site-packages", "dist-packages", "importlib", "<frozen importlib._bootstrap>"} & set(file.parts)
        if not installed and not file.resolve().is_relative_to(ours) and not frame.filename.startswith("<"):
            return f"raised in `{frame.name}`, at {file.name}:{frame.lineno}"
    return ""
