"""Mixed-integer linear programs, solved by HiGHS or CBC through PuLP.

PuLP is imported when a program is solved, so that nothing else needs PuLP or a solver.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, Final, Literal

INSTALL: Final = "pip install 'legoai[solvers]'"
"""Installs PuLP and both solvers."""

_POLL_SECONDS: Final = 0.05
"""Between two looks at whether Ctrl-C was pressed while HiGHS works on its own thread."""
_FEASIBILITY: Final = 1e-9
"""Tolerance of rows and of integrality; HiGHS's own default is 1e-6."""

Status = Literal["optimal", "stopped", "infeasible"]
SolverName = Literal["highs", "cbc"]


class SolverMissingError(ImportError):
    """PuLP or a solver is not installed."""


class SolverFailedError(RuntimeError):
    """A solver ended without a result; the message is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Result of a solver.

    Attributes:
        status: `optimal`, `stopped` at the limit of time or nodes, or `infeasible`.
        values: of the variables; empty where no feasible ones were found.
        objective: of ``values``; None where there are none.
        bound: lower bound of the objective; None where none is known.
    """

    status: Status
    values: tuple[float, ...]
    objective: float | None
    bound: float | None

    @property
    def gap(self) -> float | None:
        """Relative gap between objective and bound; None where no bound is known."""
        if self.objective is None or self.bound is None:
            return None
        difference = max(0.0, self.objective - self.bound)
        return difference / abs(self.objective) if self.objective else (math.inf if difference else 0.0)


@dataclass(frozen=True, slots=True)
class _Variable:
    low: float
    high: float
    integer: bool
    cost: float


@dataclass(frozen=True, slots=True)
class _Row:
    terms: Mapping[int, float]
    side: float
    equal: bool


class LinearProgram:
    """A program that is built variable by variable and row by row, and minimised.

    Equal programs have equal solutions: solvers run on one thread, and limits of nodes do not depend on the machine.
    """

    def __init__(self) -> None:
        self._variables: list[_Variable] = []
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        """The number of variables."""
        return len(self._variables)

    def variable(self, *, low: float = 0.0, high: float = math.inf, integer: bool = False, cost: float = 0.0) -> int:
        """Add a variable, and return its index among the values of a solution.

        Args:
            low: the smallest value; minus infinity for none.
            high: the largest value; infinity for none.
            integer: whether its value is integral.
            cost: its coefficient in the objective, which must be bounded below.
        """
        assert math.isfinite(high if cost < 0 else low if cost > 0 else 0.0), "an objective that has a least value"
        self._variables.append(_Variable(low, high, integer, cost))
        return len(self._variables) - 1

    def at_most(self, terms: Mapping[int, float], side: float) -> None:
        """Add a row: the sum of variables times their coefficients is at most ``side``."""
        self._rows.append(_Row(dict(terms), side, False))

    def equal(self, terms: Mapping[int, float], side: float) -> None:
        """Add a row: the sum of variables times their coefficients is ``side``."""
        self._rows.append(_Row(dict(terms), side, True))

    def solve(
        self, *, time_limit: float | None = None, node_limit: int | None = None, solver: SolverName | None = None
    ) -> Solution:
        """Find the values of least cost, within the solver's tolerance.

        Args:
            time_limit: seconds after which the best so far is the result.
            node_limit: nodes of branch and bound after which the best so far is the result.
            solver: to be used; by default HiGHS where it is installed, else CBC.

        Raises:
            SolverMissingError: PuLP or the solver is not installed.
            SolverFailedError: the solver ended without an answer.
            KeyboardInterrupt: Ctrl-C, when the solver has stopped.
        """
        name = solver or installed()
        if name is None or find_spec("pulp") is None or (name == "highs" and find_spec("highspy") is None):
            raise SolverMissingError(f"solving an integer program needs PuLP and a solver: {INSTALL}")
        if any(variable.low > variable.high for variable in self._variables):
            return Solution(status="infeasible", values=(), objective=None, bound=None)
        if not self._variables:
            feasible = all(row.side == 0 if row.equal else row.side >= 0 for row in self._rows)
            zero = 0.0 if feasible else None
            return Solution(status="optimal" if feasible else "infeasible", values=(), objective=zero, bound=zero)
        run = self._highs if name == "highs" else self._cbc
        return run(time_limit, node_limit)

    def _problem(self, *, relaxed: bool = False) -> tuple[Any, list[Any]]:
        """The program as PuLP has it, and its variables."""
        pulp = _imported()

        problem = pulp.LpProblem("program", pulp.LpMinimize)
        variables = [
            problem.add_variable(
                f"x{index:07}",
                None if item.low == -math.inf else item.low,
                None if item.high == math.inf else item.high,
                pulp.LpInteger if item.integer and not relaxed else pulp.LpContinuous,
            )
            for index, item in enumerate(self._variables)
        ]
        # Every variable is in the objective, so that the solver also sees those without a row.
        problem.setObjective(
            pulp.LpAffineExpression([(one, item.cost) for one, item in zip(variables, self._variables, strict=True)])
        )
        for row in self._rows:
            expression = pulp.LpAffineExpression([(variables[index], value) for index, value in row.terms.items()])
            sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintLE
            problem.addConstraint(pulp.LpConstraint(expression, sense=sense, rhs=row.side))
        return problem, variables

    def _cost(self, values: tuple[float, ...]) -> float:
        return math.fsum(item.cost * value for item, value in zip(self._variables, values, strict=True))

    def _rounded(self, values: list[float | None]) -> tuple[float, ...]:
        """Values within their limits, and whole where they must be."""
        return tuple(
            min(max(float(round(value or 0.0)) if item.integer else (value or 0.0), item.low), item.high)
            for item, value in zip(self._variables, values, strict=True)
        )

    def _highs(self, time_limit: float | None, node_limit: int | None) -> Solution:
        pulp = _imported()

        # Presolve of integer programs may not end, whatever the limits are (HiGHS 1.16, programs of 35 variables).
        options: dict[str, Any] = {"mip_feasibility_tolerance": _FEASIBILITY, "random_seed": 0, "presolve": "off"}
        if node_limit is not None:
            options["mip_max_nodes"] = node_limit
        solver = pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, threads=1, timeLimit=time_limit, **options)
        problem, variables = self._problem()
        # Not `problem.solve`: PuLP's table of HiGHS's statuses lacks that of a limit of nodes, and its `run` cannot be
        # interrupted.
        with _without_output():
            solver.createAndConfigureSolver(problem)
        solver.buildSolverModel(problem)
        model = problem.solverModel
        _run(model)
        status = model.getModelStatus().name
        info = model.getInfo()
        if status in ("kInfeasible", "kUnboundedOrInfeasible"):  # every variable with a cost is bounded
            return Solution(status="infeasible", values=(), objective=None, bound=None)
        if status not in ("kOptimal", "kTimeLimit", "kSolutionLimit", "kIterationLimit"):
            raise SolverFailedError(f"HiGHS ended with status {status[1:]}")
        optimal = status == "kOptimal"
        bound = info.mip_dual_bound if any(item.integer for item in self._variables) else None
        if info.primal_solution_status != _HIGHS_FEASIBLE:
            found = bound if bound is not None and math.isfinite(bound) else None
            return Solution(status="stopped", values=(), objective=None, bound=found)
        column = model.getSolution().col_value
        values = self._rounded([column[variable.index] for variable in variables])
        objective = self._cost(values)
        if optimal:
            bound = objective
        elif bound is not None and not math.isfinite(bound):
            bound = None
        return Solution(status="optimal" if optimal else "stopped", values=values, objective=objective, bound=bound)

    def _cbc(self, time_limit: float | None, node_limit: int | None) -> Solution:
        pulp = _imported()

        def run(*, relaxed: bool) -> tuple[Any, list[Any]]:
            problem, variables = self._problem(relaxed=relaxed)
            options = ["randomSeed 1", "allowableGap 0"]
            solver = pulp.COIN_CMD(
                path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, gapRel=0.0, timeLimit=time_limit, maxNodes=node_limit,
                options=options,
            )  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="legoai-") as folder:
                solver.tmpDir = folder  # removed with all that an interrupted solver leaves there
                try:
                    problem.solve(solver)
                except pulp.PulpSolverError as error:
                    raise SolverFailedError(f"CBC: {error}") from error
            return problem, variables

        problem, variables = run(relaxed=False)
        known = problem.sol_status
        if known == pulp.LpSolutionInfeasible:
            return Solution(status="infeasible", values=(), objective=None, bound=None)
        values: tuple[float, ...] = ()
        if known in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            values = self._rounded([variable.varValue for variable in variables])
        if known == pulp.LpSolutionOptimal:
            objective = self._cost(values)
            return Solution(status="optimal", values=values, objective=objective, bound=objective)
        # CBC does not report its bound; that of the linear relaxation is valid too.
        relaxed, _ = run(relaxed=True)
        bound = None
        if relaxed.sol_status == pulp.LpSolutionOptimal:
            bound = float(pulp.value(relaxed.objective))
        return Solution(
            status="stopped",
            values=values,
            objective=self._cost(values) if values else None,
            bound=bound,
        )


_HIGHS_FEASIBLE: Final = 2
"""HiGHS's `kSolutionStatusFeasible`."""


def _imported() -> Any:
    """Import PuLP in a thread of its own.

    Its modules for solvers that are not installed store their import errors permanently, and an exception keeps the
    frames of all callers alive, with the activations of the step that solves the first program.
    """
    if "pulp" not in sys.modules:
        thread = Thread(target=import_module, args=("pulp",))
        thread.start()
        thread.join()
    return import_module("pulp")


def installed() -> SolverName | None:
    """The solver that is used by default; None where PuLP or every solver is missing. Imports highspy at most."""
    if find_spec("pulp") is None:
        return None
    if find_spec("highspy") is not None:
        with contextlib.suppress(ImportError):
            import highspy  # noqa: F401

            return "highs"
    pulp = _imported()
    bundled = pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False)
    return "cbc" if bundled.available() else None


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Suppress the standard output, including output of C++ code.

    HiGHS 1.16 prints its name there on construction, before it can be silenced; a command's output may be JSON.
    """
    output = 1
    try:
        kept = os.dup(output)
    except OSError:  # the standard output is closed
        yield
        return
    if sys.stdout is not None:  # as in a process without one, in which descriptor 1 may be any file
        sys.stdout.flush()
    try:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), output)
        yield
    finally:
        os.dup2(kept, output)
        os.close(kept)


def _run(model: Any) -> None:
    """Run HiGHS such that Ctrl-C stops it: it runs in a thread of its own, and is asked to stop."""
    model.HandleUserInterrupt = True
    model.startSolve()
    try:
        while not model.wait(_POLL_SECONDS)[0]:
            pass
    except KeyboardInterrupt:
        model.cancelSolve()
        while not model.wait(_POLL_SECONDS)[0]:
            pass
        raise
