"""Type of the function that emits one directive family."""

from __future__ import annotations

from collections.abc import Callable

from legoai.lowering.emit.base import Draft, Lowering

Emit = Callable[[Lowering, Draft], None]
