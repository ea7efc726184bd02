"""Plans for runs of nanotron: Llama in the sweep of the Ultra-Scale Playbook.

Read for this: `nanotron/models/base.py` (which blocks a pipeline rank gets), `optim/gradient_accumulator.py`,
`optim/zero.py`, `parallel/tensor_parallel/functional.py`, `trainer.py` and the sweep's `scaling_benchmarks.py`.

- Parameters are kept whole in bf16. Gradients of all micro batches add up in one fp32 buffer for all parameters; the
  fp32 copies of the parameters and Adam's two moments lie on all ranks (ZeRO-0) or in shards (ZeRO-1).
  A plan states that by units that are never resharded and gradients that are reduced once: 2 + 4 + 12 / n bytes;
  ZeRO-0's are units over one rank, replicated.
  - The model is a `DistributedDataParallel`, whose reducer holds buckets for all gradients, in bf16, from the start: 2
  bytes for each parameter that no plan can state; they are counted beside the plan.
  - Tensor parallelism is sequence parallel. Column-wise layers save their sharded input; in backward they gather it
  again while they compute its gradient, and reduce that while they compute their weight's (`overlap = backward`).
  Forward computes the product of a layer's own piece while it gathers the others, and so does the backward of row-wise
  layers, which no plan can state. The plan for memory has a checkpoint around each layer instead, which also saves the
  product of the layer.
- Pipeline ranks get blocks in turn until their cost passes an even share of the whole; the output layer costs what its
  multiplications do, so that the first ranks hold more blocks than the last. Tied embeddings on two ranks are two
  parameters whose gradients are added.
- Cross entropy is not fused: logits in fp32 and a softmax of the same size.
"""

from __future__ import annotations

from itertools import accumulate

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources.common import batch_of, cluster_of, llama_of
from benchmarks.validation.statements import (
    FUSED_KERNELS,
    OWN_PYTHON,
    TENSOR_PARALLEL_LLAMA,
    TENSOR_PARALLEL_LLAMA_LOCAL,
    Draft,
    Stated,
    keeping_sharded_inputs,
    kept_units,
    mesh,
    name_of,
    one_forward_one_backward,
    overlapping,
    reshard_policy,
    sending_norm,
    whole_parameters,
)


def convert(row: Row, device: str | None = None) -> Stated:
    """State a run of the sweep.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    draft = Draft(name_of(row.id), f"{row.text('model')}, {row.text('framework')}")
    pp, tp, dp = row.whole("pp", 1), row.whole("tp", 1), row.whole("dp_replicate", 1)
    tied = "untied" not in row.text("arch")
    sharded = row.whole("zero_stage", 0) == 1
    points = stage_starts(row) if pp > 1 else ()
    micro_batches = row.whole("global_batch") // (row.whole("micro_batch") * dp)
    draft.add(
        llama_of(row, seq_len=row.whole("seq_len"), tied=tied and pp == 1),
        cluster_of(row, device, fabric="efa_p5"),
        batch_of(row),
        mesh(pp=pp, **{"dp_shard" if sharded else "dp_replicate": dp}, tp=tp),
    )
    if tp > 1:
        styles = overlapping(TENSOR_PARALLEL_LLAMA if tied and pp == 1 else TENSOR_PARALLEL_LLAMA_LOCAL)
        draft.add(sending_norm(styles) if points[-1:] == ("output",) else styles)
    draft.add(*_data_parallel(dp, pp, sharded=sharded, accumulates=micro_batches > 1, tied=tied and pp == 1))
    if pp > 1:
        schedule = one_forward_one_backward(micro_batches, pp)
        draft.add(f"pipeline on pp (schedule = {schedule}, stages = {pp}, split = [{', '.join(points)}])")
        if points[-1] in ("norm", "output"):
            draft.differs.append("the output layer may be on the rank before the last, which has the loss alone")
    if tp > 1:
        draft.assumed.append("sequence parallel, and inputs of column-wise layers gathered again (nanotron's defaults)")
        draft.differs.append("products of a rank's own piece while the others are gathered")
    draft.add("attention flash", "loss eager", "precision (param = bf16, reduce = fp32)")
    draft.add("optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)", "clip (norm = 1.0)")
    draft.add(FUSED_KERNELS, OWN_PYTHON)
    draft.differs.append("the reducer's buckets of bf16 gradients, counted beside the plan")
    if tied and pp > 1:
        draft.differs.append("one sum of the embeddings' gradients between the first and the last pipeline rank")
    return draft.done(
        beside={"reducer's buckets": 2.0 * parameters_of_first(row)},
        rank=0,
        for_memory=keeping_sharded_inputs if tp > 1 else None,
    )


def _data_parallel(dp: int, pp: int, *, sharded: bool, accumulates: bool, tied: bool) -> list[str]:
    """Units that hold whole bf16 parameters from one optimizer step to the next, in shards or replicas of fp32 copies.

    nanotron's model has bf16 parameters that only the optimizer writes (`FP32GradientAccumulator.step`).
    """
    units = kept_units(reshard_policy(pp), tied=tied)
    reduced = f"comm (reduce = last_micro_batch){'' if accumulates else '  # legoai: ignore[LP663]'}"
    return [f"fsdp on dp_shard {{\n{units}\n}}" if sharded and dp > 1 else whole_parameters(units, dp=dp), reduced]


def stage_starts(row: Row) -> tuple[str, ...]:
    """The first module of each pipeline rank but the first, as `build_model` hands out blocks.

    Raises:
        UnstatedError: a rank gets nothing, as the framework itself would find.
    """
    layers = row.whole("n_layers")
    names = ["tok_embeddings", *(f"layers.{index}" for index in range(layers)), "norm", "output"]
    ranks = stage_of_blocks(row, row.whole("pp"))
    starts = [names[ranks.index(rank)] for rank in range(1, row.whole("pp")) if rank in ranks]
    if len(starts) != row.whole("pp") - 1:
        raise UnstatedError(f"{layers} blocks do not give each of {row.whole('pp')} pipeline ranks one")
    return tuple(starts)


def stage_of_blocks(row: Row, pp: int) -> list[int]:
    """The pipeline rank of the embedding, each block, the last norm and the output layer.

    Where the framework leaves nothing but the loss to the last rank, the output layer is put there too.
    """
    hidden, feed_forward, layers = row.whole("hidden"), row.whole("ffn_hidden"), row.whole("n_layers")
    block = 4 * hidden * hidden + 3 * feed_forward * hidden
    costs = [0, *([block] * layers), 0, row.whole("vocab") * hidden]
    sums = list(accumulate(costs))
    rank, ranks = 0, []
    for done in sums:
        ranks.append(rank)
        if done > sums[-1] * ((rank + 1) / pp):
            rank += 1
    if rank == pp - 1 and ranks[-1] == pp - 2:
        ranks[-1] = pp - 1
    return ranks


def parameters_of_first(row: Row) -> float:
    """Parameters on one tensor-parallel rank of the first pipeline rank, its norms left out (a ten-thousandth)."""
    hidden, pp = row.whole("hidden"), row.whole("pp", 1)
    embedding = row.whole("vocab") * hidden
    heads, kv_heads = row.whole("n_heads"), row.whole("n_kv_heads")
    block = 2 * hidden * hidden * (1 + kv_heads / heads) + 3 * row.whole("ffn_hidden") * hidden
    ranks = stage_of_blocks(row, pp)
    blocks = sum(rank == 0 for rank in ranks[1:-2])
    outputs = int(pp == 1 and "untied" in row.text("arch"))
    return (blocks * block + embedding * (1 + outputs)) / row.whole("tp", 1)
