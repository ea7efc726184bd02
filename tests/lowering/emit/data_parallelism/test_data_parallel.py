"""Every form of data parallelism trains as one process does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.marks import slow_but, some_slow
from support.texts.plans import HEAD, SEQUENCE_PARALLEL
from support.training.meshed import UNITS, text_of
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

PLANS = {
    "replicas in buckets": f"mesh (dp_replicate = 4)\nreplicate on dp_replicate (bucket = 2MiB)\n{DOUBLE}",
    "replicas in one bucket": f"mesh (dp_replicate = 4)\nreplicate on dp_replicate\n{DOUBLE}",
    "replicas and tensor parallel, with checkpointing": f"""
mesh (dp_replicate = 2, tp = 2)
{SEQUENCE_PARALLEL}
replicate on dp_replicate (bucket = 500KiB)
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "sharded optimizer": f"mesh (dp_replicate = 4)\nreplicate on dp_replicate (optimizer = sharded)\n{DOUBLE}",
    "sharded optimizer and tensor parallel": f"""
mesh (dp_replicate = 2, tp = 2)
{SEQUENCE_PARALLEL}
replicate on dp_replicate (optimizer = sharded)
{DOUBLE}""",
    "replicas that reduce once, with tensor parallel": f"""
mesh (dp_replicate = 2, tp = 2)
{SEQUENCE_PARALLEL}
replicate on dp_replicate (bucket = 500KiB)
comm (reduce = last_micro_batch)
{DOUBLE}""",
    "hybrid sharding that reduces once": f"""
mesh (dp_replicate = 2, dp_shard = 2)
fsdp on dp_replicate, dp_shard {UNITS}
comm (reduce = last_micro_batch)
{DOUBLE}""",
    "parameters kept from micro batch to micro batch": f"""
mesh (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {{ layers.* = unit(reshard = never), root = unit(reshard = never) }}
comm (reduce = last_micro_batch)
{DOUBLE}""",
    "prefetching": f"""
mesh (dp_shard = 4)
fsdp on dp_shard {{ {{tok_embeddings, output}} = unit, layers.* = unit, root = unit }}
comm (prefetch = units(forward = 2, backward = 2))
{DOUBLE}""",
    "buckets by bytes, with checkpointing": f"""
mesh (dp_shard = 4)
fsdp on dp_shard {{ layers.* = unit, {{norm, output}} = unit, root = unit }}
comm (prefetch = units(forward = 1)) {{
  layers.*       = bucket(bytes(3MB))
  {{norm, output}} = bucket(group)
}}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "replicas and context parallel, with a sharded optimizer": f"""
mesh (dp_replicate = 2, cp = 2)
context on cp
replicate on dp_replicate (optimizer = sharded)
{DOUBLE}""",
    "everything in host memory": f"""
mesh (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {UNITS}
offload (parameters = all, activations = all)
{DOUBLE}""",
    "optimizer state in host memory": f"""
mesh (dp_replicate = 2, tp = 2)
{SEQUENCE_PARALLEL}
replicate on dp_replicate (optimizer = sharded)
checkpoint {{ layers.* = full }}
offload (optimizer = all, activations = all)
{DOUBLE}""",
    "one bucket for some": f"""
mesh (dp_shard = 4)
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), layers.*.{{attention, feed_forward}} = unit }}
comm {{ layers.1.{{attention, feed_forward}} = bucket(group), layers.{{2..3}}.attention = bucket(module) }}
{DOUBLE}""",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(chr(97 + (7 * i * i + i // 3) % 26) for i in range(20_000)))
    return str(path)


@pytest.fixture(scope="module")
def alone(gloo, data) -> dict:
    """The plan on one process, without any data parallelism."""
    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE), data)
    return result


def test_replicas_use_the_dtypes_of_the_plan(gloo, data):
    [single] = gloo(1)(train, text_of("precision (param = fp32)"), data)
    mixed = "mesh (dp_replicate = 4)\nreplicate on dp_replicate\nprecision (param = bf16, reduce = fp32)"
    result = gloo(4)(train, text_of(mixed), data)[0]
    assert result["dtypes"] == {torch.float32}
    # Of two steps: the learning rate overshoots, which enlarges every difference in the steps after them.
    assert result["loss"][:2] == pytest.approx(single["loss"][:2], rel=1e-2)
    assert result["loss"] != pytest.approx(single["loss"], rel=1e-6)


def train_with_a_far_host(text: str, data: str) -> dict:
    """Train where host memory is not the memory of the device, or seems not to be: everything is copied."""
    from legoai.runtime.offloading import offload

    near, copies = offload._to_host, Counter[torch.Size]()

    def counted(tensor: torch.Tensor, **options: bool) -> torch.Tensor:
        copies[tensor.shape] += 1
        return near(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "HOST", torch.device("cpu", 0))  # another device than `cpu` to all who ask
        patch.setattr(offload, "_to_host", counted)
        return train(text, data) | {"copies": copies}


@pytest.mark.parametrize(
    "name", some_slow([name for name in PLANS if "host" in name], "optimizer state in host memory")
)
def test_offloaded_tensors_return_unchanged(name: str, gloo, data, alone):
    for result in gloo(4)(train_with_a_far_host, text_of(PLANS[name]), data):
        assert sum(result["copies"].values()) > 100
        assert_close(result, alone, TOLERANCE)


@pytest.mark.parametrize("name", slow_but(PLANS, "replicas and tensor parallel, with checkpointing"))
def test_data_parallelism_equals_one_process(name: str, gloo, data, alone):
    for result in gloo(4)(train, text_of(PLANS[name]), data):
        assert_close(result, alone, TOLERANCE)


SLOW = {
    "hybrid sharding and tensor parallel": f"""
mesh (dp_replicate = 2, dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_replicate, dp_shard {{ layers.* = unit, {{norm, output}} = unit(reshard = never), root = unit }}
comm (prefetch = units(forward = 2, backward = 2)) {{ {{norm, output}} = bucket(group) }}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "replicas of a pipeline with tensor parallel": f"""
mesh (pp = 2, dp_replicate = 2, tp = 2)
{SEQUENCE_PARALLEL}
replicate on dp_replicate (optimizer = sharded)
pipeline on pp (schedule = 1F1B)
checkpoint {{ layers.* = full }}
offload (activations = all)
{DOUBLE}""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_compositions_on_eight_ranks_equal_one_process(name: str, gloo, data, alone):
    head = HEAD.replace("devices = 4", "devices = 8")
    results = gloo(8)(train, text_of(SLOW[name], head), data)
    held = set()
    for result in results:
        held |= result["parameters"].keys()
        own = {key: alone["parameters"][key] for key in result["parameters"]}
        assert_close(result, alone | {"parameters": own}, TOLERANCE)
    assert held == alone["parameters"].keys()


class Collectives(TorchDispatchMode):
    """Counts the collectives that run while it is entered, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def collectives(text: str, data: str) -> Counter[str]:
    """Numbers of gathers and reductions of a program in two steps."""
    with Collectives() as mode:
        train(text, data, steps=2)
    return mode.counts


def test_units_gather_and_reduce_as_often_as_planned(gloo, data):
    def counts(reshard: str, reduce: str) -> Counter[str]:
        units = f"{{ layers.* = unit(reshard = {reshard}), root = unit(reshard = {reshard}) }}"
        body = f"mesh (dp_shard = 2)\nfsdp on dp_shard {units}\ncomm (reduce = {reduce})\n{DOUBLE}"
        head = HEAD.replace("devices = 4", "devices = 2").replace('"tiny"', '"tiny", n_layers = 2')
        return gloo(2)(collectives, text_of(body, head), data)[0]

    units, micro_batches, steps = 3, 2, 2
    every = counts("after_forward", "every_micro_batch")
    assert every["_allgather_base_"] == 2 * units * micro_batches * steps
    assert every["_reduce_scatter_base_"] == units * micro_batches * steps
    once = counts("after_backward", "last_micro_batch")
    assert once["_allgather_base_"] == units * micro_batches * steps
    assert once["_reduce_scatter_base_"] == units * steps
    kept = counts("never", "last_micro_batch")
    assert kept["_allgather_base_"] == units * steps


def resumed(first: str, second: str, data: str, out: str) -> dict:
    """Train the first steps under one program and the rest under another."""
    train(first, data, out=Path(out), steps=1)
    return train(second, data, out=Path(out), resume_other_plan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degree", ["mesh (dp_replicate = 2, tp = 2)", "mesh (dp_shard = 4)", "mesh (dp_replicate = 4)"]
)
def test_sharded_optimizer_state_continues_on_another_mesh(degree: str, gloo, data, alone, tmp_path):
    sharded = "replicate on dp_replicate (optimizer = sharded)\n"
    second = {
        "mesh (dp_replicate = 2, tp = 2)": f"{SEQUENCE_PARALLEL}{sharded}",
        "mesh (dp_shard = 4)": f"fsdp on dp_shard {UNITS}",
        "mesh (dp_replicate = 4)": "replicate on dp_replicate\n",
    }[degree]
    start = text_of(f"mesh (dp_replicate = 4)\n{sharded}{DOUBLE}")
    [result, *_] = gloo(4)(resumed, start, text_of(f"{degree}\n{second}{DOUBLE}"), data, str(tmp_path))
    assert len(result["loss"]) == len(alone["loss"]) - 1
    whole = {**alone, "loss": alone["loss"][1:], "norm": alone["norm"][1:]}
    assert_close(result, whole, TOLERANCE)
