"""Wrappers of a module, which add a segment to the paths of what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WRAPPERS: Final[Mapping[str, str]] = {"_checkpoint_wrapped_module": "checkpoint", "_orig_mod": "compile"}
"""Segments that activation checkpointing and `torch.compile` add, each with the statement of a plan that does it."""
