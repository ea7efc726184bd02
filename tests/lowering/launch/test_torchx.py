"""Component of TorchX: the arguments that it passes to `dist.ddp`, and the resulting job."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from legoai.cli import main
from legoai.runtime.launching.torchrun import SHUTDOWN_SECONDS

PLAN = """plan small
model   llama3("tiny")
cluster {cluster}
batch   (global = 32, micro = 1, seq_len = 64)
mesh    (dp_shard = {ranks})
fsdp blocks on dp_shard
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(cluster: str = "h100_sxm(hosts = 4, fabric = infiniband_ndr)", ranks: int = 32) -> str:
    Path("small.plan").write_text(PLAN.format(cluster=cluster, ranks=ranks), encoding="utf-8")
    assert main(["lower", "small.plan", "-o", "small.py", "--launch", "torchx"]) == 0
    return Path("small_torchx.py").read_text(encoding="utf-8")


def loaded(text: str) -> Any:
    """The component's function, with a `dist.ddp` that returns its arguments."""
    found: dict[str, Any] = {}
    exec(compile(text, "small_torchx.py", "exec"), found)
    return found["train"]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("torchx", "torchx.components")}
    modules["torchx"].specs = SimpleNamespace(AppDef=dict)
    modules["torchx.components"].dist = SimpleNamespace(
        ddp=lambda *arguments, **options: {"arguments": arguments, **options}
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("stub")
def test_component_has_hosts_processes_and_gpus_of_the_plan():
    job = loaded(written())("--steps", "5", image="ours:1")
    assert (job["j"], job["gpu"], job["script"], job["name"]) == ("4x8", 8, "small.py", "/small")
    assert (job["arguments"], job["image"]) == (("--steps", "5"), "ours:1")
    assert job["env"] == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS)}
    assert loaded(written("cpu(devices = 2)", 2))(image=".")["gpu"] == 0


@pytest.mark.usefixtures("stub")
def test_component_has_typed_and_documented_parameters():
    """Each parameter has a type and a line of documentation, of which TorchX makes options."""
    text = written()
    train = loaded(text)
    documented = inspect.getdoc(train).partition("Args:\n")[2]
    for name, parameter in inspect.signature(train).parameters.items():
        assert parameter.annotation is not parameter.empty
        assert f"    {name}: " in documented
    assert f"{Path('small_torchx.py')}:train" in ast.get_docstring(ast.parse(text))


def test_command_of_the_component_quotes_its_path():
    Path("my folder").mkdir()
    written()
    assert main(["lower", "small.plan", "-o", "my folder/small.py", "--launch", "torchx"]) == 0
    text = Path("my folder/small_torchx.py").read_text(encoding="utf-8")
    assert "-s SCHEDULER 'my folder/small_torchx.py:train' --image" in ast.get_docstring(ast.parse(text))


def test_torchx_builds_a_job():
    pytest.importorskip("torchx", reason="torchx is not installed, and needs an old urllib3")
    (role,) = loaded(written())("--steps", "5", image="ours:1").roles
    assert (role.num_replicas, role.resource.gpu, role.resource.memMB) == (4, 8, -1)
    assert "--nnodes 4 --nproc_per_node 8" in role.args[1]
    assert role.args[1].endswith("small.py --steps 5")
