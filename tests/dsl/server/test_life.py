"""Start and exit of the language server, cost hints, and factories: each with a server of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands.command_line import BAD, GOOD
from support.commands.language_client import PATIENCE, Client, client

FACTORY = """
import pathlib
from torch import nn

def build():
    pathlib.Path(__file__).with_name("ran").touch()
    return nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
"""
OF_A_FACTORY = """plan made
model python("made:build")
cluster cpu(devices = 2)
batch (global = 4, micro = 2, seq_len = 8)
mesh (dp_shard = 2)
fsdp on dp_shard { 1 = unit }
"""


def started(*argv: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "legoai", *argv]
    return subprocess.run(command, input=data, capture_output=True, check=False, timeout=PATIENCE)


def test_server_exits_on_end_of_input_and_exit_notification(tmp_path: Path):
    with client(tmp_path) as server:
        assert server.initialized["serverInfo"]["name"] == "legoai"
        assert server.initialized["capabilities"]["positionEncoding"] == "utf-16"
        assert server.leave() == 0
        assert server.errors() == ""
    done = started("lsp", "--stdio")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.slow
def test_refused_rename_is_no_failure_of_the_server(tmp_path: Path):
    with client(tmp_path) as server:
        text = GOOD.replace("micro = 4", "micro = n") + "let n = 4\n"
        assert server.open("a.plan", text) == []
        with pytest.raises(AssertionError, match="a name of the language, or no name"):
            server.at("rename", "a.plan", text.replace("let n", "let |n"), newName="unit")
        assert server.leave() == 0
        assert server.errors() == ""


def test_every_request_is_answered(tmp_path: Path):
    place = {"textDocument": {"uri": "file:///x.plan"}, "position": {"line": 0, "character": 0}}

    def code(server: Client, method: str, params: object = None) -> object:
        server.send({"jsonrpc": "2.0", "id": "a", "method": method, **({} if params is None else {"params": params})})
        answer = server.response("a")
        return answer["error"]["code"] if "error" in answer else answer["result"]

    with client(tmp_path) as server:
        assert code(server, "textDocument/hover", place) is None
        for params in (None, {"foo": 1}, [], {**place, "position": {"line": "0", "character": []}}):
            assert code(server, "textDocument/hover", params) == -32602
        assert code(server, "foo/bar") == -32601
        assert code(server, "initialize", {"processId": None, "rootUri": None, "capabilities": {}}) == -32600
        assert code(server, "textDocument/hover", place) is None
        assert code(server, "shutdown") is None
        assert code(server, "textDocument/hover", place) == -32600
        server.notify("exit", None)
        assert server.process.wait(PATIENCE) == 0
        assert server.notes == []


def test_request_before_the_start_is_refused():
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "textDocument/hover", "params": {}}).encode()
    done = started("lsp", data=b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert json.loads(done.stdout.partition(b"\r\n\r\n")[2])["error"]["code"] == -32002


def test_change_of_a_closed_document_has_no_effect(tmp_path: Path):
    with client(tmp_path, options={"costs": False}) as server:
        document = {"uri": server.uri("a.plan"), "version": 1}
        server.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": BAD}]})
        assert server.open("b.plan", GOOD) == []
        assert [note["method"] for note in server.notes] == []


def test_position_encoding_follows_the_client(tmp_path: Path):
    capabilities = {"general": {"positionEncodings": ["utf-8", "utf-16"]}}
    with client(tmp_path, capabilities=capabilities) as server:
        assert server.initialized["capabilities"]["positionEncoding"] == "utf-8"
        [found] = [
            item
            for item in server.open("a.plan", GOOD + 'data (source = "🚀", fild = "x")\n')
            if "fild" in item["message"]
        ]
        assert found["range"]["start"]["character"] == len('data (source = "🚀", '.encode())


@pytest.mark.slow
def test_files_are_watched_if_the_client_supports_it(tmp_path: Path):
    watching = {"workspace": {"didChangeWatchedFiles": {"dynamicRegistration": True}}}
    with client(tmp_path, capabilities=watching) as server:
        [registered] = server.note("client/registerCapability")["registrations"]
        assert registered["method"] == "workspace/didChangeWatchedFiles"
        assert {"globPattern": "**/*.plan"} in registered["registerOptions"]["watchers"]
        (tmp_path / "base.plan").write_text(GOOD, encoding="utf-8")
        assert server.open("a.plan", 'plan a\nextends "base.plan"\n') == []
        (tmp_path / "base.plan").write_text(BAD, encoding="utf-8")
        change = {"uri": server.uri("base.plan"), "type": 2}
        server.notify("workspace/didChangeWatchedFiles", {"changes": [change]})
        assert [item["code"] for item in server.diagnostics("a.plan")] == ["LP210"]


@pytest.mark.slow
def test_exit_without_shutdown_and_interrupt_stop_the_server(tmp_path: Path):
    with client(tmp_path) as server:
        server.notify("exit", None)
        assert server.process.wait(PATIENCE) == 1
    with client(tmp_path) as server:
        server.open("a.plan", GOOD)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 130
        assert server.errors() == ""


def test_missing_packages_print_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pygls").mkdir()
    (tmp_path / "pygls" / "__init__.py").write_text("raise ModuleNotFoundError('pygls')\n", encoding="utf-8")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from legoai.cli import main; sys.exit(main(['lsp']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE, input=""
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "pip install 'legoai[lsp]'" in done.stderr


def test_server_imports_no_torch(tmp_path: Path):
    code = "import legoai.dsl.server.features, legoai.dsl.server.transport, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout == "False\n"


def test_factory_runs_only_on_request(tmp_path: Path):
    (tmp_path / "made.py").write_text(FACTORY, encoding="utf-8")
    with client(tmp_path, options={"costs": False}) as server:
        [found] = server.open("made.plan", OF_A_FACTORY)
        assert found["code"] == "LP226"
        [action] = server.on("codeAction", "made.plan", range=found["range"], context={"diagnostics": []})
        command = action["command"]
        assert "made:build" in command["title"]
        assert not (tmp_path / "ran").exists()
        server.ask("workspace/executeCommand", {"command": command["command"], "arguments": command["arguments"]})
        after = server.diagnostics("made.plan")
        assert "LP226" not in [item["code"] for item in after]
        assert (tmp_path / "ran").exists()
        assert "this runs the model factory" in server.note("window/logMessage")["message"]


@pytest.mark.slow
def test_factory_that_ran_is_not_run_by_another_server_nor_after_a_change(tmp_path: Path):
    (tmp_path / "made.py").write_text(FACTORY, encoding="utf-8")
    with client(tmp_path, options={"costs": False}) as server:
        server.open("made.plan", OF_A_FACTORY)
        arguments = [str(tmp_path), "made:build"]
        server.ask("workspace/executeCommand", {"command": "legoai.runFactory", "arguments": arguments})
        after = server.diagnostics("made.plan")
    (tmp_path / "ran").unlink()
    with client(tmp_path, options={"costs": False}) as server:
        assert server.open("made.plan", OF_A_FACTORY) == after
        (tmp_path / "made.py").write_text(FACTORY + "# changed\n", encoding="utf-8")
        server.save("made.plan")
        assert [item["code"] for item in server.diagnostics("made.plan")] == ["LP226"]
        assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_server_stops_while_a_factory_runs(tmp_path: Path):
    """Variants look at the model again: none of their inspections begins after the end."""
    slow = "import os, pathlib, time\npathlib.Path(__file__).with_name('ran').write_text(str(os.getpid()))\n"
    (tmp_path / "made.py").write_text(f"{slow}time.sleep(600)\n", encoding="utf-8")
    with client(tmp_path, options={"costs": False}) as server:
        server.open("made.plan", OF_A_FACTORY + "variant v { clip (norm = 1.0) }\n")
        arguments = [str(tmp_path), "made:build"]
        server.ask("workspace/executeCommand", {"command": "legoai.runFactory", "arguments": arguments})
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "ran").exists() or not (tmp_path / "ran").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        factory = int((tmp_path / "ran").read_text())
        assert is_alive(factory)
        assert server.leave() == 0
        assert not is_alive(factory)


COSTS = """
import json, os, sys, time
from pathlib import Path
name = Path(sys.argv[1])
log = name.with_suffix(".log")
with log.open("a") as stream:
    stream.write(f"{os.getpid()} begins\\n")
if "slow" in name.read_text():
    time.sleep(600)
print(json.dumps({"summary": "1 s a step", "lines": [{"file": str(name), "line": 5, "text": "64 sequences"}]}))
"""
"""What stands for `legoai cost --json --lines`."""

SERVER = """
import sys
from legoai.dsl.server.features import plan_server
from legoai.dsl.server.transport import serve
sys.exit(serve(plan_server("0", lambda path, *, factories: [sys.executable, {script!r}, str(path)])))
"""


def is_alive(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_cost_hints_follow_saves_and_cancel_older_simulations(tmp_path: Path):
    (tmp_path / "costs.py").write_text(COSTS, encoding="utf-8")
    program = ["-c", SERVER.format(script=str(tmp_path / "costs.py"))]
    refreshing = {"workspace": {"inlayHint": {"refreshSupport": True}}, "window": {"workDoneProgress": True}}
    everything = {"start": {"line": 0, "character": 0}, "end": {"line": 99, "character": 0}}
    with client(tmp_path, capabilities=refreshing, program=program) as server:

        def saved(text: str) -> None:
            server.change("a.plan", text)
            (tmp_path / "a.plan").write_text(text, encoding="utf-8")
            server.save("a.plan")

        server.open("a.plan", GOOD)
        assert server.on("inlayHint", "a.plan", range=everything) == []
        saved(GOOD + "# slow\n")
        log = tmp_path / "a.log"
        deadline = time.monotonic() + PATIENCE
        while not log.exists() or not log.read_text().endswith("begins\n"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        slow = int(log.read_text().split()[0])
        assert is_alive(slow)
        saved(GOOD)
        server.note("workspace/inlayHint/refresh")
        assert not is_alive(slow)
        hints = server.on("inlayHint", "a.plan", range=everything)
        assert [(item["position"]["line"], item["label"]) for item in hints] == [(4, "64 sequences"), (0, "1 s a step")]
        # A line that is changed loses its hint, and one below moves with its text.
        server.change("a.plan", "# above\n" + GOOD)
        hints = server.on("inlayHint", "a.plan", range=everything)
        assert sorted(item["position"]["line"] for item in hints) == [1, 5]
        server.change("a.plan", GOOD.replace("seq_len = 64", "seq_len = 32"))
        hints = server.on("inlayHint", "a.plan", range=everything)
        assert [item["label"] for item in hints] == ["1 s a step"]
        saved(GOOD + "# slow\n")
        while len(log.read_text().splitlines()) < 3:
            time.sleep(0.05)
        last = int(log.read_text().splitlines()[-1].split()[0])
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 143
        assert not is_alive(last)


def test_cost_hints_can_be_disabled_and_unknown_options_are_reported(tmp_path: Path):
    with client(tmp_path, options={"costs": False, "color": 1}) as server:
        assert "`color` has no effect" in server.note("window/showMessage")["message"]
        (tmp_path / "a.plan").write_text(BAD, encoding="utf-8")
        server.open("a.plan", BAD)
        server.save("a.plan")
        assert server.diagnostics("a.plan")
        assert json.dumps(server.on("inlayHint", "a.plan", range=server.open("b.plan", BAD)[0]["range"])) == "[]"


@pytest.mark.slow
def test_server_outlives_its_working_folder(tmp_path: Path):
    """A folder is deleted, and maybe made again: by a switch of branches, or a clone."""
    folder = tmp_path / "project"
    folder.mkdir()
    extending = 'plan extending\nextends "base.plan"\n'
    with client(folder, options={"costs": False}) as server:
        assert [item["code"] for item in server.open("a.plan", extending)] == ["LP214"]
        folder.rmdir()
        server.change("a.plan", extending + "# changed\n")
        assert [item["code"] for item in server.diagnostics("a.plan")] == ["LP214"]
        assert server.open("new.plan", GOOD) == []
        folder.mkdir()
        (folder / "base.plan").write_text(GOOD, encoding="utf-8")
        server.change("a.plan", extending)
        assert server.diagnostics("a.plan") == []
        assert server.leave() == 0
        assert server.errors() == ""
