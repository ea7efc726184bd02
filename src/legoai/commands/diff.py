"""`legoai diff`: the semantic difference of two plans, and what each changed line does to a step."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from legoai.commands import WrongUsage
from legoai.commands.cost import add_profile
from legoai.commands.printing import printing_to_standard_error
from legoai.commands.progress import Progress
from legoai.commands.shared import add_no_factories, add_resolution, announce, files_of, put, settings_of, show, summary
from legoai.dsl.diagnostics.diagnostic import errors_of, with_names
from legoai.dsl.differences.comparison import Comparison, Side
from legoai.dsl.frontend.files.contents import named_files
from legoai.dsl.frontend.files.revisions import RevisionPlan, ends_of, plan_of, revision
from legoai.dsl.frontend.files.sources import STANDARD_INPUT, UnreadableError, locate, read_base, read_source
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.dsl.frontend.statements.merge import Reads
from legoai.dsl.lint import lint
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings
from legoai.specs.cluster import CatalogueError

if TYPE_CHECKING:
    from legoai.cost.differences import CostDifference

_DESCRIPTION = """\
Compare what two plans mean: differences in formatting, comments, the order of statements, `let` names and base
plans do not count. Each changed value is a line, with its effect on a step: both plans are simulated, and the
first plan with each change alone, or with the fewest changes that are legal together. Also reported: whether the
batch and the numbers change, whether checkpoints load, and which ranks communicate.

A plan is a file, or REV:FILE, which git reads: from the root of the repository, or from here as REV:./FILE.
With -- FILE, after all options, the plan is given once: REV -- FILE compares a revision with the file as it is
here, REV..REV two revisions, and REV...REV the second with their merge base.

The exit status is 0 if the plans mean the same, 1 if they differ, and 2 if one of them has errors, cannot be
read, or the command line is wrong. Plans that cannot be costed are compared without costs, which is reported.
"""

_EXAMPLES = """\
examples:
  legoai diff a.plan b.plan                            two files
  legoai diff HEAD:plans/tiny.plan plans/tiny.plan     what was changed since the last commit
  legoai diff HEAD -- plans/tiny.plan                  the same
  legoai diff --format github main...HEAD -- plans/tiny.plan   for a comment of a pull request
  legoai diff a.plan b.plan --no-cost                  the language alone, at once
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai diff`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.usage = (
        "%(prog)s [-h] [--json | --format text|github] [--no-cost] [--profile DEVICE] [--no-factories] "
        "[--set NAME=VALUE] [--variant NAME] A B | REV[..REV] -- FILE"
    )
    parser.add_argument("plans", metavar="FILE", nargs="+", help="two plans; or, before -- FILE, one REV or REV..REV")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the difference as JSON")
    output.add_argument(
        "--format",
        choices=("text", "github"),
        default="text",
        help="text, or Markdown for a comment of a pull request (default: text)",
    )
    parser.add_argument("--no-cost", dest="cost", action="store_false", help="simulate nothing")
    add_profile(parser)
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Compare; returns 1 where the plans differ, and 2 where one of them is none."""
    if arguments.profile is not None and not arguments.cost:
        raise WrongUsage("--profile says on which devices plans are costed, and --no-cost costs none")
    with contextlib.ExitStack() as folders:
        try:
            sides = [_side(one, arguments, folders) for one in _named(arguments)]
        except UnreadableError as error:
            show([error.diagnostic], files_of(error), stream=sys.stderr)
            return 2
        if any(side is None for side in sides):
            return 2
        before, after = (side for side in sides if side is not None)
        comparison = Comparison(before, after)
        cost, reason = _cost(comparison, arguments)
        _print(comparison, cost, reason, arguments)
    return int(comparison.differs)


Named = RevisionPlan | str


def _named(arguments: Namespace) -> tuple[Named, Named]:
    """The two plans that the command line names.

    Raises:
        WrongUsage: it names another number of them.
        UnreadableError: a revision, or its plan, is not there.
    """
    given, rest = arguments.plans, arguments.arguments
    if rest:
        if len(given) != 1 or len(rest) != 1:
            raise WrongUsage("expected REV -- FILE or REV..REV -- FILE, with options before them")
        if rest[0] == STANDARD_INPUT:
            raise WrongUsage("standard input is in no revision")
        file = str(locate(rest[0]))
        ends = ends_of(given[0])
        if ends is None:
            return plan_of(given[0], file, from_root=False), file
        return plan_of(ends[0], file, from_root=False), plan_of(ends[1], file, from_root=False)
    if len(given) != 2:
        raise WrongUsage("expected two plans, or REV -- FILE")
    if given.count(STANDARD_INPUT) > 1:
        raise WrongUsage("standard input can be read only once")
    return _one(given[0], given[1]), _one(given[1], given[0])


def _one(text: str, other: str) -> Named:
    name, colon, file = text.partition(":")
    if Path(text).exists() or text == STANDARD_INPUT:
        return text
    if colon and name and file:
        return plan_of(name, file, from_root=True)
    with contextlib.suppress(UnreadableError):
        if not text.endswith(".plan") and not text.startswith("plan."):
            revision((ends_of(text) or (text,))[0])
            raise WrongUsage(f"`{text}` is a revision: write `{text} -- {other}`, or `{text}:FILE`")
    return text


def _side(named: Named, arguments: Namespace, folders: contextlib.ExitStack) -> Side | None:
    """One plan, linted; None, after its diagnostics, where it has errors.

    Raises:
        UnreadableError: it cannot be read.
    """
    if isinstance(named, RevisionPlan):
        return _of_revision(named, arguments, folders)
    source = read_source(named)
    return _linted(source.text, source.name, source.directory, read_base, arguments)


def _of_revision(plan: RevisionPlan, arguments: Namespace, folders: contextlib.ExitStack) -> Side | None:
    read: Reads = plan.read_base
    directory = plan.folder
    known = resolve(
        plan.text, plan.name, directory=directory, settings=settings_of(arguments), variant=arguments.variant, read=read
    )
    if known.plan is None or not named_files(known.plan):
        return _linted(plan.text, plan.name, directory, read, arguments, shown=plan.shown)
    # The files that it names are those of the revision too.
    top = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="legoai-diff-"))).resolve()
    folder = Path(plan.file).parent
    (top / folder).mkdir(parents=True, exist_ok=True)
    plan.revision.export("" if folder == Path() else folder.as_posix(), top / folder)

    def shown(text: str) -> str:
        return plan.shown(text, top)

    def read_exported(path: Path) -> str:
        return plan.read_base(path, top)

    return _linted(plan.text, plan.name, top / folder, read_exported, arguments, shown=shown)


def _linted(
    text: str, name: str, directory: Path, read: Reads, arguments: Namespace, *, shown: Callable[[str], str] = str
) -> Side | None:
    settings = settings_of(arguments)
    linted = lint(
        text,
        name,
        directory=directory,
        settings=settings,
        variant=arguments.variant,
        announce=announce,
        read=read,
        factories=arguments.factories,
    )
    errors = errors_of(linted.diagnostics)
    if errors or linted.plan is None or linted.analysis is None:
        files = {shown(file): parsed for file, parsed in linted.files.items()}
        show([with_names(item, shown) for item in errors], files, stream=sys.stderr)
        announce(f"{name} is not compared: {summary(errors)}")
        return None

    def resolved(variant: str) -> Resolution:
        return resolve(text, name, directory=directory, settings=settings, variant=variant, read=read)

    return Side(linted=linted, directory=directory, resolved=resolved, shown=shown)


@without_cpp_warnings()
def _cost(comparison: Comparison, arguments: Namespace) -> tuple[CostDifference | None, str | None]:
    """The effects of the changes on a step; None where costs are not requested or unknown, with the reason."""
    if not arguments.cost or not comparison.changes:
        return None, None
    for side in (comparison.before, comparison.after):
        if not arguments.factories and side.manifest is None:
            return None, f"--no-factories, and the model of {side.linted.resolution.file.name} is a factory"
    progress = Progress()
    progress("reading torch")
    from legoai.cost.differences import CannotCompareError, cost_difference
    from legoai.cost.machine.cluster import machine_of
    from legoai.cost.profiles import ProfileError

    gc.freeze()
    try:
        if arguments.profile is not None:
            before = comparison.before
            machine_of(before.plan.cluster, 1, directory=before.directory, override=arguments.profile)
        with printing_to_standard_error():
            found = cost_difference(
                comparison,
                profile=arguments.profile,
                progress=lambda done, every: progress(f"{done} of {every} programs simulated"),
            )
    except (ProfileError, CatalogueError) as error:
        raise WrongUsage(f"--profile {arguments.profile}: {error}") from error
    except CannotCompareError as error:
        return None, str(error)
    finally:
        gc.unfreeze()
        progress.clear()
    return found, None


def _print(comparison: Comparison, cost: CostDifference | None, reason: str | None, arguments: Namespace) -> None:
    from legoai.cost.report.differences import document, markdown, terminal
    from legoai.dsl.differences.summary import summary as summary_of

    found = summary_of(comparison)
    if arguments.json:
        put(json.dumps(document(comparison, found, cost, reason), indent=2, ensure_ascii=False) + "\n")
    elif arguments.format == "github":
        put(markdown(comparison, found, cost, reason))
    else:
        sys.stdout.write(terminal(comparison, found, cost, reason))
