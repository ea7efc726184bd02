"""Each patch of the table is needed: the test that the table names fails without it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from legoai.runtime.torch_internals.patching import left_out, patched, patched_item, restored_items
from legoai.runtime.torch_internals.table import PATCHES

HERE = Path(__file__).parent

_MESH = "torch.distributed.device_mesh:DeviceMesh"
_SCHEDULES = "torch.distributed.pipelining.schedules"
NOT_SHOWN = {
    # Torch 2.12 alone needs it.
    "torch.random:fork_rng",
    # The test passes without it on torch 2.13.
    f"{_MESH}._get_mesh_tensor_from_full_mesh",
    f"{_MESH}._sym_get_coordinate",
    f"{_MESH}.__getitem__",
    f"{_MESH}.get_coordinate",
    f"{_MESH}.get_group",
    f"{_MESH}.get_local_rank",
    f"{_MESH}.size",
    f"{_SCHEDULES}:_batch_p2p",
    "torch.distributed:batch_isend_irecv",
    f"{_SCHEDULES}:_PipelineSchedule.step",
    "torch:Tensor.__invert__",
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "torch.optim.adam:_get_value",
    # Not tried yet.
    "torch.distributed.device_mesh:new_group",
    f"{_SCHEDULES}:_PipelineSchedule._initialize_pp_stages",
    f"{_SCHEDULES}:_PipelineScheduleRuntime._assert_unsharded",
}
"""Patches of which it has not been seen that their named test fails without them; take out what has."""

TOGETHER = {"test_simulation.py::test_finding_shapes_of_dtensors_is_not_recorded"}
"""Tests of patches of functions that call one another, so that one patch covers for another."""

ALONE = {
    path: (path,)
    for path, patch in PATCHES.items()
    if patch.kind not in ("module", "setting") and path not in NOT_SHOWN and patch.test not in TOGETHER
}
GROUPS = {test: tuple(path for path, patch in PATCHES.items() if patch.test == test) for test in sorted(TOGETHER)}


def test_what_is_not_shown_is_in_the_table():
    assert PATCHES.keys() >= NOT_SHOWN


@pytest.mark.slow
@pytest.mark.parametrize("paths", [*ALONE.values(), *GROUPS.values()], ids=[*ALONE, *GROUPS])
def test_the_named_test_fails_without_the_patch(paths: tuple[str, ...], tmp_path: Path):
    status, output = run_without(paths, tmp_path)
    assert status == pytest.ExitCode.TESTS_FAILED, output[-3000:]


def test_a_patch_that_is_left_out_is_not_placed():
    path, meta = "torch.fx.traceback:current_meta", torch.fx.traceback.current_meta
    before = torch.random.fork_rng
    with left_out("torch.random:fork_rng"), patched("torch.random:fork_rng", None):
        assert torch.random.fork_rng is before
    with patched("torch.random:fork_rng", None):
        assert torch.random.fork_rng is None
    with left_out(path):
        with patched_item(path, "new", 1):
            assert "new" not in meta
        with restored_items(path, "new"):
            meta["new"] = 1
        assert meta.pop("new") == 1


def run_without(paths: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """Run the test that the table names in a fork, without the patches; its exit status, and what pytest printed."""
    printed = folder / "printed"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = -1
        try:
            descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            torch.set_num_threads(1)
            options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
            with left_out(*paths):
                status = pytest.main([*options, str(HERE / PATCHES[paths[0]].test)])
            sys.stdout.flush()
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), printed.read_text(errors="replace")
