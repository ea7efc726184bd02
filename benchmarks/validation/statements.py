"""Text of a plan, from the fields of a row and the known behaviour of its framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

TENSOR_PARALLEL_LLAMA = """shard on tp {
  tok_embeddings                  = rowwise(input = replicate, output = shard(1))
  layers.*.{attention, ffn}_norm  = sequence
  layers.*.attention              = inputs(from = shard(1), to = replicate)
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo           = rowwise(output = shard(1))
  layers.*.feed_forward           = inputs(from = shard(1), to = replicate)
  layers.*.feed_forward.{w1, w3}  = colwise
  layers.*.feed_forward.w2        = rowwise(output = shard(1))
  norm                            = sequence
  output                          = colwise(input = shard(1), loss_parallel = true)
}"""

TENSOR_PARALLEL_LLAMA_LOCAL = TENSOR_PARALLEL_LLAMA.replace(
    "rowwise(input = replicate, output = shard(1))", "colwise(output = shard(1))"
)
"""The same with the embedding cut along the features: of one that is cut along the vocabulary, as Megatron and nanotron
have it, DTensor computes the gradient for the whole vocabulary on every rank, where they compute their own part."""


def overlapping(styles: str) -> str:
    """Styles whose column-wise layers save their sharded input, and hide their communication in backward."""
    styles = styles.replace("to = replicate)", "to = replicate, overlap = backward)")
    return styles.replace("colwise(input = shard(1), ", "colwise(input = shard(1), overlap = backward, ")


def one_forward_one_backward(micro_batches: int, ranks: int) -> str:
    """The schedule that is Megatron's and nanotron's 1F1B: with fewer micro batches than ranks it is GPipe's."""
    return "1F1B" if micro_batches >= ranks else "GPipe"


def sending_norm(styles: str) -> str:
    """Styles with which a pipeline stage may begin after the last norm, whose output is then a plain tensor."""
    return re.sub(r"^(  norm +)= sequence$", r"\1= sequence(local = true)", styles, flags=re.MULTILINE)


_OF_BLOCKS = (
    "  layers.*.attention              = inputs(from = shard(1), to = replicate)\n",
    "  layers.*.feed_forward           = inputs(from = shard(1), to = replicate)\n",
)
KEEP_SHARDED_INPUTS = """checkpoint {
  layers.*.attention.{wq, wk, wv} = selective([matmul])
  layers.*.feed_forward.{w1, w3}  = selective([matmul])
  output                          = selective([matmul])
}"""


def keeping_sharded_inputs(text: str) -> str:
    """The same plan, whose column-wise layers save their inputs before these are gathered, as Megatron's do.

    Each layer gathers its own input, and once more in backward, where the frameworks gather once for all layers with
    the same input: the memory is that of the frameworks, the traffic is not.
    """
    text = text.replace("overlap = backward, ", "").replace(", overlap = backward", "")
    for line in _OF_BLOCKS:
        text = text.replace(line, "")
    text = re.sub(
        r"(\{(?:wq, wk, wv|w1, w3)\} *)= colwise$", r"\1= colwise(input = shard(1))", text, flags=re.MULTILINE
    )
    if "\ncheckpoint {\n" not in text:
        return f"{text}{KEEP_SHARDED_INPUTS}\n"
    return re.sub(r"checkpoint \{\n.*?\n\}", KEEP_SHARDED_INPUTS, text, flags=re.DOTALL)


TENSOR_PARALLEL_GPT = """shard on tp {
  tok_embeddings                  = rowwise(input = replicate)
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo           = rowwise
  layers.*.mlp.up                 = colwise
  layers.*.mlp.down               = rowwise
  output                          = colwise(loss_parallel = true)
}"""


FUSED_KERNELS = "# kernels: fused"
"""Line of a plan whose framework has kernels of its own for norms and for what torch computes by single elements.

Rules of its plan that keep outputs state what these kernels save.
"""
OWN_PYTHON = "# python: the framework's own"
"""Line of a plan whose framework has checkpoints, parallel layers and replicas of its own, without the hooks of torch's
checkpoints, DTensors and FSDP units."""
MEGATRON_PYTHON = f"{OWN_PYTHON}, as measured in layers of Megatron-DeepSpeed"
"""Line of a plan whose framework is Megatron-DeepSpeed, whose Python has been measured (`megatron_host.py`)."""
FIRST_FLASH_ATTENTION = "# attention: the first FlashAttention"
"""Line of a plan whose framework has its Triton kernel, where `attention efficient` stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A row as a plan.

    Attributes:
        text: the plan's text.
        assumed: settings that the row leaves open and the plan had to choose; a sentence each.
        differs: behaviour of the framework that no plan can state; a sentence each.
        beside: bytes that the framework holds on the measured rank at the peak and that no statement accounts for, by
            name, each derived from the framework's source and never from a measurement.
        beside_reserved: further bytes that only the allocator's segments hold, derived likewise.
        rank: the pipeline rank whose memory was measured; None for the one with the highest peak.
        for_memory: text of the plan with the framework's memory, where the plan with its time has another memory; empty
            where one plan has both.
        untimed: why the run's time differs from the plan's; such a row is compared in memory only.
    """

    text: str
    assumed: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    beside: Mapping[str, float] = field(default_factory=dict)
    beside_reserved: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None
    for_memory: str = ""
    untimed: str = ""


@dataclass(slots=True)
class Draft:
    """Plan under construction, statement by statement in the language's usual order."""

    name: str
    comment: str = ""
    statements: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    untimed: str = ""

    def add(self, *statements: str) -> None:
        """Add statements."""
        self.statements += statements

    def done(
        self,
        *,
        beside: Mapping[str, float] | None = None,
        beside_reserved: Mapping[str, float] | None = None,
        rank: int | None = None,
        for_memory: Callable[[str], str] | None = None,
    ) -> Stated:
        """The finished plan; ``for_memory`` transforms it into the plan for memory."""
        head = [f"# {self.comment}"] if self.comment else []
        remarks = [f"# Assumed: {line}" for line in self.assumed] + [f"# Not stated: {line}" for line in self.differs]
        text = "\n".join([*head, *remarks, f"plan {self.name}", "", *self.statements]) + "\n"
        return Stated(
            text=text,
            assumed=tuple(self.assumed),
            differs=tuple(self.differs),
            beside=beside or {},
            beside_reserved=beside_reserved or {},
            rank=rank,
            for_memory=for_memory(text) if for_memory is not None else "",
            untimed=self.untimed,
        )


def kept_units(reshard: str, *, tied: bool) -> str:
    """Units for parameters that stay whole, as small as gradient buckets; a tied embedding is in the root unit."""
    apart = "" if tied else f"  {{tok_embeddings, output}} = unit(reshard = {reshard})\n"
    return f"  layers.* = unit(reshard = {reshard})\n{apart}  root = unit(reshard = {reshard})"


def reshard_policy(pp: int) -> str:
    """The reshard policy that keeps parameters unsharded for as long as the pipeline allows."""
    return "after_backward" if pp > 1 else "never"


def whole_parameters(units: str, *, dp: int) -> str:
    """Replicas whose unsharded bf16 parameters persist between optimizer steps, with fp32 copies for the optimizer.

    Stated as units over one rank, replicated: `replicate` would cast the fp32 parameters again for each micro batch.
    """
    axes = "dp_replicate, dp_shard" if dp > 1 else "dp_shard"
    return f"fsdp on {axes} {{  # legoai: ignore[LP307] one rank holds all, in units that cast to bf16\n{units}\n}}"


def mesh(**sizes: int) -> str:
    """The mesh statement, without axes of one rank; empty if all axes have one rank."""
    named = ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)
    return f"mesh ({named})" if named else ""


def model(family: str, preset: str, known: Mapping[str, object], **wanted: object) -> str:
    """A built-in model by its preset, with the dimensions that differ from the preset."""
    changed = {name: value for name, value in wanted.items() if known.get(name) != value}
    arguments = "".join(f", {name} = {written(value)}" for name, value in changed.items())
    return f'model {family}("{preset}"{arguments})'


def written(value: object) -> str:
    """A value as the language writes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def cluster(device: str, *, gpus: int, per_host: int, fabric: str, usual: int = 8) -> str:
    """The cluster statement: hosts of ``per_host`` devices, or one host with all of them."""
    devices = min(gpus, per_host)
    hosts = -(-gpus // per_host)
    options = [f"hosts = {hosts}"] if hosts > 1 else []
    options += [f"devices = {devices}"] if devices != usual else []
    options += [f"fabric = {fabric}"] if hosts > 1 else []
    return f"cluster {device}({', '.join(options)})" if options else f"cluster {device}"


def name_of(row_id: str) -> str:
    """A plan's name from a row's id."""
    return "".join(letter if letter.isalnum() else "_" for letter in row_id.lower())


def listed(items: Sequence[object]) -> str:
    """Items between commas."""
    return ", ".join(str(item) for item in items)
