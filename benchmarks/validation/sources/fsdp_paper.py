"""Plans for the runs of the PyTorch FSDP paper (Zhao et al. 2023, section 5.4).

Read for this: the paper, and `mingpt/model.py` of github.com/karpathy/minGPT at `bac7434` (December 2021), which the
paper cites.

GPT-3 175B and T5 11B train on up to 512 A100s of 80 GB, in units of blocks that are recomputed, with Adam and in bf16,
the collectives included. Of GPT the paper gives the least TFLOP/s of a device on 128 to 512 of them, but for two
sequences on each of 128; they scale linearly. The plans of its rows have 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.statements import Draft, Stated, cluster, mesh, name_of

METRIC: Final = "tflops_per_gpu"
FLAT_PARAMETERS: Final = "FSDP1's flat parameters, which need no copies into and out of a collective's buffer"
"""What no plan states of FSDP1."""
_DEVICES: Final = 512


def step_operations(sequences: int, tokens: int) -> float:
    """Operations of a device in a step of GPT-3 175B with recomputed blocks.

    The paper does not state how it counts. By its section 5.4 the rates are shares of the hardware's use, so that the
    recomputation counts: equation 3 of Narayanan et al. (2021), whose count is of such blocks.
    """
    layers, width, vocabulary = 96, 12_288, 50_000
    attention, logits = tokens / (6 * width), vocabulary / (16 * layers * width)
    return 96 * sequences * tokens * layers * width**2 * (1 + attention + logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the paper.

    Attributes:
        name: the paper's name.
        factory: of `models.py`, and its arguments.
        blocks: pattern of its blocks.
        seq_len: tokens of a sequence.
    """

    name: str
    factory: str
    blocks: str
    seq_len: int


GPT: Final = Model(
    name="GPT-175B",
    factory='min_gpt", preset = "175b", vocab_size = 50000, tie_embeddings = false',
    blocks="layers.*",
    seq_len=2048,
)
T5: Final = Model(
    name="T5-11B",
    factory='encoder_decoder", config = "t5_large", d_ff = 65536, d_kv = 128, num_heads = 128',
    blocks="{encoder, decoder}.block.*",
    seq_len=512,
)


def convert(row: Row, device: str | None = None) -> Stated:
    """State a run of minGPT.

    Raises:
        UnstatedError: the row is no rate of GPT-3 175B.
    """
    if row.text("metric") != METRIC:
        raise UnstatedError("no rate, time or memory of a run")
    draft = Draft(name_of(row.id), f"{row.text('model')}, PyTorch FSDP, section {row.text('section')}")
    draft.assumed.append(f"{_DEVICES} devices")
    return stated(draft, GPT, _DEVICES, row.whole("batch_size"), device)


def stated(draft: Draft, model: Model, devices: int, sequences: int, device: str | None = None) -> Stated:
    """State a run on so many devices with so many sequences on each of them."""
    draft.add(
        f'model python("benchmarks.validation.models:{model.factory})',
        cluster(device or "a100_sxm80", gpus=devices, per_host=8, fabric="roce_200"),
        f"batch (global = {devices * sequences}, micro = {sequences}, seq_len = {model.seq_len})",
        mesh(dp_shard=devices),
        f"fsdp on dp_shard {{\n  {model.blocks} = unit\n  root = unit\n}}",
        f"checkpoint {{ {model.blocks} = full }}",
        "loss eager",
        "precision (param = bf16, reduce = bf16)",
        "optimizer adamw(lr = 1e-4, fused = false)",
    )
    draft.assumed.append("200 Gb/s between hosts for each device: 2 Tb/s are stated, perhaps of a host")
    draft.differs.append(FLAT_PARAMETERS)
    if model is GPT:
        draft.differs.append("no dropout behind the embedding")
    return draft.done()
