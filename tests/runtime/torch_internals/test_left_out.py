"""Each patch of the table is needed: the test that the table names fails without it.

Where a version or a build of torch does not need one, the table states that, and the test passes there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from legoai.runtime.torch_internals.patching import is_needed, left_out, patched, patched_item, restored_items
from legoai.runtime.torch_internals.table import PATCHES

HERE = Path(__file__).parent

TOGETHER = {"test_simulation.py::test_dtensor_shape_propagation_is_not_recorded"}
"""Tests of patches of functions that call one another, so that one patch covers for another."""

ALONE = {
    path: (path,)
    for path, patch in PATCHES.items()
    if patch.kind not in ("module", "setting") and patch.test not in TOGETHER
}
GROUPS = {test: tuple(path for path, patch in PATCHES.items() if patch.test == test) for test in sorted(TOGETHER)}


@pytest.mark.slow
@pytest.mark.parametrize("paths", [*ALONE.values(), *GROUPS.values()], ids=[*ALONE, *GROUPS])
def test_named_test_fails_without_the_patch(paths: tuple[str, ...], tmp_path: Path):
    needed = is_needed(PATCHES[paths[0]])
    status, output = run_without(paths, tmp_path)
    assert status == (pytest.ExitCode.TESTS_FAILED if needed else pytest.ExitCode.OK), output[-3000:]


def test_patch_unneeded_by_this_torch_is_not_applied():
    older, newer = "torch.random:fork_rng", "torch:UntypedStorage.resize_"
    assert is_needed(PATCHES[newer])
    assert is_needed(PATCHES[older]) == (torch.__version__ < "2.13")
    with patched(older, None):
        assert (torch.random.fork_rng is None) == is_needed(PATCHES[older])


def test_disabled_patch_is_not_applied():
    path, meta = "torch.fx.traceback:current_meta", torch.fx.traceback.current_meta
    before = torch.compile
    with left_out("torch:compile"), patched("torch:compile", None):
        assert torch.compile is before
    with patched("torch:compile", None):
        assert torch.compile is None
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
