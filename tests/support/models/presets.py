"""Presets of the reference models."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.specs.models.configs import ModelConfig
from legoai.specs.models.families import FAMILIES


def distinct_presets() -> Iterator[tuple[str, str]]:
    """Yield the family and name of every preset; of equal ones only the first."""
    for name, family in FAMILIES.items():
        seen: list[ModelConfig] = []
        for preset, config in family.presets.items():
            if config not in seen:
                seen.append(config)
                yield name, preset
