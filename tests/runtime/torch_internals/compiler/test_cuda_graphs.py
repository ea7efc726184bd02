"""CUDA graphs of compiled modules end before the process group whose collectives they contain."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed as dist

from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.process_group import process_group
from legoai.runtime.torch_internals.compiler.cuda_graphs import drop_cuda_graphs
from support.simulation.simulated import in_a_fork

TREES = "torch._inductor.cudagraph_trees"


class UserError(Exception):
    """Of a program on one rank."""


def ended(error: BaseException | None) -> list[str]:
    """What is ended at the end of a run that has recorded graphs, in order."""
    done: list[str] = []
    destroy = dist.destroy_process_group
    trees = types.SimpleNamespace(reset_cudagraph_trees=lambda: done.append("graphs"))

    def destroyed() -> None:
        done.append("groups")
        destroy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, TREES, trees)
        patch.setattr(torch.compiler, "reset", lambda: done.append("compiled code"))
        patch.setattr(dist, "destroy_process_group", destroyed)
        try:
            with process_group(Device(type="cpu"), timeout_seconds=7.0):
                if error is not None:
                    raise error
        except (RunError, UserError, KeyboardInterrupt):
            pass
    return done


@pytest.mark.parametrize(
    "error", [None, RunError(RunErrorCode.NOT_FINITE, "a loss"), UserError(), KeyboardInterrupt()], ids=repr
)
def test_graphs_end_before_the_groups(error: BaseException | None):
    assert in_a_fork(ended, error) == ["graphs", "compiled code", "groups"]


def imported() -> set[str]:
    with process_group(Device(type="cpu"), timeout_seconds=7.0):
        before = set(sys.modules)
    return {name for name in set(sys.modules) - before if name.startswith("torch.")}


def test_run_without_graphs_imports_nothing_at_its_end():
    assert in_a_fork(imported) == set()


def ended_really() -> bool:
    from torch._inductor import cudagraph_trees

    cudagraph_trees.get_container(0)
    drop_cuda_graphs()
    return bool(cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers"))


def test_torch_forgets_its_graphs():
    assert not in_a_fork(ended_really)
