"""A run on a cpu keeps the memory that it frees."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from legoai.runtime.device import Device
if sys.argv[1] == "activated":
    Device(type="cpu").activate()
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
rounds = [touched() for _ in range(40)]
print(sum(rounds[20:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the option is glibc's")
def test_freed_memory_is_reused_without_page_faults():
    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=200
        )
        return int(done.stdout)

    # glibc 2.36 takes a hole for an aligned block only if it exceeds the block by the alignment, so that the heap may
    # grow for some rounds before a hole of every place fits; from then on it asks the system for nothing.
    pages = 20 * 2**24 * 4 // resource.getpagesize()
    assert faults("activated") < pages / 100
    assert faults("left as it is") >= pages
