"""Limit of memory within which some units of a small plan stay unsharded and others do not.

Which units fit is decided by the memory curve of the step's graph. So the graph is traced, by one rank of a world of
fake processes, and rewritten for several limits.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from legoai.lowering.program import Program
from legoai.lowering.verify.processes import Job, JobError, Processes
from legoai.lowering.verify.run import SEED, STUCK_SECONDS, import_before_the_fork, settle

_LIMITS: Final = 16
_UNLIMITED: Final = 2**62


def dividing_limit(program: Program, world: int, *, least: int) -> int | None:
    """Return a limit with which about half of a program's units stay unsharded that could; None where all or none do.

    Args:
        program: of a small plan with `unshard = selective`.
        world: ranks of its mesh.
        least: bytes that any step takes.
    """
    import_before_the_fork(program.text)
    with tempfile.TemporaryDirectory(prefix="legoai-verify-") as scratch:
        job: Job = _Limits(program.text, world, Path(scratch), least)
        try:
            with Processes({"memory": job}, Path(scratch), silence=STUCK_SECONDS, watch=lambda _: None) as processes:
                [found] = processes.results(["memory"])
        except JobError:
            return None  # the ranks fail likewise, and report it
    return None if found is None else int(found)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The graph of a program's step under several limits."""

    text: str
    world: int
    folder: Path
    least: int

    def __call__(self, tell: Callable[[str], None], hear: Callable[[], Any]) -> int | None:
        import torch.distributed as dist

        from legoai.lowering.graph import StepGraph, rewritten, unshard_selectively
        from legoai.lowering.graph.passes.memory import held
        from legoai.runtime.device import Device
        from legoai.runtime.torch_internals.distributed.fake_world import FakeStore

        settle(self.folder, None)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.world)
        namespace: dict[str, Any] = {"__name__": "program"}
        exec(compile(self.text, "program.py", "exec"), namespace)
        passes, namespace["PASSES"] = namespace["PASSES"], ()
        training = namespace["trainer"]().prepare(Device(type="cpu"), seed=SEED)
        [index] = [place for place, item in enumerate(passes) if _function(item) is unshard_selectively]
        graph = rewritten(training.step_graph, passes[:index])
        options = passes[index].keywords

        def under(limit: int) -> StepGraph:
            trial = graph.copied()
            unshard_selectively(trial, **{**options, "limit": limit})
            return trial

        whole = under(_UNLIMITED)
        least, most = self.least, max(held(whole, options["moments"]))
        few, many = _stay(under(least)), _stay(whole)
        limits = [most - (most - least) * part // _LIMITS for part in range(1, _LIMITS)]
        staying = {limit: _stay(under(limit)) for limit in limits}
        dividing = [limit for limit in limits if few < staying[limit] < many]
        return min(dividing, key=lambda limit: abs(2 * staying[limit] - few - many), default=None)


def _function(rewrite: Any) -> Any:
    return rewrite.func if isinstance(rewrite, functools.partial) else rewrite


def _stay(graph: Any) -> int:
    """Return how often units stay unsharded, after forward and after backward."""
    return sum(2 - unit.reshard_after_forward - unit.reshard_after_backward for unit in graph.units)
