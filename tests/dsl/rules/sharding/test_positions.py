"""Rules about token positions report plans whose ranks would count them from 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.marks import some_slow
from support.texts.rule_plans import codes, diagnostics, message

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 256}
FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, tokens{argument}):
        x = self.embed(tokens)[:, None]
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x)[:, 0])
"""
DEVICES = "use the devices for `dp_shard` or `tp`"
CONTEXT = """mesh (dp_shard = 4, cp = 2)
fsdp on dp_shard, cp { root = unit }
context on cp
"""


@pytest.mark.parametrize(("argument", "found"), [("", True), (", positions=None", False)])
def test_context_parallel_requires_a_forward_with_positions(tmp_path: Path, argument: str, found: bool) -> None:
    (tmp_path / "net.py").write_text(FACTORY.replace("{argument}", argument))
    plan = f'model python("net:Net")\n{CONTEXT}'
    assert ("LP311" in codes(plan, tmp_path)) is found


def test_the_built_in_models_take_positions() -> None:
    assert "LP311" not in codes(f'model llama3("tiny")\n{CONTEXT}')


def test_context_parallel_of_hugging_face_models_is_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    said = message(f'model huggingface("config.json")\n{CONTEXT}', "LP311", tmp_path)
    assert "`LlamaForCausalLM` is not told their places" in said


@pytest.mark.parametrize(
    ("config", "helped"),
    [
        (LLAMA, ["write the model as one of the built-in family `llama3`, which takes positions", f"or {DEVICES}"]),
        ({**LLAMA, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}, [DEVICES]),
    ],
)
def test_help_for_hugging_face_models_names_a_built_in_family_or_other_axes(
    tmp_path: Path, config: dict, helped: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    linted = diagnostics(f'model huggingface("config.json")\n{CONTEXT}', tmp_path)
    [found] = [item for item in linted if item.code == "LP311"]
    assert list(found.help) == helped


@pytest.mark.parametrize(
    ("treatment", "found"),
    [
        ("rowwise(input = replicate, output = shard(1))", True),
        ("colwise(output = shard(1))", True),
        ("rowwise(input = replicate)", False),
    ],
)
def test_hugging_face_embeddings_refuse_sequence_sharding(tmp_path: Path, treatment: str, found: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shard = f"shard on tp {{ model.embed_tokens = {treatment} }}"
    plan = f'model huggingface("config.json")\nmesh (dp_shard = 4, tp = 2)\n{shard}'
    assert ("LP425" in codes(plan, tmp_path)) is found


def test_a_fused_layer_of_gpt2_is_refused_under_tensor_parallelism(tmp_path: Path) -> None:
    """A Conv1D of `transformers` holds its weight transposed, which no style of torch cuts."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    shard = "shard on tp { transformer.h.*.mlp.c_fc = colwise\ntransformer.h.*.mlp.c_proj = rowwise }"
    found = codes(f'model huggingface("config.json")\nmesh (dp_shard = 4, tp = 2)\n{shard}', tmp_path)
    assert "LP407" in found


MODEL = """
import torch
from torch import nn
from torch.nn import functional


def turned(x, angles):
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("table", torch.randn(256, 2))

    def forward(self, x, positions=None):
        q, k, v = (layer(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        {angles}
        y = functional.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()

    def forward(self, x, positions=None):
        return x + self.attention(self.norm(x), positions)


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(256, 16))
        self.register_buffer("scale", torch.randn(1, 16))

    def forward(self, x, positions=None):
        return {placed}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(256, 16), Places(), nn.Linear(16, 256)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(16)

    def forward(self, tokens, positions=None):
        x = self.places(self.embed(tokens), positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))
"""
COUNTED_ANGLES = "angles = torch.arange(q.shape[2], device=q.device)[:, None] * self.table[0]"
CUT_ANGLES = "angles = self.table[: q.shape[2]]"
LOOKED_UP_ANGLES = f"{CUT_ANGLES} if positions is None else self.table[positions]"
LOOKED_UP = "x + (self.table[: x.shape[1]] if positions is None else self.table[positions])"
CUT = "x + self.table[: x.shape[1]]"


def written(folder: Path, angles: str, placed: str) -> None:
    (folder / "net.py").write_text(MODEL.replace("{angles}", angles).replace("{placed}", placed))


@pytest.mark.parametrize(
    ("angles", "placed", "said"),
    [
        (LOOKED_UP_ANGLES, LOOKED_UP, None),
        (COUNTED_ANGLES, LOOKED_UP, "`layers.*.attention` counts places from 0 by `arange`"),
        pytest.param(
            CUT_ANGLES,
            LOOKED_UP,
            "`layers.*.attention` counts places from 0 by a part of `table`",
            marks=pytest.mark.slow,
        ),
        (LOOKED_UP_ANGLES, CUT, "`places` counts places from 0 by a part of `table`"),
    ],
)
def test_context_parallel_refuses_models_that_count_places(
    tmp_path: Path, angles: str, placed: str, said: str | None
) -> None:
    written(tmp_path, angles, placed)
    plan = f'model python("net:Net")\n{CONTEXT}'
    if said is None:
        assert not codes(plan, tmp_path) & {"LP311", "LP317", "LP318"}
    else:
        assert said in message(plan, "LP317", tmp_path)
        assert "LP317" not in codes(plan.replace("cp = 2", "cp = 1"), tmp_path)


def test_context_parallel_refuses_unused_positions_of_a_model_that_runs_at_one_length(tmp_path: Path) -> None:
    example = "    def example_inputs(self):\n        return (torch.zeros(2, 256, dtype=torch.int64),)\n"
    written(tmp_path, "angles = self.table", "x + self.table")
    (tmp_path / "net.py").write_text((tmp_path / "net.py").read_text() + f"\n{example}")
    said = message(f'model python("net:Net")\n{CONTEXT}', "LP317", tmp_path)
    assert said.endswith("and the model's forward takes `positions` and does not use them")


STYLES = """
  layers.*.norm                = sequence
  layers.*.attention           = inputs(from = shard(1), to = replicate)
  layers.*.attention.{q, k, v} = colwise
  layers.*.attention.o         = rowwise(output = shard(1))
  norm                         = sequence
  head                         = colwise(input = shard(1), loss_parallel = true)
"""
BEHIND = "embed = rowwise(input = replicate)\nplaces = outputs(from = replicate, to = shard(1))"
BEFORE = "embed = rowwise(input = replicate, output = shard(1))"


@pytest.mark.parametrize("angles", some_slow([COUNTED_ANGLES, CUT_ANGLES], COUNTED_ANGLES))
@pytest.mark.parametrize(
    ("embedded", "placed", "found"),
    [
        (BEFORE, CUT, True),
        (BEFORE, "x + (torch.arange(x.shape[1], device=x.device)[:, None] / 100).sin() * self.scale", True),
        (BEHIND, CUT, False),
        pytest.param(BEFORE, "x + self.scale", False, marks=pytest.mark.slow),
        (BEFORE, "x * (x.shape[1] / 256)", False),
    ],
)
def test_pieces_of_the_sequence_refuse_places_of_their_length(
    tmp_path: Path, embedded: str, placed: str, angles: str, found: bool
) -> None:
    """What attention applies to whole sequences is right."""
    written(tmp_path, angles, placed)
    plan = f'model python("net:Net")\nmesh (dp_shard = 4, tp = 2)\nshard on tp {{\n{embedded}{STYLES}}}\n'
    refused = {code for code in codes(plan, tmp_path) if code.startswith("LP4")}
    assert refused == ({"LP425"} if found else set())
    if found:
        assert "in `places` a piece of the sequence, `shard(1)` from `embed`" in message(plan, "LP425", tmp_path)
