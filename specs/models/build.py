"""Construction of the model that a plan names, from any source."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

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
        missing = f"there is no module {error.name!r} for {source}"
        raise ManifestError("factory_not_found", missing, _hidden_by_library(module_name, base_directory)) from error
    except AttributeError as error:
        if isinstance(getattr(error, "obj", None), type(sys)) or sys.modules.get(module_name) is not None:
            raise ManifestError(
                "factory_not_found",
                f"module {module_name!r} has no {attribute!r}, which {source} names",
                _hidden_by_library(module_name, base_directory),
            ) from error
        raise _raised(source, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(source, error) from error
    try:
        model = factory(**source.arguments)
    except (Exception, SystemExit) as error:
        raise _raised(source, error) from error
    if not isinstance(model, nn.Module):
        raise ManifestError("not_a_module", f"{source} returned {type(model).__qualname__}, not a torch.nn.Module")
    return model


def _hidden_by_library(module: str, base_directory: Path) -> str:
    """Advice where a module of the factory's name beside the plan is not imported, since Python's library has one."""
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return ""
    if find_module_file(package, [str(base_directory)]) is None:
        return f"`{package}` is a module of Python's own library"
    return f"`{package}` is a module of Python's own library, which comes before the one beside the plan: rename yours"


def _raised(source: ModelSource, error: BaseException) -> ManifestError:
    text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    return ManifestError("factory_raised", f"{source} raised {text}", raised_at(error))


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
