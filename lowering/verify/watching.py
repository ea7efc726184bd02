"""Observation of a verified rank's training: samples, reductions and parameters."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from legoai.lowering.verify.rates import current_rates
from legoai.runtime.data.sequences import MicroBatch
from legoai.runtime.initialize import plain_path
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.torch_internals.operators import TorchDispatchMode
from legoai.runtime.training.state import Training

_REDUCE_SCATTER = "_reduce_scatter_base_"
_ALL_REDUCE = "allreduce_"
_REDUCE_IN_GRAPH = torch.ops._c10d_functional.reduce_scatter_tensor.default
_NUMBERS_OF_A_STEP = 4
"""Elements of the all-reduce of loss and norm over ranks, which does not count as a reduction of gradients."""


class Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the reductions of gradients by dtype while entered.

    FSDP units and replicas reduce gradients by calls on process groups. DTensors use functional collectives, which in
    the graph of a step reduce gradients, and otherwise activations.

    Args:
        traced: whether the step is a graph.
    """

    def __init__(self, *, traced: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traced = traced
        self.dtypes: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code alone: beside a mode that sees its operators, torch refuses to compile a loss."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count, and call."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d":
            name = func.name().partition("::")[2].partition(".")[0]
            tensor = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            if name == _REDUCE_SCATTER or (name == _ALL_REDUCE and tensor.numel() > _NUMBERS_OF_A_STEP):
                self.dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
        elif self._traced and func is _REDUCE_IN_GRAPH and not args[0].is_meta and not isinstance(args[0], FakeTensor):
            self.dtypes[str(args[0].dtype).removeprefix("torch.")] += 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Full tensors that a rank holds, by the model's names, and the samples that it reads.

    Args:
        tell: called with the progress of each step.
        steps: of the training.
        clips: whether the plan clips.

    Attributes:
        gradients: of the first step.
        clipped: the same as the optimizer receives them, where the plan clips.
        updated: the parameters after the first step.
        rates: for each step, the learning rate of each group of parameters.
        samples: for each step, the digests of the samples that were read.
    """

    def __init__(self, tell: Callable[[str], None], steps: int, *, clips: bool) -> None:
        self._tell = tell
        self._steps = steps
        self._clips = clips
        self._step = 0
        self.gradients: dict[str, Any] = {}
        self.clipped: dict[str, Any] = {}
        self.updated: dict[str, Any] = {}
        self.rates: list[list[float]] = []
        self.samples: list[list[str]] = [[]]

    def prepared(self, training: Training) -> None:
        """Observe samples and clipped gradients from the first step on."""
        training.control.on_samples.append(lambda batch: self.samples[-1].extend(sample_digests(batch)))

        def clipped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._clips and not self.clipped:
                self.clipped = self._gradients(training)

        training.optimizer.register_step_pre_hook(clipped)

    def __call__(self, training: Training) -> None:
        """Observe the gradients of the first step, and later the updated parameters."""
        self._step += 1
        self.samples.append([])
        self.rates.append(current_rates(training))
        self._tell(f"step {self._step}/{self._steps}")
        if self._step == 1:
            self.gradients = self._gradients(training)
        elif self._step == 2:
            self.updated = self.parameters(training)

    def parameters(self, training: Training) -> dict[str, Any]:
        """Return every parameter that this rank holds."""
        return {name: _whole(parameter) for name, parameter in self._named(training)}

    def _gradients(self, training: Training) -> dict[str, Any]:
        named = ((name, parameter.grad) for name, parameter in self._named(training))
        return {name: None if grad is None else _whole(grad) for name, grad in named}

    def _named(self, training: Training) -> Iterator[tuple[str, Any]]:
        for name, parameter in training.model.named_parameters(remove_duplicate=False):
            yield plain_path(name), parameter


def sample_digests(batch: MicroBatch) -> list[str]:
    """Return a digest of each sample of a micro batch, over the model's inputs."""
    rows = zip(*(item.unbind(0) for item in batch.inputs), strict=True)
    return [hashlib.blake2b(b"".join(_bytes(part) for part in row), digest_size=12).hexdigest() for row in rows]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _whole(tensor: Any) -> Any:
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.clone()  # a replicated tensor is its own full tensor, and is changed in place
