"""Plans for every way in which a training is spread over ranks.

Each is on a model of two small blocks, or of four in a pipeline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.texts.plans import SEQUENCE_PARALLEL

_DENSE = """\
plan combination
model llama3("tiny", n_layers = LAYERS, dim = 32, n_heads = 4, n_kv_heads = 4, hidden_dim = 64, vocab_size = 128)
"""
_SPARSE = """\
plan combination
model mixtral("8x7b", n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 24, vocab_size = 128,
              n_experts = 8, top_k = 2, max_seq_len = 64)
"""
_OPTIMIZER = "optimizer adamw(lr = 1e-3)\n"
_LOCAL_NORM = re.sub(r"norm( +)= sequence\n  output", r"norm\1= sequence(local = true)\n  output", SEQUENCE_PARALLEL)
_TENSOR_PARALLEL = """\
shard on tp {
  layers.*.attention.{wq, wk, wv}    = colwise
  layers.*.attention.wo              = rowwise
  layers.*.feed_forward.{w1, w3}     = colwise
  layers.*.feed_forward.w2           = rowwise
}
"""
_EXPERTS = "shard on ep { layers.*.feed_forward.experts = experts }\n"


def _fsdp(axes: str = "dp_shard", *, reshard: str = "") -> str:
    unit = f"unit(reshard = {reshard})" if reshard else "unit"
    return f"fsdp on {axes} {{ layers.* = {unit}, root = {unit} }}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A plan: its body, how many ranks it has, how many of them read other samples, and whether it has experts."""

    world: int
    data: int
    body: str
    sparse: bool = False

    @property
    def text(self) -> str:
        """The whole plan."""
        pipeline = "mesh (pp" in self.body
        head = _SPARSE if self.sparse else _DENSE.replace("LAYERS", "4" if pipeline else "2")
        micro_batches = 4 if pipeline else 2
        batch = f"batch (global = {micro_batches * self.data}, micro = 1, seq_len = 32)\n"
        return f"{head}cluster cpu(devices = {self.world})\n{batch}{_OPTIMIZER}{self.body}"


def _two(body: str, *, data: int = 2, sparse: bool = False) -> Combination:
    return Combination(world=2, data=data, body=body, sparse=sparse)


def _four(body: str, *, data: int = 4, sparse: bool = False) -> Combination:
    return Combination(world=4, data=data, body=body, sparse=sparse)


_SHARDED = "mesh (dp_shard = 2)\n"
_CLIP = "clip (norm = 1.0)\n"
_GATHERED = "  layers.*.feed_forward              = inputs(from = shard(1), to = replicate)\n"
_FULL = "checkpoint { layers.* = full }\n"
_SINGLE = "precision (param = fp32)\n"
_LAST = "loss chunked(3, last_layer = true)\n"

_SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _pipeline(schedule: str) -> Combination:
    return _two(f"mesh (pp = 2)\npipeline on pp (schedule = {schedule})\n{_SINGLE}", data=1)


COMBINATIONS = {
    "fsdp": _two(f"{_SHARDED}{_fsdp()}"),
    "fsdp, resharded after backward": _two(f"{_SHARDED}{_fsdp(reshard='after_backward')}"),
    "fsdp, never resharded, reduced last": _two(
        f"{_SHARDED}{_fsdp(reshard='never')}comm (reduce = last_micro_batch)\n"
    ),
    "fsdp, two ranks after forward": _four(f"mesh (dp_shard = 4)\n{_fsdp(reshard='2')}"),
    "fsdp, prefetching, parts as units": _two(
        f"""{_SHARDED}fsdp on dp_shard {{ {{tok_embeddings, output}} = unit, layers.* = unit, root = unit }}
comm (prefetch = units(forward = 2, backward = 2))
"""
    ),
    "fsdp, units in one bucket": _two(f"{_SHARDED}{_fsdp()}comm {{ layers.* = bucket(bytes(1MB)) }}\n"),
    "fsdp, reduced after the last micro batch": _two(f"{_SHARDED}{_fsdp()}comm (reduce = last_micro_batch)\n"),
    "fsdp in bf16, clipped": _two(f"{_SHARDED}{_fsdp()}{_CLIP}precision (param = bf16, reduce = fp32)\n"),
    "fsdp, as one graph": _two(
        f"{_SHARDED}{_fsdp()}{_CLIP}comm (reorder = true)\n".replace("on dp_shard {", "on dp_shard (backend = graph) {")
    ),
    "fsdp, as one graph, scheduled by torch": _two(
        f"{_SHARDED}{_fsdp()}{_CLIP}comm {{ layers.* = bucket(compiler) }}\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        )
    ),
    "fsdp, as one graph, never resharded": _two(
        f"{_SHARDED}{_fsdp(reshard='never')}comm (reorder = true)\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        )
    ),
    "fsdp, as one graph, checkpointed": _two(
        f"{_SHARDED}{_fsdp()}{_FULL}".replace("on dp_shard {", "on dp_shard (backend = graph) {")
    ),
    "fsdp, as one graph, operators kept": _two(
        f"{_SHARDED}{_fsdp()}checkpoint {{ layers.* = selective([attention, alternate_matmul]) }}\n"
        "comm (reorder = true)\n".replace("on dp_shard {", "on dp_shard (backend = graph) {")
    ),
    "fsdp, as one graph, activations on the host": _two(
        f"{_SHARDED}{_fsdp()}comm (reorder = true, prefetch = proactive(limit = 64KiB))\n"
        "offload (activations = all)\n".replace("on dp_shard {", "on dp_shard (backend = graph) {")
    ),
    "fsdp, as one graph, optimizer state on the host": _two(
        f"{_SHARDED}{_fsdp()}{_CLIP}offload (optimizer = all)\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        )
    ),
    "fsdp, as one graph, uneven": Combination(
        world=3,
        data=3,
        body=f"mesh (dp_shard = 3)\n{_fsdp()}{_CLIP}comm (reorder = true)\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
    ),
    "fsdp, last layer in pieces": _two(f"{_SHARDED}{_fsdp()}{_LAST}"),
    "fsdp, last layer a unit, in pieces": _two(
        f"{_SHARDED}fsdp on dp_shard {{ layers.* = unit, output = unit, root = unit }}\n{_CLIP}{_LAST}"
    ),
    "fsdp, checkpointed": _two(f"{_SHARDED}{_fsdp()}{_FULL}"),
    "fsdp, selectively checkpointed": _two(
        f"{_SHARDED}{_fsdp()}checkpoint {{ layers.* = selective([attention, alternate_matmul]) }}\n"
    ),
    "hybrid shards": _four(f"mesh (dp_replicate = 2, dp_shard = 2)\n{_fsdp('dp_replicate, dp_shard')}"),
    "hybrid shards, reduced last, clipped": _four(
        f"mesh (dp_replicate = 2, dp_shard = 2)\n{_fsdp('dp_replicate, dp_shard')}{_CLIP}"
        "comm (reduce = last_micro_batch)\n"
    ),
    "replicas": _two("mesh (dp_replicate = 2)\nreplicate on dp_replicate\n"),
    "replicas in buckets": _two("mesh (dp_replicate = 2)\nreplicate on dp_replicate (bucket = 10KiB)\n"),
    "replicas, reduced last": _two(
        "mesh (dp_replicate = 2)\nreplicate on dp_replicate (bucket = 10KiB)\ncomm (reduce = last_micro_batch)\n"
    ),
    "replicas, sharded optimizer": _two(
        f"mesh (dp_replicate = 2)\nreplicate on dp_replicate (optimizer = sharded)\n{_CLIP}"
    ),
    "tensor parallel": _two(f"mesh (tp = 2)\n{_TENSOR_PARALLEL}{_SINGLE}", data=1),
    "tensor and sequence parallel": _two(f"mesh (tp = 2)\n{SEQUENCE_PARALLEL}{_CLIP}{_SINGLE}", data=1),
    "tensor and sequence parallel, checkpointed": _two(
        f"mesh (tp = 2)\n{SEQUENCE_PARALLEL}{_FULL}{_SINGLE}", data=1
    ),
    "tensor and sequence parallel, last layer in pieces": _two(
        f"mesh (tp = 2)\n{SEQUENCE_PARALLEL}{_LAST}{_SINGLE}", data=1
    ),
    "tensor and sequence parallel, gathered by torch": _two(
        f"mesh (tp = 2)\n{SEQUENCE_PARALLEL.replace(_GATHERED, '')}{_SINGLE}", data=1
    ),
    "fsdp and tensor parallel": _four(f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}{_fsdp()}{_CLIP}", data=2),
    "fsdp and tensor parallel, as one graph": _four(
        f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}{_fsdp()}{_FULL}{_CLIP}comm (reorder = true)\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
        data=2,
    ),
    "fsdp and tensor parallel, checkpointed": _four(
        f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}{_fsdp()}"
        "checkpoint { layers.* = selective([attention, alternate_matmul]) }\n",
        data=2,
    ),
    "replicas and tensor parallel, sharded optimizer": _four(
        f"mesh (dp_replicate = 2, tp = 2)\n{SEQUENCE_PARALLEL}replicate on dp_replicate (optimizer = sharded)\n",
        data=2,
    ),
    "context parallel, keys gathered": _two(f"mesh (cp = 2)\ncontext on cp\n{_fsdp('cp')}", data=1),
    "context parallel, keys around the ring": _two(
        f"mesh (cp = 2)\ncontext on cp (rotate = alltoall)\n{_fsdp('cp')}", data=1
    ),
    "shards and context parallel": _four(
        f"mesh (dp_shard = 2, cp = 2)\ncontext on cp (rotate = alltoall)\n{_fsdp('dp_shard, cp')}{_FULL}",
        data=2,
    ),
    "context parallel, as one graph": _two(
        f"mesh (cp = 2)\ncontext on cp (rotate = alltoall)\n{_fsdp('cp')}{_FULL}comm (reorder = true)\n".replace(
            "on cp {", "on cp (backend = graph) {"
        ),
        data=1,
    ),
    "shards and context parallel, as one graph": _four(
        f"mesh (dp_shard = 2, cp = 2)\ncontext on cp\n{_fsdp('dp_shard, cp')}{_FULL}comm (reorder = true)\n".replace(
            "on dp_shard, cp {", "on dp_shard, cp (backend = graph) {"
        ),
        data=2,
    ),
    "context and tensor parallel": _four(
        f"mesh (cp = 2, tp = 2)\n{SEQUENCE_PARALLEL}context on cp\n{_fsdp('cp')}", data=1
    ),
    "experts": _four(f"mesh (dp_shard = 4, ep = 2)\n{_EXPERTS}{_fsdp()}", sparse=True),
    "experts on every rank, in bf16": _two(
        f"mesh (dp_shard = 2, ep = 2)\n{_EXPERTS}{_fsdp()}{_FULL}precision (param = bf16, reduce = fp32)\n",
        sparse=True,
    ),
    "experts with room for fewer rows": _two(
        f"mesh (dp_shard = 2, ep = 2)\n{_EXPERTS.replace('= experts', '= experts(capacity_factor = 0.75)')}{_fsdp()}",
        sparse=True,
    ),
    "experts, as one graph": _four(
        f"mesh (dp_shard = 4, ep = 2)\n{_EXPERTS}{_fsdp()}{_FULL}comm (reorder = true)\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
        sparse=True,
    ),
    "experts on every rank, as one graph": _two(
        f"mesh (dp_shard = 2, ep = 2)\n{_EXPERTS}{_fsdp()}{_FULL}{_SINGLE}".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
        sparse=True,
    ),
    "experts in shards, in bf16, as one graph": _two(
        f"{_SHARDED}{_fsdp()}{_FULL}comm (reorder = true)\nprecision (param = bf16, reduce = fp32)\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
        sparse=True,
    ),
    "autocast to bf16 under tensor parallel": _two(f"mesh (tp = 2)\n{SEQUENCE_PARALLEL}", data=1),
    "autocast to bf16 under tensor parallel, last layer in pieces": _two(
        f"mesh (tp = 2)\n{SEQUENCE_PARALLEL}{_LAST}", data=1
    ),
    "host memory for parameters and activations": _two(
        f"{_SHARDED}{_fsdp()}offload (parameters = all, activations = all)\n"
    ),
    **{f"pipeline, {schedule}": _pipeline(schedule) for schedule in _SCHEDULES},
    "pipeline, backward split, recomputed": _two(
        f"mesh (pp = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n{_FULL}{_SINGLE}", data=1
    ),
    "pipeline and fsdp, backward split, recomputed": _four(
        f"mesh (pp = 2, dp_shard = 2)\n{_fsdp(reshard='after_backward')}{_FULL}"
        f"pipeline on pp (schedule = InterleavedZeroBubble)\n{_CLIP}", data=2
    ),
    "pipeline and fsdp": _four(
        f"mesh (pp = 2, dp_shard = 2)\n{_fsdp(reshard='after_backward')}"
        f"pipeline on pp (schedule = Interleaved1F1B)\n{_CLIP}",
        data=2,
    ),
    "pipeline and fsdp, last layer in pieces": _four(
        f"mesh (pp = 2, dp_shard = 2)\n{_fsdp(reshard='after_backward')}pipeline on pp (schedule = 1F1B)\n{_LAST}",
        data=2,
    ),
    "pipeline and fsdp, as graphs": _four(
        f"mesh (pp = 2, dp_shard = 2)\n{_fsdp(reshard='after_backward')}{_FULL}comm (reorder = true)\n"
        f"pipeline on pp (schedule = Interleaved1F1B)\n{_CLIP}".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
        data=2,
    ),
    "pipeline and fsdp, as graphs, resharded after forward": _four(
        f"mesh (pp = 2, dp_shard = 2)\n{_fsdp(reshard='after_forward')}"
        f"pipeline on pp (schedule = Interleaved1F1B)\n{_FULL}{_CLIP}comm (reorder = true)\n".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
        data=2,
    ),
    "pipeline and fsdp, as graphs, backward split": _four(
        f"mesh (pp = 2, dp_shard = 2)\n{_fsdp(reshard='after_backward')}{_FULL}"
        f"pipeline on pp (schedule = ZBVZeroBubble)\n{_CLIP}".replace(
            "on dp_shard {", "on dp_shard (backend = graph) {"
        ),
        data=2,
    ),
    "pipeline and experts, as graphs": Combination(
        world=4,
        data=2,
        sparse=True,
        body=f"mesh (pp = 2, dp_shard = 2, ep = 2)\n{_EXPERTS}{_fsdp(reshard='after_backward')}{_FULL}"
        f"pipeline on pp (schedule = 1F1B)\n{_CLIP}".replace("on dp_shard {", "on dp_shard (backend = graph) {"),
    ),
    "pipeline and context parallelism, as graphs": _four(
        f"mesh (pp = 2, cp = 2)\ncontext on cp\n{_fsdp('cp', reshard='after_backward')}{_FULL}comm (reorder = true)\n"
        "pipeline on pp (schedule = Interleaved1F1B)\n".replace("on cp {", "on cp (backend = graph) {"),
        data=1,
    ),
    "pipeline and fsdp, resharded after forward": _four(
        f"mesh (pp = 2, dp_shard = 2)\n{_fsdp()}pipeline on pp (schedule = 1F1B)\n{_FULL}", data=2
    ),
    "pipeline and tensor parallel": _four(
        f"mesh (pp = 2, tp = 2)\n{SEQUENCE_PARALLEL}pipeline on pp (schedule = ZBVZeroBubble)\n{_SINGLE}", data=1
    ),
    "pipeline and tensor parallel, the output layer alone": _four(
        f"mesh (pp = 2, tp = 2)\n{_LOCAL_NORM}pipeline on pp (schedule = 1F1B, split = [output])\n{_SINGLE}", data=1
    ),
}  # fmt: skip
