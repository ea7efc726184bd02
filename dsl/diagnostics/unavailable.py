"""Diagnostic of a model that cannot be inspected, with what its author can do.

It is imported for such models alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from legoai.dsl.diagnostics.codes.names import ModelUnavailable
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.model_names import our_model

if TYPE_CHECKING:
    from legoai.specs.directives.model import Model
    from legoai.specs.models.manifests.manifest import ManifestError
    from legoai.specs.span import Span

_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def unavailable(error: ManifestError, model: Model, place: Span, directory: Path) -> Diagnostic:
    """Return the diagnostic of the model of a plan in a directory."""
    return ModelUnavailable.at(
        place, error.message, label="cannot be looked at", help=_reasons(error, model, directory)
    )


def _reasons(error: ManifestError, model: Model, directory: Path) -> list[str]:
    """Return help for a model that cannot be inspected: the author's own line, not a traceback through LegoAI."""
    if error.kind == "config_missing" and model.target is not None:
        ours = our_model(model.target)
        built_in = [f"`{ours}` is built in"] if ours else []
        return [*built_in, "nothing is downloaded: name the `config.json` of the model, relative to the plan"]
    if error.kind == "config_invalid" and not error.detail:
        return ["name the `config.json` that `transformers` writes beside a model's weights, or correct the file"]
    if error.kind == "unknown_architecture":
        return ['a function of your own builds any model: `model python("package.module:function")`']
    frames = [frame for frame in _FRAME.findall(error.detail) if _is_the_authors(frame[0])]
    if frames:
        file, line, function = frames[-1]
        path = Path(file)
        shown = path.relative_to(directory.resolve()) if path.is_relative_to(directory.resolve()) else path
        return [f"raised in `{function}`, line {line} of {shown}"]
    return [] if not error.detail or _FRAME.search(error.detail) else [error.detail]


def _is_the_authors(file: str) -> bool:
    """Whether a file of a traceback is neither this package's, nor a library's."""
    libraries = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", "<frozen")
    return not file.startswith(str(Path(__file__).resolve().parents[2])) and not any(x in file for x in libraries)
