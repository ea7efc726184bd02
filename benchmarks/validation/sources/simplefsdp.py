"""Plans for the runs of the SimpleFSDP paper (Zhang et al. 2024): Llama 3.1 on the graph backend, and by FSDP2.

Sections 3 and 5 of the paper describe SimpleFSDP. A plan states:

- Every parameter has its own all-gather and reduce-scatter (`vanilla`): each layer is a unit. Manual wrapping merges
  those of a block: each block is a unit. In both the embedding, the last norm and the output layer are units.
- `reorder` moves gathers before the last wait in forward and after it in backward (section 3.2.2).
- The model is compiled without its loss. A plan compiles the regions between two collectives. Inductor's partitioner
  saves the same tensors of a compiled block for backward as autograd, except the activation of the feed-forward layer:
  with FSDP2 the simulator runs that partitioner, and both save 38 GiB of activations of the 8B model.
- Under a pipeline the stages run 1F1B, and each gathers its units once a step, as FSDP2's do.
- The eager mode of table 3 is the graph with a unit for each layer, run node by node.

FSDP2 is TorchTitan's (`torchtitan.py`). TorchTitan's model rotates complex numbers, repeats keys and values and has
norms in single steps; the graph backend traces only built-in models, in which these are one kernel or none. Inductor
makes one kernel of a norm. `fsdp2` states FSDP2 with either model, so that eager modes are compared on the same one.

The paper is of 1 November 2024, ten days after TorchTitan's script began to set expandable segments: its runs are taken
to be without them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources import torchtitan
from benchmarks.validation.sources.common import batch_of, cluster_of, llama_of
from benchmarks.validation.statements import TENSOR_PARALLEL_LLAMA, Draft, Stated, mesh, name_of

LLAMA = {
    "8b": {"n_layers": 32, "hidden": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_hidden": 14_336},
    "70b": {"n_layers": 80, "hidden": 8192, "n_heads": 64, "n_kv_heads": 8, "ffn_hidden": 28_672},
    "405b": {"n_layers": 126, "hidden": 16_384, "n_heads": 128, "n_kv_heads": 8, "ffn_hidden": 53_248},
}
"""Llama 3.1 (Grattafiori et al. 2024, table 3)."""
META_H100 = {"gpu": "H100-96GB-HBM2e", "gpu_mem_gb": "96", "interconnect": "400 Gb/s RDMA per GPU"}

BY_BLOCK = """  {tok_embeddings, norm, output} = unit
  layers.* = unit"""
BY_LAYER = """  {tok_embeddings, norm, output} = unit
  layers.*.{attention, ffn}_norm = unit
  layers.*.attention.{wq, wk, wv, wo} = unit
  layers.*.feed_forward.{w1, w2, w3} = unit"""
COMPILED = "compile {\n  layers.* = inductor\n  {norm, output} = inductor\n}"
KEPT_BY_INDUCTOR = 'checkpoint { layers.*.feed_forward = selective([matmul, "aten.mul.Tensor"]) }'
"""The activation alone is computed again: it is read by elementwise operators, and all else by a product, attention or
a norm, which inductor's partitioner does not compute twice (`ban_recompute_materialized_backward`)."""
OPTIMIZER = "optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1, fused = false)"

_SETTINGS = {
    "vanilla": {"bucketed": False, "reordered": False},
    "+ reorder": {"bucketed": False, "reordered": True},
    "+ bucket": {"bucketed": True, "reordered": False},
    "+ reorder & bucket": {"bucketed": True, "reordered": True},
}
"""Of table 5."""
_PAPERS_PLACES = "AG placed fwd=before bwd=after last all-gather-wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run of the paper.

    Attributes:
        size: of Llama 3.1: `8b`, `70b` or `405b`.
        gpus: in hosts of 8.
        tp: ranks of tensor parallelism.
        pp: stages of a pipeline, and as many micro batches.
        batch: sequences on each rank of data parallelism.
        ac: `none` or `full`.
        compiled: whether inductor compiles the model.
        bucketed: whether the parameters of a block share a collective; of SimpleFSDP alone.
        reordered: whether gathers start ahead; of SimpleFSDP alone.
    """

    size: str
    gpus: int
    tp: int = 1
    pp: int = 1
    batch: int = 1
    ac: str = "none"
    compiled: bool = True
    bucketed: bool = True
    reordered: bool = True

    @property
    def row(self) -> Row:
        """In TorchTitan's columns."""
        shards = self.gpus // (self.tp * self.pp)
        fields = {
            "model": f"Llama-3.1-{self.size.upper()}", "vocab": 128_256, **LLAMA[self.size], **META_H100,
            "n_gpus": self.gpus, "gpus_per_node": 8, "dp_shard": shards, "tp": self.tp, "pp": self.pp,
            "ac_mode": self.ac, "precision": "bf16", "compile": int(self.compiled), "micro_batch": self.batch,
            "global_batch": self.batch * shards, "seq_len": 8192,
        }  # fmt: skip
        return Row(self.name, {name: str(value) for name, value in fields.items()})

    @property
    def name(self) -> str:
        """Of the plan."""
        words = [f"llama_{self.size}", f"{self.gpus}gpus"]
        words += [f"{axis}{ranks}" for axis, ranks in (("tp", self.tp), ("pp", self.pp)) if ranks > 1]
        words += [f"batch{self.batch}", f"{self.ac}_ac", "compiled" if self.compiled else "eager"]
        return "_".join(words)


def traced(setting: Setting, *, name: str = "", source: str = "", device: str | None = None) -> Stated:
    """State a run of SimpleFSDP."""
    row = setting.row
    parts = ["bucket"] * setting.bucketed + ["reorder"] * setting.reordered
    draft = Draft(name or "_".join(["traced", row.id, *parts]), f"SimpleFSDP, {source}" if source else "SimpleFSDP")
    draft.assumed.append("sequences of 8192 tokens, TorchTitan's for Llama 3.1")
    draft.differs.append("rotations of complex numbers, and keys and values that are repeated")
    draft.add(
        llama_of(row, seq_len=row.whole("seq_len")),
        cluster_of(row, device, fabric="roce_400"),
        batch_of(row, micro=setting.batch // setting.pp),
        mesh(pp=setting.pp, dp_shard=row.whole("dp_shard"), tp=setting.tp),
    )
    if setting.tp > 1:
        draft.add(TENSOR_PARALLEL_LLAMA)
    units = BY_BLOCK if setting.bucketed else BY_LAYER
    if setting.pp > 1:
        units = units.replace("= unit", "= unit(reshard = after_backward)")
    draft.add(f"fsdp on dp_shard (backend = graph) {{\n{units}\n}}")
    if setting.pp > 1:
        draft.add(f"pipeline on pp (schedule = 1F1B, stages = {setting.pp})")
    if setting.reordered:
        draft.add("comm (reorder = true)")
    if setting.ac == "full":
        draft.add("checkpoint { layers.* = full }")
    elif setting.compiled:
        draft.add(KEPT_BY_INDUCTOR)
    draft.add("attention flash", "loss eager", "precision (param = bf16, reduce = fp32)")
    if setting.compiled:
        draft.add(COMPILED)
    draft.add(OPTIMIZER, "clip (norm = 1.0)")
    return draft.done()


def fsdp2(setting: Setting, *, built_in: bool = False, device: str | None = None) -> Stated:
    """State a run of FSDP2 in TorchTitan.

    Args:
        setting: the run; options that only SimpleFSDP has are ignored.
        built_in: whether the model is the built-in one that the graph backend traces.
        device: in place of the paper's.
    """
    row = setting.row
    stated = torchtitan.convert(Row(row.id, {**row.fields, "source": "FSDP2"}), device)
    if not built_in:
        return stated
    return replace(stated, text=stated.text.replace(f'python("{torchtitan.STEPWISE}", preset = "8b"', 'llama3("8b"'))


def setting_of(row: Row) -> Setting:
    """The run that a row of tables 3, 5 and 6 measured.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    if row.text("metric") not in ("throughput_total", "peak_memory"):
        raise UnstatedError("no figure of one run")
    found = re.search(r"(8|70|405)\s*B", row.text("model"), re.IGNORECASE)
    if found is None:
        raise UnstatedError(f"no Llama 3.1 is named: {row.text('model') or 'no model'}")
    setting = Setting(
        size=f"{found[1]}b",
        gpus=row.whole("gpus"),
        batch=row.whole("batch_size"),
        ac=row.text("ac", "none").lower(),
        compiled=row.text("mode") == "compile",
    )
    if row.text("system") == "FSDP2-eager":
        return setting
    named = row.text("setting")
    if named.startswith("AG placed") and named != _PAPERS_PLACES:
        raise UnstatedError(
            "other places of gathers than `reorder` knows: before the last wait in forward, and behind it in backward"
        )
    if named and named not in _SETTINGS and named != _PAPERS_PLACES:
        raise UnstatedError(f"no plan says {named}")
    if not setting.compiled:
        return replace(setting, bucketed=False, reordered=False)
    return replace(setting, **_SETTINGS.get(named, {}))


def convert(row: Row, device: str | None = None) -> Stated:
    """State a row of tables 3, 5 and 6.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    setting, source = setting_of(row), f"table {row.text('table')}"
    if row.text("system") == "FSDP2-eager":
        return torchtitan.convert(Row(row.id, {**setting.row.fields, "source": source}), device)
    return traced(setting, name=name_of(row.id), source=source, device=device)
