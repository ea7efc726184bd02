"""Common parts of commands: arguments, diagnostics on the terminal, and a plan that may be lowered."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from legoai.commands import WrongUsage
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.codes.names import FactoryNotRun
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.frontend.files.contents import named_files
from legoai.dsl.frontend.files.sources import Source, UnreadableError, read_base, read_source
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import Linted, lint
from legoai.dsl.reporting.output import render
from legoai.specs.cluster import profile_path
from legoai.specs.files import replace_file, try_to_replace
from legoai.specs.terminal import may_color
from legoai.specs.units import counted
from legoai.specs.visible_text import visible_line

if TYPE_CHECKING:
    from legoai.lowering.program import Program

STANDARD_OUTPUT: Final = Path("-")
"""What names standard output where a file is written."""
_NOWHERE: Final = Path(os.devnull)
"""A file that takes every output, and has none of them."""
_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(\S[^\r\n]*)")


def add_resolution(parser: ArgumentParser) -> None:
    """Add the options that decide which plan a file comes to."""
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="NAME=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="give a `let` name of the plan another value; may be repeated",
    )
    parser.add_argument("--variant", metavar="NAME", help="apply this variant of the plan")


def settings_of(arguments: Namespace) -> dict[str, str]:
    """The values of `--set`, by name; the last one wins."""
    return dict(arguments.settings)


def _setting(text: str) -> tuple[str, str]:
    match = _SETTING.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f"expected NAME=VALUE, such as hosts=4, not {text!r}")
    return match[1], match[2]


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write: its folder must be there before any work is done.

    Raises:
        ArgumentTypeError: there is no such folder, or the name is that of a folder.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"`{path}` is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder `{path.parent}` to write `{path.name}` into")
    return path


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[tuple[Path, str]] = ()) -> None:
    """Check that each output can be written, is none of the files that are read, and that no two are one file.

    Args:
        outputs: the files to write; None for one that is not asked for.
        inputs: the files that are read, and what each of them is.

    Raises:
        WrongUsage: one of them cannot be written so.
    """
    wanted = [path for path in outputs if path is not None and path != STANDARD_OUTPUT]
    read = list(inputs)
    for index, path in enumerate(wanted):
        if path == _NOWHERE:
            continue
        if any(is_same_file(path, other) for other in wanted[:index]):
            raise WrongUsage(f"{path} is named for two outputs: name another file for one of them")
        for source, what in read:
            if is_same_file(path, source):
                raise WrongUsage(f"{path} is {what}: name another file to write")
        check_writable(path)


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, also one that is not there yet."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def check_writable(path: Path) -> None:
    """Check that a file can be written, which its content does not decide.

    Raises:
        WrongUsage: it cannot.
    """
    try:
        try_to_replace(path)
    except OSError as error:
        raise WrongUsage(f"{path} cannot be written: {error.strerror}") from error


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, and say so; or write to standard output.

    Raises:
        WrongUsage: it cannot be written.
    """
    if path == STANDARD_OUTPUT:
        put(text)
        return
    rewrite(path, text)
    say(f"wrote {path}")


def put(text: str) -> None:
    """Write a file's content to standard output: in UTF-8, as into a file, whatever the encoding of a terminal is."""
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # replaced by a caller
        sys.stdout.write(text)
        return
    sys.stdout.flush()
    buffer.write(text.encode("utf-8", "backslashreplace"))  # halves of surrogate pairs, from names of files


def rewrite(path: Path, text: str) -> None:
    """Write a file as a whole or not at all.

    Raises:
        WrongUsage: it cannot be written; the message names it, and not the one beside it that would replace it.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise WrongUsage(f"{path} cannot be written: {error.strerror}") from error


def add_output_file(parser: ArgumentParser, what: str) -> None:
    """Add the option for the file of a result, which is standard output by default."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=output_file,
        default=STANDARD_OUTPUT,
        help=f"write {what} to this file (default: -, standard output)",
    )


def add_output(parser: ArgumentParser) -> None:
    """Add the options for messages besides the result, and for colours."""
    parser.add_argument("-q", "--quiet", action="store_true", help="write diagnostics only, without a summary")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours (default: auto, on terminals)"
    )


def add_no_factories(parser: ArgumentParser) -> None:
    """Add the option that keeps a plan from running Python."""
    parser.add_argument(
        "--no-factories",
        dest="factories",
        action="store_false",
        help="never run a Python factory that a plan names as its model, as for a pull request from a stranger",
    )


def lacks_factory(linted: Linted, arguments: Namespace, done: str) -> bool:
    """Whether a plan without errors cannot be processed because `--no-factories` leaves its model unknown; reports it.

    Args:
        linted: the plan.
        arguments: of the command.
        done: what the command does not do then, such as `lowered`.
    """
    assert linted.plan is not None
    # Where a statement cannot be read before a hole is answered, nothing was analysed.
    unknown = linted.plan.model.family == "python" if linted.analysis is None else linted.analysis.manifest is None
    if arguments.factories or not unknown:
        return False
    show([item for item in linted.diagnostics if item.code == FactoryNotRun.code], linted.files, stream=sys.stderr)
    announce(
        f"{linted.resolution.file.name} is not {done}: --no-factories, and its model is the factory "
        f"{linted.plan.model.target}"
    )
    return True


def lacks_graph(linted: Linted) -> bool:
    """Whether the step of a plan without errors is no graph; shows the diagnostic then."""
    from legoai.dsl.diagnostics.codes.lowering import NoStepGraph

    assert linted.plan is not None
    assert linted.analysis is not None
    analysis, fsdp = linted.analysis, linted.plan.fsdp
    if is_traced(analysis):
        return False
    if fsdp is None:
        place, help = analysis.span_of(linted.plan.mesh), "shard with `fsdp on dp_shard (backend = graph)`"
    else:
        place, help = analysis.span_of(fsdp, "backend"), "write `backend = graph`"
    diagnostic = NoStepGraph.at(
        place, "the step of this plan is not traced as a graph", label="without `backend = graph`", help=[help]
    )
    show([diagnostic], linted.files, stream=sys.stderr)
    return True


def lacks_figures(linted: Linted, profile: str | None) -> bool:
    """Whether a plan cannot be costed, by :func:`legoai.api.without_figures`; shows the diagnostic then."""
    from legoai.api import without_figures

    found = without_figures(linted, profile)
    if found is not None:
        show([found], linted.files, stream=sys.stderr)
    return found is not None


def note_profile(linted: Linted) -> None:
    """Say by which profile the passes over the graph decide, where the plan wants one that a run measures."""
    from legoai.cost.assumptions import of_profile

    assert linted.plan is not None
    assert linted.analysis is not None
    for text in of_profile(linted.plan, linted.analysis.device_kind):
        announce(text)


def announce(message: str) -> None:
    """Announce on standard error what is about to be run."""
    say(f"legoai: {message}")


def say(message: str) -> None:
    """Write one line on standard error: no name of a file in it steers the terminal, or forges a line of a log."""
    print(visible_line(message), file=sys.stderr, flush=True)


def wants_color(stream: TextIO, choice: str) -> bool:
    """Whether colours are shown: as ``choice`` says; `auto` where the stream may carry them."""
    return choice == "always" or (choice == "auto" and may_color(stream))


def show(
    diagnostics: Sequence[Diagnostic],
    files: Mapping[str, PlanFile],
    *,
    format: str = "full",
    stream: TextIO | None = None,
    color: str = "auto",
) -> None:
    """Write diagnostics, to standard output unless ``stream`` is given."""
    stream = stream or sys.stdout
    stream.write(render(format, diagnostics, files, color=wants_color(stream, color)))


def summary(diagnostics: Sequence[Diagnostic]) -> str:
    """How many diagnostics there are of each severity: ``2 errors and 1 warning``; empty for none."""
    kinds = [item.severity for item in diagnostics]
    parts = [counted(kinds.count(kind), kind) for kind in ("error", "warning") if kind in kinds]
    if "advice" in kinds:
        parts.append(f"{kinds.count('advice')} advice")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def examine(
    source: Source,
    settings: Mapping[str, str],
    variant: str | None,
    *,
    variants: bool = True,
    factories: bool = True,
    reopen: bool = False,
) -> Linted:
    """Lint one plan, announcing on standard error that a model factory is run; arguments are those of `lint`."""
    return lint(
        source.text,
        source.name,
        directory=source.directory,
        settings=settings,
        variant=variant,
        announce=announce,
        read=read_base,
        variants=variants,
        factories=factories,
        reopen=reopen,
    )


def files_of(error: UnreadableError) -> dict[str, PlanFile]:
    """What could be read of the file that an error is about, by name."""
    return {error.file.name: error.file} if error.file is not None else {}


def source_of(name: str) -> Source | None:
    """The plan that the command line names; None, after its diagnostic on standard error, where it cannot be read."""
    try:
        return read_source(name)
    except UnreadableError as error:
        show([error.diagnostic], files_of(error), stream=sys.stderr)
        return None


def refuse(name: str, done: str, diagnostics: Sequence[Diagnostic], files: Mapping[str, PlanFile]) -> None:
    """Write on standard error why a plan is not ``done``, such as `lowered`: standard output has results alone."""
    show(diagnostics, files, stream=sys.stderr)
    announce(f"{name} is not {done}: {summary(diagnostics)}")


def sound(
    source: Source, arguments: Namespace, done: str, outputs: Sequence[Path | None] = (), *, reopen: bool = False
) -> Linted | None:
    """The plan without its variants; None, after its errors on standard error, where it has any or lacks its model.

    A project's `select` and `ignore` apply to reports only: an error of any code stops the command, unless the plan
    itself suppresses it.

    Args:
        source: the plan.
        arguments: of the command.
        done: what the command does not do then, such as `costed`.
        outputs: the files that the command would write.
        reopen: forget the answers of its holes, and the errors that follow from them.

    Raises:
        WrongUsage: an output is no file to write, or one that the plan is made of.
    """
    check_outputs(outputs, [] if source.path is None else [(source.path, "the plan that is read")])
    linted = examine(
        source, settings_of(arguments), arguments.variant, variants=False, factories=arguments.factories,
        reopen=reopen,
    )  # fmt: skip
    errors = errors_of(linted.diagnostics)
    if errors:
        refuse(source.name, done, errors, linted.files)
        return None
    check_outputs(outputs, _inputs(linted, source, getattr(arguments, "profile", None)))
    return None if lacks_factory(linted, arguments, done) else linted


def _inputs(linted: Linted, source: Source, profile: str | None) -> Iterator[tuple[Path, str]]:
    """The files of a plan, and of `--profile`, and what each of them is."""
    yield from ((Path(name), f"a base of {source.name}") for name in linted.files if name != source.name)
    plan = linted.plan
    named = [] if plan is None else [source.directory / name for name in named_files(plan)]
    if plan is not None and plan.data is not None:  # relative to where the program is started
        named += [Path(name) for name in (plan.data.source, plan.data.tokenizer) if isinstance(name, str)]
    for path in named:
        yield path, f"a file that {source.name} names"
    if profile is not None:
        yield Path(profile), "the file of --profile"
        if profile.endswith(".toml"):
            yield profile_path(Path(profile)), "the profile of --profile"


def lowered(
    arguments: Namespace, done: str = "lowered", outputs: Sequence[Path | None] = ()
) -> tuple[Linted, Program] | None:
    """The plan that ``arguments.file`` names and its program; None, after its errors, as by :func:`sound`."""
    source = source_of(arguments.file)
    linted = None if source is None else sound(source, arguments, done, outputs)
    if source is None or linted is None:
        return None
    from legoai.lowering.program import LoweringError, lower

    assert linted.analysis is not None
    try:
        return linted, lower(linted.analysis)
    except LoweringError as error:
        refuse(source.name, done, error.diagnostics, linted.files)
        return None
