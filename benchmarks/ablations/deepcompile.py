"""Ablations of the DeepCompile paper (Tanaka et al. 2025), as pairs of plans.

Sources are sections 4 and 5 of the paper, `deepspeed/compile/passes/{prefetch,selective_gather}.py` of DeepSpeed, and
`benchmarks/deepcompile` of DeepSpeedExamples, the script of the paper's runs. 32 H100s of 80 GB in 4 hosts with
InfiniBand train Llama 3 70B; 16 of them, with offloading. Mixtral 8x7B trains on 32 of them too, according to the
figure and the script: its 30 GB of section 5.3 are too few for the 16 that the text names.

- DeepSpeed's ZeRO-3 gathers parameter by parameter and starts the next one ahead: with products of this size its
  prefetch buffer of 50 million elements holds no second one. Norms stay whole (`stage3_param_persistence_threshold`).
  A plan states eager units of single layers.
- FSDP has a unit for each block.
- DeepCompile's graph gathers parameter by parameter: each layer is a unit. `(P)` starts gathers ahead while their
  buffers take less than 4 GB (`MAX_BUFFERED_SIZE`); `(S)` keeps parameters whole as long as 65.7 GB are not exceeded:
  80 GB, less 7 GB for the driver and NCCL, less a tenth (section 5.3). The plan keeps the last blocks unsharded: all
  have the same gathers. Their number follows from the memory that the same plan without them leaves.
- Each layer is checkpointed as a block. Parameters, gradients and moments are held in fp32, and gradients are reduced
  in bf16, as DeepSpeed does by default (`communication_data_type` of its engine).
- The experts of a layer are one module here, whose weights are stacked, and one unit; those that ran are modules, of
  which each weight is gathered by itself. Units are sharded by experts, and 32 ranks share 8 of them unevenly: three in
  four would hold none, and each gather would send four times the bytes. The plans replace each expert by four of a
  quarter of its width, and choose four times as many: weights, products and shards are those that ran.

The paper gives the ends of ranges of speedups over batch sizes and sequence lengths, without the single values;
`OTHERS` are the settings that are simulated for a range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from benchmarks.ablations.claims import Claim, Filled, Pair, Unstated
from benchmarks.validation.predict import Prediction
from benchmarks.validation.rows import Row
from benchmarks.validation.statements import Draft

FILE: Final = "seeds/deepcompile.csv"
LIMIT: Final = int((80 - 7) * 0.9 * 1e9)
"""Memory limit of DeepCompile in bytes: 80 GB without 7 GB and a tenth (section 5.3)."""
_FULL: Final = 65.0
"""GB in use where parameters stay unsharded (section 5.3, in the next row)."""
PREFETCHED: Final = "4GB"
BYTES_OF_EACH: Final = 2
"""Bytes per unsharded parameter."""

_HOST_OPTIMIZER: Final = "DeepSpeed offloads the optimizer with its step, which a plan leaves on the device"
_EXPERTS: Final = (
    "the experts of a layer are gathered as one unit, those that ran weight by weight",
    "each expert is four of a quarter of its width: four times the rows are copied to and from experts",
    "one product for all experts, whose rows a kernel counts; the runs looped over experts, with counts on the host",
)
_EAGER: Final = "ZeRO-3's own host time, and the attention of the models that it ran, are not stated"
_SYNC: Final = "copies that wait are those of eager units without a compiler"


_LOW, _HIGH = "range low", "range high"

_SLICES: Final = 4
"""Experts in the place of one, so that 32 ranks share them evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that the paper trains.

    Attributes:
        name: the paper's name.
        text: family and preset of a plan's model, with what differs from the preset.
        layers: number of blocks.
        block: parameters of a block in its linear layers.
        linear: pattern of the linear layers of all blocks; each such module is a unit.
        differs: how the plan's model differs from the one that ran.
    """

    name: str
    text: str
    layers: int
    block: int
    linear: tuple[str, ...]
    differs: tuple[str, ...] = ()


ATTENTION: Final = "layers.*.attention.{wq, wk, wv, wo}"
LLAMA: Final = Model(
    name="Llama-3 70B",
    text='llama3("70b"',
    layers=80,
    block=8192 * (2 * 8192 + 2 * 1024 + 3 * 28_672),
    linear=(ATTENTION, "layers.*.feed_forward.{w1, w2, w3}"),
)
MIXTRAL: Final = Model(
    name="Mixtral 8x7B",
    text=f'mixtral("8x7b", n_experts = {8 * _SLICES}, top_k = {2 * _SLICES}, hidden_dim = {14_336 // _SLICES}',
    layers=32,
    block=4096 * (2 * 4096 + 2 * 1024 + 3 * 8 * 14_336),
    linear=(ATTENTION, "layers.*.feed_forward.experts"),
    differs=_EXPERTS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A configuration of section 5.2 or 5.4."""

    seq_len: int
    batch: int = 1
    accumulation: int = 1
    gpus: int = 32
    model: Model = LLAMA

    @property
    def words(self) -> str:
        """In the paper's terms."""
        steps = f", accumulation {self.accumulation}" if self.accumulation > 1 else ""
        return f"{self.gpus} GPUs, batch {self.batch}, {self.seq_len} tokens{steps}"


SMALLEST: Final = Setting(seq_len=512)
OTHERS: Final = (Setting(seq_len=1024), Setting(seq_len=2048), Setting(seq_len=1024, batch=4))
ACCUMULATED: Final = (Setting(seq_len=1024, accumulation=4), Setting(seq_len=1024, accumulation=16))
OFFLOADED: Final = Setting(seq_len=1024, gpus=16)


def _draft(setting: Setting, name: str) -> Draft:
    draft, devices = Draft(name, f"DeepCompile, {setting.words}"), setting.gpus
    draft.add(
        f"model {setting.model.text}, max_seq_len = {setting.seq_len})",
        f"cluster h100_sxm(hosts = {devices // 8}, fabric = infiniband_ndr)",
        f"batch (global = {devices * setting.batch * setting.accumulation}, micro = {setting.batch}, "
        f"seq_len = {setting.seq_len})",
        f"mesh (dp_shard = {devices})",
    )
    return draft


def _rest(draft: Draft) -> str:
    draft.add(
        "checkpoint { layers.* = full }",
        "attention flash",
        "loss eager",
        "precision (param = bf16, reduce = bf16)",
        "optimizer adamw(lr = 1.5e-5, fused = true)",
    )
    return draft.done().text


def zero_3(setting: Setting, *, offload: str = "") -> str:
    """DeepSpeed's ZeRO-3 without a compiler, optionally with the optimizer's state offloaded."""
    draft = _draft(setting, "zero_3")
    units = ("{tok_embeddings, output}", *setting.model.linear)
    draft.add("fsdp on dp_shard {\n" + "".join(f"  {path} = unit\n" for path in units) + "}")
    if offload:
        draft.add(f"offload (optimizer = {offload})")
    return _rest(draft)


def fsdp(setting: Setting) -> str:
    """PyTorch's FSDP without a compiler."""
    draft = _draft(setting, "fsdp")
    draft.add("fsdp on dp_shard { layers.* = unit }")
    return _rest(draft)


def deep_compile(setting: Setting, *, prefetch: bool = False, kept: int = 0, offload: str = "") -> str:
    """DeepCompile.

    Args:
        setting: setting of the run.
        prefetch: whether gathers start ahead as memory allows (P).
        kept: number of blocks that stay unsharded (S).
        offload: offloading of the optimizer's state; empty for none.
    """
    draft = _draft(setting, "deep_compile")
    keep = "never" if setting.accumulation > 1 else "after_backward"
    units = ["  {tok_embeddings, output} = unit"]
    for path in setting.model.linear:
        units.append(f"  {path} = {_kept(path, setting.model.layers, kept, keep)}")
    draft.add("fsdp on dp_shard (backend = graph) {\n" + "\n".join(units) + "\n}")
    if prefetch:
        draft.add(f"comm (reorder = true, prefetch = proactive(limit = {PREFETCHED}))")
    draft.add("compile {\n  layers.* = inductor\n  {norm, output} = inductor\n}")
    if offload:
        draft.add(f"offload (optimizer = {offload})")
    if offload == "adaptive":
        draft.add(f"require peak_memory <= {LIMIT // 10**6}MB")
    return _rest(draft)


def _kept(path: str, layers: int, kept: int, keep: str) -> str:
    """The treatment of a rule for the layers of all blocks, of which the last ones stay unsharded."""
    if not kept:
        return "unit"
    inside = path.rpartition(".")[2]
    each = inside.count(",") + 1
    return f"first({each * (layers - kept)}, unit, others = unit(reshard = {keep}))"


def selectively(setting: Setting, *, prefetch: bool) -> Filled:
    """DeepCompile with as many blocks kept as fit (S), after prefetching or without (P+S)."""
    return Filled(
        deep_compile(setting, prefetch=prefetch),
        partial(_filled, setting=setting, prefetch=prefetch),
    )


def _filled(predicted: Prediction, *, setting: Setting, prefetch: bool) -> str:
    left = LIMIT - max(predicted.active)
    model = setting.model
    kept = max(0, min(model.layers, int(left // (BYTES_OF_EACH * model.block))))
    return deep_compile(setting, prefetch=prefetch, kept=kept)


def _of(settings: Iterable[Setting], model: Model) -> tuple[Setting, ...]:
    return tuple(replace(item, model=model) for item in settings)


def _model(row: Row) -> Model:
    """The model of a row; where none is named it reads as Llama."""
    return MIXTRAL if "Mixtral" in row.text("model") else LLAMA


def claims(rows: Sequence[Row]) -> Iterator[Claim | Unstated]:
    """Yield the paper's ratios; rows that only describe its experiments have none."""
    for row in rows:
        if row.text("qualifier").startswith(_HIGH):
            continue
        found = _of_row(row, _other_end(row, rows))
        if found is not None:
            yield found


def _other_end(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row with the high end of a range, given the row with the low end."""
    if not row.text("qualifier").startswith(_LOW):
        return None
    same = ("section", "model", "system", "baseline", "metric")
    return next(
        item
        for item in rows
        if item.text("qualifier").startswith(_HIGH) and all(item.text(name) == row.text(name) for name in same)
    )


def _of_row(row: Row, high: Row | None) -> Claim | Unstated | None:
    ids = (row.id,) if high is None else (row.id, high.id)
    section, system, baseline = row.text("section"), row.text("system"), row.text("baseline")
    what = " ".join(filter(None, (row.text("model", "a model"), system, f"by {baseline}" if baseline else "")))
    if row.text("metric") == "peak_memory":
        return _memory(row)
    if row.text("unit") != "x":
        return None
    if section in ("abstract", "1", "7"):
        return Unstated((row.id,), what, "the largest of section 5, which is stated there")
    if section == "5.4":
        return _offload(row, what)
    ends = [row] if high is None else [row, high]
    model = _model(row)
    settings = OTHERS if model is LLAMA else (SMALLEST, *OTHERS)  # of Llama 512 tokens are a row of their own
    if row.text("seq_len") == "512":
        settings = (SMALLEST,)
    elif row.whole("grad_accum", 1) > 1:
        settings = ACCUMULATED
    settings = _of(settings, model)
    state = fsdp if baseline == "FSDP" else zero_3
    return Claim(
        rows=ids,
        of=f"DeepCompile, section {section}",
        what=f"{model.name} {system} by {baseline}",
        metric="throughput",
        published=tuple(float(item.text("value")) for item in ends),
        qualifier="range" if high is not None else row.text("qualifier"),
        pairs=tuple(Pair(item.words, selectively(item, prefetch=True), state(item)) for item in settings),
        differs=(_EAGER, *model.differs),
    )


def _offload(row: Row, what: str) -> Claim | Unstated:
    """Section 5.4: as much of the optimizer's state as necessary is offloaded, overlapped with computation."""
    if "Sync" not in row.text("baseline"):
        return Unstated((row.id,), what, _HOST_OPTIMIZER)
    changed = deep_compile(OFFLOADED, prefetch=True, offload="adaptive")
    return Claim(
        rows=(row.id,),
        of="DeepCompile, section 5.4",
        what="Llama-3 70B adaptive offload of the optimizer's state by all of it, with copies that wait",
        metric="throughput",
        published=(float(row.text("value")),),
        pairs=(Pair(OFFLOADED.words, changed, zero_3(OFFLOADED, offload="all")),),
        differs=(_SYNC,),
    )


def _memory(row: Row) -> Claim | None:
    """Section 5.3: ratio of DeepCompile's memory to that of ZeRO-3; DeepCompile limits allocated memory."""
    if not row.text("model"):  # of both models; the ratio stands with the other rows
        return None
    model = _model(row)
    settings = _of((SMALLEST, *OTHERS), model)
    return Claim(
        rows=(row.id,),
        of="DeepCompile, section 5.3",
        what=f"{model.name} DeepCompile (P+S) by ZeRO-3, peak memory",
        metric="allocated",
        published=(_FULL / float(row.text("value")),),
        qualifier="approx",
        pairs=tuple(Pair(item.words, selectively(item, prefetch=True), zero_3(item)) for item in settings),
        differs=model.differs,
    )
