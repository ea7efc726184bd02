"""Recorder of operator calls."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts operators, under the names of `torch.ops` without their overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator.name().partition("::")[2].partition(".")[0]] += 1
        return operator(*args, **(kwargs or {}))
