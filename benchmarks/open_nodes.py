"""Unexplored nodes of a stopped search: those with the lowest bounds, and the cost of some completions of them.

The gap that `legoai solve` reports is that of the lowest bound among unexplored nodes, so a better bound of these nodes
reduces it. Each worked plan with holes whose search does not end by itself is searched for some seconds. The output has
the nodes with the lowest bounds and their decisions, the numbers of nodes below the best candidate by half seconds, and
the time per node. With `--complete N` the N nodes with the lowest bounds are completed like the search's own first
guess, and simulated, which takes seconds for each.

    python benchmarks/open_nodes.py [--seconds S] [--nodes N] [--complete N] [NAME ...]
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections import Counter
from pathlib import Path

from machine import about_machine
from solve_time import CASES, ROOT, Case, holed

from legoai.cost.search.branch_and_bound.neighbours import Neighbours
from legoai.cost.search.branch_and_bound.tree import Search
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import Figures, Simulation
from legoai.cost.search.objective import objective_of
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.open_rules import with_open_rules


def decisions(plan: OpenPlan, choices: Choices) -> str:
    """Text of a node's decisions."""
    pairs = zip(plan.holes, choices, strict=True)
    return ", ".join(f"{hole.what} {hole.choices[index]}" for hole, index in pairs if index is not None)


def opened(case: Case, folder: Path) -> OpenPlan:
    """A worked plan with holes."""
    linted = lint(holed(case), str(folder / f"{case.plan}.plan"), directory=ROOT / "plans")
    return OpenPlan(with_open_rules(linted, directory=ROOT / "plans"), directory=ROOT / "plans")


def searched(plan: OpenPlan, seconds: float, nodes: int, complete: int) -> None:
    """Search for some seconds, and print the unexplored nodes."""
    with Simulation(directory=plan.directory) as evaluator:
        begin, used = time.monotonic(), time.process_time()
        search = Search(
            plan, bounds=BoundsOf(), evaluator=evaluator, objective=objective_of(None), deadline=begin + seconds
        )
        found = search.run()
        used = time.process_time() - used
        if found.best is None or found.bound is None:
            print("nothing fits so far, or nothing is bounded")
            return
        best = search.state.costs.of(found.best)
        left = sorted(node for node in search.nodes.heap if node[0] < best)
        took = time.monotonic() - begin
        print(f"{found.status} after {took:.1f} s: best {best:.3f} s, {decisions(plan, found.best.choices)}")
        print(f"bound {found.bound:.3f} s, gap {1 - found.bound / best:.1%}; {len(left)} nodes below the best")
        count = len(search.nodes.heap)
        print(f"{used:.1f} s of this process, {1e3 * used / count:.1f} ms for each of {count} open nodes")
        print("by half seconds:", sorted(Counter(math.floor(2 * bound) / 2 for bound, *_ in left).items()))
        for bound, _, choices in left[:nodes]:
            print(f"  {bound:8.3f} s  {decisions(plan, choices)}")
        near = Neighbours(search.state)
        for bound, _, choices in left[:complete]:
            guess = near.smallest(choices)
            analysis = None if guess is None else plan.candidate(guess).analysis
            if guess is None or analysis is None:
                print(f"  {bound:8.3f} s  no completion fits: {decisions(plan, choices)}", flush=True)
                continue
            [outcome] = evaluator.evaluate([analysis], None)
            cost = f"{outcome.step_time:.3f} s" if isinstance(outcome, Figures) else outcome.reason
            print(f"  {bound:8.3f} s  truly {cost}: {decisions(plan, guess)}", flush=True)


def main() -> int:
    """Search each selected case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only cases whose name contains NAME")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds of each search (default: 25)")
    parser.add_argument("--nodes", type=int, default=30, help="number of nodes to print (default: 30)")
    parser.add_argument("--complete", type=int, default=0, help="number of nodes to complete and simulate (default: 0)")
    options = parser.parse_args()
    print(about_machine(), "\n")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if case.stops and (not options.names or any(part in case.name for part in options.names)):
                print(case.name)
                searched(opened(case, Path(folder)), options.seconds, options.nodes, options.complete)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
