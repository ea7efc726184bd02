"""Plans for runs of TorchTitan: Llama with FSDP2.

Read for this: `torchtitan/parallelisms/parallelize_llama.py` and `pipelining_utils.py` of December 2024 (the commit
that the published tables name), and `docs/fsdp.md`.

- Units are the blocks and the model; the last block keeps its parameters between forward and backward, and under a
  pipeline every block does, since it would be gathered again for each micro batch.
- Parameters are stored in fp32, computed with in bf16 and reduced in fp32; gradients are clipped to a norm of 1.
- Selective checkpointing by operator keeps attention, reduce-scatter and every second matrix product.
- Compilation is of each block. The loss is computed eagerly, in fp32 on all logits, and on sharded logits under
  tensor parallelism.
- A pipeline has as many micro batches as ranks, unless a run says otherwise: `n_microbatches` is by default
  `pipeline_parallel_degree`, also where each rank has several stages.
- Float8 applies to all linear layers but the output layer. Tensor parallelism casts before it gathers, wherever there
  is float8. That FSDP does so too is an option, which is off by default, and in the commands of `benchmarks/` of June
  2025 for 8B and 70B, and on in `llama3_405b.toml` (`enable_fsdp_float8_all_gather`, with scales computed ahead).
- Norms run step by step, rotations in fp32 and complex, and keys and values are repeated for the queries that share
  them (`torchtitan/models/norms.py`, `llama/model.py` of 2024): a factory states that model. Inductor makes one kernel
  of a norm, and compiles no complex numbers.
- Runs up to June 2024 held two things more, counted beside the plan: the logits in fp32 until the end of
  the backward pass (freed before it since pytorch/torchtitan#391), and in segments of another stream the
  model's own gradients on their way into the reduce-scatter (since pytorch/pytorch#129721 on the default stream).
"""

from __future__ import annotations

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources.common import batch_of, cluster_of, llama_of
from benchmarks.validation.statements import TENSOR_PARALLEL_LLAMA, Draft, Stated, mesh, name_of

FLOAT8 = """precision (param = bf16, reduce = fp32) {{
  layers.*.attention.{{wq, wk, wv, wo}} = float8({how})
  layers.*.feed_forward.{{w1, w2, w3}}  = float8({how})
}}"""
STEPWISE = "benchmarks.validation.models:torchtitan_llama"
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
    theta = 500_000.0 if "3" in row.text("model").split("-")[1] else 10_000.0
    model = llama_of(row, seq_len=seq_len, theta=theta)
    if pp == 1:
        model = model.replace('llama3("8b"', f'python("{STEPWISE}", preset = "8b"')
    draft.add(
        model,
        cluster_of(row, device, fabric=fabric),
        batch_of(row, micro=micro),
    )
    draft.add(mesh(**{axis: row.whole(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}))
    if row.whole("tp", 1) > 1:
        draft.add(TENSOR_PARALLEL_LLAMA)
    draft.add(_fsdp(row))
    if pp > 1:
        draft.add(f"pipeline on pp (schedule = {schedule or '1F1B'}, stages = {stages})")
    if row.whole("cp", 1) > 1:
        draft.add("context on cp (rotate = allgather, balance = head_tail)")
    draft.add(*_memory_and_compute(row, draft, notes))
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


def _gathered(row: Row) -> str:
    """What is gathered in float8, as arguments of `float8`."""
    what = ["weights"] * ("405B" in row.text("model")) + ["activations"] * (row.whole("tp", 1) > 1)
    return f"gather = [{', '.join(what)}]" if what else "tensorwise"


def _fsdp(row: Row) -> str:
    axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if row.whole(axis, 1) > 1]
    last = row.whole("n_layers") - 1
    if not axes:
        raise UnstatedError("one rank holds all parameters, which FSDP does not shard")
    if row.whole("pp", 1) > 1:
        units = "  layers.* = unit(reshard = after_backward)"
    else:
        units = f"  layers.* = unit\n  layers.{last} = unit(reshard = after_backward)"
    return f"fsdp on {', '.join(axes)} {{\n{units}\n  root = unit\n}}"


def _memory_and_compute(row: Row, draft: Draft, notes: str) -> list[str]:
    mode, precision, compiled = row.text("ac_mode"), row.text("precision"), row.text("compile")
    if mode not in CHECKPOINT:
        raise UnstatedError(f"checkpointing is {mode or 'not stated'}")
    lines = [CHECKPOINT[mode]] if CHECKPOINT[mode] else []
    if mode == "selective_op" and row.whole("tp", 1) > 1:
        lines = ["checkpoint { layers.* = selective([attention, alternate_matmul, collective]) }"]
    float8 = "float8" in precision.lower()
    lines += ["attention flash", "loss eager"]
    if float8:
        lines.append(FLOAT8.format(how=_gathered(row)))
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
    fused = "fused=True" in notes
    lines.append(f"optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1, fused = {str(fused).lower()})")
    return [*lines, "clip (norm = 1.0)"]
