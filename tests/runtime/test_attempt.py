"""Attempts of a run: ranks that torchrun starts again join each other, and none of an earlier attempt."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

from legoai.runtime import attempt, process_group
from legoai.runtime.device import Device

PROGRAM = """
import itertools, os, signal, sys
import torch
from pathlib import Path
from support.training import programs

killed, times = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
count = len(list(killed.iterdir()))
seen = Path(killed.parent, "counts")
seen.mkdir(exist_ok=True)
(seen / f"{count}-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()

def observe(_, steps=itertools.count(1)):
    if os.environ["RANK"] == "1" and count < times and next(steps) == 3:
        (killed / str(count)).touch()
        os.kill(os.getpid(), signal.SIGKILL)

trainer = programs.trainer(dp_shard=2, dtype=torch.float32)
fit = type(trainer).fit
type(trainer).fit = lambda self, options: fit(self, options, observe=observe)
trainer.main()
"""


@pytest.fixture
def store():
    """A store that outlives attempts."""
    return TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))


@pytest.fixture(autouse=True)
def own_attempt(monkeypatch):
    monkeypatch.setattr(attempt, "_of_process", attempt._Attempt())


def joined(port: int, rank: int, world_size: int, seconds: float = 20.0) -> str:
    client = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=seconds))
    return attempt.agree_on_attempt(client, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds))


def all_joined(store: TCPStore, world_size: int) -> list[str]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: joined(store.port, rank, world_size), reversed(range(world_size))))


def test_each_attempt_has_one_name_of_its_own(store):
    names = [all_joined(store, size) for size in (3, 3, 2, 1, 3)]
    assert [set(found) for found in names] == [{f"attempt {number}"} for number in range(1, 6)]


def test_ranks_that_ended_while_they_joined_are_not_waited_for(store):
    for rank in (1, 2):
        store.set(f"{attempt._JOINING}/{rank}", f"of a process that has ended, as rank {rank}")
    with pytest.raises(DistStoreError, match=r"timed out after 0\.2 s"):
        joined(store.port, 0, 3, seconds=0.2)
    assert set(all_joined(store, 3)) == {"attempt 2"}


def test_name_is_found_from_outside_by_a_rank_of_the_attempt(store, monkeypatch):
    for count in ("0", "1"):
        rank = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": count}
        for name, value in rank.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(attempt, "_of_process", attempt._Attempt())
        before = attempt.attempt()
        assert attempt.published_attempt(store, rank) == before == f"after {count} restarts"
        assert attempt.is_restart() == (count == "1")
        assert joined(store.port, 0, 1) == attempt.attempt() == attempt.published_attempt(store, rank) != before


def test_second_attempt_is_a_restart_even_where_it_is_not_counted(store, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    found = []
    for _ in range(2):
        joined(store.port, 0, 1)
        found.append(attempt.is_restart())
    assert found == [False, True]


def test_group_keeps_its_keys_apart_from_those_of_other_attempts(store, monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    for name, value in (environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    given: list[dict] = []
    monkeypatch.setattr(dist, "init_process_group", lambda _, **options: given.append(options))
    for number in (1, 2):
        process_group._join(Device.choose("cpu"), timedelta(seconds=20))
        given[-1]["store"].set("address", str(number))
        assert (given[-1]["rank"], given[-1]["world_size"]) == (0, 1)
    assert [options["store"].get("address") for options in given] == [b"1", b"2"]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    process_group._join(Device.choose("cpu"), timedelta(seconds=20))
    assert given[-1].keys() == {"timeout"}, "rank 0 serves a store that ends with it"


def agents(tmp_path: Path, hosts: int, *, kills: int) -> tuple[list[int], str]:
    """Statuses and output of torchrun's agents, each with a share of two ranks, of which one is killed some times."""
    program, killed = tmp_path / "program.py", tmp_path / "killed"
    program.write_text(PROGRAM)
    killed.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = [f"--nnodes={hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"]
    command = [sys.executable, "-m", "torch.distributed.run", *(where if hosts > 1 else ["--standalone"])]
    command += [f"--nproc-per-node={2 // hosts}", f"--max-restarts={kills}", str(program), str(killed), str(kills)]
    command += ["--device", "cpu", "--steps", str(2 * kills + 2), "--save-every", "1", "--out", str(tmp_path / "out")]
    log = tmp_path / "log"
    with log.open("w") as output:
        running = [subprocess.Popen(command, stdout=output, stderr=output, env=os.environ) for _ in range(hosts)]
        try:
            statuses = [agent.wait(timeout=180) for agent in running]
        finally:
            for agent in running:
                agent.terminate()
                agent.wait()
    return statuses, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_restarted_ranks_join_again_and_resume(tmp_path, hosts):
    statuses, output = agents(tmp_path, hosts, kills=2)
    assert statuses == [0] * hosts, output
    assert "connectFullMesh" not in output and "did not answer" not in output, output
    assert len(list((tmp_path / "killed").iterdir())) == 2
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["event"] == "end" and len([record for record in records if record["event"] == "resume"]) == 2
