"""What would a lowered program cost: the simulator, from what one rank does to what a step takes.

A program runs on a simulated device (:mod:`legoai.cost.simulated`, and :mod:`legoai.cost.compilation` where it is
compiled) while what it does is recorded as a trace (:mod:`legoai.cost.capture`), in which what is done over and over
is taken once (:mod:`legoai.cost.replay`, :mod:`legoai.cost.pipelines`). The trace tells the memory
(:mod:`legoai.cost.memory`) and, with a machine's kernels and networks, the time (:mod:`legoai.cost.timing`). Which
packages may import which is a contract in `pyproject.toml`.
"""
