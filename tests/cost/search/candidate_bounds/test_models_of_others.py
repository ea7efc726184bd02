"""Lower bounds of models of other authors, and of images, never exceed the full simulation of a candidate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.dsl.lint import lint
from support.models.manifests import inspected_in_this_process
from support.simulation.bounded_candidates import bounded_wrongly
from support.simulation.simulator import in_the_simulator

_SIZE = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 32000}
CONFIGS = {
    "llama": {"model_type": "llama", "intermediate_size": 5632, "num_key_value_heads": 4, **_SIZE},
    "tied": {"model_type": "qwen3", "intermediate_size": 6144, "num_key_value_heads": 8, "head_dim": 128, **_SIZE}
    | {"tie_word_embeddings": True},
    # Attention and feed-forward module of a block read the same input.
    "parallel": {"model_type": "gpt_neox", "intermediate_size": 8192, "use_parallel_residual": True, **_SIZE},
    "two texts": {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 1024, "d_kv": 64, "d_ff": 4096,
        "num_layers": 3, "num_heads": 16, "decoder_start_token_id": 0,
    },
    "images": {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 1024,
        "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
    },
}  # fmt: skip
BLOCKS = {
    "llama": "model.layers", "tied": "model.layers", "parallel": "gpt_neox.layers", "images": "vit.layers",
    "two texts": "{encoder, decoder}.block",
}  # fmt: skip
FACTORY = '''\
"""A decoder with layers that not every token goes through, or whose input has no gradient."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(1024)
        self.up, self.gate = nn.Linear(1024, 4096), nn.Linear(1024, 4096)
        self.down, self.of_positions = nn.Linear(4096, 1024), nn.Linear(1024, 1024)
        self.first = nn.Linear(1024, 1024)

    def forward(self, x):
        normed = self.norm(x)
        at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None].expand(-1, 1024)
        x = x + self.down(self.up(normed) * torch.sigmoid(self.gate(normed))) + self.of_positions(at)
        return x + self.first(x[:, :1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8192, 1024)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.output = nn.Linear(1024, 8192)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def build():
    return Model()
'''
HEAD = """\
plan test
model {model}
cluster h100_sxm(devices = 4)
"""
SHARDED = """\
batch (global = 16, micro = auto in [1, 2, 4], seq_len = 1024)
mesh (dp_shard = rest, tp = auto in [1, 2])
shard standard on tp (sequence)
fsdp blocks on dp_shard {{ {blocks}.* = unit(reshard = auto in [after_forward, never]) }}
comm (prefetch = auto in [implicit, units(2, 2)])
checkpoint {{ {blocks}.* = auto in [none, full, every(2), selective([attention, matmul])] }}
loss auto in [eager, chunked(4), chunked(4, last_layer = true)]
"""
REPLICATED = """\
batch (global = 16, micro = auto in [1, 2, 4], seq_len = 1024)
mesh (dp_replicate = auto in [1, 2, 4], dp_shard = rest)
fsdp blocks on dp_shard {{ {blocks}.* = unit(reshard = auto in [after_forward, never]) }}
checkpoint {{ {blocks}.* = auto in [none, full] }}
compile {{ {blocks}.* = auto in [none, inductor] }}
precision (param = auto in [bf16, fp32])
"""
PIPELINED = """\
batch (global = 16, micro = auto in [1, 2], seq_len = 1024)
mesh (pp = auto in [1, 2], dp_shard = rest)
fsdp blocks on dp_shard {{ {blocks}.* = unit(reshard = after_backward) }}
pipeline on pp (schedule = auto in [GPipe, 1F1B, Interleaved1F1B], split = auto in [even, [1, 3], [3, 1]])
checkpoint {{ {blocks}.* = auto in [none, full] }}
"""


def bounded(folder: Path, name: str, body: str, count: int, seed: int) -> list[str]:
    """Return drawn candidates whose bounds exceed their simulation."""
    if name == "factory":
        (folder / "models.py").write_text(FACTORY)
        model = 'python("models:build")'
    elif name == "built-in images":
        model = 'vit("l16", n_layers = 4)'
    else:
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
        model = 'huggingface("config.json")'
    blocks = BLOCKS.get(name, "layers")
    if name not in ("llama", "tied"):  # there are no standard styles of these
        body = body.replace("shard standard on tp (sequence)\n", "").replace(", tp = auto in [1, 2]", "")
    if name == "factory" or "images" in name:
        body = body.replace("fsdp blocks on dp_shard {{ ", "fsdp on dp_shard {{ root = unit, ")
    if "images" in name:
        body = body.replace(", seq_len = 1024", "").replace(", chunked(4), chunked(4, last_layer = true)", "")
    return bounded_wrongly(HEAD.format(model=model) + body.format(blocks=blocks), folder, count, seed)


DECIDED = """\
batch (global = 16, micro = 2, seq_len = 1024)
mesh (dp_shard = 2, tp = 2)
shard standard on tp (sequence)
fsdp blocks on dp_shard
"""


def test_layers_bound_a_step_before_any_simulation(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    with inspected_in_this_process():
        text = HEAD.format(model='huggingface("config.json")') + DECIDED
        analysis = lint(text, "test.plan", directory=tmp_path).analysis
    assert analysis is not None
    bounds = BoundsOf()
    least = bounds.layers.of_layers(analysis)
    assert len(least) == 4 * 7 + 1  # linear layers of four blocks, and the last one
    assert all(took.backward > took.forward > 0.0 for took in least.values())
    # What else a step takes at least is added.
    layers = sum(took.forward + took.backward for took in least.values())
    assert 4 * layers < bounds.step_time(analysis) < 2 * 4 * layers


@pytest.mark.slow
@pytest.mark.parametrize("body", [SHARDED, REPLICATED, PIPELINED], ids=["sharded", "replicated", "pipelined"])
@pytest.mark.parametrize("name", [*CONFIGS, "factory", "built-in images"])
def test_bounds_are_below_the_simulation(name: str, body: str, tmp_path: Path):
    assert in_the_simulator(bounded, tmp_path, name, body, 8, 7) == []
