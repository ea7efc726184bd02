"""The estimate joins time, memory and breakdowns, and evaluates the plan's requirements."""

from __future__ import annotations

from pathlib import Path

import pytest

import legoai
from legoai.cost.estimate import CannotEstimateError
from legoai.cost.kernels.work import kind_of
from legoai.cost.machine.cluster import machine_of
from legoai.cost.memory.storages import memory
from legoai.cost.profiles import ProfileError
from legoai.cost.trace.records import Collective, Kernel
from legoai.specs.directives.cluster import ClusterUse
from support.marks import some_slow
from support.simulation.simulator import in_the_simulator
from support.simulation.timelines import busy

PLAN = """plan small

model   llama3("tiny")
cluster {cluster}
batch   (global = 16, micro = 2, seq_len = 128)
mesh    (dp_shard = 4, tp = 2)

shard on tp {{
  layers.*.attention.{{wq, wk, wv}} = colwise
  layers.*.attention.wo           = rowwise
  layers.*.feed_forward.{{w1, w3}}  = colwise
  layers.*.feed_forward.w2        = rowwise
}}

fsdp on dp_shard {{
  layers.* = unit
  root     = unit
}}

checkpoint {{ layers.{{0..1}} = full }}
precision  (param = {dtype})
clip       (norm = 1.0)

{requires}
"""

REQUIRES = """require peak_memory <= 3MiB
require reserved_memory <= 70GiB
require step_time <= 10us
require exposed_comm <= 99%
require recompute <= 0.1%
require mfu >= 99%
require tokens_per_s >= 1"""


def plan(folder: Path, *, cluster="h100_sxm", dtype="bf16", requires=REQUIRES) -> Path:
    path = folder / "small.plan"
    path.write_text(PLAN.format(cluster=cluster, dtype=dtype, requires=requires), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Figures of an estimate that is computed in a fork."""
    return in_the_simulator(figures, plan(tmp_path_factory.mktemp("plans")))


def figures(path: Path, **options) -> dict:
    estimate = legoai.estimate(path, **options)
    rank, one = estimate.ranks[0], estimate.ranks[0].breakdown
    return {
        "plan": (estimate.plan, estimate.digest, estimate.world_size, estimate.tokens_per_step),
        "step": estimate.step_time,
        "parts": (one.compute, one.exposed, one.copies, one.host, one.idle),
        "busy": sum(end - start for start, end in busy(rank.intervals, ("compute",))),
        "ends": (min(item.start for item in rank.intervals), max(item.end for item in rank.intervals)),
        "active": (estimate.peak_active, memory(rank.trace).peak, estimate.peak_reserved),
        "fits": estimate.fits,
        "axes": dict(estimate.exposed_by_axis),
        "exposed": estimate.exposed_communication,
        "recompute": estimate.recompute,
        "mfu": estimate.mfu,
        "flops": estimate.model_flops,
        "speed": estimate.tokens_per_second_per_device,
        "hours": estimate.device_hours_per_trillion_tokens,
        "models": dict(estimate.share_by_model),
        "kinds": (dict(one.by_kind), dict(one.by_phase)),
        "kernels": {
            (item.record.op, kind_of(item.record.op), item.record.phase)
            for item in rank.intervals
            if isinstance(item.record, Kernel)
        },
        "requirements": [(item.requirement.metric, item.value, item.ok) for item in estimate.requirements],
        "device": (estimate.machine.device.name, estimate.machine.profile.name, estimate.peak_flops),
    }


def test_estimate_names_its_plan(estimated: dict, tmp_path: Path):
    loaded = legoai.load(plan(tmp_path))
    assert estimated["plan"] == (loaded.name, loaded.digest, 8, 16 * 128)


def test_breakdown_covers_the_whole_second_step(estimated: dict):
    assert sum(estimated["parts"]) == pytest.approx(estimated["step"])
    assert estimated["parts"][0] == pytest.approx(estimated["busy"])
    first, last = estimated["ends"]
    assert first >= 0 and last <= estimated["step"] * (1 + 1e-9)


def test_throughput_follows_from_the_step(estimated: dict):
    assert estimated["speed"] == pytest.approx(16 * 128 / estimated["step"] / 8)
    assert estimated["mfu"] == pytest.approx(estimated["flops"] / estimated["step"] / 8 / 989.4e12)
    assert estimated["hours"] == pytest.approx(1e12 / (estimated["speed"] * 3600))


def test_memory_figures_are_consistent(estimated: dict):
    active, alone, reserved = estimated["active"]
    assert active == alone <= reserved
    assert estimated["fits"] is True


def test_communication_by_axis_and_recomputation_are_separate(estimated: dict):
    assert set(estimated["axes"]) <= {"dp_shard", "tp", "dp_shard+tp"}
    assert sum(estimated["axes"].values()) == pytest.approx(estimated["exposed"])
    assert 0 < estimated["recompute"] < estimated["parts"][0]


def test_kernel_model_shares_sum_to_one(estimated: dict):
    assert sum(estimated["models"].values()) == pytest.approx(1)


def test_kernels_on_lists_are_of_the_kind_that_each_tensor_undergoes(estimated: dict):
    by_kind, by_phase = estimated["kinds"]
    listed = {(op, kind, phase) for op, kind, phase in estimated["kernels"] if "_foreach_" in op}
    assert {("aten._foreach_copy_", "copy", "forward"), ("aten._foreach_norm", "reduction", "optimizer")} <= listed
    assert {phase for _, kind, phase in estimated["kernels"] if kind == "optimizer"} == {"optimizer"}
    assert 0 < by_kind["optimizer"] < by_phase["optimizer"]
    assert sum(by_kind.values()) == pytest.approx(sum(by_phase.values())) == pytest.approx(estimated["parts"][0])


def test_every_requirement_is_measured(estimated: dict):
    values = {(metric, ok): value for metric, value, ok in estimated["requirements"]}
    assert values["peak_memory", False] == estimated["active"][0]
    assert values["reserved_memory", True] == estimated["active"][2]
    assert values["step_time", False] == estimated["step"]
    assert values["exposed_comm", True] == pytest.approx(estimated["exposed"] / estimated["step"])
    assert values["recompute", False] == pytest.approx(estimated["recompute"] / estimated["step"])
    assert values["mfu", False] == estimated["mfu"]
    assert values["tokens_per_s", True] == estimated["speed"]


def test_slower_device_override_takes_longer(estimated: dict, tmp_path: Path):
    other = in_the_simulator(figures, plan(tmp_path), profile="a100_sxm80")
    assert other["device"] == ("a100_sxm80", "a100_sxm80", 312e12)
    assert other["flops"] == estimated["flops"]
    assert other["parts"][0] > estimated["parts"][0]


def test_uneven_shards_are_largest_on_the_first_rank(tmp_path: Path):
    """torch.chunk gives 86 rows to the first two of three ranks and 84 to the last, of 256."""
    path = tmp_path / "uneven.plan"
    text = PLAN.format(cluster="h100_sxm(devices = 3)", dtype="bf16", requires="").replace(
        "dp_shard = 4, tp = 2", "dp_shard = 3"
    )
    path.write_text(
        text.partition("shard on tp")[0].replace("global = 16", "global = 12")
        + "fsdp on dp_shard { layers.* = unit }\n"
    )
    first, last = (in_the_simulator(peak, path, rank) for rank in (0, 2))
    assert first > last


def peak(path: Path, rank: int) -> int:
    return legoai.estimate(path, rank=rank).peak_active


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"profile": "h1000"}, "h1000"),
        ({"profile": "missing.toml"}, "missing.toml"),
        ({"profile": "missing.json.gz"}, "cannot be read"),
        ({"rank": 8}, "no rank 8"),
    ],
)
def test_estimate_failure_states_the_reason(tmp_path: Path, options: dict, why: str):
    with pytest.raises(CannotEstimateError, match=why):
        legoai.estimate(plan(tmp_path), **options)


def test_a_dtype_without_a_rate_is_refused():
    with pytest.raises(ProfileError, match="fp16"):
        machine_of(ClusterUse(device="cpu"), 1, directory=Path()).peak("fp16")


def test_a_plan_with_errors_is_not_costed(tmp_path: Path):
    path = plan(tmp_path, requires="checkpoint { layrs.* = full }")
    with pytest.raises(legoai.PlanError):
        legoai.estimate(path)


IN_CONTEXT = """plan ordered
model   llama3("8b", n_layers = 1)
cluster h100_sxm
batch   (global = 2, micro = 1, seq_len = 32768)
mesh    (dp_shard = 2, cp = 4)
fsdp on dp_shard, cp { layers.* = unit }
context on cp (rotate = ROTATE, balance = BALANCE)
attention flash
precision (param = bf16)
"""


def times_of_ranks(path: Path) -> tuple[list[float], set[str]]:
    """Step times of the default rank and of three of `cp`, and the kinds of the default rank's collectives."""
    found = [legoai.estimate(path, rank=rank) for rank in (None, 0, 1, 3)]
    kinds = {item.kind for item in found[0].ranks[0].trace.once_each() if isinstance(item, Collective)}
    return [item.step_time for item in found], kinds


@pytest.mark.parametrize("rotate", some_slow(("allgather", "alltoall"), "allgather"))
def test_busiest_rank_is_simulated(tmp_path, rotate):
    path = tmp_path / "ordered.plan"
    path.write_text(IN_CONTEXT.replace("ROTATE", rotate).replace("BALANCE", "none"))
    (default, first, _, last), kinds = in_the_simulator(times_of_ranks, path)
    assert default == last > 1.1 * first
    assert ("permute" in kinds) == (rotate == "alltoall") and "all_to_all" not in kinds
    path.write_text(IN_CONTEXT.replace("ROTATE", rotate).replace("BALANCE", "head_tail"))
    (even, *each), _ = in_the_simulator(times_of_ranks, path)
    assert each == [pytest.approx(even, rel=0.02)] * 3 and even < default
    assert each[-1] == even, "the last one merges both of its pieces with those of others"


def attention_of(path: Path) -> tuple[set[str], float]:
    """The operators of attention in a step of one rank, and its time."""
    found = legoai.estimate(path)
    kernels = [item for item in found.ranks[0].trace.once_each() if isinstance(item, Kernel)]
    return {item.op for item in kernels if "attention" in item.op}, found.step_time


def test_pieces_of_a_sequence_are_attended_to_by_the_kernel_of_the_plan(tmp_path):
    path, found = tmp_path / "ordered.plan", {}
    for kernel in ("flash", "cudnn"):
        text = IN_CONTEXT.replace("ROTATE", "alltoall").replace("BALANCE", "head_tail")
        path.write_text(text.replace("attention flash", f"attention {kernel}"))
        found[kernel] = in_the_simulator(attention_of, path)
        operator = f"aten._scaled_dot_product_{kernel}_attention"
        assert found[kernel][0] == {operator, f"{operator}_backward"}
    assert found["cudnn"][1] < found["flash"][1], "FlashAttention-2 was written for the GPUs before Hopper"


CASTING = """import torch
from torch import nn


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixer, self.head = nn.Embedding(256, 64), nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        with torch.autocast(hidden.device.type, torch.bfloat16):
            hidden = hidden + self.mixer(hidden)
        return self.head(hidden.float())
"""


def dtypes_of_products(path: Path) -> set[tuple[str, str]]:
    trace = legoai.estimate(path).ranks[0].trace
    products = [item for item in trace.once_each() if isinstance(item, Kernel) and item.op == "aten.addmm"]
    return {(item.module, item.inputs[-1].dtype) for item in products}


def test_region_of_autocast_in_a_model_of_a_factory_is_followed(tmp_path):
    (tmp_path / "casting.py").write_text(CASTING)
    path = tmp_path / "casting.plan"
    head = 'plan casting\nprecision (param = fp32)\nmodel python("casting:Casting")\ncluster h100_sxm(devices = 2)\n'
    path.write_text(
        f"{head}batch (global = 4, micro = 1, seq_len = 32)\nmesh (dp_shard = 2)\nfsdp on dp_shard {{ root = unit }}\n"
    )
    assert in_the_simulator(dtypes_of_products, path) == {("mixer", "bfloat16"), ("head", "float32")}
