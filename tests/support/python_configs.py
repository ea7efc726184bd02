"""TorchTitan configs in Python, read from texts."""

from __future__ import annotations

from pathlib import Path

from legoai.dsl.importing.config import Config
from legoai.dsl.importing.python_config import read_python

HEAD = """\
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer
"""


def read(text: str, function: str | None = None, path: Path | None = None, **settings: str) -> Config:
    return read_python(text, "runs.py", path, function, {name.replace("__", "."): to for name, to in settings.items()})


def config_of(body: str, **settings: str) -> Config:
    """The config of a function with these statements, beside a model."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = f'{HEAD}def a() -> Trainer.Config:\n    config = Trainer.Config(model_spec=model_registry("8B"))\n{lines}'
    return read(f"{text}    return config\n", **settings)
