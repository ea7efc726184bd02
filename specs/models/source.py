"""Source of a plan's model: a built-in family, a Python factory, or a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from legoai.specs.models.config_checks import Scalar
from legoai.specs.models.configs import ModelConfig
from legoai.specs.models.families import resolve_config

SourceKind = Literal["builtin", "python", "huggingface"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as a plan names it, before anything is built.

    | kind | target | preset | arguments |
    |---|---|---|---|
    | `builtin` | a family: `llama3` | a preset of the family, or None | override config fields |
    | `python` | `pkg.mod:build` | None | keyword arguments of the factory |
    | `huggingface` | path of a `config.json` | None | override fields of that file |
    """

    kind: SourceKind
    target: str
    preset: str | None = None
    arguments: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.kind == "builtin" or self.preset is None, "only built-in families have presets"

    def __hash__(self) -> int:
        return hash((self.kind, self.target, self.preset, tuple(sorted(self.arguments.items()))))

    def __str__(self) -> str:
        """Write the source as a plan does: `llama3("8b", n_layers = 4)`, `python("m:build", depth = 2)`."""
        name, first = (self.target, self.preset) if self.kind == "builtin" else (self.kind, self.target)
        parts = [] if first is None else [_plan_text(first)]
        parts += [f"{key} = {_plan_text(value)}" for key, value in sorted(self.arguments.items())]
        return f"{name}({', '.join(parts)})"

    def config(self) -> ModelConfig:
        """Return the config of a built-in model.

        Raises:
            ConfigError: see `resolve_config`.
        """
        assert self.kind == "builtin", "only built-in models have a config of ours"
        return resolve_config(self.target, self.preset, self.arguments)


def _plan_text(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
