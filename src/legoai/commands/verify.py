"""`legoai verify`: a shrunken plan compared with a single device."""

from __future__ import annotations

import math
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from legoai.commands import WrongUsage
from legoai.commands.progress import ProgressLine
from legoai.commands.shared import (
    STANDARD_OUTPUT,
    add_no_factories,
    add_resolution,
    output_file,
    refuse,
    rewrite,
    say,
    sound,
    source_of,
)
from legoai.dsl.lint import Linted
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings
from legoai.specs.units import counted
from legoai.specs.visible_text import visible_line

if TYPE_CHECKING:
    from legoai.lowering.shrink import Shrunken
    from legoai.lowering.verify.compare import Difference
    from legoai.lowering.verify.prepared import Prepared
    from legoai.lowering.verify.run import Verdict

_MOST_RANKS = 16
_SHOWN = 8

_DESCRIPTION = """\
Run a shrunken copy of a plan on a few processes of this machine, and the same training on one device without a
plan, and compare: the loss and the norm of the gradient in every step, every gradient of the first step before
and after clipping, every parameter after the first step and after the last, the learning rates of the whole
schedule, the samples that the ranks read, the dtype in which gradients are reduced, and for a Python model its
initial weights. Model, mesh and batch shrink, with the ratios that the plan relies on preserved; the changes are
printed. Everything runs on the CPU.

The exit status is 0 if nothing differs by more than rounding, 1 if something does, if the program fails, or if
the plan has errors, and 2 if the plan cannot be verified here.
"""

_EXAMPLES = """\
examples:
  legoai verify plan.tiny                  in fp64, where rounding hides nothing
  legoai verify plan.tiny --ranks 2        with fewer processes
  legoai verify plan.tiny --dtype plan     in the plan's own dtypes, with looser tolerances
  legoai verify plan.tiny --save-program x.py   and keep the program that was run
  legoai verify plan.tiny --program x.py        that program, as it was edited since
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai verify`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=_MOST_RANKS,
        metavar="N",
        help="the most processes to start (default: what the shrunken plan needs, at most 16)",
    )
    parser.add_argument("--steps", type=_steps, default=2, metavar="N", help="optimizer steps (default: 2)")
    parser.add_argument(
        "--dtype", choices=("fp64", "plan"), default="fp64", help="compute in fp64, or in the plan's dtypes"
    )
    parser.add_argument(
        "--save-program",
        metavar="OUT",
        type=output_file,
        help="write the shrunken plan's program to this file too, to be edited or started by hand",
    )
    parser.add_argument(
        "--program",
        metavar="FILE",
        help="run this program in its place: one that --save-program wrote, or that `legoai lower` wrote of a plan "
        "small enough to be run here as it is, edited by hand",
    )
    add_no_factories(parser)
    add_resolution(parser)


@without_cpp_warnings()
def run(arguments: Namespace) -> int:
    """Verify; returns 1 where something differs, fails or is wrong with the plan."""
    if arguments.save_program == STANDARD_OUTPUT:
        raise WrongUsage("--save-program names a file: standard output has the report")
    source = source_of(arguments.file)
    linted = None if source is None else sound(source, arguments, "verified", [arguments.save_program])
    if source is None or linted is None:
        return 1

    from legoai.lowering.program import LoweringError
    from legoai.lowering.shrink_sizes import CannotShrinkError
    from legoai.lowering.verify.prepare import OtherProgramError, prepare, with_program

    try:
        prepared = prepare(
            linted,
            directory=source.directory,
            ranks=arguments.ranks,
            double=arguments.dtype == "fp64",
        )
    except LoweringError as error:
        refuse(source.name, "verified", error.diagnostics, linted.files)
        return 1
    except CannotShrinkError as error:
        raise WrongUsage(f"{source.name} cannot be verified: {error}") from error
    if arguments.program is not None:
        try:
            prepared = with_program(prepared, Path(arguments.program), linted, ranks=arguments.ranks)
        except OtherProgramError as error:
            raise WrongUsage(str(error)) from error
    if arguments.save_program is not None:
        rewrite(arguments.save_program, prepared.program.text)
        ranks = prepared.shrunken.plan.mesh.world_size
        command = f"torchrun --nproc-per-node {ranks} {arguments.save_program} --device cpu"
        say(f"wrote {arguments.save_program}; start it with: {command}")
    return _run(arguments, linted, prepared)


def _run(arguments: Namespace, linted: Linted, prepared: Prepared) -> int:
    from legoai.lowering.verify.processes import leaving_on_signals
    from legoai.lowering.verify.run import ProgramFailedError, run

    assert linted.analysis is not None
    name = linted.resolution.file.name
    small = prepared.shrunken
    for line in small.changes:
        print(f"  {line}")
    sys.stdout.flush()
    progress = _Progress()
    try:
        with leaving_on_signals():
            verdict = run(prepared, directory=linted.analysis.directory, steps=arguments.steps, watch=progress)
    except ProgramFailedError as error:
        progress.clear()
        print(f"{visible_line(name)}: the program of the shrunken plan fails: {error.message}")
        if arguments.dtype == "fp64" and re.search(r"dtype|scalar type", error.message):
            print("  forward may make tensors of other dtypes than its parameters, here fp64: try `--dtype plan`")
        if os.environ.get("LEGOAI_DEBUG") == "1":
            print(error.detail, file=sys.stderr)
        else:
            print("legoai: LEGOAI_DEBUG=1 shows where", file=sys.stderr)
        return 1
    progress.clear()
    for line in report(verdict, small, linted):
        print(line)
    return 0 if verdict.equal else 1


def report(verdict: Verdict, small: Shrunken, linted: Linted) -> Iterator[str]:
    """The result, in lines."""
    name = visible_line(linted.resolution.file.name)
    ranks = counted(small.plan.mesh.world_size, "rank")
    if verdict.equal:
        yield f"{name}: {ranks} compute what one device computes"
    else:
        yield f"{name}: {ranks} do not compute what one device computes"
    yield from _table(verdict)
    if verdict.first is not None:
        yield from _first(verdict, verdict.first, small, linted)


def _table(verdict: Verdict) -> Iterator[str]:
    """One line for each kind of number: how many were compared, the largest difference, and what is allowed."""
    from legoai.lowering.verify.compare import relative

    limits = verdict.tolerances
    beginning = f"{limits.loss:.0e}" + (f", after an update {limits.after:.0e}" if limits.after != limits.loss else "")
    rows = [
        ("loss", [relative(*pair) for pair in verdict.losses], len(verdict.wrong_losses), "of its value", beginning),
        (
            "gradient norm",
            [relative(*pair) for pair in verdict.norms],
            len(verdict.wrong_norms),
            "of its value",
            beginning,
        ),
    ]
    kinds = (
        ("gradient", "gradients", "of its norm"),
        ("clipped", "clipped", "of its norm"),
        ("update", "updates", "of the learning rates so far"),
    )
    for kind, name, words in kinds:
        sizes = [item.size for item in verdict.differences if item.kind == kind]
        if sizes:
            limit = limits.update if kind == "update" else limits.gradient
            rows.append((name, sizes, sum(not size <= limit for size in sizes), words, f"{limit:.0e}"))
    for what, sizes, wrong, words, allowed in rows:
        found = f"{wrong} of {len(sizes)} differ" if wrong else f"{len(sizes)} equal"
        yield f"  {what:<13}  {found:<16}  by at most {_size(max(sizes))} {words} (allowed {allowed})"
    yield from _facts(verdict)


def _facts(verdict: Verdict) -> Iterator[str]:
    """What is right or wrong, and not near."""
    if verdict.compared_rates:
        wrong = len(verdict.wrong_rates)
        found = f"{wrong} of {verdict.compared_rates} differ" if wrong else f"{verdict.compared_rates} equal"
        yield f"  {'learning rate':<13}  {found:<16}  in steps of the whole schedule"
        for item in verdict.wrong_rates[:1]:
            yield f"    first in step {item.step}: {item.own:.6g}, and {item.wanted:.6g} by the plan, of {item.name}"
    wrong = len(verdict.wrong_samples)
    yield f"  {'samples':<13}  {f'{verdict.samples} read by their ranks' if not wrong else 'not those of the batch'}"
    for text in verdict.wrong_samples[:_SHOWN]:
        yield f"    {text}"
    if verdict.compared_beginnings:
        found = (
            f"{len(verdict.unlike)} of {verdict.compared_beginnings} unlike"
            if verdict.unlike
            else (f"{verdict.compared_beginnings} alike")
        )
        yield f"  {'first values':<13}  {found:<16}  those of the model's own constructor"
        for tensor in verdict.unlike[:_SHOWN]:
            yield f"    {tensor.name}: {tensor.what}"
    if verdict.reductions:
        count, wrong_dtypes = sum(verdict.reductions.values()), verdict.wrong_reductions
        others = ", ".join(f"{number} in {dtype}" for dtype, number in wrong_dtypes.items())
        found = f"{others} of {count}" if others else f"{count} as planned"
        yield f"  {'reductions':<13}  {found:<16}  of gradients, in {verdict.reduce_dtype}"
    if verdict.draws:
        yield f"  {'random':<13}  {'drawn in forward':<16}  not by dropout: one device draws others than the ranks"
    if verdict.clipped is not None:
        yield f"  {'clipping':<13}  {'acted' if verdict.clipped else 'did not act: the gradient is shorter'}"


def _first(verdict: Verdict, first: Difference, small: Shrunken, linted: Linted) -> Iterator[str]:
    """Where the first difference is, and the plan's statements about that module."""
    from legoai.dsl.reporting.explain import decisions_of, place

    path = small.original(first.name)
    module, _, parameter = path.rpartition(".")
    whats = {"gradient": "the gradient of", "clipped": "the clipped gradient of"}
    what = whats.get(first.kind, f"after step {first.step}")
    yield f"  the first that differs, in the model's order: {what} {path}" + (
        f" ({first.name} of the shrunken model)" if path != first.name else ""
    )
    if math.isinf(first.largest):
        yield "    it is missing, has another shape, or is not finite"
    else:
        yield f"    by {_size(first.size)}; its largest element by {_size(first.largest)}"
    assert linted.analysis is not None
    if first.kind == "gradient" and 1 not in verdict.wrong_losses and small.plan.model.family == "python":
        yield "    the loss is equal; one that forward itself adds to gradients depends on the mesh (docs/factories.md)"
    rows = [row for row in decisions_of(linted.analysis, module, parameter) if place(row.origin) != "default"]
    if rows:
        yield f"  what the plan says about {module or 'root'}:"
        width = max(len(f"{row.statement}: {row.what}") for row in rows)
        for row in rows:
            yield f"    {f'{row.statement}: {row.what}':<{width}}  {place(row.origin)}"
    others = [item for item in verdict.differences if item.kind == first.kind and item.step == first.step]
    wrong = [small.original(item.name) for item in others if not item.size <= verdict.limit(item)]
    if len(wrong) > 1:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        yield f"  differ: {', '.join(wrong[:_SHOWN])}{more}"


def _size(value: float) -> str:
    return "infinity" if math.isinf(value) else f"{value:.1e}"


class _Progress(ProgressLine):
    """A progress line with the state of the processes."""

    def __call__(self, states: dict[str, str]) -> None:
        device = states.get("one device", "")
        ranks = Counter(text for name, text in states.items() if name != "one device")
        words = [f"{count} ranks: {text}" if count > 1 else f"1 rank: {text}" for text, count in ranks.most_common()]
        self.show(f"one device: {device}; {'; '.join(words)}"[:100])


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise ArgumentTypeError(f"expected a number of processes from 1 to {_MOST_RANKS}, not {text!r}")
    return int(text)


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise ArgumentTypeError(f"expected a number of steps from 1 to 100, not {text!r}")
    return int(text)
