"""Policies of selective activation checkpointing: which operators' outputs are saved for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.recomputation.storages import changed_by, is_mutable, sizes, tensors_in
from legoai.runtime.torch_internals.checkpointing import SavedOutputs, recompute_freely
from legoai.runtime.torch_internals.operators import OpOverload, OpOverloadPacket, has_kernel
from legoai.specs.models.random_operators import is_random
from legoai.specs.operators import KEPT

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
"""Context managers of `torch.utils.checkpoint.checkpoint(context_fn=…)`, for forward and for recomputation."""

Policy = Callable[..., CheckpointPolicy]
"""Whether to save an operator's output, given a context that is not used, the operator and its arguments."""


class Tracing(Protocol):
    """Observer of checkpointed modules in a trace of the step: it notes which outputs to save, and saves none."""

    def contexts(self, policy: Policy) -> Contexts:
        """Return the contexts of one call of a module."""

    def measured(self, module: nn.Module) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Run a module untraced while entered; yields tensors that the module does not save for the backward pass."""


_TRACING: Final[ContextVar[Tracing | None]] = ContextVar("_TRACING", default=None)

WAIT: Final = torch.ops._c10d_functional.wait_tensor.default

WORDS: Final = tuple(KEPT)
"""Values that `keep_outputs` accepts besides names of operators."""


def keep_outputs(*names: str) -> Callable[[], Contexts]:
    """Return the `context_fn` of checkpointing that saves the outputs of some operators, and recomputes the rest.

    Random operators are always recomputed, including attention with dropout: if one of them were skipped, those after
    it would draw other numbers than in forward.

    Args:
        names: `attention`, `matmul`, `alternate_matmul` (of the products of two matrices, as linear layers compute,
            the first, the third, … in one call of the module), `collective`, or operators as `torch.ops` names them:
            `aten.mm.default`, or `aten.mm` for all of its overloads.

    Raises:
        RunError: torch has no operator of that name, or none whose output can be saved.
    """
    kept, alternate, collectives = _resolve(names)

    def contexts() -> Contexts:
        products = 0

        def policy(_: Any, operator: OpOverload, *arguments: Any, **options: Any) -> CheckpointPolicy:
            nonlocal products
            keep = operator in kept or (collectives and is_collective(operator))
            if operator in alternate:
                keep = keep or products % 2 == 0
                products += 1
            return save(keep and not is_random(operator, arguments, options))

        return selective_contexts(policy, keeps)

    def keeps(operator: OpOverload) -> bool:
        return operator in kept or operator in alternate or (collectives and is_collective(operator))

    return contexts


@contextmanager
def traced_by(tracing: Tracing) -> Iterator[None]:
    """While entered, let a trace decide the contexts of checkpointed modules."""
    token = _TRACING.set(tracing)
    try:
        yield
    finally:
        _TRACING.reset(token)


def selective_contexts(policy: Policy, keeps: Callable[[OpOverload], bool]) -> Contexts:
    """Return torch's contexts of selective checkpointing, or those of the current trace.

    An output that forward changes in place after it was saved is computed again: what was saved is no longer what the
    operator returned, and recomputation would change it a second time.

    Args:
        policy: for one call of a module.
        keeps: whether outputs of an operator may be saved.
    """
    tracing = _TRACING.get()
    if tracing is not None:
        return tracing.contexts(policy)
    if not SavedOutputs.SUPPORTED:
        forward, recomputation = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return forward, recompute_freely(recomputation, keeps)
    saved: dict[int, list[tuple[OpOverload, int]]] = {}

    def watched(context: Any, operator: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decision = policy(context, operator, *args, **kwargs)
        if is_mutable(operator):
            if saved:
                for storage in changed_by(operator, args, kwargs):
                    for output in saved.pop(storage, ()):
                        outputs.recompute(*output)
            return save(False)
        if decision is CheckpointPolicy.MUST_SAVE:
            # Views of an output share its storage, but not always its version counter: torch's own check misses those
            # of a linear layer without a bias.
            output = outputs.last(operator)
            for storage in sizes(tensors_in(context.op_output)):
                saved.setdefault(storage, []).append(output)
        return decision

    forward, recomputation = create_selective_checkpoint_contexts(watched)  # type: ignore[no-untyped-call]
    outputs = SavedOutputs.of(forward)
    return forward, recompute_freely(recomputation, keeps)


def is_traced() -> bool:
    """Whether a trace of the step is in progress. Its ranks compute with equal shapes, and thus make equal choices."""
    return _TRACING.get() is not None


def measured_alone(module: nn.Module) -> AbstractContextManager[Sequence[torch.Tensor]]:
    """Run a module outside the current trace, if there is one; yields tensors that exist anyway."""
    tracing = _TRACING.get()
    return nullcontext(()) if tracing is None else tracing.measured(module)


def save(keep: bool) -> CheckpointPolicy:
    """Return torch's policy for saving or recomputing an output."""
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _resolve(names: Iterable[str]) -> tuple[frozenset[OpOverload], frozenset[OpOverload], bool]:
    """The operators whose outputs are saved, those of which every second is, and whether collectives are."""
    kept: set[OpOverload] = set()
    alternate: frozenset[OpOverload] = frozenset()
    for name in names:
        if name == "alternate_matmul":
            alternate = frozenset(_operators_of(KEPT[name]))
        else:
            kept.update(_operators_of(KEPT[name]) if name in KEPT else operators(name))
    return frozenset(kept), alternate, "collective" in names


def _operators_of(names: Iterable[str]) -> set[OpOverload]:
    """The operators of a list of ours; a build of torch for one device lacks those of others."""
    return {operator for name in names for operator in _find(name)}


def operators(name: str) -> set[OpOverload]:
    """Return the operator of a name such as `aten.mm.default`, or all overloads of one such as `aten.mm`.

    Raises:
        RunError: torch has none, or none that leaves its inputs as they are, draws no random numbers and is computed by
            a kernel of its own.
    """
    found = _find(name)
    if not found:
        raise RunError(
            RunErrorCode.NO_OPERATOR,
            f'torch {torch.__version__} has no operator "{name}"',
            help=f"operators are named as torch.ops names them, such as aten.mm or aten.mm.default; there are also the "
            f"words {', '.join(WORDS)}",
        )
    lasting = {item for item in found if not item._schema.is_mutable and not is_random(item, (), {})}
    if not lasting:
        why = "changes its input in place" if any(item._schema.is_mutable for item in found) else "draws random numbers"
        raise RunError(
            RunErrorCode.NO_OPERATOR,
            f'the operator "{name}" {why}, and what it computes cannot be kept',
            help="leave it out: it is computed again",
        )
    keepable = {item for item in lasting if not is_composed(item)}
    if not keepable:
        raise RunError(
            RunErrorCode.NO_OPERATOR,
            f'the operator "{name}" is computed by others, whose results are kept or computed again in its place',
            help="name these, which `legoai cost` lists: of `aten.linear` and `aten.matmul` they are `aten.mm`, "
            "`aten.addmm` and `aten.bmm`",
        )
    return keepable


def is_composed(operator: OpOverload) -> bool:
    """Whether torch computes an operator by calling others, so that no policy sees it.

    Kernels for autograd beside the composition are those of nested tensors, or of another device, which may be the one
    that trains.
    """
    name: str = operator.name()  # type: ignore[no-untyped-call]
    try:
        if not has_kernel(name, "CompositeImplicitAutograd") or has_kernel(name, "CPU"):
            return False
        return not has_kernel(name, "Autograd") or has_kernel(name, "NestedTensorCPU")
    except RuntimeError:  # one of TorchScript alone, which nothing dispatches
        return True


def _find(name: str) -> set[OpOverload]:
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None) if packet_name else None
    if not isinstance(packet, OpOverloadPacket):
        return set()
    if overload:
        return {getattr(packet, overload)} if overload in packet.overloads() else set()  # type: ignore[no-untyped-call]
    return {getattr(packet, each) for each in packet.overloads()}  # type: ignore[no-untyped-call]


def is_collective(operator: OpOverload) -> bool:
    """Whether the operator communicates; waiting for a result does not."""
    return operator.namespace in ("_c10d_functional", "c10d_functional") and operator is not WAIT
