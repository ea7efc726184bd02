"""Options of other tools with their equivalents in plans: Megatron-LM, DeepSpeed, TorchTitan, Hugging Face, PyTorch.

It is imported when a word is unknown, never for a plan without errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

from legoai.dsl.diagnostics.examples import EXAMPLES


class Entry(NamedTuple):
    """Options of other tools with one meaning.

    The first of ``ours`` that is legal at the position is the equivalent. ``form`` is an equivalent statement, for a
    position where none is legal; ``note`` a sentence, where there is no equivalent statement.
    """

    words: str
    ours: str = ""
    form: str = ""
    note: str = ""


_BATCH = EXAMPLES["batch"]
_FSDP = "fsdp on dp_shard { layers.* = unit }"
_FULL = "checkpoint { layers.* = full }"
_DTYPES = EXAMPLES["precision"]
_FLOAT8 = "precision { layers.*.feed_forward.{w1, w2, w3} = float8 }"
_ADAMW = "optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)"
_COSINE = EXAMPLES["schedule"]
_SHARD = "shard on tp { layers.*.attention.{wq, wk, wv} = colwise, layers.*.attention.wo = rowwise }"
_TRAINER = "options of a run follow `--`: `legoai run FILE -- --help` lists them"

TABLE: Final[tuple[Entry, ...]] = (
    # The mesh.
    Entry("device_mesh init_device_mesh parallelism parallel_dims topology parallel_config", "mesh",
          "mesh (dp_shard = rest, tp = 8)"),
    Entry("tensor_parallel tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size tensor tp_size "
          "tp_degree model_parallel model_parallel_size mp mp_size autotp_size",
          "tp shard", "mesh (dp_shard = rest, tp = 8)"),
    Entry("pipeline_parallel pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size pp_size "
          "pp_degree pipeline pipe pipe_parallel_size", "pp pipeline", "mesh (pp = 4, dp_shard = rest)"),
    Entry("data_parallel data_parallel_size data_parallel_degree data_parallel_shard_degree dp dp_size dp_degree data "
          "dp_shard_degree shard_degree fsdp fsdp_size fsdp_degree", "dp_shard fsdp", "mesh (dp_shard = rest)"),
    Entry("data_parallel_replicate_degree dp_replicate_degree replicate_degree num_replicas replica ddp_size "
          "num_distributed_optimizer_instances", "dp_replicate replicate", "mesh (dp_replicate = 4, dp_shard = rest)"),
    Entry("context_parallel context_parallel_degree context_parallel_size cp_size cp_degree context ring_attention "
          "sequence_parallel_size sp_size", "cp context", "mesh (dp_shard = rest, cp = 4)"),
    Entry("expert_parallel expert_parallel_degree expert_parallel_size expert_model_parallel_size ep_size ep_degree "
          "expert autoep_size moe_expert_parallel", "ep experts", "mesh (dp_shard = rest, ep = 8)"),
    Entry("expert_tensor_parallel_degree expert_tensor_parallel_size etp_size etp", "across_tp",
          "shard standard on ep (across_tp)"),
    Entry("sequence_parallel enable_sequence_parallel sequenceparallel sp", "sequence",
          note="sequence parallelism is the treatment `sequence` of the norms in `shard on tp`"),
    # The cluster.
    Entry("hardware machine device_type gpu_type accelerator accelerators resources nodes", "cluster hosts",
          EXAMPLES["cluster"]),
    Entry("nnodes num_nodes n_nodes node num_hosts", "hosts", EXAMPLES["cluster"]),
    Entry("nproc_per_node gpus_per_node num_gpus_per_node devices_per_host ngpus num_gpus gpus n_gpus", "devices",
          EXAMPLES["cluster"]),
    Entry("world_size num_devices", note="the number of devices is the product of the mesh's axes"),
    Entry("network interconnect net", "fabric"),
    Entry("h100 h100_80gb h100_sxm5 h100_80gb_hbm3 nvidia_h100 nvidia_h100_80gb_hbm3 dgx_h100 hgx_h100 hopper p5",
          "h100_sxm"),
    Entry("a100_40gb a100_sxm4_40gb p4d", "a100_sxm40"),
    Entry("a100 a100_80gb a100_sxm a100_sxm4 a100_sxm4_80gb nvidia_a100 dgx_a100 ampere p4de", "a100_sxm80"),
    Entry("h200_sxm nvidia_h200 dgx_h200 p5en p5e", "h200"),
    Entry("b200_sxm nvidia_b200 dgx_b200 hgx_b200 blackwell p6_b200", "b200"),
    Entry("gpu cuda nvidia", note="name the device, such as `h100_sxm`, or calibrate your own: `legoai calibrate`"),
    Entry("gloo localhost local", "cpu"),
    Entry("infiniband ib ndr ib_ndr ndr400 quantum2 quantum_2 connectx7 cx7", "infiniband_ndr"),
    Entry("hdr ib_hdr hdr200 connectx6 cx6", "infiniband_hdr"),
    Entry("xdr ib_xdr quantum_x800 connectx8 cx8", "infiniband_xdr"),
    Entry("efa aws_efa efav2", "efa_p5"),
    Entry("roce rocev2 roce_v2 rdma", "roce_400"),
    Entry("ethernet eth tcp sockets 100gbe", "ethernet_100"),
    Entry("slingshot cxi hpe_slingshot", "slingshot11"),
    Entry("tcpx tcpxo gpudirect fastrak", "tcpxo_a3_mega"),
    Entry("nvlink nvswitch nvl72", note="links inside a host belong to the device; `fabric` joins hosts"),
    # The batch.
    Entry("training data_config dataloader", "batch", _BATCH),
    Entry("global_batch_size train_batch_size total_batch_size gbs batch_size global_batch", "global batch", _BATCH),
    Entry("micro_batch_size mbs train_micro_batch_size_per_gpu per_device_train_batch_size per_device_batch_size "
          "local_batch_size device_batch_size micro_batch microbatch_size per_gpu_batch_size "
          "pipeline_parallel_microbatch_size", "micro batch", _BATCH),
    Entry("seq_length sequence_length max_length max_seq_length max_seq_len max_context_length context_length seqlen "
          "ctx_len block_size encoder_seq_length decoder_seq_length n_ctx", "seq_len max_seq_len batch", _BATCH),
    Entry("gradient_accumulation_steps gradient_accumulation grad_accum grad_acc grad_accum_steps accumulation "
          "accumulate_grad_batches accumulation_steps",
          note="accumulation follows from the batch: `global` = `micro` · data-parallel degree · accumulation"),
    # Sharded data parallelism.
    Entry("zero zero_optimization zero_stage zero3 zero_3 stage3 stage_3 fully_shard fully_sharded_data_parallel "
          "fullyshardeddataparallel fsdp1 fsdp2 fsdp_config full_shard use_torch_fsdp2 use_megatron_fsdp deepspeed "
          "sharding_strategy data_parallel_sharding_strategy optim_grads_params simple_fsdp",
          "after_forward fsdp unit", _FSDP),
    Entry("zero2 zero_2 stage2 stage_2 shard_grad_op optim_grads torch_fsdp2_no_reshard_after_forward",
          "after_backward fsdp unit", "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }"),
    Entry("stage", "stages", "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }"),
    Entry("zero1 zero_1 stage1 stage_1 use_distributed_optimizer distributed_optimizer zeroredundancyoptimizer "
          "zero_redundancy_optimizer", "never fsdp unit", "fsdp on dp_shard { layers.* = unit(reshard = never) }"),
    Entry("hsdp hybrid_shard hybrid_shard_zero2 _hybrid_shard_zero2 enable_full_sharding_in_hsdp", "fsdp",
          "fsdp on dp_replicate, dp_shard { layers.* = unit }"),
    Entry("reshard_after_forward fsdp_reshard_after_forward zero_hpz_partition_size", "reshard",
          "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }"),
    Entry("always", "after_forward"),
    Entry("auto_wrap_policy wrap_policy transformer_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap wrap "
          "transformer_layer_cls_to_wrap", "unit fsdp", _FSDP),
    Entry("ddp distributed_data_parallel distributeddataparallel no_shard zero0 zero_0 allreduce all_reduce",
          "replicate", EXAMPLES["replicate"]),
    Entry("bucket_cap_mb ddp_bucket_size reduce_bucket_size allgather_bucket_size bucket_size ddp_num_buckets",
          "bucket comm", "comm { layers.* = bucket(module) }"),
    Entry("overlap_comm overlap_grad_reduce overlap_param_gather forward_prefetch backward_prefetch limit_all_gathers "
          "fsdp_forward_prefetch fsdp_backward_prefetch stage3_prefetch_bucket_size backward_pre backward_post overlap",
          "prefetch comm", EXAMPLES["comm"]),
    Entry("communication collectives nccl", "comm", EXAMPLES["comm"]),
    Entry("no_sync requires_gradient_sync set_requires_gradient_sync", "reduce comm",
          "comm (reduce = last_micro_batch)"),
    # Tensor parallelism.
    Entry("tp_plan parallelize_plan parallelize_module layer_plan sharding shardings partition_spec layer_specs",
          "shard", _SHARD),
    Entry("colwiseparallel colwise_parallel column_parallel columnparallel columnparallellinear column_parallel_linear "
          "column col colwise_rep", "colwise", _SHARD),
    Entry("rowwiseparallel rowwise_parallel row_parallel rowparallel rowparallellinear row_parallel_linear row "
          "rowwise_rep", "rowwise", _SHARD),
    Entry("preparemoduleinput prepare_module_input", "inputs"),
    Entry("preparemoduleoutput prepare_module_output", "outputs"),
    Entry("expertparallel grouped_gemm moe_grouped_gemm", "experts"),
    Entry("input_layouts input_layout", "input from"),
    Entry("output_layouts output_layout", "output to"),
    Entry("desired_input_layouts desired_output_layouts", "to"),
    Entry("loss_parallel enable_loss_parallel disable_loss_parallel parallel_output vocab_parallel", "loss_parallel",
          note="the last layer keeps its logits sharded: `output = colwise(loss_parallel = true)` in `shard on tp`, "
          "or `shard standard on tp (loss_parallel)`"),
    Entry("tp_linear_async_communication async_tensor_model_parallel_allreduce tp_recompute_allgather", "overlap",
          "shard standard on tp (sequence, overlap)"),
    Entry("replicated duplicate", "replicate"),
    # Pipelines.
    Entry("pipeline_parallel_schedule pipeline_schedule pp_schedule schedule_class", "schedule pipeline",
          "pipeline on pp (schedule = 1F1B)"),
    Entry("one_f_one_b onefoneb pipedream pipedream_flush", "1F1B"),
    Entry("interleaved interleaved_1f1b virtual_pipeline vpp looping", "Interleaved1F1B"),
    Entry("zero_bubble zerobubble zb zbv zb_v zb_vpp zbv_zero_bubble", "ZBVZeroBubble InterleavedZeroBubble"),
    Entry("zb_h1 interleaved_zero_bubble", "InterleavedZeroBubble"),
    Entry("dualpipe dual_pipe dualpipe_v", "DualPipeV"),
    Entry("bfs looped looped_bfs breadth_first", "LoopedBFS"),
    Entry("num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size stages_per_rank "
          "num_virtual_stages_per_pipeline_rank pipeline_parallel_layers_per_stage virtual_stages", "pipeline",
          EXAMPLES["pipeline"]),
    Entry("num_stages", "stages pipeline", EXAMPLES["pipeline"]),
    Entry("pipeline_parallel_split_points split_points split_spec module_fqns_per_model_part "
          "pipeline_model_parallel_layout stage_layout partition_method", "split pipeline",
          "pipeline on pp (split = [layers.8, layers.16, layers.24])"),
    Entry("num_microbatches num_micro_batches n_microbatches num_pp_microbatches chunks", "microbatches micro",
          "pipeline on pp (schedule = 1F1B, microbatches = 8)"),
    Entry("pipeline_parallel_schedule_csv", "csv"),
    # Context parallelism.
    Entry("ulysses ulysses_degree", "rotate context", "context on cp (rotate = heads)"),
    Entry("context_parallel_rotate_method rotate_method cp_comm_type set_rotate_method", "rotate context",
          "context on cp (rotate = allgather)"),
    Entry("context_parallel_load_balancer load_balancer load_balance", "balance context",
          "context on cp (balance = head_tail)"),
    Entry("headtail zigzag zig_zag striped", "head_tail"),
    Entry("all_gather all_gather_into_tensor", "allgather"),
    Entry("all_to_all a2a all2all", "alltoall"),
    # Activation checkpointing.
    Entry("recompute recompute_activations recompute_granularity recompute_method recompute_num_layers remat "
          "activation_checkpointing activation_checkpoint gradient_checkpointing gradient_checkpointing_enable ac "
          "rematerialization checkpoint_activations activation_recomputation number_checkpoints checkpointing "
          "partition_activations checkpoint_wrapper", "checkpoint full", _FULL),
    Entry("selective_ac selective_ac_option sac recompute_modules per_op_sac_force_recompute_mm_shapes",
          "selective checkpoint", "checkpoint { layers.* = selective([attention, matmul]) }"),
    Entry("memory_budget activation_memory_budget", "budget checkpoint",
          "checkpoint { layers.* = budget(50%) }"),
    Entry("uniform block", "full every"),
    Entry("preserve_rng_state", "preserve_rng"),
    # Precision.
    Entry("mixed_precision mixed_precision_policy mp_policy amp autocast torch_autocast dtype torch_dtype "
          "half_precision_backend", "param precision", _DTYPES),
    Entry("bfloat16 bf16", "bf16 param precision", _DTYPES),
    Entry("float16 half fp16", "fp16 param precision",
          note="small gradients become zero in `fp16`, and nothing scales the loss: train in `bf16`"),
    Entry("float32 float single fp32 tf32", "fp32 param precision", "precision (param = fp32)"),
    Entry("float64 double fp64", "fp64 param precision", "precision (master = fp64, param = fp64, reduce = fp64)"),
    Entry("mixed_precision_param param_dtype params_dtype compute_dtype", "param precision", _DTYPES),
    Entry("mixed_precision_reduce reduce_dtype grad_reduce_in_bf16 communication_data_type grad_reduce_dtype "
          "accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32", "reduce precision", _DTYPES),
    Entry("master_dtype master_weights main_params_dtype storage_dtype", "master precision",
          "precision (master = fp32)"),
    Entry("main_grads_dtype grad_dtype gradient_accumulation_dtype", "gradient precision",
          "precision (gradient = fp32)"),
    Entry("output_dtype cast_output", "output precision", "precision (output = bf16)"),
    Entry("float8 fp8 fp8_format enable_fp8 transformer_engine te float8linear e4m3 quantize quantization "
          "convert_to_float8_training torchao", "float8 precision", _FLOAT8),
    Entry("mx mxfp8 mxlinear mx_formats", "mxfp8 precision",
          "precision { layers.*.feed_forward.{w1, w2, w3} = float8 }"),
    Entry("fp8_recipe recipe_name fp8_scaling", "recipe"),
    Entry("loss_scale loss_scaling initial_scale_power initial_loss_scale gradscaler grad_scaler",
          note="nothing scales the loss: train in `bf16`"),
    # Offloading.
    Entry("cpu_offload offload_optimizer optimizer_cpu_offload zero_offload", "offload optimizer",
          EXAMPLES["offload"]),
    Entry("offload_param offload_params cpuoffloadpolicy param_offload enable_cpu_offload", "parameters offload",
          "offload (parameters = all)"),
    Entry("offload_activations activation_offload cpu_checkpointing activation_offloading", "activations offload",
          "offload (activations = all)"),
    Entry("cpu host pinned", "all"),
    Entry("pytorch_alloc_conf pytorch_cuda_alloc_conf alloc_conf allocator_settings caching_allocator expandable",
          "allocator expandable_segments", EXAMPLES["allocator"]),
    # Attention and loss.
    Entry("flash_attention flash_attn flash_attention_2 flash_attention_3 fa2 fa3 use_flash_attn", "flash attention",
          EXAMPLES["attention"]),
    Entry("attn_implementation attention_backend attn attn_type use_sdpa sdpa scaled_dot_product_attention",
          "default attention", EXAMPLES["attention"]),
    Entry("flex_attention use_flex_attn flexattention", "flex"),
    Entry("memory_efficient mem_efficient efficient_attention xformers", "efficient"),
    Entry("cudnn_attention", "cudnn"),
    Entry("naive unfused", "math eager"),
    Entry("cross_entropy cross_entropy_loss cross_entropy_loss_fusion fused_cross_entropy liger use_liger_kernel "
          "criterion loss_fn", "fused loss", EXAMPLES["loss"]),
    Entry("chunked_cross_entropy chunked_ce num_chunks num_output_chunks", "chunked loss", "loss chunked(8)"),
    Entry("chunked_loss chunkedlosswrapper fused_linear_cross_entropy linear_cross_entropy cut_cross_entropy",
          "last_layer chunked", "loss chunked(8, last_layer = true)"),
    # Compilation.
    Entry("torch_compile torchcompile compile_enable enable_compile dynamo torchdynamo torch_compile_backend jit",
          "inductor compile", EXAMPLES["compile"]),
    Entry("torch_compile_mode compile_mode", "mode"),
    Entry("cuda_graph cuda_graphs cudagraphs enable_cuda_graph", "reduce_overhead"),
    Entry("enable_async_tensor_parallel async_tensor_parallel tp_comm_overlap tp_overlap_comm micro_pipeline_tp",
          "async_tp", "compile (async_tp = true) { layers.* = inductor }"),
    # The optimizer.
    Entry("optim optimizer_config", "optimizer", _ADAMW),
    Entry("adam_w adamw_torch adamw_torch_fused adamw_hf fused_adam fusedadam adamw_apex_fused adamw adam",
          "adamw optimizer",
          _ADAMW),
    Entry("learning_rate base_lr max_lr peak_lr lr", "lr optimizer", _ADAMW),
    Entry("adam_beta1 adam_beta2 beta1 beta2 adam_betas", "betas", _ADAMW),
    Entry("adam_epsilon adam_eps epsilon", "eps"),
    Entry("wd l2 decay weight_decay", "weight_decay optimizer", _ADAMW),
    Entry("sgd_momentum", "momentum"),
    Entry("max_norm max_grad_norm clip_grad clip_grad_norm clip_grad_norm_ gradient_clipping gradient_clip grad_clip "
          "gradient_clip_val grad_norm_clip clipping", "clip norm", EXAMPLES["clip"]),
    Entry("lr_scheduler scheduler lr_scheduler_type lr_schedule lr_decay_style learning_rate_schedule", "schedule",
          _COSINE),
    Entry("warmup_steps lr_warmup_iters lr_warmup_steps warmup_num_steps warmup_iters num_warmup_steps warm_up warmup "
          "lr_warmup_fraction warmup_ratio", "warmup schedule", _COSINE),
    Entry("lr_decay_iters lr_decay_steps decay_steps total_num_steps decay_ratio", "steps schedule", _COSINE),
    Entry("min_lr min_lr_factor lr_min eta_min min_lr_ratio warmup_min_lr", "floor schedule", _COSINE),
    Entry("cosineannealinglr cosine_annealing cosine_decay warmupcosinelr cosine_with_min_lr", "cosine schedule",
          _COSINE),
    Entry("linear_decay warmupdecaylr polynomial", "linear schedule", "schedule linear(steps = 10000, warmup = 1000)"),
    Entry("warmup_stable_decay", "wsd schedule", "schedule wsd(steps = 10000, decay = 1000, warmup = 1000)"),
    Entry("constant_with_warmup warmuplr", "constant schedule", "schedule constant(warmup = 1000)"),
    # Runs.
    Entry("train_iters max_steps training_steps num_steps total_steps", "steps", EXAMPLES["steps"]),
    Entry("num_train_epochs epochs", "steps", EXAMPLES["steps"]),
    Entry("save_interval save_steps interval checkpoint_interval ckpt_interval enable_checkpoint save_strategy "
          "save_every",
          "save every", EXAMPLES["save"]),
    Entry("keep_latest_k save_total_limit", "keep save", EXAMPLES["save"]),
    Entry("async_mode async_save async_checkpoint async_checkpointing", "asynchronous save",
          "save (every = 100, asynchronous = true)"),
    Entry("output_dir dump_folder", note=_TRAINER),
    Entry("dataset data_path dataset_path train_data train_data_path mock_data", "data source",
          'data (source = "texts.jsonl")'),
    Entry("tokenizer_path tokenizer_model hf_assets_path tokenizer_name vocab_file", "tokenizer data",
          'data (source = "texts.jsonl", tokenizer = "tokenizer.json")'),
    Entry("initial_load_path init_from pretrained pretrained_model pretrained_checkpoint load_from weights_path",
          "weights", EXAMPLES["weights"]),
    Entry("eval validation eval_interval eval_steps eval_iters do_eval", "evaluate every",
          "evaluate (every = 100)"),
    Entry("random_seed manual_seed", "seed", EXAMPLES["seed"]),
    # Models, and their dimensions.
    Entry("architecture network_config model_config model_name model_name_or_path flavor", "model",
          EXAMPLES["model"]),
    Entry("llama llama_3 llama3_1 llama3_2 llama3_3 meta_llama llamaforcausallm", "llama3", EXAMPLES["model"]),
    Entry("gpt2lmheadmodel gpt_2 gpt nanogpt", "gpt2", 'model gpt2("xl")'),
    Entry("gpt_3 gpt3_model", "gpt3", 'model gpt3("13b")'),
    Entry("mixtralforcausallm mixtral_8x7b moe mixture_of_experts", "mixtral", 'model mixtral("8x7b")'),
    Entry("deepseek_v3 deepseek_v2 deepseekv3 deepseekv2 deepseekv3forcausallm deepseekv2forcausallm mla", "deepseek",
          'model deepseek("v2_lite")'),
    Entry("vision_transformer visiontransformer vit_b_16", "vit", 'model vit("b16")'),
    Entry("hf transformers hub automodel automodelforcausallm from_pretrained autoconfig qwen qwen2 qwen3 gemma phi "
          "mistral olmo bert t5 falcon",
          "huggingface", note="`huggingface(\"config.json\")` builds a model of transformers from its config file"),
    Entry("factory callable custom nn_module", "python"),
    Entry("num_hidden_layers num_layers n_layer n_blocks num_blocks depth layers", "n_layers"),
    Entry("hidden_size d_model n_embd embed_dim embedding_dim model_dim", "dim"),
    Entry("num_attention_heads n_head num_heads heads", "n_heads"),
    Entry("num_key_value_heads num_query_groups n_kv_head num_kv_heads kv_heads", "n_kv_heads"),
    Entry("intermediate_size ffn_hidden_size ffn_dim n_inner d_ff mlp_dim feed_forward_dim moe_intermediate_size "
          "moe_ffn_hidden_size", "hidden_dim"),
    Entry("qk_nope_head_dim qk_head_dim", "nope_head_dim"),
    Entry("qk_rope_head_dim qk_pos_emb_head_dim", "rope_head_dim"),
    Entry("num_shared_experts moe_shared_experts", "n_shared_experts"),
    Entry("first_k_dense_replace first_dense num_dense_layers", "n_dense_layers"),
    Entry("n_group num_expert_groups", "n_groups"), Entry("topk_group num_limited_groups", "top_groups"),
    Entry("routed_scaling_factor route_scale", "routed_scaling"), Entry("scoring_func score_func", "scores"),
    Entry("padded_vocab_size n_vocab vocabulary_size num_embeddings", "vocab_size"),
    Entry("max_position_embeddings n_positions max_sequence_length", "max_seq_len"),
    Entry("rms_norm_eps layer_norm_epsilon layernorm_epsilon layer_norm_eps norm_epsilon", "norm_eps"),
    Entry("rotary_base rope_base theta", "rope_theta"),
    Entry("rope_scaling_factor", "rope_scaling"),
    Entry("tie_word_embeddings weight_tying tied_embeddings share_embeddings_and_output_weights", "tie_embeddings"),
    Entry("num_experts num_local_experts n_routed_experts", "n_experts"),
    Entry("num_experts_per_tok moe_router_topk topk moe_top_k experts_per_token", "top_k"),
    # Figures.
    Entry("memory max_memory gpu_memory max_memory_allocated max_active_gib peak_memory_gib hbm vram", "peak_memory",
          EXAMPLES["require"]),
    Entry("max_memory_reserved max_reserved_gib reserved", "reserved_memory", "require reserved_memory <= 76GiB"),
    Entry("iteration_time time_per_step elapsed_time_per_iteration step_seconds latency time", "step_time",
          "require step_time <= 10s"),
    Entry("throughput tps tokens_per_second tokens_per_sec tokens_per_second_per_gpu tokens_per_gpu_per_second wps",
          "tokens_per_s", "require tokens_per_s >= 100"),
    Entry("communication_time comm_time exposed_communication exposed_comm_time", "exposed_comm",
          "require exposed_comm <= 50%"),
    Entry("bubble_ratio bubble_fraction pipeline_bubble", "bubble", "require bubble <= 50%"),
    Entry("tflops flops mfu_percent model_flops_utilization hfu utilization", "mfu", "require mfu >= 10%"),
    Entry("budget constraint limit assert", "require", EXAMPLES["require"]),
    Entry("optimize objective", "minimize", EXAMPLES["minimize"]),
    Entry("include inherit defaults_from base_plan", "extends",
          note='another plan is built on: `extends "base.plan"`'),
    Entry("var variable define set const param", "let", EXAMPLES["let"]),
    Entry("profile override preset experiment", "variant",
          "variant small { batch (global = 32, micro = 1, seq_len = 8192) }"),
)  # fmt: skip
"""Every entry. A word may be in several; the first whose own word is legal is used."""

TORCHTITAN: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("model", ("flavor",)),
    ("training", ("local_batch_size", "global_batch_size", "seq_len")),
    ("training", ("steps",)),
    ("training", ("dataset", "dataset_path")),
    ("model", ("hf_assets_path",)),
    ("training", ("max_norm",)),
    ("training", ("mixed_precision_param", "mixed_precision_reduce")),
    ("training", ("enable_cpu_offload",)),
    ("parallelism", ("data_parallel_replicate_degree",)),
    ("parallelism", ("data_parallel_shard_degree",)),
    ("parallelism", ("fsdp_reshard_after_forward",)),
    ("parallelism", ("tensor_parallel_degree",)),
    ("parallelism", ("disable_loss_parallel",)),
    ("parallelism", ("enable_async_tensor_parallel",)),
    ("parallelism", ("pipeline_parallel_degree",)),
    ("parallelism", ("pipeline_parallel_schedule",)),
    ("parallelism", ("pipeline_parallel_layers_per_stage",)),
    ("parallelism", ("module_fqns_per_model_part",)),
    ("parallelism", ("context_parallel_degree",)),
    ("parallelism", ("context_parallel_rotate_method",)),
    ("parallelism", ("expert_parallel_degree",)),
    ("activation_checkpoint", ("mode",)),
    ("activation_checkpoint", ("selective_ac_option",)),
    ("activation_checkpoint", ("memory_budget",)),
    ("compile", ("enable",)),
    ("optimizer", ("lr", "beta1", "beta2", "weight_decay")),
    ("lr_scheduler", ("warmup_steps", "decay_ratio", "min_lr_factor")),
    ("checkpoint", ("interval", "keep_latest_k")),
    ("checkpoint", ("async_mode",)),
    ("checkpoint", ("initial_load_path",)),
    ("validation", ("enable",)),
    ("quantize.linear", ("float8",)),
)
"""Sections and options of TorchTitan's configuration, grouped by statement.

An option is looked up in the table by its own word or, where that is ambiguous, by its section and word.
"""


def _normal(word: str) -> str:
    return word.lower().lstrip("-").replace("-", "_")


@cache
def _index() -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in TABLE:
        for word in entry.words.split():
            found.setdefault(word, []).append(entry)
    return found


def entries(word: str) -> list[Entry]:
    """Return the entries for ``word``: as it is, or by its last part (``torch.bfloat16``)."""
    normal = _normal(word)
    return _index().get(normal, []) or _index().get(normal.rpartition(".")[2], [])


def our_word(word: str, choices: Sequence[str]) -> str | None:
    """Return the one of ``choices`` that is the equivalent of ``word``."""
    return next((ours for entry in entries(word) for ours in entry.ours.split() if ours in choices), None)


def our_form(word: str) -> str | None:
    """Return a sentence on the equivalent of ``word`` in plans."""
    for entry in entries(word):
        if entry.form:
            return f"`{word}` of other tools is written `{entry.form}`"
        if entry.note:
            return entry.note
    return None


def torchtitan() -> Iterator[tuple[str, str]]:
    """Yield options of TorchTitan's configuration, as it writes them, with the equivalent statement, or a sentence."""
    for section, options in TORCHTITAN:
        names = ", ".join(f"`{section}.{options[0]}`" if item == options[0] else f"`{item}`" for item in options)
        for word in (options[0], f"{section}_{options[0]}", section):
            found = next((entry for entry in _index().get(word, ()) if entry.form or entry.note), None)
            if found is not None:
                yield names, f"`{found.form}`" if found.form else found.note
                break


def our_number(text: str, unit: str) -> list[str]:
    """Return the replacement of a number with a unit of other tools, such as ``8k`` or ``8b``."""
    power = {"k": 1, "m": 2, "g": 3}.get(unit.lower())
    if unit == "b" or re.fullmatch(r"[xX]\d+[bB]", unit):
        return [f'a preset stands in quotes: `"{text}{unit.lower()}"`']
    if power is None or not re.fullmatch(r"\d+(\.\d+)?", text):
        return []
    binary, decimal = float(text) * 1024**power, float(text) * 1000**power
    return [f"a number is written out: `{binary:.0f}`, or `{decimal:.0f}`"]
