"""Subprocess that builds a model on the meta device and writes its manifest.

    python -m legoai.specs.models.inspect < request.json

A request is an object with `kind`, `target`, `preset`, `arguments` (see `ModelSource`), `base_directory`, `steps` (see
`load_manifest`), `sys_path`, `reply`, the file to write, and the limits of the process: `timeout` in seconds, and
`parent`, the descriptor of a pipe that the asking process holds open. The reply is `{"manifest": ..., "dependencies":
[[file, fingerprint], ...], "environment": [name, ...]}` or `{"error": {"kind": ..., "message": ..., "detail": ...}}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from threading import Thread
from typing import Any

from legoai.specs.models.build import build_model, raised_at
from legoai.specs.models.first_values import construct
from legoai.specs.models.import_path import add_author_folder, author_folder
from legoai.specs.models.manifests.dependency_recorder import DependencyRecorder
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.manifest import Manifest, ManifestError
from legoai.specs.models.source import ModelSource
from legoai.specs.models.torch_internals import autocast_without_device, import_compiler


def inspect_model(source: ModelSource, base_directory: Path, *, steps: bool = False) -> Manifest:
    """Build a model on the meta device and describe it; see `load_manifest`.

    Raises:
        ManifestError: it cannot be built.
    """
    with autocast_without_device():  # a constructor may make one, and a decorator at import
        model, first_values = construct(lambda: build_model(source, base_directory))
    if source.kind == "huggingface":
        # Without a cache, masking reads positions to look for packed sequences; meta tensors have no values.
        config: Any = model.config
        config.use_cache = True
    return describe(model, str(source), first_values, shapes=source.kind != "builtin", steps=steps)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serve a request; see the module docstring."""
    base_directory = Path(request["base_directory"])
    source = ModelSource(**{name: request[name] for name in ("kind", "target", "preset", "arguments")})
    add_author_folder(author_folder(source.kind, base_directory), others=request["sys_path"])
    recorder = DependencyRecorder(source.target.partition(":")[0].partition(".")[0])
    import_compiler()  # what torch reads is no factory's
    try:
        with recorder if source.kind == "python" else contextlib.nullcontext():
            made = inspect_model(source, base_directory, steps=request["steps"])
    except ManifestError as error:
        return {"error": {"kind": error.kind, "message": error.message, "detail": error.detail}}
    except Exception as error:
        message = f"{source} could not be inspected: {type(error).__name__}: {error}"
        return {"error": {"kind": "inspection_failed", "message": message, "detail": raised_at(error)}}
    return {
        "manifest": json.loads(made.to_json()),
        "dependencies": recorder.files,
        "environment": recorder.environment,
    }


def _end_with_parent(parent: int, timeout: float) -> None:
    """End this session once the asking process has ended, and this process after ``timeout`` at the latest.

    The asking process cannot: a signal may end it at any time, and this one is in a session of its own.
    """
    signal.setitimer(signal.ITIMER_REAL, timeout)  # by its default it ends a process that is in no Python code, too

    def watch() -> None:
        os.read(parent, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serve the request on standard input, and end without waiting for threads that a factory has left."""
    request = json.load(sys.stdin)
    _end_with_parent(request["parent"], request["timeout"])
    Path(request["reply"]).write_text(json.dumps(answer(request)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
