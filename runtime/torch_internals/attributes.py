"""Table of the private attributes of torch's objects that the other modules read or set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """A private attribute of torch's objects that LegoAI reads, or sets on an object of its own making.

    Attributes:
        owners: classes that have it, as `module:Class`.
        why: why no public attribute serves.
    """

    owners: tuple[str, ...]
    why: str


_MESH: Final = "torch.distributed.device_mesh:DeviceMesh"
_SCHEDULE_CLASS: Final = "torch.distributed.pipelining.schedules:_PipelineSchedule"
_SINGLE: Final = "torch.distributed.pipelining.schedules:PipelineScheduleSingle"
_RUNTIME: Final = "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime"
_MODULE: Final = "torch.nn:Module"
_DTENSOR: Final = "torch.distributed.tensor:DTensor"

ATTRIBUTES: Final[dict[str, Attribute]] = {
    # Modules
    "_parameters": Attribute(owners=(_MODULE,), why="the module's own parameters, writable and in order"),
    "_buffers": Attribute(owners=(_MODULE,), why="as `_parameters`"),
    "_modules": Attribute(owners=(_MODULE,), why="as `_parameters`; children that are None included"),
    "_forward_hooks": Attribute(owners=(_MODULE,), why="hooks of FSDP units, which run around a compiled graph"),
    "_forward_pre_hooks": Attribute(owners=(_MODULE,), why="as `_forward_hooks`"),
    "_call_impl": Attribute(owners=(_MODULE,), why="what `module.compile()` compiles"),
    "_compiled_call_impl": Attribute(owners=(_MODULE,), why="what it compiled; None in other modules"),
    # Tensors and storages
    "_cdata": Attribute(
        owners=("torch:UntypedStorage",), why="identity of a storage, of which each tensor has a new object"
    ),
    "_is_view": Attribute(
        owners=("torch:Tensor",), why="a view cannot be detached in place, and autocast keeps no casts of views"
    ),
    "_local_tensor": Attribute(owners=(_DTENSOR,), why="this rank's shard; `to_local` is an operation of autograd"),
    "_spec": Attribute(owners=(_DTENSOR,), why="mesh and placements together, compared once"),
    # Operators and autograd
    "_schema": Attribute(
        owners=("torch._ops:OpOverload",), why="names, aliases and mutations of an operator's arguments"
    ),
    "_overloadname": Attribute(owners=("torch._ops:OpOverload",), why="as `_schema`"),
    "_overloadpacket": Attribute(owners=("torch._ops:OpOverload",), why="key of torch's registry of flops"),
    "_sequence_nr": Attribute(owners=("torch.autograd.graph:Node",), why="forward operation of a node in backward"),
    "_destroy": Attribute(owners=("torch.library:Library",), why="a library's kernels end with the simulation"),
    # Meshes
    "_flatten_rank_map": Attribute(owners=(_MESH,), why="ranks, compared once"),
    "_layout": Attribute(owners=(_MESH,), why="sizes and strides, by which meshes are equal"),
    "_device_type": Attribute(owners=(_MESH,), why="as `_layout`"),
    "_mesh_dim_names": Attribute(owners=(_MESH,), why="as `_layout`"),
    "_thread_id": Attribute(owners=(_MESH,), why="as `_layout`"),
    # Pipelines
    "_n_microbatches": Attribute(owners=(_SCHEDULE_CLASS,), why="micro batches of a pass"),
    "_stage": Attribute(owners=(_SINGLE,), why="the one stage of a rank"),
    "_internal_losses": Attribute(
        owners=(_SCHEDULE_CLASS,), why="losses of a pass, to which those of replayed actions are added"
    ),
    "_maybe_compute_loss": Attribute(owners=(_SCHEDULE_CLASS,), why="patched; see the table of patches"),
    "_initialize_pp_stages": Attribute(owners=(_SCHEDULE_CLASS,), why="patched; see the table of patches"),
    "_assert_unsharded": Attribute(owners=(_RUNTIME,), why="patched; see the table of patches"),
    "_prepare_schedule_with_comms": Attribute(owners=(_RUNTIME,), why="gives a schedule the order of a plan"),
    "_comp_type_to_function_map": Attribute(
        owners=(_RUNTIME,), why="what an action on parameters calls, set for another rank"
    ),
    "_user_meta": Attribute(owners=("torch.distributed.pipelining:PipelineStage",), why="shapes that a stage was told"),
    "_inference_mode": Attribute(
        owners=("torch.distributed.pipelining:PipelineStage",),
        why="set as the vote of all ranks would set it",
    ),
    # Compilation and optimizers
    "_boxed_call": Attribute(
        owners=(), why="set on a function of ours, by which AOT autograd knows that it empties its arguments"
    ),
    "_update_scheduler": Attribute(
        owners=("torch._inductor.graph:GraphLowering",), why="schedules without generating code"
    ),
    "_last_lr": Attribute(owners=("torch.optim.lr_scheduler:LRScheduler",), why="set when a run resumes at a step"),
    # Python's own
    "_replace": Attribute(owners=(), why="of `collections.namedtuple`, which is documented"),
    "_exit": Attribute(owners=(), why="of `os`, which is documented"),
}
"""Private attributes by their name."""
