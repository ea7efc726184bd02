"""Manifests without their start-up: those of built-in models are computed once, others are made without a subprocess.

A subprocess imports torch, and transformers for a Hugging Face config, before it looks at a model: seconds of processor
time for milliseconds of work. A test process that imported both keeps them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from legoai.specs.models.manifests import cache as manifest_cache
from legoai.specs.models.manifests.computed import builtin as computed
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource


@contextlib.contextmanager
def manifests_computed_once() -> Iterator[None]:
    known: dict[str, Manifest] = {}
    compute = computed.computed_manifest

    def remembered(source: ModelSource) -> Manifest:
        # By its text, in which `true` and `1` differ.
        if str(source) not in known:
            known[str(source)] = compute(source)
        return known[str(source)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computed, "computed_manifest", remembered)
        yield


@contextlib.contextmanager
def inspected_in_this_process() -> Iterator[None]:
    """Inspect models here; modules of factories are forgotten, since the next test may have others of their names."""

    def answer(source: ModelSource, base_directory: Path, timeout: float, *, steps: bool) -> dict[str, Any]:
        inspect = importlib.import_module("legoai.specs.models.inspect")
        names = ("kind", "target", "preset", "arguments")
        request = {name: getattr(source, name) for name in names}
        path, known = list(sys.path), set(sys.modules)
        try:
            return inspect.answer({**request, "base_directory": str(base_directory), "sys_path": [], "steps": steps})
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - known:
                file = Path(getattr(sys.modules[name], "__file__", None) or "/")
                # A checkout may hold the environment, whose libraries cannot be imported twice.
                if file.is_relative_to(base_directory) and "site-packages" not in file.parts:
                    del sys.modules[name]
            importlib.invalidate_caches()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_cache, "_ask", answer)
        yield
