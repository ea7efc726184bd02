"""Several optimizers, each over some of the parameters, as one."""

from __future__ import annotations

from typing import Any

import torch

from legoai.runtime.optimizer.sharded import ShardedOptimizer


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers that share their groups and their state with one, for schedules, clipping and checkpoints.

    Args:
        parts: over different parameters; the defaults of the first are those of the whole.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.defaults = parts[0].defaults
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each optimizer update its parameters."""
        assert closure is None, "a closure would compute its gradients again for every optimizer"
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of the same optimizers."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Share the groups and the state of the whole with the parts."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
            if isinstance(part, ShardedOptimizer):
                part.give_state()
