"""The protocol's errors: every request gets an answer, also one that the server cannot read, or comes out of turn."""

from __future__ import annotations

import json
from typing import Any, Final

from lsprotocol import types
from pygls.exceptions import (
    JsonRpcException,
    JsonRpcInvalidParams,
    JsonRpcInvalidRequest,
    JsonRpcServerNotInitialized,
)
from pygls.protocol import LanguageServerProtocol

from legoai.specs.record import Record

_HEAD: Final = "Content-Length: {}\r\n\r\n"


class _Unreadable(Record):
    """A request whose parameters are not those of its method."""

    id: object
    method: str
    jsonrpc: str = "2.0"


class PlanProtocol(LanguageServerProtocol):
    """The protocol as pygls speaks it, which drops such requests, with an error for each of them."""

    _begun = False
    _left = False

    def structure_message(self, data: dict[str, Any]) -> Any:
        """Return a message as an object."""
        if "jsonrpc" not in data or "method" not in data:
            return super().structure_message(data)
        if self.get_message_type(data["method"]) is None:
            data.setdefault("params", None)  # pygls finds out that it has no such method, and says so
        try:
            return super().structure_message(data)
        except JsonRpcException:
            if "id" not in data:
                raise
            return _Unreadable(data["id"], data["method"])

    def handle_message(self, message: Any) -> None:
        """Handle a message, or answer with the reason why it is not handled."""
        method = getattr(message, "method", None)
        error = self._refusal(message, method)
        if error is not None:
            if hasattr(message, "id") or method is None:
                self._answer(getattr(message, "id", None), error)
            return
        if method == types.TEXT_DOCUMENT_DID_CHANGE and not self._is_open(message.params.text_document.uri):
            return
        super().handle_message(message)
        self._begun |= method == types.INITIALIZE
        self._left |= method == types.SHUTDOWN

    def _refusal(self, message: Any, method: str | None) -> JsonRpcException | None:
        if not hasattr(message, "jsonrpc"):
            return JsonRpcInvalidRequest("the message is no request, notification or response")
        if method is None or method == types.EXIT:
            return None
        if self._left:
            return JsonRpcInvalidRequest(f"`{method}` comes after `shutdown`")
        if self._begun and method == types.INITIALIZE:
            return JsonRpcInvalidRequest("the server is initialized once")
        if not self._begun and method != types.INITIALIZE:
            return JsonRpcServerNotInitialized(f"`{method}` comes before `initialize`")
        if isinstance(message, _Unreadable):
            return JsonRpcInvalidParams(f"the parameters are not those of `{method}`")
        return None

    def _is_open(self, uri: str) -> bool:
        # By identity: the keys of pygls are not the client's URIs, but those without percent-escapes.
        held = self.workspace.get_text_document(uri)
        return any(document is held for document in self.workspace.text_documents.values())

    def _answer(self, number: object, error: JsonRpcException) -> None:
        """Write an error's response; the writer takes messages as a whole."""
        assert self.writer is not None, "messages are handled while the server is connected"
        content = {"jsonrpc": self.VERSION, "id": number, "error": {"code": error.code, "message": error.message}}
        body = json.dumps(content).encode(self.CHARSET)
        self.writer.write(_HEAD.format(len(body)).encode(self.CHARSET) + body)
