"""The directive families of the language: a table from keyword to the model that declares it.

A family is imported when a plan uses it, since linting a plan must not pay for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast

from legoai.specs.directives.base import Directive

FAMILIES: Final[dict[str, tuple[str, str]]] = {
    "model": ("model", "Model"),
    "cluster": ("cluster", "ClusterUse"),
    "batch": ("batch", "Batch"),
    "mesh": ("mesh", "Mesh"),
    "shard": ("shard", "Shard"),
    "fsdp": ("fsdp", "Fsdp"),
    "replicate": ("replicate", "ReplicateUse"),
    "pipeline": ("pipeline", "Pipeline"),
    "context": ("context", "Context"),
    "checkpoint": ("checkpoint", "Checkpoint"),
    "comm": ("comm", "Comm"),
    "offload": ("offload", "Offload"),
    "allocator": ("allocator", "Allocator"),
    "precision": ("precision", "Precision"),
    "attention": ("attention", "Attention"),
    "loss": ("loss", "Loss"),
    "compile": ("compile", "Compile"),
    "optimizer": ("optimizer", "Optimizer"),
    "clip": ("clip", "Clip"),
    "schedule": ("schedule", "Schedule"),
    "data": ("run", "Data"),
    "weights": ("run", "Weights"),
    "steps": ("run", "Steps"),
    "seed": ("run", "Seed"),
    "save": ("run", "Save"),
    "evaluate": ("run", "Evaluate"),
}
"""Keyword to the module and class of its model, in the order in which the reference lists them."""

REQUIRED: Final = ("model", "cluster", "batch")
"""Statements that every plan must have."""

DEFAULTED: Final = ("mesh", "precision", "attention", "loss", "optimizer", "schedule")
"""Statements that take effect with their defaults where a plan omits them."""


def family(keyword: str) -> type[Directive]:
    """The model of the directive that begins with ``keyword``, which must be one of :data:`FAMILIES`."""
    module, name = FAMILIES[keyword]
    return cast(type[Directive], getattr(import_module(f"legoai.specs.directives.{module}"), name))
