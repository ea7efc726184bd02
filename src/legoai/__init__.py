"""LegoAI: a declarative schedule language for distributed training.

>>> import legoai
>>> plan = legoai.load("plans/tiny.plan")
>>> plan.mesh.world_size
4
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legoai.api import PlanError, estimate, lint, load, lower, run, solve, verify

__version__ = "0.1.0"
__all__ = ["PlanError", "__version__", "estimate", "lint", "load", "lower", "run", "solve", "verify"]


def __getattr__(name: str) -> Any:
    """Import the API when it is used, since every process of every plan imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from legoai import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """List the API before it was used."""
    return sorted({*globals(), *__all__})
