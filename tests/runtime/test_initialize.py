"""Weights do not depend on the mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.initialize import cast_parameters, materialize, plain_path
from legoai.specs.models.first_values import construct
from support.training import programs

CPU = Device(type="cpu")


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        plain_path(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def weights_on(program: dict) -> dict[str, torch.Tensor]:
    return whole(programs.trainer(**program).prepare(CPU, seed=3).model)


@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 4}, {"tp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "tp": 2, "checkpoint": True}],
    ids=["fsdp4", "tp4", "fsdp2 x tp2", "fsdp2 x tp2, checkpointed"],
)
def test_initial_weights_are_equal_on_every_mesh(gloo, mesh):
    alone = gloo(1)(weights_on, {})[0]
    for rank in gloo(4)(weights_on, mesh):
        assert rank.keys() == alone.keys()
        for name, weight in rank.items():
            assert torch.equal(weight, alone[name]), name


class Uneven(nn.Module):
    """Sizes that no mesh of 4 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def uneven_weights(form: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Uneven()
    if form == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)))
    elif form == "fsdp x tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp_shard"])
    elif form == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    elif form == "by hand":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for module in (model.up, model.down):
            placed = distribute_tensor(module.weight, mesh, [Shard(1), Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(placed)
            module.bias = nn.Parameter(
                distribute_tensor(module.bias, mesh, [Replicate(), Shard(0)], src_data_rank=None)
            )
    before = torch.get_rng_state()
    materialize(model, device=CPU, seed=0)
    assert torch.equal(before, torch.get_rng_state()), "the caller's random state is kept"
    weights = whole(model)
    if form in ("fsdp", "hybrid"):
        model(torch.ones(2, 5)).sum().backward()  # the padded shards are whole enough to compute with
    return weights


@pytest.mark.parametrize("form", ["fsdp", "fsdp x tp", "hybrid", "by hand"])
def test_uneven_shards_have_equal_initial_weights(gloo, form):
    alone = uneven_weights("plain")
    for rank in gloo(4)(uneven_weights, form):
        for name, weight in rank.items():
            assert torch.equal(weight, alone[name]), name


def no_collective() -> None:
    program = programs.trainer(dp_shard=2, tp=2)
    mesh = program.build_mesh("cpu")
    with torch.device("meta"):
        model = program.build_model()
    model = program.parallelize(model, mesh)
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as seen:
        materialize(model, device=CPU, seed=dist.get_rank() * 0)
    assert seen.get_total_counts() == 0


def test_initialisation_communicates_nothing(gloo):
    gloo(4)(no_collective)


def test_wrappers_do_not_change_initial_weights():
    def built(wrap: bool) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if wrap:
            model[0] = checkpoint_wrapper(model[0])
            model[1] = torch.compile(model[1], backend="eager")
        materialize(model, device=CPU, seed=0)
        return whole(model)

    plain, wrapped = built(False), built(True)
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)
    assert not torch.equal(plain["0.weight"], plain["1.weight"]), "modules differ from each other"


def test_only_parameters_take_the_master_dtype():
    with torch.device("meta"):
        model = programs.TinyLlama()
    cast_parameters(model, torch.bfloat16)
    materialize(model, device=CPU, seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.table, programs.rotary(64, programs.DIM // programs.HEADS))


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_buffers_are_as_wide_as_weights(dtype: torch.dtype, kept: torch.dtype):
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
        model[1].register_buffer("table", torch.zeros(4))
    cast_parameters(model, dtype)
    assert model[0].running_mean.dtype == model[0].running_var.dtype == model[1].table.dtype == kept
    assert model[0].weight.dtype == dtype and model[0].num_batches_tracked.dtype == torch.int64


def test_distribution_equals_the_module_initialiser():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"wide": nn.Linear(400, 400), "norm": nn.RMSNorm(16), "embedding": nn.Embedding(300, 300)}
        )
    materialize(model, device=CPU, seed=0)
    wide, embedding = model["wide"].weight.detach(), model["embedding"].weight.detach()
    assert float(wide.abs().max()) <= 1 / 20
    assert float(wide.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.01)
    assert torch.equal(model["norm"].weight, torch.ones(16))
    assert float(embedding.std()) == pytest.approx(1.0, rel=0.01)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


class BareBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(3))


@pytest.mark.parametrize(("module", "method"), [(Bare, "reset_parameters"), (BareBuffer, "init_buffers")])
def test_module_without_an_initialiser_is_named(module, method):
    with torch.device("meta"):
        model = nn.Sequential(module())
    with pytest.raises(RunError, match=rf"module 0 \({module.__name__}\)") as caught:
        materialize(model, device=CPU, seed=0)
    assert method in caught.value.help


class Forgetful(nn.Module):
    """Draws its weight, and has a temperature of which its constructor alone knows the value."""

    def __init__(self, draws: tuple[str, ...]) -> None:
        super().__init__()
        self.weight, self.temperature = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(2.5))
        self.draws = draws

    def initialise_module(self, path: str, parameters: dict[str, torch.Tensor], buffers: dict) -> None:
        for name in self.draws:
            if name in parameters:
                parameters[name].fill_(1.5)


def test_uninitialised_parameter_is_named():
    with torch.device("meta"):
        whole, forgetful = Forgetful(("weight", "temperature")), Forgetful(("weight",))
    materialize(whole, device=Device(type="cpu"), seed=0)
    assert whole.temperature.item() == 1.5
    with pytest.raises(RunError, match="does not draw temperature") as caught:
        materialize(forgetful, device=Device(type="cpu"), seed=0)
    assert caught.value.code == RunErrorCode.NO_INITIALISER


def test_what_a_model_does_not_draw_has_the_value_of_its_constructor():
    model, first_values = construct(lambda: Forgetful(("weight",)))
    model.register_buffer("eps", torch.empty((), device="meta"))
    with pytest.raises(RunError, match="has buffers"):
        materialize(model, device=Device(type="cpu"), seed=0, first_values=first_values)
    model, first_values = construct(lambda: Forgetful(("weight",)))
    materialize(model, device=Device(type="cpu"), seed=0, first_values=first_values)
    assert (model.weight.tolist(), model.temperature.item()) == ([1.5] * 3, 2.5)
