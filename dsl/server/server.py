"""State of the language server: the plans that are open, and the linting of their newest versions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from lsprotocol import types
from pygls.lsp.server import LanguageServer

from legoai.dsl.frontend.files.project import repository_root, working_folder
from legoai.dsl.server.costs import CostCommand, CostError, Costs, costs_of, hints
from legoai.dsl.server.documents import Checked, Checking, Document, check, factory_of, path_of
from legoai.dsl.server.protocol import PlanProtocol
from legoai.dsl.server.published import files_beside, published
from legoai.specs.models.manifests.cache import stop_inspections

T = TypeVar("T")

_WAIT: Final = 0.15
"""Seconds without another change before a text is linted."""
_PATIENCE: Final = 2.0
"""Seconds that a client may take to accept progress reports."""
_WORKERS: Final = 4
"""Threads that lint: more than one, since one may wait for a model that is inspected."""


class _Open:
    """A document that is open, and the linting of its newest version."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.task: asyncio.Task[Checked] | None = None
        """Lints the newest version; None until it is requested."""
        self.last: Checked | None = None
        """The last result of linting, maybe of an older version."""
        self.known: Checked | None = None
        """The same, for a version whose model is known."""
        self.waiting: asyncio.Task[None] | None = None
        """Publishes the diagnostics after a while without another change."""
        self.costing: asyncio.Task[None] | None = None
        """Simulates the version that was saved last."""
        self.costs: Costs | None = None


class PlanServer(LanguageServer):
    """A language server for plans.

    Texts are synchronised as a whole with each change: a plan has some hundred lines, and no incremental positions are
    needed.
    """

    def __init__(self, version: str, cost_command: CostCommand) -> None:
        super().__init__("legoai", version, types.TextDocumentSyncKind.Full, protocol_cls=PlanProtocol)
        self.open: dict[str, _Open] = {}
        self.approved: set[tuple[Path, str]] = set()
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="lint")
        self._announced: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cost_command = cost_command
        self.shows_costs = True

    def begin(self, options: object) -> None:
        """Record the event loop of the server, and the client's capabilities."""
        self._loop = asyncio.get_running_loop()
        for name, value in (options or {}).items() if isinstance(options, dict | None) else ():
            if name == "costs" and isinstance(value, bool):
                self.shows_costs = value
            else:
                self.show_once(f"the only initialization option is `costs`, true or false; `{name}` has no effect")

    # -- documents

    def hold(self, uri: str) -> None:
        """Store the client's newest text of a document, and lint it after a while without another change."""
        held = self.workspace.get_text_document(uri)
        encoding = str(getattr(self.workspace.position_encoding, "value", self.workspace.position_encoding))
        document = Document(uri, held.version, held.source, encoding, self.folder)
        found = self.open.get(uri)
        first = found is None
        if found is None:
            found = self.open[uri] = _Open(document)
        found.document, found.task = document, None
        self._schedule(found, 0.0 if first else _WAIT)
        if document.path is not None:
            self._recheck(where=document.path)

    def drop(self, uri: str) -> None:
        """Forget a document that was closed, and its diagnostics with it."""
        found = self.open.pop(uri, None)
        if found is None:
            return
        for task in (found.waiting, found.costing):
            if task is not None:
                task.cancel()
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))
        if found.document.path is not None:
            self._recheck(where=found.document.path)

    def document(self, uri: str) -> Document | None:
        """The newest version of a document; None where it is not open."""
        found = self.open.get(uri)
        return None if found is None else found.document

    def approve(self, directory: Path, target: str) -> None:
        """Allow a model factory to run, on the user's request, until the server ends."""
        self.approved.add((directory, target))
        self.recheck_all()

    @property
    def folder(self) -> Path:
        """Return the assumed folder of documents without a file: the first folder of the workspace."""
        return next(iter(self._folders()), None) or working_folder() or Path(os.sep)

    def folders_around(self, document: Document) -> list[Path]:
        """Return where plans may extend a document, or what it extends: the workspace, its repository, its folder."""
        root = repository_root(document.directory)
        return [*self._folders(), *([] if root is None else [root]), document.directory]

    def _folders(self) -> list[Path]:
        uris = [*self.workspace.folders, self.workspace.root_uri]
        return [path for uri in uris if uri and (path := path_of(uri)) is not None]

    def recheck_all(self) -> None:
        """Lint every document again: something beside them has changed."""
        for found in self.open.values():
            found.task = None
            self._schedule(found, _WAIT)

    def _recheck(self, where: Path) -> None:
        """Lint the documents again that depend on a changed file."""
        for found in self.open.values():
            named = {path for _, path in found.document.extended()}
            if found.last is not None:
                named |= files_beside(found.last).keys()
            if found.document.path != where and where in named:
                found.task = None
                self._schedule(found, _WAIT)

    # -- linting

    async def checked(self, uri: str) -> Checked | None:
        """Return the result of linting the newest text of a document; None where it is not open."""
        found = self.open.get(uri)
        return None if found is None else await self._check(found)

    def known(self, uri: str) -> Checked | None:
        """Return the last result of linting a version of a document whose model is known, without waiting."""
        found = self.open.get(uri)
        return None if found is None else found.known or found.last

    async def aside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that may take a while without blocking other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *arguments))

    def checking(self) -> Checking:
        """Return the current key of everything besides a document that linting depends on."""
        documents = [found.document for found in self.open.values()]
        texts = {item.path: item.text for item in documents if item.path is not None}
        return Checking(texts, frozenset(self.approved), self.log)

    def _schedule(self, found: _Open, delay: float) -> None:
        if found.waiting is not None:
            found.waiting.cancel()
        found.waiting = asyncio.ensure_future(self._publish(found, delay))

    async def _publish(self, found: _Open, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            checked = await self._check(found)
        except Exception as error:
            logging.getLogger(__name__).exception("linting failed")
            self.show_once(f"internal error: {type(error).__name__}: {error}")
            return
        document = checked.document
        if found.document is not document or self.open.get(document.uri) is not found:
            return
        if checked.problem is not None:
            self.show_once(checked.problem)
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, published(checked), document.version)
        )

    async def _check(self, found: _Open) -> Checked:
        """Return the result of linting the newest version; all requests share it."""
        if found.task is None:
            found.task = asyncio.ensure_future(self._lint(found, found.document))
        # A cancelled request does not cancel the shared result.
        return await asyncio.shield(found.task)

    async def _lint(self, found: _Open, document: Document) -> Checked:
        checked = await self.aside(check, document, self.checking())
        if found.document is not document and found.last is not None:
            return checked  # a newer version may have been linted meanwhile
        found.last = checked
        if checked.linted is not None and checked.linted.analysis and checked.linted.analysis.manifest:
            found.known = checked
        return checked

    # -- costs

    def cost(self, uri: str) -> None:
        """Simulate the saved version of a document; cancel a running simulation of it."""
        found = self.open.get(uri)
        if found is None or found.document.path is None or not self.shows_costs:
            return
        if found.costing is not None:
            found.costing.cancel()
        found.costing = asyncio.ensure_future(self._cost(found, found.document, found.document.path))

    async def _cost(self, found: _Open, document: Document, path: Path) -> None:
        checked = await self._check(found)
        target = None if checked.linted is None else factory_of(checked.linted)
        command = self._cost_command(path, factories=(document.directory, target) in self.approved)
        try:
            async with self._telling(f"simulating {path.name}"):
                found.costs = await costs_of(document, command)
        except (CostError, OSError) as error:
            found.costs = None
            self.log(f"{document.name} is not costed: {error}")
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)

    @contextlib.asynccontextmanager
    async def _telling(self, what: str) -> AsyncIterator[None]:
        """Report progress to the client, if it supports that."""
        window = self.client_capabilities.window
        if window is None or not window.work_done_progress:
            yield
            return
        token = str(uuid.uuid4())
        try:
            await asyncio.wait_for(self.work_done_progress.create_async(token), _PATIENCE)
        except Exception:  # the client does not support it, or does not respond
            yield
            return
        self.work_done_progress.begin(token, types.WorkDoneProgressBegin(f"legoai: {what}"))
        try:
            yield
        finally:
            self.work_done_progress.end(token, types.WorkDoneProgressEnd())

    def hints(self, uri: str, first: int, last: int) -> list[types.InlayHint]:
        """Return the costs of a document's lines, for lines that are unchanged since the simulation."""
        found = self.open.get(uri)
        return [] if found is None or found.costs is None else hints(found.document, found.costs, first, last)

    def stop(self) -> None:
        """End all running work, so that the process can end."""
        stop_inspections()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- messages

    def log(self, message: str) -> None:
        """Write a line into the client's log, from any thread."""
        self._soon(self.window_log_message, types.LogMessageParams(types.MessageType.Info, f"legoai: {message}"))

    def show_once(self, message: str) -> None:
        """Show the user a message, once only."""
        if message not in self._announced:
            self._announced.add(message)
            self.window_show_message(types.ShowMessageParams(types.MessageType.Error, f"legoai: {message}"))

    def _soon(self, function: Any, *arguments: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *arguments)
