"""What a rank of a verified program reads, sends and holds, as its training goes on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from legoai.runtime.data import MicroBatch
from legoai.runtime.initialize import plain_path
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.torch_internals.operators import TorchDispatchMode
from legoai.runtime.training import Training

_REDUCE_SCATTER = "_reduce_scatter_base_"
_ALL_REDUCE = "allreduce_"
_REDUCE_IN_GRAPH = torch.ops._c10d_functional.reduce_scatter_tensor.default
_NUMBERS_OF_A_STEP = 4
"""Elements of the all-reduce by which ranks agree on loss and norm, which is none of gradients."""


class Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the reductions of gradients by dtype while entered.

    They are those that FSDP units and replicas call on process groups. DTensors reduce by functional collectives, which
    are reductions of gradients in the graph of a step, and otherwise of activations.

    Args:
        traced: whether the step is a graph.
    """

    def __init__(self, *, traced: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traced = traced
        self.dtypes: Counter[str] = Counter()

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
    """What a rank holds, whole and by the names of the model, and which samples it reads.

    Args:
        tell: is told of each step.
        steps: of the training.
        clips: whether the plan clips.

    Attributes:
        gradients: of the first step.
        clipped: the same as the optimizer gets them, where the plan clips.
        updated: the parameters after the first step.
        samples: of each step, the digests of the samples that were read.
    """

    def __init__(self, tell: Callable[[str], None], steps: int, *, clips: bool) -> None:
        self._tell = tell
        self._steps = steps
        self._clips = clips
        self._step = 0
        self.gradients: dict[str, Any] = {}
        self.clipped: dict[str, Any] = {}
        self.updated: dict[str, Any] = {}
        self.samples: list[list[str]] = [[]]

    def prepared(self, training: Training) -> None:
        """Look at samples and clipped gradients from the first step on."""
        training.control.on_samples.append(lambda batch: self.samples[-1].extend(sample_digests(batch)))

        def clipped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._clips and not self.clipped:
                self.clipped = self._gradients(training)

        training.optimizer.register_step_pre_hook(clipped)

    def __call__(self, training: Training) -> None:
        """Look at the gradients of the first step, and then at what came of them."""
        self._step += 1
        self.samples.append([])
        self._tell(f"step {self._step}/{self._steps}")
        if self._step == 1:
            self.gradients = self._gradients(training)
        elif self._step == 2:
            self.updated = self.parameters(training)

    def parameters(self, training: Training) -> dict[str, Any]:
        """Every parameter that this rank holds."""
        return {name: _whole(parameter) for name, parameter in self._named(training)}

    def _gradients(self, training: Training) -> dict[str, Any]:
        named = ((name, parameter.grad) for name, parameter in self._named(training))
        return {name: None if grad is None else _whole(grad) for name, grad in named}

    def _named(self, training: Training) -> Iterator[tuple[str, Any]]:
        for name, parameter in training.model.named_parameters(remove_duplicate=False):
            yield plain_path(name), parameter


def sample_digests(batch: MicroBatch) -> list[str]:
    """A digest of each sample of a micro batch: of what the model reads."""
    rows = zip(*(item.unbind(0) for item in batch.inputs), strict=True)
    return [hashlib.blake2b(b"".join(_bytes(part) for part in row), digest_size=12).hexdigest() for row in rows]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _whole(tensor: Any) -> Any:
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.clone()  # what is replicated is its own whole, and changes in place
