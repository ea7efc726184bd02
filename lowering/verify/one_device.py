"""What does a plan's training compute on one device, without a mesh and without any of what lowering makes?

The model is built from its source, its whole batch goes through it at once, and the step is written out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.runtime.corpus import open_corpus
from legoai.runtime.data import TokenStream
from legoai.runtime.device import Device
from legoai.runtime.initialize import cast_parameters, materialize
from legoai.specs.directives.schedule import Constant
from legoai.specs.plan import Plan

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def train(
    plan: Plan,
    build_model: Callable[[], nn.Module],
    *,
    data: Path,
    steps: int,
    seed: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Train for some steps.

    Returns:
        `losses` and `norms` (of the gradient, before clipping) of each step, the `gradients` of the first step and the
        parameters after the first step (`updated`) and after the last (`trained`), whole, by name; a tied one under
        each of its names. Also the learning `rates` of the steps, and the `names` of each parameter in the model's
        order.
    """
    with torch.device("meta"):
        model = without_dropout(build_model())
    cast_parameters(model, DTYPES[plan.precision.master])
    materialize(model, device=Device(type="cpu"), seed=seed)
    optimizer = _optimizer(plan, model)
    base = float(optimizer.param_groups[0]["lr"])
    stream = TokenStream(
        open_corpus(str(data)).train,
        seq_len=plan.batch.seq_len,
        micro_batch=plan.batch.global_batch,
        seed=seed,
    )
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for step in range(steps):
        tell(f"step {step + 1}/{steps}")
        batch = stream.next()
        logits = model(batch.tokens)
        exact = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(exact.flatten(0, 1), batch.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
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
        rate = base * _factor(plan, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["norms"].append(float(norm))
        found["rates"].append(rate)
        if step == 0:
            found["updated"] = {name: _copied(p) for name, p in _named(model)}
    found["trained"] = {name: _copied(p) for name, p in _named(model)}
    names: dict[int, list[str]] = {}
    for name, parameter in _named(model):
        names.setdefault(id(parameter), []).append(name)
    found["names"] = list(names.values())
    return found


def without_dropout(model: nn.Module) -> nn.Module:
    """Let dropout pass everything: no mesh drops the same elements as one device does."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
            module.p = 0.0
    return model


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    algorithm = plan.optimizer.algorithm
    values = {item.field: getattr(algorithm, item.field) for item in algorithm.options if item.field != "fused"}
    return _OPTIMIZERS[algorithm.name](list(model.parameters()), **values)


def _factor(plan: Plan, step: int) -> float:
    """The learning rate of a step, counted from 0, as a share of the optimizer's."""
    form = plan.schedule.form
    if step < form.warmup:
        return (step + 1) / form.warmup
    if isinstance(form, Constant):
        return 1.0
    progress = min(1.0, (step - form.warmup) / max(1, form.steps - form.warmup))
    shape = 1.0 - progress if form.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return form.floor + (1.0 - form.floor) * shape
