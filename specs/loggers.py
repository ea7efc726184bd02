"""Loggers of other packages, whose warnings concern no plan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

OF_TORCHAO: Final = ("torchao", "torch.utils._pytree")
"""What warns while torchao is imported: of kernels that training does not use, and of how torchao registers its types.
`transformers` imports it for its quantised weights."""


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Limit loggers to errors."""
    before = [(logger, logger.level) for logger in map(logging.getLogger, loggers)]
    try:
        for logger, _ in before:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
