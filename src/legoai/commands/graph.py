"""`legoai graph`: a plan's mesh, pipeline or step as a picture."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from legoai.commands import WrongUsage
from legoai.commands.cost import add_profile, estimated, pass_estimated
from legoai.commands.shared import (
    add_no_factories,
    add_output_file,
    add_resolution,
    lacks_figures,
    lacks_graph,
    lowered,
    show,
    write,
)

if TYPE_CHECKING:
    from legoai.dsl.lint import Linted
    from legoai.lowering.program import Program

_DESCRIPTION = """\
Draw a plan as SVG: which ranks lie on which hosts and which of them an axis joins; when each rank of the
pipeline takes each action of the schedule; when each operation of a step runs on its stream; or, with
`backend = graph`, the same before and after the passes over the graph of the step. All but the first are
simulated, as by `legoai cost`.
"""

_EXAMPLES = """\
examples:
  legoai graph plan.tiny -o mesh.svg
  legoai graph plan.tiny --what timeline -o step.svg
  legoai graph plan.g --what step -o passes.svg
  legoai graph plan.llama3_405b_512 --what pipeline -o pipeline.svg
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai graph`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    parser.add_argument(
        "--what", choices=("mesh", "pipeline", "timeline", "step"), default="mesh", help="what is drawn (default: mesh)"
    )
    add_output_file(parser, "it")
    add_profile(parser)
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Draw; returns 1 where the plan has errors."""
    if arguments.what == "mesh" and arguments.profile is not None:
        raise WrongUsage("--profile says on which devices a step is simulated, and the mesh is drawn without one")
    done = lowered(arguments, "drawn", [arguments.output])
    if done is None:
        return 1
    linted, program = done
    lacks = {"step": lacks_graph, "pipeline": _lacks_pipeline}.get(arguments.what)
    if lacks is not None and lacks(linted):
        return 1
    if arguments.what != "mesh" and lacks_figures(linted, arguments.profile):
        return 1
    picture = _mesh(linted) if arguments.what == "mesh" else _simulated(linted, program, arguments)
    write(arguments.output, picture)
    return 0


def _lacks_pipeline(linted: Linted) -> bool:
    """Whether a plan without errors has no pipeline; shows the diagnostic then."""
    from legoai.dsl.diagnostics.codes.lowering import NoPipeline

    assert linted.plan is not None
    assert linted.analysis is not None
    if linted.plan.pipeline is not None:
        return False
    diagnostic = NoPipeline.at(
        linted.analysis.span_of(linted.plan.mesh), "this plan has no pipeline to draw",
        label="all ranks run one program",
        help=["draw one rank: `--what timeline`", "or write `pipeline on pp`, with `pp` in the mesh"],
    )  # fmt: skip
    show([diagnostic], linted.files, stream=sys.stderr)
    return True


def _mesh(linted: Linted) -> str:
    from legoai.cost.report.pictures import mesh_picture

    plan, analysis = linted.plan, linted.analysis
    assert plan is not None and analysis is not None and analysis.device is not None
    devices = plan.cluster.devices_for(analysis.device, plan.mesh.world_size)
    return mesh_picture(plan.mesh, devices_per_host=devices, name=plan.name)


def _simulated(linted: Linted, program: Program, arguments: Namespace) -> str:
    assert linted.plan is not None
    assert linted.analysis is not None
    if arguments.what == "step":
        found = pass_estimated(linted, profile=arguments.profile, between=False)

        from legoai.cost.report.causes import Causes
        from legoai.cost.report.pictures import passes_picture

        return passes_picture(found, Causes(linted.analysis), name=linted.plan.name)
    estimate = estimated(linted, program, profile=arguments.profile)

    from legoai.cost.report.causes import Causes
    from legoai.cost.report.pictures import pipeline_picture, timeline_picture

    if arguments.what == "pipeline":
        return pipeline_picture(estimate, alone=True)
    return timeline_picture(estimate.slowest, Causes(linted.analysis), name=estimate.plan)
