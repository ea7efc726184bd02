"""`legoai verify` of models from a factory or from Hugging Face."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.commands.verified import here, verified

__all__ = ["here"]

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512, "n_positions": 128}
LLAMA_PLAN = """plan theirs

model   huggingface("config.json")
cluster cpu(devices = 4)
batch   (global = 16, micro = 2, seq_len = 64)
mesh    (dp_shard = 2, tp = 2)

shard on tp {
  model.layers.*.self_attn.{q_proj, k_proj, v_proj} = colwise
  model.layers.*.self_attn.o_proj                   = rowwise
  model.layers.*.mlp.{gate_proj, up_proj}           = colwise
  model.layers.*.mlp.down_proj                      = rowwise
}

fsdp on dp_shard { model.layers.* = unit }
checkpoint { model.layers.{0..1} = full }
"""
GPT2_PLAN = """plan theirs

model   huggingface("config.json")
cluster cpu(devices = 2)
batch   (global = 16, micro = 2, seq_len = 64)
mesh    (dp_shard = 2)

fsdp on dp_shard { transformer.h.* = unit }
"""
FACTORY = """
import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(dim, 2 * dim), nn.Dropout(0.5), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.drop(self.down(F.dropout(self.up(x).relu(), 0.5, self.training)))


class Net(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList([Mixer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(dim, depth):
    return Net(dim, depth)
"""
FACTORY_PLAN = """plan mine

let dim = 16

model   python("my_model:build", dim = dim, depth = 3)
cluster cpu(devices = 2)
batch   (global = 16, micro = 2, seq_len = 64)
mesh    (dp_shard = 2)

fsdp on dp_shard { blocks.* = unit }
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_factory_pipeline_equals_one_device(schedule: str, capsys: pytest.CaptureFixture[str]):
    Path("my_model.py").write_text(FACTORY, encoding="utf-8")
    text = FACTORY_PLAN.replace("depth = 3", "depth = 5").replace("dp_shard = 2", "pp = 2").partition("fsdp")[0]
    status, out, _ = verified(capsys, f"{text}pipeline on pp (schedule = {schedule})")
    assert status == 0, out
    assert "a.plan: 2 ranks compute what one device computes" in out


def test_factory_model_is_verified_unshrunk_or_refused(capsys: pytest.CaptureFixture[str]):
    Path("my_model.py").write_text(FACTORY)
    status, out, _ = verified(capsys, f"{FACTORY_PLAN}checkpoint {{ blocks.0 = full }}")
    assert status == 0, out
    assert "model: python(" in out
    assert re.search(r"first values +15 alike", out)
    status, _, err = verified(capsys, FACTORY_PLAN, "--set", "dim=4096")
    assert status == 2
    assert "only its author can make it smaller" in err


def test_random_numbers_other_than_dropout_are_named(capsys: pytest.CaptureFixture[str]):
    Path("my_model.py").write_text(FACTORY.replace("self.up(x).relu()", "self.up(x) * torch.rand_like(x[..., :1])"))
    status, out, _ = verified(capsys, FACTORY_PLAN, "--steps", "1")
    assert status == 1
    assert "random         drawn in forward  not by dropout: one device draws others than the ranks" in out


def test_initial_values_that_a_constructor_gives_are_those_of_the_training(capsys: pytest.CaptureFixture[str]):
    own = """        self.register_buffer("places", torch.arange(64))
        self.register_buffer("ones", torch.empty(dim))
        nn.init.normal_(self.embed.weight, std=0.02)

    def reset_parameters(self):
        raise AssertionError

"""
    left_empty = "\n    def init_buffers(self):\n        self.places.copy_(torch.arange(64)); self.ones.fill_(1.0)\n"
    text = FACTORY.replace(
        "        self.head = nn.Linear(dim, 256)\n", f"        self.head = nn.Linear(dim, 256)\n{own}"
    )
    Path("my_model.py").write_text(text.replace("\n\ndef build", f"{left_empty}\n\ndef build"), encoding="utf-8")
    status, out, _ = verified(capsys, FACTORY_PLAN, "--steps", "1")
    assert status == 0, out
    assert re.search(r"first values +16 alike", out), "without the buffer that the constructor leaves empty"


@pytest.mark.parametrize(
    ("config", "plan"),
    [pytest.param(LLAMA, LLAMA_PLAN, id="llama", marks=pytest.mark.slow), pytest.param(GPT2, GPT2_PLAN, id="gpt2")],
)
def test_hugging_face_model_equals_one_device(config: dict[str, object], plan: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    Path("config.json").write_text(json.dumps(config))
    status, out, _ = verified(capsys, plan)
    assert status == 0, out
    assert "compute what one device computes" in out


OTHER_AUTHORS = """plan theirs

model     python("support.models.other_authors:build", kind = "KIND")
cluster   cpu(devices = 2)
batch     (global = 4, micro = 2, seq_len = 8)
mesh      (dp_shard = 2)
fsdp on dp_shard { blocks.* = unit }
precision (param = fp32)
"""


def test_buffers_follow_parameters_into_fp64(here: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = verified(capsys, OTHER_AUTHORS.replace("KIND", "multiplied"), "--steps", "1")
    assert status == 0, out
    assert "fp64 throughout" in out


def test_tensors_that_forward_makes_in_fp32_are_explained(here: Path, capsys: pytest.CaptureFixture[str]):
    plan = OTHER_AUTHORS.replace("KIND", "made_matrix")
    status, out, _ = verified(capsys, plan, "--steps", "1")
    assert status == 1
    assert "here fp64: try `--dtype plan`" in out
    assert verified(capsys, plan, "--steps", "1", "--dtype", "plan")[0] == 0


def test_loss_inside_of_a_model_is_suspected(here: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = verified(capsys, OTHER_AUTHORS.replace("KIND", "balanced"), "--steps", "1")
    assert status == 1
    assert "one that forward itself adds to gradients depends on the mesh" in out
