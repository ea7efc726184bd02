"""Random plans with holes, in families whose plans share most captured programs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import Linted, errors, manifest_of
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.open_rules import with_open_rules
from legoai.specs.models.manifests.manifest import Manifest

VARIANTS = 10
"""Plans of a family without memory limits; a pipeline, which shares no captured programs, has one plan."""
STAGED = 0.5
"""Share of the families that are pipelines; these have a tenth of the plans of others."""

MODELS = (
    'llama3("1b", n_layers = {layers})',
    'llama3("8b", n_layers = {layers}, dim = 2048, n_heads = 16, hidden_dim = 4096)',
    'llama3("tiny", n_layers = {layers})',
    'gpt2("small", n_layers = {layers})',
    'mixtral("8x7b", n_layers = {layers}, dim = 1024, n_heads = 8, hidden_dim = 2048)',
)
CLUSTERS = {
    4: ("h100_sxm(devices = 4)", "a100_sxm80(devices = 4)", "h200(devices = 4)", "b200(devices = 4)"),
    8: ("h100_sxm", "a100_sxm80", "h200", "b200", "h100_sxm(hosts = 2, devices = 4, fabric = infiniband_ndr)"),
    32: (
        "h100_sxm(hosts = 4, fabric = infiniband_ndr)", "a100_sxm80(hosts = 4, fabric = infiniband_hdr)",
        "h200(hosts = 4, fabric = roce_400)", "h100_sxm(hosts = 4, fabric = ethernet_100)",
    ),
}  # fmt: skip
"""Cluster statements, by number of devices."""
LOSSES = ("eager", "chunked(2)", "chunked(4)", "chunked(4, last_layer = true)")
CHECKPOINTS = (
    "none", "full", "every(2)", "selective([attention])", "selective([attention, matmul])",
    "selective([attention, alternate_matmul])", "budget(0.5)", "budget(0.25)",
)  # fmt: skip
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True, slots=True)
class Variant:
    """Properties in which plans of a family differ: blocks, sequences per step, devices, and memory limit in bytes."""

    layers: int
    sequences: int
    cluster: str
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Plans with the same holes and the same programs, except where a :class:`Variant` differs.

    Attributes:
        model: model statement, without the number of blocks.
        batch: batch statement, without the number of sequences.
        others: further statements.
        variants: variants without memory limits.
    """

    model: str
    batch: str
    others: tuple[str, ...]
    variants: tuple[Variant, ...]

    def text(self, one: Variant) -> str:
        """The text of a plan."""
        lines = (
            "plan drawn",
            f"model {self.model.format(layers=one.layers)}",
            f"cluster {one.cluster}",
            f"batch (global = {one.sequences}, {self.batch})",
            *self.others,
            *([] if one.limit is None else [f"require peak_memory <= {one.limit}B"]),
        )
        return "\n".join(lines) + "\n"


def drawn_family(draw: random.Random) -> Family:
    """Draw a family of plans with holes."""
    model, staged = draw.choice(MODELS), draw.random() < STAGED
    lengths = (512, 2048, 4096) if staged else (128, 512, 1024, 2048)
    length = draw.choice([one for one in lengths if "gpt2" not in model or one <= 1024])
    devices = draw.choice((4, 8)) if staged else draw.choice((4, 8, 8, 32))
    if staged:
        schedules = ", ".join(draw.sample(SCHEDULES, 3))
        cut = ", tp = 2" if draw.random() < 0.3 else ""
        others = [
            f"mesh (pp = auto in [{draw.choice(('1, 2', '2', '2, 4'))}], dp_shard = rest{cut})",
            *(["shard auto on tp"] if cut else []),
            "fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_backward, after_forward]) }",
            f"pipeline on pp (schedule = auto in [{schedules}])",
        ]
    elif draw.random() < 0.25 and "gpt2" not in model:
        cut = draw.choice(("cp = auto in [1, 2, 4]", "cp = auto in [1, 2], tp = auto in [1, 2]"))
        cut = "cp = auto in [1, 2, 4]" if "mixtral" in model else cut
        others = [
            f"mesh (dp_shard = rest, {cut})",
            *(["shard standard on tp"] if "tp" in cut else []),
            "fsdp blocks on dp_shard, cp { layers.* = unit(reshard = auto in [after_forward, after_backward, never]) }",
            f"context on cp (rotate = {draw.choice(('allgather', 'alltoall'))})",
        ]
    elif "mixtral" in model and draw.random() < 0.5:
        others = [
            "mesh (dp_shard = rest, ep = auto in [1, 2, 4])",
            "shard standard on ep",
            "fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_forward, after_backward]) }",
        ]
    elif draw.random() < 0.7:
        usual = "mixtral" not in model and "gpt2" not in model
        others = [
            "mesh (dp_shard = rest, tp = auto in [1, 2, 4])",
            f"shard {draw.choice(('standard', 'auto')) if usual else 'auto'} on tp",
            "fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_forward, after_backward, never]) }",
        ]
    else:
        others = [
            "mesh (dp_replicate = auto in [1, 2, 4], dp_shard = rest)",
            "fsdp blocks on dp_replicate, dp_shard { layers.* = unit(reshard = auto in [after_forward, never]) }",
        ]
    others.append(f"checkpoint {{ layers.* = auto in [{', '.join(draw.sample(CHECKPOINTS, 4))}] }}")
    kernels = ("flash", "efficient", "math") if "gpt2" in model else ("flash", "math")
    if any(one.startswith("context") for one in others):
        kernels = ("flash",)
    others.append(f"attention {draw.choice(kernels)}")
    others.append(f"loss auto in [{', '.join(draw.sample(LOSSES, 2))}]")
    if draw.random() < 0.7:
        others.append("precision (param = auto in [bf16, fp32], reduce = fp32)")
    if not staged and draw.random() < 0.3:
        others.append("comm (prefetch = auto in [implicit, units(2, 2)])")
    if not staged and draw.random() < 0.2:
        others.append("offload (optimizer = auto in [none, all])")
    # Deeper ones have the trace of one capture, and so have three micro batches and more.
    depths = (4, 5, 8) if staged else draw.choice(((2, 3), (6, 7, 8, 9, 10), (6, 7, 8, 9, 10)))
    batches = (4, 8) if staged else draw.choice(((2,), (4,), (12, 16, 20, 24)))
    every = [
        Variant(layers, devices * batch, cluster)
        for layers in depths
        for batch in batches
        for cluster in CLUSTERS[devices]
    ]
    variants = draw.sample(every, 1 if staged else min(VARIANTS, len(every)))
    return Family(model, f"micro = auto in [1, 2, 4], seq_len = {length}", tuple(others), tuple(variants))


def opened(family: Family, variant: Variant) -> OpenPlan | None:
    """A plan of a family; None where it is not legal.

    Values of domains are not linted here, but with each candidate that has them.
    """
    found = resolve(family.text(variant), "drawn.plan", directory=Path())
    if found.plan is None or any(item.severity == "error" for item in found.diagnostics):
        return None
    manifest = manifest_of(found.plan, found, Path(), None)
    assert isinstance(manifest, Manifest)
    analysis = Analysis(found.plan, manifest, Path(), resolution=found)
    if errors(analysis):
        return None
    linted = with_open_rules(Linted((), found.files, found, analysis), directory=Path())
    plan = OpenPlan(linted, directory=Path())
    return None if plan.refused else plan
