"""Control of the garbage collector: cycles are collected inside of scopes with collection, and not outside."""

from __future__ import annotations

import gc

from legoai.cost.trace.garbage import collected, uncollected


def test_collected_scope_inside_an_uncollected_one_runs_the_collector():
    seen = []
    with uncollected():
        seen.append(gc.isenabled())
        with collected():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
    assert seen == [False, True, False]
    assert gc.isenabled()


def test_surviving_objects_are_frozen():
    frozen = gc.get_freeze_count()
    try:
        with uncollected(kept=True):
            made = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)
    finally:
        gc.unfreeze()
