"""Training and FSDP units of programs on a mesh without stages."""

from __future__ import annotations

from support.texts.plans import HEAD, lowered
from support.training.staged import with_fewer_passes

TRAINING = """\
batch     (global = 8, micro = 2, seq_len = 32)
optimizer adamw(lr = 1e-2, betas = [0.9, 0.95], weight_decay = 0.1)
clip      (norm = 1.0)
schedule  cosine(warmup = 1, steps = 10, floor = 0.1)
"""
TWO_BLOCKS = HEAD.replace('"tiny"', '"tiny", n_layers = 2')
"""For tests with equal blocks: a training takes half of the time."""
UNITS = "{ layers.* = unit, root = unit }\n"


def text_of(body: str, head: str = HEAD) -> str:
    return lowered(f"{head}{with_fewer_passes(TRAINING, body)}{body}").text
