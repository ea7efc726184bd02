"""Models of other authors under the graph backend of `fsdp`: they train as under the eager one, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.plans import HEAD
from support.training.backends import MIXED, agree


def huggingface(config: str, *fields: str) -> str:
    """The head of a plan for a model of a config."""
    place = Path(__file__).parents[2] / "support" / "huggingface" / f"{config}.json"
    return HEAD.replace('llama3("tiny")', f"huggingface({', '.join((repr(str(place)), *fields))})".replace("'", '"'))


def of_others(kind: str) -> str:
    """The head of a plan for a model of another author."""
    return HEAD.replace('llama3("tiny")', f'python("support.models.other_authors:build", kind = "{kind}")')


OF_TRANSFORMERS = "fsdp on dp_shard { model.layers.* = unit }\n"
OF_OTHERS = "mesh (dp_shard = 2)\nfsdp on dp_shard { blocks.* = unit }\n"
PLANS = {
    "of transformers": (
        huggingface("llama"),
        f"mesh (dp_shard = 4)\n{OF_TRANSFORMERS}checkpoint {{ model.layers.0 = full }}\n{MIXED}",
        "(reorder = by_time)\ncompile { model.layers.* = aot_eager }",
    ),
    "of transformers, tensor and sequence parallel": (
        huggingface("qwen3"),
        "mesh (dp_shard = 2, tp = 2)\nshard standard on tp (sequence, loss_parallel)\n"
        f"{OF_TRANSFORMERS}checkpoint {{ model.layers.* = selective([attention, matmul]) }}\n{MIXED}",
        "(reorder = true)",
    ),
    "of transformers, tied, on the host": (
        huggingface("gemma2"),
        f"mesh (dp_shard = 2)\n{OF_TRANSFORMERS}{MIXED}",
        "(reorder = true, prefetch = proactive(limit = 1MiB))\noffload (activations = all, optimizer = all)",
    ),
    "of transformers, experts": (
        huggingface("mixtral"),
        f"mesh (dp_shard = 2)\n{OF_TRANSFORMERS}{MIXED}",
        "(reorder = true)",
    ),
    "of transformers, stages whose backward is split": (
        huggingface("qwen3", "num_hidden_layers = 4"),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n"
        f"fsdp on dp_shard {{ model.layers.* = unit(reshard = after_backward) }}\n{MIXED}",
        "(reorder = true)",
    ),
    "of transformers, stages that gather again for backward": (
        huggingface("gpt2", "n_layer = 4"),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = Interleaved1F1B)\n"
        f"fsdp on dp_shard {{ transformer.h.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "of others, with a function of autograd": (of_others("balanced"), f"{OF_OTHERS}{MIXED}", "(reorder = true)"),
    "of others, dropping, compiled": (
        of_others("dropping"),
        f"{OF_OTHERS}precision (param = fp32, reduce = fp32)\n",
        "(reorder = true)\ncompile { blocks.* = aot_eager }",
    ),
    "of others, with hooks and checkpoints": (
        of_others("hooked"),
        f"{OF_OTHERS}checkpoint {{ blocks.1 = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "of others, with buffers": (of_others("buffered"), f"{OF_OTHERS}precision (param = fp32, reduce = fp32)\n", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_backends_agree_bitwise(name: str, gloo, tmp_path: Path):
    agree(gloo, tmp_path, *PLANS[name])
