"""Simulator of a lowered program: from the trace of one rank to the time and memory of a step.

A program runs on a simulated device (:mod:`legoai.cost.simulated`, and :mod:`legoai.cost.compilation` where it is
compiled) while its ops are recorded as a trace (:mod:`legoai.cost.capture`, :mod:`legoai.cost.trace`). Repeated work is
captured once and replayed (:mod:`legoai.cost.replay`, :mod:`legoai.cost.pipelines`). Memory is computed from the trace
(:mod:`legoai.cost.memory`), and time from the trace and a machine (:mod:`legoai.cost.timing`,
:mod:`legoai.cost.machine`). A contract in `pyproject.toml` states which package imports which.
"""
