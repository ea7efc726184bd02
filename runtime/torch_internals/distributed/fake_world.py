"""Private names of `torch.distributed` that the simulation of one rank among many needs."""

import torch

# A pending collective of the `fake` backend, for which a stream waits.
from torch._C._distributed_c10d import FakeWork

# A checkpointed module, whose calls are tagged while it is compiled.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.distributed_c10d import _get_group_size_by_name as group_size_by_name

# The state of an FSDP unit, which identifies its hooks among those of a module.
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec

# The store of process groups without processes.
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = [
    "CheckpointWrapper",
    "DTensorSpec",
    "FSDPState",
    "FakeStore",
    "FakeWork",
    "forget_meshes",
    "group_size_by_name",
]


def forget_meshes() -> None:
    """Drop the meshes that DTensor caches for destroyed process groups.

    They compare equal to those of new groups, but contain this process's former rank.
    """
    # As `torch.distributed.tensor.debug` does it, which imports inductor.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
