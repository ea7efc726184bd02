"""Units of sharded parameters with the all-gather as a parametrization (Zhang et al. 2024, SimpleFSDP, figure 1).

A parameter is a sharded DTensor. Its module reads it through a property that all-gathers it; the gradient is
reduce-scattered by the derivative of `redistribute`. Names of modules and parameters are unchanged, so that checkpoints
of `fully_shard` are compatible.

Where the number of ranks does not divide dim 0, the shards of the last ranks are smaller, and some may be empty. Their
storages are zero-padded to the size of the first, as with `fully_shard`, and the graph's inputs and outputs are the
padded shards, so that it is the same on all ranks. Gathered tensors end with padding, which is sliced off; reduced ones
are padded.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import pad

from legoai.lowering.graph.step.operators import all_gather, all_reduce, reduce_scatter, wait
from legoai.runtime.initialize import plain_path
from legoai.runtime.parallelism.mesh import split_into_parts
from legoai.runtime.torch_internals.distributed.meshes import DTensorSpec, StridedShard, TensorMeta, concatenate
from legoai.runtime.torch_internals.operators import tree_map


class Among(NamedTuple):
    """The ranks that hold the shards of gathered parameters from forward to backward.

    Attributes:
        group: their name.
        ranks: their number.
        rank: index of this rank.
    """

    group: str
    ranks: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        parameters: their names in the model; a tied one has the first of its names.
        reshard_after_forward: whether they are gathered again for backward.
        reshard_after_backward: whether they are gathered again for the next micro batch of a step.
        among: the ranks from which they are gathered again for backward, where these are not all that hold shards.
    """

    parameters: tuple[str, ...]
    reshard_after_forward: bool
    reshard_after_backward: bool
    among: Among | None = None


@dataclass(frozen=True, eq=False)
class _Made:
    """A unit while the model is being sharded; compared by identity."""

    reshard_after_forward: bool
    reshard_after_backward: bool
    among: Among | None


_CLASSES: Final[dict[tuple[type[nn.Module], tuple[str, ...], Any, Any], type[nn.Module]]] = {}

_MADE: Final[weakref.WeakKeyDictionary[nn.Module, _Made]] = weakref.WeakKeyDictionary()
"""The units by the modules from which they were made."""

_GATHERED: Final[weakref.WeakKeyDictionary[nn.Module, dict[str, DTensorSpec]]] = weakref.WeakKeyDictionary()
"""Layouts of gathered parameters on the axis of tensor parallelism, by module and name."""

_MESHES: Final[weakref.WeakKeyDictionary[nn.Module, DeviceMesh]] = weakref.WeakKeyDictionary()
"""The mesh over which a module's own parameters are gathered. The mesh in a parameter's layout may have other groups of
the same ranks, since DTensor's caches are keyed by the shape of a mesh, and outlive it."""

_COMMUNICATING: Final[list[None]] = []
_REDUCING: Final[list[None]] = []
_CASTING: Final[list[None]] = []
_ADDED_UP: Final[ContextVar[bool]] = ContextVar("_ADDED_UP", default=False)
"""Whether gradients of several micro batches are accumulated before they are reduced."""
_BEFORE: Final[ContextVar[dict[int, torch.Tensor] | None]] = ContextVar("_BEFORE", default=None)
"""Parameters that were gathered before they are read, by the identity of their shards."""


def shard_unit(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int,
    reshard_after_backward: bool = True,
) -> None:
    """Shard the parameters of modules on dim 0, and let the modules gather them, like `fully_shard` without its hooks.

    Parameters that tensor parallelism has placed are sharded further: each rank of its axis gathers its own part. Inner
    units are made first, and keep their parameters.

    Args:
        module: or several, whose parameters are gathered together.
        mesh: the axis of the shards, preceded by that of their replicas if there is one.
        mp_policy: the dtypes of gathered parameters, of the reduction, and of the modules' inputs and outputs.
        reshard_after_forward: gather again for backward; a number is that of ranks over which they are sharded
            meanwhile.
        reshard_after_backward: gather again for the next micro batch of a step.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    among = None if isinstance(reshard_after_forward, bool) else _among(mesh, reshard_after_forward)
    unit = _Made(bool(reshard_after_forward), reshard_after_backward, among)
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for outer in modules:
        _MADE[outer] = unit
        _cast_inputs_and_outputs(outer, mp_policy)
        for owner in outer.modules():
            _shard(owner, mesh, mp_policy, shards)


def _among(mesh: DeviceMesh, ranks: int) -> Among | None:
    """Return this rank's group of ``ranks`` consecutive ranks on the last axis of a mesh; None for all."""
    if ranks == mesh.size(-1):
        return None
    group = split_into_parts(mesh, ranks=ranks).get_group()
    return Among(group.group_name, group.size(), group.rank())


def is_of_unit() -> bool:
    """Return whether a unit is gathering parameters or reducing their gradients."""
    return bool(_COMMUNICATING)


@contextlib.contextmanager
def _of_unit() -> Iterator[None]:
    """Mark operators called while entered as communication of a unit."""
    _COMMUNICATING.append(None)
    try:
        yield
    finally:
        _COMMUNICATING.pop()


def is_of_pass() -> bool:
    """Return whether current operators run once for all micro batches of a pass."""
    return bool(_REDUCING)


@contextlib.contextmanager
def _of_pass() -> Iterator[None]:
    """Mark operators called while entered as running once for all micro batches of a pass."""
    _REDUCING.append(None)
    try:
        yield
    finally:
        _REDUCING.pop()


def is_cast_for_sum() -> bool:
    """Return whether a gradient is being cast to the dtype in which those of several micro batches are accumulated."""
    return bool(_CASTING)


@contextlib.contextmanager
def _cast_for_sum() -> Iterator[None]:
    """Mark operators called while entered as a cast of a gradient to the dtype in which it is accumulated."""
    _CASTING.append(None)
    try:
        yield
    finally:
        _CASTING.pop()


@contextlib.contextmanager
def added_up() -> Iterator[None]:
    """While entered, reduce gradients on the axis of tensor parallelism after the cast, together with those of shards.

    Sums over several micro batches are computed in the dtype of the reduction, and reduced as a whole.
    """
    token = _ADDED_UP.set(True)
    try:
        yield
    finally:
        _ADDED_UP.reset(token)


@contextlib.contextmanager
def gathered_before(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Gather all parameters of a module, and let it read these while entered."""
    found: dict[int, torch.Tensor] = {}
    token = _BEFORE.set(found)
    try:
        for owner in module.modules():
            for name in owner._parameters:
                getattr(owner, name)
        yield list(found.values())
    finally:
        _BEFORE.reset(token)


def padded_shard(parameter: DTensor) -> torch.Tensor:
    """Return the shard of a parameter padded to the first rank's rows, and make the parameter a view of it."""
    local, (whole, ranks) = parameter._local_tensor, _rows(parameter._spec)
    rows = -(-whole // ranks)
    if local.shape[0] == rows:
        return local
    shape = torch.Size((rows, *local.shape[1:]))
    if local.storage_offset() == 0 and local.untyped_storage().nbytes() >= shape.numel() * local.itemsize:
        return local.as_strided(shape, torch.empty(shape, device="meta").stride())
    padded = local.new_zeros(shape)
    parameter._local_tensor = padded[: local.shape[0]].copy_(local)
    return padded


def _rows(spec: DTensorSpec) -> tuple[int, int]:
    """Return the rows of a gathered parameter on this rank, and the number of ranks among which they are divided."""
    cut = [axis for axis, placement in enumerate(spec.placements) if _cuts_rows(placement)]
    pieces = math.prod(spec.mesh.size(axis) for axis in cut[1:])
    assert spec.shape[0] % pieces == 0, "see `supports` of the graph backend"
    return spec.shape[0] // pieces, spec.mesh.size(cut[0])


def _cuts_rows(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard) and placement.dim == 0


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model that hold parameters, in the model's order."""
    around: dict[str, _Made] = {}
    found: dict[_Made, list[str]] = {}
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        unit = _MADE.get(module) or around.get(path.rpartition(".")[0]) or around.get("")
        assert unit is not None, "the model itself is a unit"
        around[path] = unit
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                found.setdefault(unit, []).append(plain_path(f"{path}.{name}" if path else name))
    return tuple(
        Unit(
            parameters=tuple(names),
            reshard_after_forward=unit.reshard_after_forward,
            reshard_after_backward=unit.reshard_after_backward,
            among=unit.among,
        )
        for unit, names in found.items()
    )


def _shard(
    owner: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, shards: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Replace a module's own parameters by their shards, a tied one by the same everywhere."""
    if type(owner) in _CLASSES.values():  # an inner unit has already done so
        return
    names = []
    for name, whole in owner.named_parameters(recurse=False, remove_duplicate=False):
        if whole not in shards:
            shards[whole] = nn.Parameter(_cut(whole, mesh), requires_grad=whole.requires_grad)
        owner._parameters[name] = shards[whole]
        if isinstance(whole, DTensor):
            _GATHERED.setdefault(owner, {})[name] = whole._spec
        names.append(name)
    if names:
        _MESHES[owner] = mesh
        owner.__class__ = _gathering(type(owner), tuple(names), policy.param_dtype, policy.reduce_dtype)


def _gathering(
    kind: type[nn.Module], names: tuple[str, ...], param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> type[nn.Module]:
    """Return the class of modules like ``kind`` whose named parameters are read gathered."""
    key = kind, names, param_dtype, reduce_dtype
    if key in _CLASSES:
        return _CLASSES[key]

    def reader(name: str) -> property:
        def read(module: nn.Module) -> Any:
            parameter, gathered = module._parameters[name], _GATHERED.get(module, {}).get(name)
            if not isinstance(parameter, DTensor):  # while initial values are drawn into a full parameter
                return parameter
            before = _BEFORE.get()
            if before is not None and id(parameter) in before:
                return before[id(parameter)]
            whole = _gathered(parameter, gathered, _MESHES[module], param_dtype, reduce_dtype)
            if before is not None:
                before[id(parameter)] = whole
            return whole

        return property(read)

    made = _CLASSES[key] = type(kind.__name__, (kind,), {name: reader(name) for name in names})
    return made


def _cut(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the shards of a parameter; of one that tensor parallelism has sharded, those of this rank's part."""
    replicas = [Replicate()] * (mesh.ndim - 1)
    if not isinstance(whole, DTensor):
        return distribute_tensor(whole.detach(), mesh, (*replicas, Shard(0)), src_data_rank=None)
    spec = whole._spec
    pieces = spec.num_shards_map[0]
    own: Placement = StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)
    local, ranks, rank = whole._local_tensor.detach(), mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    rows = -(-local.shape[0] // ranks)
    shard = local[rank * rows : (rank + 1) * rows].clone()
    laid = DTensorSpec(concatenate([mesh, spec.mesh]), (*replicas, own, *spec.placements), tensor_meta=spec.tensor_meta)
    return DTensor(shard, laid, requires_grad=False)  # type: ignore[no-untyped-call]


def _gathered(
    parameter: DTensor,
    gathered: DTensorSpec | None,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return a full parameter, whose gradient is averaged over the ranks that hold its shards, and over replicas."""
    result: torch.Tensor = _Gather.apply(parameter, gathered, mesh, (param_dtype, reduce_dtype))  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    """All-gather of shards on dim 0; its gradient is reduce-scattered, and then reduced over the replicas.

    The derivative of DTensor's `redistribute` would reduce the full gradient over the replicas, and then scatter it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        parameter: DTensor,
        gathered: DTensorSpec | None,
        mesh: DeviceMesh,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
    ) -> torch.Tensor:
        """Return the full tensor in the dtype of parameters, in the layout of tensor parallelism."""
        shard, (param_dtype, reduce_dtype) = padded_shard(parameter), dtypes
        ctx.spec, ctx.gathered, ctx.reduce_dtype, ctx.dtype = parameter._spec, gathered, reduce_dtype, shard.dtype
        *ctx.replicas, ctx.shards = _groups(mesh)
        group = ctx.shards
        sent = shard if param_dtype is None else shard.to(param_dtype)
        with _of_unit():
            whole: torch.Tensor = wait(all_gather(sent, group.size(), group.group_name))
            rows, _ = _rows(parameter._spec)
            if whole.shape[0] > rows:
                whole = whole[:rows]
        if gathered is None:
            return whole
        meta = TensorMeta(gathered.shape, gathered.stride, whole.dtype)
        laid = DTensorSpec(gathered.mesh, gathered.placements, tensor_meta=meta)
        return DTensor(whole, laid, requires_grad=False)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the shards in their dtype."""
        [gradient] = gradients
        if _ADDED_UP.get():
            with _cast_for_sum():
                sent = gradient if ctx.reduce_dtype is None else gradient.to(ctx.reduce_dtype)
            with _of_pass():
                sent = _as_gathered(sent, ctx.gathered)
        else:
            sent = _as_gathered(gradient, ctx.gathered)
            sent = sent if ctx.reduce_dtype is None else sent.to(ctx.reduce_dtype)
        with _of_unit():
            missing = -sent.shape[0] % ctx.shards.size()
            if missing:
                sent = pad(sent, [*[0, 0] * (sent.dim() - 1), 0, missing])
            reduced = wait(reduce_scatter(sent.contiguous(), "avg", ctx.shards.size(), ctx.shards.group_name))
            for group in ctx.replicas:
                reduced = wait(all_reduce(reduced, "avg", group.group_name))
        local = reduced.to(ctx.dtype)
        return DTensor(local, ctx.spec, requires_grad=False), None, None, None  # type: ignore[no-untyped-call]


def _as_gathered(gradient: torch.Tensor, gathered: DTensorSpec | None) -> torch.Tensor:
    """Return the local tensor of a gradient in the layout of the gathered parameter."""
    if not isinstance(gradient, DTensor):
        return gradient
    assert gathered is not None, "a parameter that tensor parallelism has placed"
    return gradient.redistribute(placements=gathered.placements)._local_tensor


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of a mesh by its axes: of replicas, if there are any, and then of shards."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def _cast_inputs_and_outputs(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Cast a unit's inputs and outputs by the policy."""
    given, made = policy.param_dtype, policy.output_dtype
    if given is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(lambda _, args, kwargs: _cast((args, kwargs), given), with_kwargs=True)
    if made is not None:
        module.register_forward_hook(lambda _, __, output: _cast(output, made))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda item: item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item, values
    )
