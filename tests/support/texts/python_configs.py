"""TorchTitan configs in Python, read from texts."""

from __future__ import annotations

from pathlib import Path

from legoai.dsl.importing.config import Config
from legoai.dsl.importing.python_config import read_python

HEAD = """\
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer
"""
MADE = 'Trainer.Config(model_spec=model_registry("8B"), optimizer=default_adamw())'


def read(text: str, function: str | None = None, path: Path | None = None, **settings: str) -> Config:
    return read_python(text, "runs.py", path, function, {name.replace("__", "."): to for name, to in settings.items()})


def config_of(body: str, **settings: str) -> Config:
    """The config of a function with these statements, beside a model and an optimizer."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return read(f"{HEAD}def a() -> Trainer.Config:\n    config = {MADE}\n{lines}    return config\n", **settings)
