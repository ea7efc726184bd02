"""Patches of torch under which modules are compiled for the simulated device, and collectives are scheduled."""

from __future__ import annotations

from typing import Final

from legoai.runtime.torch_internals.patch_record import Patch

COMPILATION: Final = (
    Patch(
        path="torch:compile",
        parameters="model",
        why="dynamo cannot trace the simulated device",
        test="compiler/test_compilation.py::test_modules_are_compiled_for_the_simulated_device",
    ),
    *(
        Patch(
            path=f"torch.nn.modules.module:{name}",
            kind="mapping",
            why="hooks of all modules would become part of the graph; one of ours notes which module makes a node",
            test="compiler/test_compilation.py::test_kernels_know_their_module",
        )
        for name in ("_global_forward_pre_hooks", "_global_forward_hooks")
    ),
    Patch(
        path="torch.fx.traceback:current_meta",
        kind="mapping",
        why="a checkpoint's context tags the nodes of a graph, and does not take its tags back",
        test="compiler/test_compilation.py::test_checkpoints_tag_only_their_own_operators",
    ),
    Patch(
        path="torch._functorch.partitioners:functionalize_rng_ops",
        parameters="joint_module, fw_module, bw_module, num_sym_nodes",
        why="a recomputed operator that may be random would keep the state of CUDA's generator",
        test="compiler/test_compilation.py::test_random_operators_are_recomputed_without_a_generator",
    ),
    Patch(
        path="torch._functorch.partitioners:_size_of",
        parameters="node",
        why="a device mesh that enters a graph over DTensors has no size for it, so that no budget could be kept",
        test="compiler/test_compilation.py::test_device_meshes_have_no_size_within_a_budget",
    ),
    Patch(
        path="torch:Tensor.copy_",
        kind="builtin",
        why="inductor's passes try a copy on constants of the device to see whether shapes fit",
        test="compiler/test_compilation.py::test_inductor_schedules_without_a_gpu",
    ),
    Patch(
        path="torch._inductor.scheduler:Scheduler.create_backend",
        parameters="self, device",
        why="inductor refuses to schedule for a GPU that is not there",
        test="compiler/test_compilation.py::test_inductor_schedules_without_a_gpu",
    ),
    Patch(
        path="torch._inductor.runtime.hints:DeviceProperties.create",
        kind="class method",
        parameters="cls, device",
        why="inductor asks the driver; it is told the properties of the plan's device",
        test="compiler/test_compilation.py::test_inductor_gets_the_properties_of_the_device",
    ),
    Patch(
        path="torch.distributed:is_nccl_available",
        why="inductor's AsyncTP pass does nothing in a build of torch without NCCL",
        test="compiler/test_compilation.py::test_products_are_fused_with_their_collectives",
    ),
    Patch(
        path="torch.distributed._symmetric_memory:make_contiguous_for_perm",
        parameters="t, perm",
        why="the pass would copy a tensor of a GPU",
        test="compiler/test_compilation.py::test_products_are_fused_with_their_collectives",
    ),
    Patch(
        path="torch.distributed._symmetric_memory:enable_symm_mem_for_group",
        parameters="group_name",
        why="exchanges handles of memory with the ranks of a group, of which only one is simulated",
        test="compiler/test_compilation.py::test_symmetric_memory_state_is_reset",
    ),
    Patch(
        path="torch.distributed._symmetric_memory:_group_name_to_store",
        kind="mapping",
        why="groups of one simulation that have symmetric memory, by which the AsyncTP pass knows them",
        test="compiler/test_compilation.py::test_symmetric_memory_state_is_reset",
    ),
)

_SCHEDULER_TEST: Final = "compiler/test_overlap_scheduling.py::test_overlap_scheduler_uses_the_given_times"

SCHEDULING: Final = (
    Patch(
        path="torch._inductor.fx_passes.overlap_scheduling:estimate_roofline_runtime_ms",
        parameters="node",
        why="the scheduler of communication asks the driver for rates before it takes the times that are given",
        test=_SCHEDULER_TEST,
    ),
    *(
        Patch(
            path=f"torch._inductor.fx_passes.node_runtime_estimation:{name}",
            parameters=parameters,
            why="estimates everything once more by NCCL's tuning for a GPU that may not be there, only to log it",
            test=_SCHEDULER_TEST,
        )
        for name, parameters in (
            ("_log_compute_estimations", "compute_nodes, benchmarked_estimations, analytical_estimations"),
            ("_log_collective_benchmarks", "collective_nodes"),
        )
    ),
)
