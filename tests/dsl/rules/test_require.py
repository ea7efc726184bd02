"""Rules about budgets; the bound on memory is compared with the tensors that PyTorch makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from legoai.dsl.analysis.magnitudes.state import StateBytes, state_bytes
from legoai.dsl.lint import lint
from legoai.specs.models.families import resolve_config
from legoai.specs.models.llama import Llama
from support.texts.rule_plans import BASE, codes, message

TINY = {"n_layers": 2, "dim": 64, "hidden_dim": 128, "vocab_size": 256}


def bound(text: str) -> StateBytes:
    """The lower bound for a plan of the small model below."""
    arguments = ", ".join(f"{name} = {value}" for name, value in TINY.items())
    whole = f'plan test\nextends "base.plan"\nmodel llama3("tiny", {arguments})\n{text}'
    context = lint(whole, "test.plan", directory=Path(), read=lambda _: BASE).analysis
    assert context is not None
    found = state_bytes(context)
    assert found is not None
    return found


@contextmanager
def pretended_ranks(count: int) -> Iterator[None]:
    """A process group of the given size whose collectives move nothing: this process is the first of them."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Llama(resolve_config("llama3", "tiny", TINY))  # type: ignore[arg-type]


def held(model: nn.Module, algorithm: type[torch.optim.Optimizer], **options: float) -> StateBytes:
    """Bytes of this rank after one update."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    optimizer = algorithm([{"params": group} for group in groups.values()], lr=1e-3, foreach=True, **options)  # type: ignore[call-arg]
    model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    optimizer.step()

    def local(tensors: Iterator[torch.Tensor | None]) -> int:
        tensors_here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        return sum(tensor.nbytes for tensor in tensors_here if tensor is not None and tensor.ndim > 0)

    return StateBytes(
        parameters=local(iter(model.parameters())),
        gradients=local(parameter.grad for parameter in model.parameters()),
        optimizer=local(value for state in optimizer.state.values() for value in state.values()),
    )


@pytest.mark.parametrize(
    ("text", "algorithm", "options"),
    [
        ("optimizer adamw", torch.optim.AdamW, {}),
        ("optimizer sgd", torch.optim.SGD, {}),
        ("optimizer sgd(momentum = 0.9)", torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_memory_bound_on_one_device_equals_pytorch_state(
    text: str, algorithm: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    assert bound(f"{text}\nprecision (master = fp32)") == held(build(), algorithm, **options)


def test_half_precision_masters_halve_the_bound() -> None:
    assert bound("precision (master = bf16)").total * 2 == bound("precision (master = fp32)").total


@pytest.mark.parametrize("ranks", [2, 8])
def test_memory_bound_under_fsdp_is_exact_up_to_padding(ranks: int) -> None:
    with pretended_ranks(ranks):
        model = build()
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.layers.values():  # type: ignore[union-attr, operator]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        real = held(model, torch.optim.AdamW)
    least = bound(f"mesh (dp_shard = {ranks})\nfsdp on dp_shard {{ layers.* = unit }}")
    assert least.total <= real.total <= 1.02 * least.total
    assert least.parameters <= real.parameters
    assert least.gradients <= real.gradients
    assert least.optimizer <= real.optimizer


def test_memory_bound_under_tensor_parallelism_divides_sharded_parameters_only() -> None:
    with pretended_ranks(8):
        model = build()
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
        for block in model.layers.values():  # type: ignore[union-attr, operator]
            styles = {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
            parallelize_module(block, mesh["tp"], {**styles, "feed_forward.w2": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
        real = held(model, torch.optim.AdamW)
    least = bound("""
    mesh (dp_shard = 2, tp = 4)
    shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }
    fsdp on dp_shard { layers.* = unit }
    """)
    assert least.total <= real.total <= 1.02 * least.total


def test_sharding_and_offloading_divide_the_state() -> None:
    alone = bound("mesh (dp_replicate = 8)\nreplicate on dp_replicate")
    assert bound("").total == alone.total
    sharded = bound("mesh (dp_replicate = 8)\nreplicate on dp_replicate (optimizer = sharded)")
    assert (sharded.parameters, sharded.optimizer) == (alone.parameters, alone.optimizer // 8)
    hybrid = bound("mesh (dp_replicate = 2, dp_shard = 4)\nfsdp on dp_replicate, dp_shard")
    assert hybrid.total == alone.total // 4
    assert bound("mesh (pp = 2, dp_replicate = 4)\npipeline on pp\nreplicate on dp_replicate").total == alone.total // 2
    offloaded = bound("mesh (dp_shard = 8)\nfsdp on dp_shard\noffload (optimizer = all)")
    assert offloaded.optimizer == 0
    assert bound("mesh (dp_shard = 8)\nfsdp on dp_shard\noffload (parameters = all)").total == 0


def test_a_tied_parameter_counts_once() -> None:
    plan = 'plan test\nextends "base.plan"\nmodel gpt2("small")'
    context = lint(plan, "test.plan", directory=Path(), read=lambda _: BASE).analysis
    assert context is not None
    found = state_bytes(context)
    assert found is not None
    assert found.parameters == 124_439_808 * 4  # the published number of parameters


def test_model_larger_than_memory_is_reported() -> None:
    whole = 'model llama3("8b")\nmesh (dp_replicate = 8)\nreplicate on dp_replicate\n'
    assert "are at least 119.66" in message(whole, "LP704")  # 8,030,261,248 · 16 bytes
    assert "LP704" not in codes('model llama3("8b")\nmesh (dp_shard = 8)\nfsdp on dp_shard { layers.* = unit }')
    small = 'model llama3("8b")\nmesh (dp_shard = 8)\nfsdp on dp_shard {{ layers.* = unit }}\nrequire {} <= {}'
    assert "gradients (3.739" in message(small.format("peak_memory", "14GiB"), "LP703")
    assert "LP703" in codes(small.format("reserved_memory", "14GiB"))
    assert "LP703" not in codes(small.format("peak_memory", "15GiB"))


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("peak_memory <= 10GiB", "peak_memory >= 20GiB", True),
        ("peak_memory <= 20GiB", "peak_memory >= 10GiB", False),
        ("peak_memory < 20GiB", "peak_memory >= 20GiB", True),
        ("peak_memory <= 20GiB", "peak_memory >= 20GiB", False),
        ("step_time == 2s", "step_time <= 1s", True),
        ("mfu >= 50%", "mfu == 40%", True),
        ("exposed_comm <= 10%", "exposed_comm >= 1s", False),
        ("peak_memory <= 10GiB", "reserved_memory >= 20GiB", False),
    ],
)
def test_contradictory_budgets_are_reported(first: str, second: str, code: bool) -> None:
    for lines in ((first, second), (second, first)):
        assert ("LP701" in codes("\n".join(f"require {line}" for line in lines))) is code


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("peak_memory <= 90GiB", {"LP702"}),
        ("peak_memory <= 72GiB", set()),
        ("step_time >= 1s", {"LP706"}),
        ("tokens_per_s <= 9000", {"LP706"}),
        ("tokens_per_s >= 9000", set()),
        ("mfu >= 120%", set()),  # of long sequences, or in float8
        ("mfu <= 100%", {"LP706"}),
        ("step_time <= 0s", {"LP707"}),
        ("mfu >= 0%", {"LP708"}),
        ("step_time == 1s", {"LP710"}),
        ("bubble <= 10%", {"LP709"}),
        ("recompute <= 10%", {"LP709"}),
        ("recompute <= 10%\nloss fused", {"LP709"}),
        ("recompute <= 10%\nloss chunked(4)", set()),
        ("exposed_comm <= 10%", {"LP709"}),
    ],
)
def test_budget_values_are_checked(budget: str, expected: set[str]) -> None:
    found = codes(f"require {budget}")
    assert {code for code in found if code.startswith("LP7")} == expected


@pytest.mark.parametrize(
    ("metric", "bound"),
    [
        ("peak_memory", "23586817B"),
        ("peak_memory", "72GiB"),
        ("peak_memory", "1100MiB"),
        ("step_time", "59.31174953446257ms"),
        ("step_time", "12.3456789us"),
        ("recompute", "1.23456789%"),
        ("tokens_per_s", "1234567.5"),
    ],
)
def test_an_exact_budget_is_written_with_all_its_digits(metric: str, bound: str) -> None:
    found = lint(
        f'plan test\nextends "base.plan"\nrequire {metric} == {bound}\n', "test.plan", directory=Path(),
        read=lambda _: BASE,
    )  # fmt: skip
    [exact] = [item for item in found.diagnostics if item.code == "LP710"]
    start = f"`{metric}` passes only if it is exactly {bound}: any change of the plan, of torch"
    assert exact.message.startswith(start)
    assert exact.help == (f"write `{metric} {'>=' if metric == 'tokens_per_s' else '<='} {bound}`",)


def test_advice_on_the_other_direction_has_all_digits_of_the_budget() -> None:
    assert message("require step_time >= 1.23456789s", "LP706").startswith("`step_time >= 1.23456789s` forbids")


def test_always_satisfied_share_is_reported() -> None:
    two = "mesh (dp_shard = 8)\nfsdp on dp_shard\nrequire exposed_comm <= {}"
    assert "LP708" in codes(two.format("100%"))
    assert "LP708" not in codes(two.format("99%"))
    assert "LP707" in codes("mesh (dp_shard = 8)\nfsdp on dp_shard\nrequire exposed_comm == 101%")


def test_requirement_without_a_measurable_figure_is_reported() -> None:
    pipeline = "mesh (pp = 2, dp_shard = 4)\npipeline on pp\ncheckpoint { layers.* = full }\n"
    assert "LP709" not in codes(
        pipeline + "require bubble <= 10%\nrequire recompute <= 30%\nrequire exposed_comm <= 5%"
    )
    assert "LP709" in codes("minimize bubble")
    assert "LP709" not in codes(pipeline + "minimize bubble")


@pytest.mark.parametrize(
    ("plan", "objective"),
    [
        ("checkpoint {{ layers.* = {} none }}", "minimize recompute"),
        ("checkpoint {{ layers.* = {} none }}", "require recompute <= 1%"),
        ("mesh (pp = {} 1, dp_shard = rest)\npipeline on pp", "minimize bubble"),
        ("cluster h100_sxm(devices = {} 1)\nmesh (dp_shard = rest)", "minimize exposed_comm"),
    ],
)
def test_figure_that_is_zero_by_an_answer_is_asked_for_with_reason(plan: str, objective: str) -> None:
    domain = "auto in [none, full] ->" if "checkpoint" in plan else "auto in [1, 2] ->"
    assert "LP709" in codes(f"{plan.format('')}\n{objective}")
    assert "LP709" not in codes(f"{plan.format(domain)}\n{objective}")


@pytest.mark.parametrize(
    ("objective", "wrong"),
    [
        ("minimize step_time", False),
        ("maximize step_time", True),
        ("minimize mfu", True),
        ("maximize tokens_per_s", False),
    ],
)
def test_objective_must_point_to_the_better_direction(objective: str, wrong: bool) -> None:
    assert ("LP705" in codes(objective)) is wrong
