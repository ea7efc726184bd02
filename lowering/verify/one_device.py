"""Training of a plan on one device, without a mesh and without lowering.

The model is built from its source, receives the whole batch at once, and the training step is written out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.dsl.analysis.batch import global_batch_at
from legoai.dsl.analysis.training.optimizer import closest_rules, muon_constants, own_constants
from legoai.dsl.analysis.training.schedule import decay_shape, decay_steps, floor_share, stable_steps, warmup_steps
from legoai.dsl.frontend.paths import Paths
from legoai.lowering.verify.compare import InitialDifference, unlike
from legoai.lowering.verify.rates import steps_of_schedule
from legoai.lowering.verify.watching import sample_digests
from legoai.runtime.data.samples import open_data
from legoai.runtime.device import Device
from legoai.runtime.initialize import cast_parameters, materialize, tensors_of
from legoai.specs.directives.optimizer import Muon
from legoai.specs.directives.schedule import Constant
from legoai.specs.dtypes import TORCH_DTYPES
from legoai.specs.models.first_values import construct
from legoai.specs.models.random_operators import RandomOperators
from legoai.specs.models.reads import ImagesWithTexts, Reads
from legoai.specs.models.torch_internals import BatchNorm
from legoai.specs.plan import Plan

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def train(
    plan: Plan,
    build_model: Callable[[], nn.Module],
    reads: Reads,
    *,
    data: str,
    steps: int,
    seed: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Train for some steps.

    Args:
        plan: the plan.
        build_model: constructs its model, which drops nothing.
        reads: the model's inputs.
        data: the file of a text, or the name of other data.
        steps: number of steps.
        seed: of weights and order of data.
        tell: called with the progress of each step.

    Returns:
        `losses` and `norms` (of the gradient, before clipping) of each step, digests of its `samples`, the `gradients`
        of the first step, these `clipped`, and the full parameters after the first step (`updated`) and after the last
        (`trained`), by name; a tied parameter under each of its names. Also the learning `rates` of each parameter in
        the steps, by name, those of the whole `schedule` (see `wrong_rates`), whether forward `draws` random numbers,
        and the `names` of each parameter in the model's order.
    """
    model, first_values = construct(build_model, seed=seed)
    cast_parameters(model, _stored_dtype(plan))
    materialize(model, device=Device(type="cpu"), seed=seed, first_values=first_values)
    optimizers = _optimizers(plan, model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names: dict[int, list[str]] = {}
    for name, parameter in _named(model):
        names.setdefault(id(parameter), []).append(name)
    base = [float(group["lr"]) for group in groups]
    of_group = [names[id(group["params"][0])] for group in groups]
    # A contrastive loss matches texts and images within a micro batch, and batch normalisation has the statistics of
    # one, so that the micro batches must be the plan's. A batch that grows is split into pieces, of which every step
    # has a whole number.
    joined = isinstance(reads, ImagesWithTexts) or any(isinstance(module, BatchNorm) for module in model.modules())
    piece = plan.batch.micro_batch if joined else math.gcd(*(global_batch_at(plan, step) for step in range(steps)))
    stream = open_data(data, reads, seq_len=plan.batch.seq_len or 0, dtype=_stored_dtype(plan)).stream(
        validation=False, micro_batch=piece, rank=0, degree=1, seed=seed
    )
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": {}, "samples": [], "draws": False}
    drawn = RandomOperators(lambda: found.update(draws=True))
    for step in range(steps):
        tell(f"step {step + 1}/{steps}")
        total = 0.0
        pieces = global_batch_at(plan, step) // piece
        found["samples"].append([])
        for _ in range(pieces):
            batch = stream.next()
            found["samples"][-1] += sample_digests(batch)
            with drawn:
                given = model(*batch.inputs)
            exact = given if given.dtype == torch.float64 else given.float()
            loss = F.cross_entropy(exact.flatten(0, -2), batch.targets.flatten())
            if isinstance(reads, ImagesWithTexts):
                loss = (loss + F.cross_entropy(exact.t(), batch.targets)) / 2
            (loss / pieces).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / pieces
        if step == 0:
            found["gradients"] = {name: _copied(p.grad) for name, p in _named(model)}
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None])
        )
        if plan.clip is not None:
            scale = min(1.0, plan.clip.norm / (float(norm) + 1e-6))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        if step == 0:
            found["clipped"] = {name: _copied(p.grad) for name, p in _named(model)}
        for group, own, rate in zip(groups, of_group, base, strict=True):
            group["lr"] = rate * _factor(plan, step)
            for name in own:
                found["rates"].setdefault(name, []).append(group["lr"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found["losses"].append(total)
        found["norms"].append(float(norm))
        if step == 0:
            found["updated"] = {name: _copied(p) for name, p in _named(model)}
    found["trained"] = {name: _copied(p) for name, p in _named(model)}
    found["names"] = list(names.values())
    compared = steps_of_schedule(plan.schedule, steps)
    found["schedule"] = {
        "steps": compared,
        "factors": [_factor(plan, step) for step in compared],
        "base": {name: rate for own, rate in zip(of_group, base, strict=True) for name in own},
    }
    return found


def _stored_dtype(plan: Plan) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[plan.precision.master])
    return dtype


def compare_initial_values(
    plan: Plan, build_model: Callable[[], nn.Module], *, seed: int
) -> tuple[int, list[InitialDifference]]:
    """Compare the initial values of a training with those of the model's own constructor.

    Args:
        plan: the plan.
        build_model: constructs its model, on the meta device or on the CPU.
        seed: of the weights.

    Returns:
        The number of parameters and buffers that were compared, and those that differ.
    """
    drawn, first_values = construct(build_model, seed=seed)
    by_model = hasattr(type(drawn), "initialise_module")
    # A tensor that the constructor leaves empty has no value there with which to compare.
    compared = {
        name for name, tensor in tensors_of(drawn).items() if by_model or first_values.holds(name, tensor.shape)
    }
    cast_parameters(drawn, _stored_dtype(plan))
    materialize(drawn, device=Device(type="cpu"), seed=seed, first_values=first_values)
    built = []
    for number in (1, 2):
        torch.manual_seed(number)
        built.append(tensors_of(build_model()))
    found = []
    for name, tensor in tensors_of(drawn).items():
        if name not in compared:
            continue
        what = unlike(tensor, [own[name] for own in built if name in own])
        if what is not None:
            found.append(InitialDifference(name=name, what=what))
    return len(compared), found


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _optimizers(plan: Plan, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizer, with a group for each parameter, and Muon for the parameters that use it."""
    algorithm = plan.optimizer.algorithm
    values = {
        item.field: getattr(algorithm, item.field) for item in algorithm.options if item.field not in ("fused", "state")
    }
    modules = [name for name, _ in model.named_modules()]
    shapes = {name: tuple(parameter.shape) for name, parameter in _named(model)}
    followed = closest_rules(plan.optimizer.rules, Paths([*modules, *shapes]), shapes)
    usual: list[dict[str, Any]] = []
    by_muon: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        rule = followed.get(name)
        if rule is not None and isinstance(rule.treatment, Muon):
            by_muon.append({"params": [parameter], **muon_constants(rule.treatment)})
        else:
            usual.append({"params": [parameter], **({} if rule is None else own_constants(rule.treatment, algorithm))})
    found = [_OPTIMIZERS[algorithm.name](usual, **values)] if usual else []
    return [*found, torch.optim.Muon(by_muon)] if by_muon else found


def _factor(plan: Plan, step: int) -> float:
    """Return the learning rate of a step, counted from 0, relative to the optimizer's."""
    schedule, warmup, floor = plan.schedule, warmup_steps(plan.schedule), floor_share(plan)
    if step < warmup:
        return (step + 1) / warmup
    if isinstance(schedule.form, Constant):
        return 1.0
    into_decay = step - warmup - stable_steps(schedule)
    progress = min(1.0, max(0, into_decay) / max(1, decay_steps(schedule)))
    shape = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "sqrt": 1.0 - math.sqrt(progress),
    }[decay_shape(schedule)]
    return floor + (1.0 - floor) * shape
