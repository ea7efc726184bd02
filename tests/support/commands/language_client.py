"""A language client in a few lines: starts `legoai lsp`, sends it messages and reads its answers."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from legoai.dsl.server.documents import uri_of

PATIENCE = 60
"""Seconds; a machine that tests share may be slow."""


class Client:
    """A server in its own process, and its messages.

    Args:
        folder: the workspace.
        options: initialization options.
        capabilities: of the client.
        program: arguments of Python that start the server.
    """

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any] | None = None,
        capabilities: Mapping[str, Any] | None = None,
        program: Sequence[str] = ("-m", "legoai", "lsp"),
    ) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
        )
        self.notes: list[dict[str, Any]] = []
        """Notifications and requests of the server that were not read yet."""
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._number = 0
        self._versions: dict[str, int] = {}
        threading.Thread(target=self._read, daemon=True).start()
        self.initialized = self.ask(
            "initialize",
            {
                "processId": None,
                "rootUri": uri_of(folder),
                "capabilities": dict(capabilities or {}),
                "initializationOptions": dict(options) if options is not None else None,
            },
        )
        self.notify("initialized", {})

    def _read(self) -> None:
        assert self.process.stdout is not None
        stream = self.process.stdout
        while True:
            length = None
            while line := stream.readline().strip():
                name, _, value = line.partition(b":")
                assert name in (b"Content-Length", b"Content-Type"), line
                length = int(value) if name == b"Content-Length" else length
            if length is None:
                self._inbox.put(None)
                return
            self._inbox.put(json.loads(stream.read(length)))

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def notify(self, method: str, params: Any) -> None:
        """Send a notification."""
        self.send({"method": method, "params": params})

    def request(self, method: str, params: Any) -> int:
        """Send a request without waiting for its answer; the result is its number."""
        self._number += 1
        self.send({"id": self._number, "method": method, "params": params})
        return self._number

    def ask(self, method: str, params: Any = None) -> Any:
        """Send a request and wait for its answer."""
        return self.answer(self.request(method, params))

    def response(self, number: object) -> dict[str, Any]:
        """The response to a request, also an error; other messages are stored."""
        return self._until(lambda message: message.get("id") == number and "method" not in message)

    def answer(self, number: int) -> Any:
        """The answer to a request; other messages are stored."""
        message = self.response(number)
        assert "error" not in message, message["error"]
        return message["result"]

    def note(self, method: str, wanted: Callable[[Any], bool] = lambda params: True) -> Any:
        """Parameters of the next wanted notification of a method, stored or received."""
        for index, message in enumerate(self.notes):
            if message["method"] == method and wanted(message.get("params")):
                return self.notes.pop(index).get("params")
        message = self._until(lambda message: message.get("method") == method and wanted(message.get("params")))
        return message.get("params")

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message = self._inbox.get(timeout=PATIENCE)
            assert message is not None, "the server ended"
            if "method" in message and "id" in message:
                self.send({"id": message["id"], "result": None})
            if wanted(message):
                return message
            if "method" in message:
                self.notes.append(message)

    # -- documents

    def uri(self, name: str) -> str:
        return name if ":" in name else uri_of(self.folder / name)

    def open(self, name: str, text: str) -> list[dict[str, Any]]:
        """Open a document; the result are its diagnostics."""
        uri = self.uri(name)
        self._versions[uri] = 1
        item = {"uri": uri, "languageId": "plan", "version": 1, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": item})
        return self.diagnostics(name)

    def change(self, name: str, text: str) -> None:
        uri = self.uri(name)
        self._versions[uri] += 1
        document = {"uri": uri, "version": self._versions[uri]}
        self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})

    def close(self, name: str) -> None:
        self.notify("textDocument/didClose", {"textDocument": {"uri": self.uri(name)}})

    def save(self, name: str) -> None:
        self.notify("textDocument/didSave", {"textDocument": {"uri": self.uri(name)}})

    def diagnostics(self, name: str, version: int | None = None) -> list[dict[str, Any]]:
        """The diagnostics of the newest version of a document."""
        uri = self.uri(name)
        wanted = version or self._versions[uri]
        said = self.note(
            "textDocument/publishDiagnostics",
            lambda params: params["uri"] == uri and params.get("version") == wanted,
        )
        found: list[dict[str, Any]] = said["diagnostics"]
        return found

    def at(self, method: str, name: str, marked: str, **more: Any) -> Any:
        """Ask about the place that `|` marks in a text, which becomes the document's."""
        text, position = place(marked)
        self.change(name, text)
        params = {"textDocument": {"uri": self.uri(name)}, "position": position, **more}
        return self.ask(f"textDocument/{method}", params)

    def on(self, method: str, name: str, **more: Any) -> Any:
        """Ask about a document."""
        return self.ask(f"textDocument/{method}", {"textDocument": {"uri": self.uri(name)}, **more})

    # -- the end

    def leave(self) -> int:
        """Take leave as the protocol has it; the result is the exit status."""
        self.ask("shutdown")
        self.notify("exit", None)
        return self.process.wait(PATIENCE)

    def errors(self) -> str:
        """Standard error of the ended server."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


def place(marked: str) -> tuple[str, dict[str, int]]:
    """A text without its mark `|`, and the mark's position in UTF-16."""
    before, _, behind = marked.partition("|")
    line = before.rpartition("\n")[2]
    return before + behind, {"line": before.count("\n"), "character": len(line.encode("utf-16-le")) // 2}


@contextlib.contextmanager
def client(folder: Path, **more: Any) -> Iterator[Client]:
    """A client whose server ends with the block."""
    made = Client(folder, **more)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.process.wait()
        for stream in (made.process.stdin, made.process.stdout, made.process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


def applied(text: str, edits: list[dict[str, Any]]) -> str:
    """A text after edits whose positions are in UTF-16."""

    def offset(position: Mapping[str, int]) -> int:
        lines = text.split("\n")
        before = "".join(f"{line}\n" for line in lines[: position["line"]])
        line = lines[position["line"]] if position["line"] < len(lines) else ""
        cut = line.encode("utf-16-le")[: 2 * position["character"]].decode("utf-16-le")
        return min(len(before) + len(cut), len(text))

    for edit in sorted(edits, key=lambda edit: offset(edit["range"]["start"]), reverse=True):
        text = text[: offset(edit["range"]["start"])] + edit["newText"] + text[offset(edit["range"]["end"]) :]
    return text
