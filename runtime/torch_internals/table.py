"""Table of the patches of torch, and of the private names that lowered programs import."""

from __future__ import annotations

from typing import Final

from legoai.runtime.torch_internals.compilation_patches import COMPILATION, SCHEDULING
from legoai.runtime.torch_internals.patch_record import Kind, Patch

_MESH: Final = "torch.distributed.device_mesh:DeviceMesh"
_RANKS: Final = "computes with tensors of ranks, whose values a fake tensor mode would drop"
_SCHEDULES: Final = "torch.distributed.pipelining.schedules"
_STAGE: Final = "torch.distributed.pipelining.stage:_PipelineStageBase"
_STAGES_TEST: Final = "distributed/test_pipelines.py::test_every_action_and_transfer_is_recorded"
_TRANSFERS_TEST: Final = "distributed/test_pipelines.py::test_transfers_have_the_phase_of_the_action_that_they_serve"
_PASSES_TEST: Final = "distributed/test_pipelines.py::test_one_rank_represents_an_equal_rank"
_ESTIMATOR_TEST: Final = "test_tools.py::test_torch_runtime_estimator_runs_without_a_gpu"
_OF_AUTOCAST: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("torch:is_autocast_enabled", "builtin", "", "test_state_of_cuda_is_that_of_the_simulated_gpu"),
    ("torch:get_autocast_dtype", "builtin", "", "test_state_of_cuda_is_that_of_the_simulated_gpu"),
    ("torch:get_autocast_gpu_dtype", "builtin", "", "test_state_of_cuda_is_that_of_the_simulated_gpu"),
    ("torch:set_autocast_enabled", "builtin", "", "test_autocast_of_cuda_is_on"),
    ("torch:set_autocast_dtype", "builtin", "", "test_autocast_of_cuda_is_on"),
    ("torch.amp.autocast_mode:_cast", "function", "value, device_type, dtype", "test_inputs_are_cast_for_cuda"),
)

_SIMULATION: Final = (
    Patch(
        path="torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init",
        kind="property",
        why="constructors would call kernels of the device, and a backend written in Python has none",
        test="test_simulation.py::test_constructors_need_no_device_kernel",
    ),
    Patch(
        path="torch._subclasses.fake_tensor:FakeTensor.tolist",
        parameters="self",
        why="reading values of a fake tensor is an error; a program that reads them waits for the device",
        test="test_simulation.py::test_value_reads_are_recorded",
    ),
    Patch(
        path="torch._subclasses.fake_impls:op_implementations_dict",
        kind="mapping",
        why="page-locking fake host memory would ask for an accelerator with real memory, and a convolution asks for "
        "its device's type whether it leaves channels last",
        test="test_simulation.py::test_host_memory_is_page_locked",
    ),
    Patch(
        path="torch.distributed._functional_collectives:_maybe_wrap_tensor",
        parameters="self",
        why="a fake tensor mode is taken for compilation, so that each collective would be waited for at once; while a "
        "module is compiled, torch's own is put back",
        test="test_simulation.py::test_collectives_are_awaited_at_first_use",
    ),
    Patch(
        path="torch._C._distributed_c10d:FakeWork.wait",
        kind="builtin",
        why="tells the recorder that a stream waits for a collective",
        test="test_simulation.py::test_waits_for_collectives_are_recorded",
    ),
    Patch(
        path="torch.autograd.profiler:record_function.__enter__",
        parameters="self",
        why="labels of the profiler, which nobody reads, are operators that go through every mode",
        test="test_simulation.py::test_profiler_labels_are_not_recorded",
    ),
    Patch(
        path="torch.autograd.profiler:record_function.__exit__",
        parameters="self, exc_type, exc_value, traceback",
        why="as `__enter__`",
        test="test_simulation.py::test_profiler_labels_are_not_recorded",
    ),
    Patch(
        path="torch.utils.checkpoint:_CachingTorchDispatchMode.__torch_dispatch__",
        parameters="self, func, types, args, kwargs",
        why="tells the recorder that a policy of selective checkpointing sees an operator, which takes the host long",
        test="test_simulation.py::test_operators_under_a_policy_are_recorded_as_such",
    ),
    Patch(
        path="torch.utils.checkpoint:_CachedTorchDispatchMode.__torch_dispatch__",
        parameters="self, func, types, args, kwargs",
        why="the same of an operator that is recomputed",
        test="test_simulation.py::test_operators_under_a_policy_are_recorded_as_such",
    ),
    Patch(
        path="torch.autograd.function:Function.apply",
        kind="class method",
        why="tells the recorder that a Python autograd function is called, which takes the host time",
        test="test_simulation.py::test_calls_of_autograd_functions_are_recorded",
    ),
    Patch(
        path="torch.autograd.function:BackwardCFunction.apply",
        parameters="self",
        why="the same of its backward",
        test="test_simulation.py::test_calls_of_autograd_functions_are_recorded",
    ),
    Patch(
        path="torch.random:fork_rng",
        parameters="devices",
        why="torch 2.12 asks CUDA for the random state of stages on any device, which fails without a driver",
        until="2.13",
        test="test_simulation.py::test_fork_rng_queries_no_other_device",
    ),
    Patch(
        path="torch.accelerator:current_stream",
        parameters="device",
        why="FSDP waits on it for a unit that it gathered ahead and that has no backward; a real stream takes no event",
        test="test_simulation.py::test_accelerator_stream_is_the_recorded_one",
    ),
    Patch(
        path="torch:UntypedStorage.resize_",
        kind="builtin",
        why="FSDP allocates and frees unsharded parameters by resizing; no operator tells of it",
        test="test_simulation.py::test_resized_storages_are_recorded",
    ),
    Patch(
        path="torch:clear_autocast_cache",
        kind="builtin",
        why="casts of parameters, which the simulated device's own rules keep, end when torch's do",
        test="test_simulation.py::test_cast_cache_ends_with_autocast",
    ),
    *(
        Patch(
            path=path,
            kind=kind,
            parameters=parameters,
            why="a model names the device that is simulated, whose tensors are on the simulated device",
            test=f"test_autocast.py::{test}",
        )
        for path, kind, parameters, test in _OF_AUTOCAST
    ),
    Patch(
        path="torch.cuda.amp.common:amp_definitely_not_available",
        why="autocast of CUDA would be off where this process has no GPU, though one is simulated",
        test="test_autocast.py::test_autocast_of_cuda_is_on",
    ),
    Patch(
        path="torch.cuda:is_bf16_supported",
        parameters="including_emulation",
        why="autocast of CUDA in bf16 would ask the driver of a GPU that this process does not have",
        test="test_autocast.py::test_autocast_of_cuda_is_on",
    ),
    Patch(
        path="torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached",
        parameters="self, op_schema",
        why="shapes are found with tensors of global shape, which no device allocates",
        test="test_simulation.py::test_dtensor_shape_propagation_is_not_recorded",
    ),
    Patch(
        path="torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
        parameters="self, op_schema",
        why="as `propagate_op_sharding_non_cached`, for callers that want only the shapes",
        test="test_simulation.py::test_dtensor_shape_propagation_is_not_recorded",
    ),
)

_MADE_OF_MESHES: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("_concatenate", "static", "device_mesh_list"),
    ("_flatten", "function", "self, mesh_dim_name"),
    ("_unflatten", "function", "self, dim, mesh_sizes, mesh_dim_names"),
)

_MESHES: Final = (
    *(
        Patch(
            path=f"{_MESH}.{name}",
            kind=kind,
            parameters=parameters,
            why=_RANKS,
            test="distributed/test_meshes.py::test_axes_are_joined_and_split",
        )
        for name, kind, parameters in _MADE_OF_MESHES
    ),
    Patch(
        path="torch.distributed.fsdp._fully_shard._fully_shard:_get_post_forward_mesh_info",
        parameters="reshard_after_forward, mesh_info",
        why=f"the mesh over which `fully_shard` reshards after forward: {_RANKS}",
        test="distributed/test_meshes.py::test_units_reshard_over_some_of_their_ranks",
    ),
    Patch(
        path="torch.distributed.tensor.placement_types:_StridedShard.local_shard_size_and_offset",
        parameters="self, curr_local_size, num_chunks, rank",
        why="reads the offsets of a strided shard from a tensor, of which fake tensor modes leave no values",
        test="distributed/test_meshes.py::test_strided_shards_are_redistributed",
    ),
    Patch(
        path=f"{_MESH}.__eq__",
        parameters="self, other",
        why="compares all ranks of a world each time that DTensor looks a mesh up",
        test="distributed/test_meshes.py::test_ranks_of_equal_meshes_are_compared_once",
    ),
    Patch(
        path="torch.distributed.device_mesh:new_group",
        parameters="ranks",
        why="each rank makes the groups of all others along an axis, and keeps its own",
        test="distributed/test_meshes.py::test_groups_of_other_ranks_are_not_created",
    ),
    *(
        Patch(
            path=f"torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.{name}",
            parameters=parameters,
            why="tells whose parameters are gathered, or whose gradients are reduced, while other modules run",
            test="distributed/test_units.py::test_collectives_of_parameters_name_their_unit",
        )
        for name, parameters in (("unshard", "self, async_op"), ("post_backward", "self"))
    ),
    Patch(
        path="torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._to_sharded_post_forward",
        parameters="self",
        why="tells what a unit keeps of its parameters between forward and backward under `reshard = k`",
        test="distributed/test_units.py::test_pieces_kept_after_forward_are_parameters_of_their_unit",
    ),
    Patch(
        path="torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty",
        parameters="tensor, num_chunks, dim",
        why="cuts each parameter into the chunks of all ranks, and keeps its own",
        test="distributed/test_meshes.py::test_units_compute_only_their_own_chunk",
    ),
)

_PIPELINES: Final = (
    Patch(
        path=f"{_SCHEDULES}:record_function",
        kind="class",
        parameters="name",
        why="the label of an action on parameters tells when it begins and ends",
        test=_STAGES_TEST,
    ),
    Patch(
        path=f"{_SCHEDULES}:_PipelineSchedule._warmup_p2p",
        parameters="self, stages, has_backward, p2p_done",
        why="stages vote on their shapes, and a vote has a value",
        test=_STAGES_TEST,
    ),
    Patch(
        path=f"{_SCHEDULES}:_batch_p2p",
        parameters="p2p_ops, desc",
        why="transfers in one direction are recorded without the way through all modes",
        test="distributed/test_pipelines.py::test_one_way_transfers_are_not_recorded_as_operators",
    ),
    Patch(
        path="torch.distributed:batch_isend_irecv",
        parameters="p2p_op_list",
        why="tells which transfers are one operation of NCCL",
        test="distributed/test_pipelines.py::test_transfers_of_one_operation_are_recorded_as_a_batch",
    ),
    *(
        Patch(path=f"{owner}.{name}", parameters=parameters, why=why, test=test)
        for owner, name, parameters, why, test in (
            (
                _STAGE,
                "forward_one_chunk",
                "self, fwd_chunk_id, args",
                "one action of a stage, replayed where it is equal",
                _STAGES_TEST,
            ),
            (
                _STAGE,
                "backward_one_chunk",
                "self, bwd_chunk_id, loss, full_backward, last_backward",
                "as the forward",
                _STAGES_TEST,
            ),
            (_STAGE, "backward_weight_one_chunk", "self, bwd_chunk_id, last_backward", "as the forward", _STAGES_TEST),
            (_STAGE, "perform_reduce_grad", "self, grad_scale_factor", "as the forward", _STAGES_TEST),
            *(
                (
                    _STAGE,
                    f"get_{way}_ops",
                    f"self, {way[:3]}_chunk_id",
                    "tells the phase of a transfer",
                    _TRANSFERS_TEST,
                )
                for way in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send")
            ),
            (f"{_SCHEDULES}:_PipelineSchedule", "step", "self", "tells when a pass begins and ends", _PASSES_TEST),
            (
                f"{_SCHEDULES}:_PipelineSchedule",
                "_maybe_compute_loss",
                "self, stage, output, target_mbs, mb_index",
                "the loss belongs to the forward of the last stage",
                _STAGES_TEST,
            ),
            (
                f"{_SCHEDULES}:_PipelineSchedule",
                "_initialize_pp_stages",
                "self, stages",
                "tells when the stages are prepared",
                _PASSES_TEST,
            ),
            (
                f"{_SCHEDULES}:_PipelineScheduleRuntime",
                "_assert_unsharded",
                "self, stage",
                "the wait for unsharded parameters is recorded by itself",
                _PASSES_TEST,
            ),
        )
    ),
)

_PLACED: Final = (
    Patch(
        path="torch:_dynamo",
        kind="module",
        why="hooks and optimizers would import dynamo only to keep it away; see the module `dynamo` of this folder",
        test="compiler/test_dynamo.py::test_dynamo_state_is_restored_after_simulation",
    ),
    Patch(
        path="torch._inductor:config._micro_pipeline_tp",
        kind="setting",
        why="AsyncTP has no public switch; set for a whole run, and reset after a simulation by `settings`",
        test="compiler/test_compilation.py::test_symmetric_memory_state_is_reset",
    ),
    Patch(
        path="torch.distributed.tensor._random:_rng_tracker",
        kind="setting",
        why="DTensor makes it by a broadcast within a forward; set for a whole run, and reset after a simulation",
        test="distributed/test_random_numbers.py::test_dtensor_alone_gives_all_ranks_the_state_of_the_first",
    ),
)

_RUNS: Final = (
    Patch(
        path="torch.distributed.distributed_c10d:_get_default_timeout",
        parameters="backend",
        why="`init_device_mesh` takes no timeout, so that groups of mesh axes would wait 10 or 30 minutes",
        test="distributed/test_process_groups.py::test_groups_of_mesh_axes_have_the_timeout_of_the_run",
    ),
    Patch(
        path="torch.distributed.elastic.multiprocessing.api:PContext.close",
        parameters="self, death_sig, timeout",
        why="torchrun waits 30 s for ranks that cannot go on, such as one that is stopped, and has no option for it",
        test="distributed/test_process_groups.py::test_ranks_are_killed_soon_after_a_failure",
    ),
    Patch(
        path="torch.distributed.elastic.multiprocessing.api:PContext.start",
        parameters="self",
        why="torchrun starts ranks that a signal ends with a traceback until they have imported what handles it",
        test="distributed/test_process_groups.py::test_ranks_are_started_while_signals_are_held",
    ),
)

_BENCHMARKS: Final = (
    Patch(
        path="torch.distributed.tensor._sharding_prop:detect_fake_mode",
        parameters="inputs",
        why="DTensor takes the memory tracker's fake mode for a compiler's, and too much is counted",
        since="2.13",
        test="test_tools.py::test_fsdp_memory_tracker_runs_without_a_gpu",
    ),
    Patch(
        path="torch.cuda:is_available",
        why="torch's runtime estimator runs only where there is a GPU",
        test=_ESTIMATOR_TEST,
    ),
    Patch(
        path="torch.cuda:is_current_stream_capturing",
        why="an optimizer asks the driver, where there seems to be a GPU, whether a graph is captured",
        build="cuda",
        test=_ESTIMATOR_TEST,
    ),
    Patch(
        path="torch.utils._runtime_estimation:get_device_tflops",
        parameters="dtype",
        why="the estimator asks the driver for rates; it is told those of the catalogue",
        test=_ESTIMATOR_TEST,
    ),
    Patch(
        path="torch.utils._runtime_estimation:get_gpu_dram_gbps",
        why="as `get_device_tflops`",
        test=_ESTIMATOR_TEST,
    ),
)

PATCHES: Final[dict[str, Patch]] = {
    patch.path: patch
    for patch in (*_SIMULATION, *_MESHES, *_PIPELINES, *COMPILATION, *SCHEDULING, *_PLACED, *_RUNS, *_BENCHMARKS)
}
"""All patches by their path."""

IN_PROGRAMS: Final[dict[str, str]] = {
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper": "keeps a checkpointed module's "
    "parameters under their names; documented nowhere else",
    "torch.distributed._composable.replicate_with_fsdp:replicate": "replicates in the way of `fully_shard`; DDP, "
    "which is public, cannot be composed with tensor parallelism",
}
"""Private names that lowered programs import, as `module:name`, and why."""
