"""Host time of kernels, by what issues them: modules, autograd nodes, Python autograd functions, or recomputation.

Tensors are so small that only the host's work takes time.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from legoai.cost.calibration.timing import Timer
from legoai.cost.simulated.operators.properties import operator
from legoai.cost.trace.garbage import uncollected
from legoai.runtime.recomputation.policies import Contexts, keep_outputs
from legoai.runtime.torch_internals.operators import TorchDispatchMode
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT

GAP_SOURCE: Final = (
    "measured here: forward and backward of a layer of two features over the operators that it runs, less what the "
    "same operators take when they are called alone"
)
SMALL: Final = {"dim": 16, "n_layers": 8, "n_heads": 4, "hidden_dim": 32, "vocab_size": 16, "max_seq_len": 8}
"""Dimensions of a decoder that computes next to nothing."""
_DEPTH: Final = 50
_TIMES: Final = 60
_FEWEST: Final = 5
"""Most and fewest repetitions of a part."""


class _Kernels(TorchDispatchMode):
    """Counts operators that are kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator(func).treatment in ("kernel", "copy")
        return func(*args, **(kwargs or {}))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten.gelu_backward(grad, *ctx.saved_tensors)
        return found


class _Activation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        found: torch.Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
        return found


def python_function() -> nn.Module:
    """A module of one Python autograd function, which issues one kernel in each direction."""
    return _Activation()


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, contexts: Callable[[], Contexts]) -> None:
        super().__init__()
        self.block = block
        self.contexts = contexts

    def forward(self, *arguments: Any) -> Any:
        """Run the block in a checkpoint."""
        return checkpoint(self.block, *arguments, use_reentrant=False, context_fn=self.contexts)


def _checkpointed(decoder: nn.Module, contexts: Callable[[], Contexts] = noop_context_fn) -> nn.Module:
    """Return a copy of a decoder with each block in a checkpoint."""
    found = copy.deepcopy(decoder)
    blocks = found.get_submodule("layers")
    for name, block in list(blocks.named_children()):
        blocks.add_module(name, _Checkpointed(block, contexts))
    return found


def chain(make: Callable[[], nn.Module], length: int = _DEPTH) -> nn.Sequential:
    """A sequence of equal modules, so many that what surrounds them takes no time in comparison."""
    return nn.Sequential(*(make() for _ in range(length)))


@dataclass(frozen=True, slots=True)
class HostTimer:
    """Timer of the host's work.

    Attributes:
        clock: seconds.
        settle: waits until a device that computes concurrently is idle.
        budget: seconds after which the repetitions of a part end, if these are not too few.
    """

    clock: Callable[[], float] = time.perf_counter
    settle: Callable[[], object] = lambda: None
    budget: float = math.inf

    def forward(self, model: nn.Module, x: torch.Tensor, *, records: bool = True) -> float:
        """Seconds of a kernel in a forward pass, with autograd's records as in training, or without."""
        with torch.set_grad_enabled(records):
            return self.least(lambda: None, lambda _: model(x)) / issued_kernels(lambda: model(x))

    def backward(self, model: nn.Module, x: torch.Tensor) -> float:
        """Seconds of a kernel in a backward pass, gradients being new."""

        def loss() -> torch.Tensor:
            model.zero_grad()
            out: torch.Tensor = model(x).sum()
            return out

        def run(out: torch.Tensor) -> None:
            out.backward()  # type: ignore[no-untyped-call]

        run(loss())
        out = loss()
        kernels = issued_kernels(lambda: run(out))  # gradients are new here too
        return self.least(loss, run) / kernels

    def recomputation(self, decoder: nn.Module, tokens: torch.Tensor) -> float:
        """Seconds of a kernel that checkpoints of a decoder's blocks run again, with their hooks in both passes."""
        models = decoder, _checkpointed(decoder)

        def step(model: nn.Module) -> None:
            model.zero_grad()
            model(tokens).sum().backward()

        counts, least = [], [math.inf, math.inf]
        for model in models:
            step(model)
            counts.append(issued_kernels(functools.partial(step, model)))
        for _ in range(_TIMES):  # in turns: a processor's speed may change
            least = [min(known, self._once(model, step)) for known, model in zip(least, models, strict=True)]
        each: float = (least[1] - least[0]) / (counts[1] - counts[0])
        return each

    def under_policy(self, decoder: nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
        """Seconds of a kernel that a policy of selective checkpointing sees: in forward, and where it runs again.

        The latter are what it adds to a backward pass, with the checkpoint's hooks.
        """
        models = decoder, _checkpointed(decoder, keep_outputs("matmul"))
        counts, least = [], [math.inf, math.inf]
        for model in models:
            model(tokens).sum().backward()
            counts.append(issued_kernels(model(tokens).sum().backward))
        for _ in range(_TIMES):
            for index, model in enumerate(models):
                model.zero_grad()
                out = model(tokens).sum()
                least[index] = min(least[index], self._once(out, lambda loss: loss.backward()))
        again = (least[1] - least[0]) / (counts[1] - counts[0])
        return self.forward(models[1], tokens), again

    def least(self, prepare: Callable[[], Any], run: Callable[[Any], object]) -> float:
        """Least seconds of many repetitions of a part, each with a preparation that is not timed."""
        least, end = math.inf, self.clock() + self.budget
        for count in range(_TIMES):
            if count >= _FEWEST and self.clock() > end:
                break
            least = min(least, self._once(prepare(), run))
        return least

    def _once(self, prepared: Any, run: Callable[[Any], object]) -> float:
        self.settle()
        begin = self.clock()
        result = run(prepared)  # kept: its release is no part of the pass
        seconds = self.clock() - begin
        del result
        return seconds


def host_timer(device: str, budget: float = math.inf) -> HostTimer:
    """Return a timer of the host's work beside a device, with a budget of seconds for each part."""
    return HostTimer(settle=torch.cuda.synchronize if device == "cuda" else lambda: None, budget=budget)


def issued_kernels(function: Callable[[], object]) -> int:
    """Return the number of kernels that a call issues."""
    with _Kernels() as kernels:
        function()
    count: int = kernels.count
    return count


def _decoder(device: str) -> tuple[nn.Module, torch.Tensor]:
    """A small decoder, and its input."""
    tokens = torch.zeros(1, SMALL["max_seq_len"], dtype=torch.int64, device=device)
    return GPT(resolve_config("gpt3", "1.3b", SMALL)).to(device), tokens  # type: ignore[arg-type]


def python_seconds(device: str) -> float:
    """Return the seconds of a kernel in the forward of a small decoder, with autograd's records."""
    with uncollected():
        return host_timer(device).forward(*_decoder(device))


def issue_constants(device: str) -> dict[str, dict[str, Any]]:
    """Return a profile's constants for the host time of a kernel on a device that computes concurrently."""
    timer = host_timer(device)
    decoder, tokens = _decoder(device)
    functions, x = chain(python_function), torch.ones(1, 16, device=device, requires_grad=True)
    with uncollected():
        policy, again = timer.under_policy(decoder, tokens)
        what = "small decoder under a policy of selective checkpointing"
        measured = {
            "policy_seconds": (policy, f"forward of a {what}"),
            "policy_recompute_seconds": (again, f"what recomputation adds to backward of a {what}"),
            "python_seconds": (timer.forward(decoder, tokens), "forward of a small decoder, with autograd's records"),
            "dispatch_seconds": (timer.backward(decoder, tokens), "backward of a small decoder"),
            "function_seconds": (timer.backward(functions, x), "backward of a chain of Python autograd functions"),
            "recompute_seconds": (
                timer.recomputation(decoder, tokens),
                "what checkpoints of a small decoder's blocks add to a step",
            ),
        }
    return {
        name: {"value": seconds, "source": f"measured here: {what}, over its kernels"}
        for name, (seconds, what) in measured.items()
    }


def gap_seconds(timer: Timer, budget: float) -> float:
    """Return the seconds of modules, autograd and Python for each operator on a cpu, beyond the operator itself."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.SiLU(), nn.Linear(2, 2), nn.SiLU())
    inputs = torch.ones(2, 2)

    def step() -> None:
        layer(inputs).sum().backward()

    step()
    kernels = issued_kernels(step)
    alone = torch.ones(2, 2)
    least = timer.seconds(lambda: torch.add(alone, alone), budget / 2)
    each: float = timer.seconds(step, budget / 2) / kernels
    return max(0.0, each - least)
