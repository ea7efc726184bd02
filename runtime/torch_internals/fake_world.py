"""Private names of `torch.distributed` that the simulation of one rank among many needs."""

import torch

# A collective of the `fake` backend on its way, for which a stream waits.
from torch._C._distributed_c10d import FakeWork

# A checkpointed module, whose calls are tagged while it is compiled.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.distributed_c10d import _get_group_size_by_name as group_size_by_name

# The state of an FSDP unit, by which its hooks are known among those of a module.
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
    """Forget the meshes that DTensor keeps of process groups that are gone.

    They are equal to those of new groups, but know this process by the rank that it was.
    """
    # As `torch.distributed.tensor.debug` does it, which imports inductor.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
