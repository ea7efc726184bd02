"""Plans for runs of TorchTitan: Llama and Qwen3 with FSDP2.

Read for this: `torchtitan/parallelisms/parallelize_llama.py` and `pipelining_utils.py` of December 2024 (the commit
that the published tables name), and `docs/fsdp.md`.

- Units are the blocks and the model; the last block keeps its parameters between forward and backward, and under a
  pipeline every block does, since it would be gathered again for each micro batch. Of Qwen3 in September 2025 the
  embedding is a unit too, and so are the last norm and the output layer, which keep theirs; under tensor parallelism
  it gathers queries and keys for their norms, which a plan computes on each rank's heads (its `parallelize.py`).
- Parameters are stored in fp32, computed with in bf16 and reduced in fp32; gradients are clipped to a norm of 1.
- Selective checkpointing by operator keeps attention, reduce-scatter and every second matrix product, and nothing that
  is gathered.
- Compilation is of each block. The loss is computed in fp32 on all logits, and on sharded logits under tensor
  parallelism; it is compiled too from 22 October to 18 December 2024 (commits e10cb9494 and e8977b007), and again since
  2 April 2025 (bbb1b616e).
- The optimizer is fused by default since 24 February 2025 (6e4988550).
- A pipeline has as many micro batches as ranks, unless a run says otherwise: `n_microbatches` is by default
  `pipeline_parallel_degree`, also where each rank has several stages.
- Float8 applies to all linear layers but the output layer. Tensor parallelism casts before it gathers, wherever scales
  are of tensors; with scales of rows it gathers in bf16. That FSDP casts first is an option, off by default, and on in
  `llama3_405b.toml` (`enable_fsdp_float8_all_gather`, with scales computed ahead) and in commands that say so.
- Norms run step by step, rotations in fp32 and complex, and keys and values are repeated for the queries that share
  them (`torchtitan/models/norms.py`, `llama/model.py` of 2024): a factory states that model. Inductor makes one kernel
  of a norm, and compiles no complex numbers.
- The allocator grows its segments since pytorch/torchtitan#643 of 22 October 2024, with which `run_llama_train.sh`
  (`run_train.sh` since 2025) sets `expandable_segments:True`. Which launcher a run used is published for few:
  `multinode_trainer.slurm` does not set it. Plans of later runs assume the script, those of runs without a date do not.
- Runs up to June 2024 held two things more, counted beside the plan: the logits in fp32 until the end of
  the backward pass (freed before it since pytorch/torchtitan#391), and in segments of another stream the
  model's own gradients on their way into the reduce-scatter (since pytorch/pytorch#129721 on the default stream).
"""

from __future__ import annotations

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources.common import batch_of, cluster_of, llama_of
from benchmarks.validation.statements import TENSOR_PARALLEL_LLAMA, Draft, Stated, mesh, name_of

REDUCE_SCATTER = '"_c10d_functional.reduce_scatter_tensor.default"'
FLOAT8 = """precision (param = bf16, reduce = fp32) {{
  layers.*.attention.{{wq, wk, wv, wo}} = float8({how})
  layers.*.feed_forward.{{w1, w2, w3}}  = float8({how})
}}"""
STEPWISE = "benchmarks.validation.models:torchtitan_llama"
EXPANDABLE = "allocator (expandable_segments = true)"
EXPANDABLE_SINCE = "2024-11"
"""The first month that lies wholly after the commit: of no run of October 2024 is the day known."""
FUSED_OPTIMIZER_SINCE = "2025-03"
CHECKPOINT = {
    "full": "checkpoint { layers.* = full }",
    "selective_op": "checkpoint { layers.* = selective([attention, alternate_matmul]) }",
    "selective_layer": "checkpoint { layers.* = every(2) }",
    "none": "",
}


def convert(row: Row, device: str | None = None) -> Stated:
    """State a run of TorchTitan.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    draft = Draft(name_of(row.id), f"{row.text('model')}, {row.text('source')}")
    seq_len, pp, notes = row.whole("seq_len"), row.whole("pp", 1), row.text("notes")
    fabric = "infiniband_ndr" if row.text("interconnect") == "InfiniBand" else "roce_400"
    if row.whole("n_gpus") > row.whole("gpus_per_node", 8) and not row.text("interconnect"):
        fabric = "infiniband_hdr" if "A100" in row.text("gpu") else fabric
        draft.assumed.append("the network between hosts")
    schedule, stages = row.text("pp_schedule").replace(" ", ""), pp
    if pp > 1 and schedule.startswith("Interleaved"):
        stages = 2 * pp
    micro = row.whole("micro_batch")
    if pp > 1:
        if micro % pp:
            raise UnstatedError(f"a local batch of {micro} does not split into {pp} micro batches")
        micro //= pp
        draft.assumed.append("as many micro batches as pipeline ranks, TorchTitan's default")
    is_qwen = row.text("model").startswith("Qwen3")
    draft.assumed += [words for words in row.text("assumed").split("; ") if words]
    draft.add(
        _qwen_of(row) if is_qwen else _llama_of(row, pp=pp),
        cluster_of(row, device, fabric=fabric),
        batch_of(row, micro=micro),
    )
    draft.add(mesh(**{axis: row.whole(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}))
    if row.whole("tp", 1) > 1:
        draft.add("shard standard on tp (sequence, loss_parallel)" if is_qwen else TENSOR_PARALLEL_LLAMA)
    draft.add(_fsdp(row, apart=is_qwen))
    if pp > 1:
        draft.add(f"pipeline on pp (schedule = {schedule or '1F1B'}, stages = {stages})")
    if row.whole("cp", 1) > 1:
        draft.add("context on cp (rotate = allgather, balance = head_tail)")
    draft.add(*_memory_and_compute(row, draft, notes))
    if row.text("date") >= EXPANDABLE_SINCE and "launched by torchrun" not in notes:
        draft.add(EXPANDABLE)
        draft.assumed.append(
            "expandable segments, which TorchTitan's script of that date sets, whatever launched the run"
        )
    if is_qwen:
        draft.differs.append("keys and values that are repeated")
        if row.whole("tp", 1) > 1:
            draft.differs.append("queries and keys that are gathered for their norms")
    if "FSDP1" in notes:
        draft.differs.append(
            "FSDP1 keeps flat parameters, and its all-gathers wait for memory on another stream than FSDP2's"
        )
    if row.text("date", "2025") > "2024-06":
        return draft.done()
    tokens = micro * seq_len / row.whole("cp", 1)
    return draft.done(
        beside={"logits in fp32": 4.0 * tokens * row.whole("vocab") / row.whole("tp", 1)},
        beside_reserved={
            "gradients of the model's own unit": 4.0 * 2 * row.whole("vocab") * row.whole("hidden") / row.whole("tp", 1)
        },
    )


def _compiles_loss(row: Row) -> bool:
    """Whether TorchTitan of the row's month compiles the loss with the model."""
    return row.text("date") == "2024-11" or row.text("date") >= "2025-04"


def _gathered(row: Row) -> str:
    """Scales and what is gathered in float8, as arguments of `float8`."""
    if "rowwise" in row.text("precision"):
        return "rowwise"
    weights = "405B" in row.text("model") or "FSDP gathers in float8" in row.text("notes")
    what = ["weights"] * weights + ["activations"] * (row.whole("tp", 1) > 1)
    return f"gather = [{', '.join(what)}]" if what else "tensorwise"


def _llama_of(row: Row, *, pp: int) -> str:
    theta = 500_000.0 if "3" in row.text("model").split("-")[1] else 10_000.0
    model = llama_of(row, seq_len=row.whole("seq_len"), theta=theta)
    return model if pp > 1 else model.replace('llama3("8b"', f'python("{STEPWISE}", preset = "8b"')


def _qwen_of(row: Row) -> str:
    return llama_of(row, seq_len=row.whole("seq_len"), theta=1e6, head_dim=row.whole("head_dim"), qk_norm=True)


def _fsdp(row: Row, *, apart: bool) -> str:
    """Units of blocks and of the model; with ``apart`` of the embedding too, and of the layers behind the blocks."""
    axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if row.whole(axis, 1) > 1]
    last = row.whole("n_layers") - 1
    if not axes:
        raise UnstatedError("one rank holds all parameters, which FSDP does not shard")
    if row.whole("pp", 1) > 1:
        units = "  layers.* = unit(reshard = after_backward)"
    elif apart:
        units = "  tok_embeddings = unit\n  layers.* = unit\n  {norm, output} = unit(reshard = after_backward)"
    else:
        units = f"  layers.* = unit\n  layers.{last} = unit(reshard = after_backward)"
    root = "" if apart else "  root = unit\n"
    return f"fsdp on {', '.join(axes)} {{\n{units}\n{root}}}"


def _memory_and_compute(row: Row, draft: Draft, notes: str) -> list[str]:
    mode, precision, compiled = row.text("ac_mode"), row.text("precision"), row.text("compile")
    if mode not in CHECKPOINT:
        raise UnstatedError(f"checkpointing is {mode or 'not stated'}")
    lines = [CHECKPOINT[mode]] if CHECKPOINT[mode] else []
    if mode == "selective_op" and row.whole("tp", 1) > 1:
        lines = [f"checkpoint {{ layers.* = selective([attention, alternate_matmul, {REDUCE_SCATTER}]) }}"]
    float8 = "float8" in precision.lower()
    lines += ["attention flash", f"loss {'fused' if compiled == '1' and _compiles_loss(row) else 'eager'}"]
    if float8:
        lines.append(FLOAT8.format(how=_gathered(row)))
        if "FSDP gathers in" not in notes:
            draft.assumed.append("what FSDP gathers in float8, by TorchTitan's config of the model")
        if "delayed" in precision:
            draft.differs.append("delayed scaling: scales from the steps before, not from this one")
    else:
        lines.append("precision (param = bf16, reduce = fp32)")
    if compiled == "1" or (not compiled and float8):
        option = "(async_tp = true) " if "AsyncTP" in notes else ""
        lines.append(f"compile {option}{{ layers.* = inductor }}")
    if not compiled:
        draft.assumed.append("compiled, as float8 is slower without" if float8 else "not compiled")
    fused = "fused=True" in notes or row.text("date") >= FUSED_OPTIMIZER_SINCE
    lines.append(f"optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1, fused = {str(fused).lower()})")
    return [*lines, "clip (norm = 1.0)"]
