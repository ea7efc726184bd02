"""`legoai lsp`: the language server that an editor starts."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from legoai import __version__
from legoai.commands import WrongUsage

_DESCRIPTION = """\
Serve an editor by the Language Server Protocol, on standard input and output, until the editor leaves. It reports what
`legoai lint` reports, of the text in the editor's buffer.
"""

_EXAMPLES = """\
examples:
  legoai lsp    the server that an editor starts for files named *.plan; see docs/editors.md

A Python factory that a plan names as its model is run only after a person asked for it in the editor.
"""

INSTALL = "pip install 'legoai[lsp]'"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai lsp`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("--stdio", action="store_true", help="taken since many editors pass it; there is no other way")


def run(arguments: Namespace) -> int:
    """Serve; returns 0 where the editor took its leave.

    Raises:
        WrongUsage: the packages that speak the protocol are not installed.
    """
    try:
        import pygls.lsp.server  # noqa: F401
    except ModuleNotFoundError as error:
        raise WrongUsage(f"the language server needs the package pygls: {INSTALL}") from error
    from legoai.dsl.server.features import plan_server
    from legoai.dsl.server.transport import serve

    return serve(plan_server(__version__, cost_command))


def cost_command(path: Path, *, factories: bool) -> list[str]:
    """The command that prints what a plan costs, for the server to start in a process of its own."""
    return [
        sys.executable,
        *("-P", "-m", "legoai", "cost", str(path), "--json", "--lines"),
        *([] if factories else ["--no-factories"]),
    ]
