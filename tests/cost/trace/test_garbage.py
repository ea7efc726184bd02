"""Control of the garbage collector: cycles are collected inside of scopes with collection, and not outside."""

from __future__ import annotations

import gc

from legoai.cost.trace.garbage import collected, uncollected


def test_a_part_that_leaves_cycles_is_collected_inside_of_what_is_not():
    seen = []
    with uncollected():
        seen.append(gc.isenabled())
        with collected():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
    assert seen == [False, True, False]
    assert gc.isenabled()


def test_what_is_kept_is_not_looked_through_afterwards():
    frozen = gc.get_freeze_count()
    try:
        with uncollected(kept=True):
            made = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)
    finally:
        gc.unfreeze()
