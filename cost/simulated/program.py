"""Trainer of a program, which may be given as a lowered program, text, a module, or the trainer itself."""

from __future__ import annotations

import sys
import types

from legoai.cost.simulated.device import SimulationError
from legoai.lowering.program import Program
from legoai.runtime import Trainer


def trainer_of(program: Program | str | types.ModuleType | Trainer) -> Trainer:
    """Return the result of a program's `trainer()`.

    Raises:
        SimulationError: the program has none.
    """
    if isinstance(program, Program):
        program = program.text
    if isinstance(program, str):
        module = types.ModuleType("lowered_program")
        sys.modules["lowered_program"] = module
        try:
            exec(compile(program, "<lowered program>", "exec"), module.__dict__)
        except SyntaxError as error:
            raise SimulationError(f"the program is not valid Python: {error}") from error
        program = module
    if isinstance(program, types.ModuleType):
        made = getattr(program, "trainer", None)
        if not callable(made):
            raise SimulationError("the program has no trainer()")
        program = made()
    if not isinstance(program, Trainer):
        raise SimulationError(f"trainer() returned {type(program).__name__}, not a Trainer")
    return program
