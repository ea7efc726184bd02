"""The protocol's requests, each with the function that answers it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lsprotocol import types
from pygls.exceptions import JsonRpcException

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.server.costs import CostCommand
from legoai.dsl.server.positions import replacement
from legoai.dsl.server.requests.actions import FIX_ALL, KINDS, RUN_FACTORY, actions, fix_all, wanted
from legoai.dsl.server.requests.completion import TRIGGERS, completion, documented
from legoai.dsl.server.requests.highlighting import LEGEND, semantic_tokens
from legoai.dsl.server.requests.hover import hover
from legoai.dsl.server.requests.navigation import CannotRenameError, definition, references, renameable, renamed
from legoai.dsl.server.requests.outline import folds, symbols
from legoai.dsl.server.server import PlanServer

_WATCHED: Final = ("**/*.plan", "**/pyproject.toml", "**/*.py")
"""Files whose change on disk may affect linting: base plans, configurations and factories."""


def plan_server(version: str, cost_command: CostCommand) -> PlanServer:
    """Return a server with all its handlers."""
    server = PlanServer(version, cost_command)
    for register in (_life, _documents, _fixes, _words, _places):
        register(server)
    return server


def _life(server: PlanServer) -> None:
    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        server.begin(params.initialization_options)

    @server.feature(types.INITIALIZED)
    def initialized(params: types.InitializedParams) -> None:
        workspace = server.client_capabilities.workspace
        watching = workspace.did_change_watched_files if workspace is not None else None
        if watching is not None and watching.dynamic_registration:
            options = types.DidChangeWatchedFilesRegistrationOptions([types.FileSystemWatcher(x) for x in _WATCHED])
            method = types.WORKSPACE_DID_CHANGE_WATCHED_FILES
            server.client_register_capability(types.RegistrationParams([types.Registration("watch", method, options)]))

    @server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def did_change_files(params: types.DidChangeWatchedFilesParams) -> None:
        server.recheck_all()

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def did_change_configuration(params: types.DidChangeConfigurationParams) -> None:
        """No-op: a project's configuration is in its pyproject.toml."""


def _documents(server: PlanServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: types.DidOpenTextDocumentParams) -> None:
        server.hold(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: types.DidChangeTextDocumentParams) -> None:
        server.hold(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(params: types.DidCloseTextDocumentParams) -> None:
        server.drop(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def did_save(params: types.DidSaveTextDocumentParams) -> None:
        server.recheck_all()
        server.cost(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    def hinting(params: types.InlayHintParams) -> list[types.InlayHint]:
        return server.hints(params.text_document.uri, params.range.start.line, params.range.end.line)


def _fixes(server: PlanServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    async def formatting(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        document = server.document(params.text_document.uri)
        if document is None:
            return None
        formatted = await server.aside(format_text, document.text, document.name)
        # A text with syntax errors is left unchanged.
        return None if formatted.text is None else replacement(document.positions, formatted.text)

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(code_action_kinds=list(KINDS)),
    )
    async def code_action(params: types.CodeActionParams) -> list[types.CodeAction] | None:
        checked = await server.checked(params.text_document.uri)
        if checked is None:
            return None
        only = params.context.only
        positions = checked.document.positions
        start, end = positions.offset(params.range.start), positions.offset(params.range.end)
        found = list(actions(checked, start, end, only))
        if wanted(only, FIX_ALL) and any(item.fix is not None and item.fix.safe for item in checked.diagnostics):
            whole = await server.aside(fix_all, checked, server.checking())
            found += [whole] if whole is not None else []
        return found

    @server.command(RUN_FACTORY)
    def run_factory(directory: str, target: str) -> None:
        server.approve(Path(directory), target)


def _words(server: PlanServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_HOVER)
    async def hovering(params: types.HoverParams) -> types.Hover | None:
        checked = await server.checked(params.text_document.uri)
        if checked is None:
            return None
        offset = checked.document.positions.offset(params.position)
        return await server.aside(hover, checked, offset, server.checking())

    @server.feature(
        types.TEXT_DOCUMENT_COMPLETION,
        types.CompletionOptions(trigger_characters=list(TRIGGERS), resolve_provider=True),
    )
    async def completing(params: types.CompletionParams) -> types.CompletionList | None:
        document = server.document(params.text_document.uri)
        if document is None:
            return None
        offset = document.positions.offset(params.position)
        return await server.aside(completion, document, offset, server.known(params.text_document.uri))

    @server.feature(types.COMPLETION_ITEM_RESOLVE)
    def resolving(item: types.CompletionItem) -> types.CompletionItem:
        return documented(item)


def _places(server: PlanServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    async def symbolling(params: types.DocumentSymbolParams) -> list[types.DocumentSymbol] | None:
        document = server.document(params.text_document.uri)
        return None if document is None else await server.aside(symbols, document)

    @server.feature(types.TEXT_DOCUMENT_FOLDING_RANGE)
    async def folding(params: types.FoldingRangeParams) -> list[types.FoldingRange] | None:
        document = server.document(params.text_document.uri)
        return None if document is None else await server.aside(folds, document)

    @server.feature(
        types.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL,
        types.SemanticTokensLegend(token_types=[str(sort.value) for sort in LEGEND], token_modifiers=[]),
    )
    async def colouring(params: types.SemanticTokensParams) -> types.SemanticTokens | None:
        document = server.document(params.text_document.uri)
        return None if document is None else await server.aside(semantic_tokens, document)

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    async def defining(params: types.DefinitionParams) -> list[types.Location] | None:
        checked = await server.checked(params.text_document.uri)
        return None if checked is None else definition(checked, checked.document.positions.offset(params.position))

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    async def referring(params: types.ReferenceParams) -> list[types.Location] | None:
        checked = await server.checked(params.text_document.uri)
        if checked is None:
            return None
        offset = checked.document.positions.offset(params.position)
        return references(checked, offset, definitions=params.context.include_declaration)

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    async def highlighting(params: types.DocumentHighlightParams) -> list[types.DocumentHighlight] | None:
        checked = await server.checked(params.text_document.uri)
        if checked is None:
            return None
        offset = checked.document.positions.offset(params.position)
        found = references(checked, offset, definitions=True)
        return [types.DocumentHighlight(item.range) for item in found if item.uri == checked.document.uri]

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    async def may_rename(params: types.PrepareRenameParams) -> types.Range | None:
        checked = await server.checked(params.text_document.uri)
        if checked is None:
            return None
        use = renameable(checked, checked.document.positions.offset(params.position))
        return None if use is None else checked.document.positions.of(use.span)

    @server.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    async def renaming(params: types.RenameParams) -> types.WorkspaceEdit | None:
        checked = await server.checked(params.text_document.uri)
        if checked is None:
            return None
        offset = checked.document.positions.offset(params.position)
        folders = server.folders_around(checked.document)
        try:
            return await server.aside(renamed, checked, offset, params.new_name, server.checking(), folders)
        except CannotRenameError as error:
            raise JsonRpcException(str(error), types.LSPErrorCodes.RequestFailed) from error
