"""The traffic of a step has the closed form in the literature."""

from __future__ import annotations

from collections import Counter

import pytest

from legoai.cost.capture import capture
from legoai.cost.trace.records import Collective
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered

DIM, HIDDEN, VOCABULARY, LAYERS = 32, 64, 128, 2
BLOCK = 4 * DIM * DIM + 3 * DIM * HIDDEN + 2 * DIM
PARAMETERS = LAYERS * BLOCK + 2 * DIM * VOCABULARY + DIM
TOKENS = 32
SINGLE = 4
UNITS = "{ layers.* = unit(reshard = after_forward), root = unit(reshard = after_forward) }"
TENSOR_PARALLEL = """\
shard on tp {
  layers.*.attention.{wq, wk, wv}    = colwise
  layers.*.attention.wo              = rowwise
  layers.*.feed_forward.{w1, w3}     = colwise
  layers.*.feed_forward.w2           = rowwise
}
"""


def communicated(body: str, *, data: int, world: int) -> list[Collective]:
    """The collectives of the second step of rank 0, of one micro batch of one sequence in fp32."""
    model = f"n_layers = {LAYERS}, dim = {DIM}, n_heads = 4, n_kv_heads = 4, hidden_dim = {HIDDEN}"
    text = f"""\
plan traffic
model llama3("tiny", {model}, vocab_size = {VOCABULARY})
cluster cpu(devices = {world})
batch (global = {data}, micro = 1, seq_len = {TOKENS})
precision (param = fp32)
{body}"""
    return in_the_simulator(_collectives, lowered(text).text, world)


def _collectives(program: str, world: int) -> list[Collective]:
    trace = capture(program, world=world, kind="cpu")
    span = trace.steps[-1]
    return [item for item in trace.records[span.start : span.stop] if isinstance(item, Collective)]


def sent(collectives: list[Collective]) -> float:
    """Bytes that one rank sends by rings: (n-1)/n of the buffer, and twice that for an all-reduce."""
    times = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    return sum(times[item.kind] * item.bytes * (len(item.ranks) - 1) / len(item.ranks) for item in collectives)


def of_training(collectives: list[Collective], axis: str) -> list[Collective]:
    """Those on an axis, without the few bytes by which ranks agree on the loss."""
    return [item for item in collectives if item.axis == axis and item.dtype != "float64"]


@pytest.mark.parametrize("n", [2, 8])
def test_fully_sharded_parameters_send_three_times_their_size(n):
    """Rajbhandari et al. 2020, section 7.2.2: parameters gathered twice, gradients scattered once."""
    found = of_training(communicated(f"mesh (dp_shard = {n})\nfsdp on dp_shard {UNITS}\n", data=n, world=n), "dp_shard")
    assert sent(found) == 3 * SINGLE * PARAMETERS * (n - 1) / n


def test_parameters_kept_after_forward_send_twice_their_size():
    units = UNITS.replace("after_forward", "after_backward")
    found = of_training(communicated(f"mesh (dp_shard = 4)\nfsdp on dp_shard {units}\n", data=4, world=4), "dp_shard")
    assert sent(found) == 2 * SINGLE * PARAMETERS * 3 / 4


@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
def test_replicas_send_twice_the_size_of_their_gradients(optimizer):
    """Section 7.1 there. With a sharded optimizer (7.2.1) the new parameters are gathered on top of an all-reduce."""
    body = f"mesh (dp_replicate = 4)\nreplicate on dp_replicate (optimizer = {optimizer})\n"
    found = communicated(body, data=4, world=4)
    found = of_training(found, "dp_replicate")
    reduced = [item for item in found if item.kind == "all_reduce"]
    gathered = [item for item in found if item.kind == "all_gather"]
    assert sent(reduced) == 2 * SINGLE * PARAMETERS * 3 / 4
    assert sent(gathered) == (SINGLE * PARAMETERS * 3 / 4 if optimizer == "sharded" else 0)


def test_hybrid_shards_send_only_their_shard_to_the_replicas():
    body = f"mesh (dp_replicate = 2, dp_shard = 4)\nfsdp on dp_replicate, dp_shard {UNITS}\n"
    found = communicated(body, data=8, world=8)
    assert sent(of_training(found, "dp_shard")) == 3 * SINGLE * PARAMETERS * 3 / 4
    assert sent(of_training(found, "dp_replicate")) == 2 * SINGLE * (PARAMETERS / 4) * 1 / 2


@pytest.mark.parametrize(("shared", "backward"), [(True, 2), (False, 5)])
def test_tensor_parallel_layer_has_four_all_reduces(shared, backward):
    """Shoeybi et al. 2019, section 3: two in forward, two in backward, each of batch x sequence x width.

    Where the projections do not share their input, each of the five adds up its own gradient.
    """
    inputs = "layers.*.{attention, feed_forward} = inputs(from = replicate, to = replicate)"
    body = TENSOR_PARALLEL.replace("{\n", f"{{\n  {inputs}\n", 1) if shared else TENSOR_PARALLEL
    found = of_training(communicated(f"mesh (tp = 2)\n{body}", data=1, world=2), "tp")
    in_layers = [item for item in found if item.module.startswith("layers.")]
    assert {(item.kind, item.bytes) for item in in_layers} == {("all_reduce", SINGLE * TOKENS * DIM)}
    assert Counter(item.phase for item in in_layers) == {"forward": 2 * LAYERS, "backward": backward * LAYERS}
    assert sent(in_layers) == LAYERS * (2 + backward) * 2 * SINGLE * TOKENS * DIM / 2


def test_checkpointing_repeats_the_all_reduces_of_forward():
    """Korthikanti et al. 2022, section 4: full recomputation runs the forward's communication again."""
    body = f"mesh (tp = 2)\n{TENSOR_PARALLEL}checkpoint {{ layers.* = full }}\n"
    phases = Counter(item.phase for item in of_training(communicated(body, data=1, world=2), "tp"))
    # The last all-reduce of a layer gives what only the next layer needs, and recomputation ends before it.
    assert phases["recompute"] == LAYERS
    assert phases["forward"] == 2 * LAYERS
