"""A model whose forward cannot be followed is reported where a statement needs its flow."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.rule_plans import codes, diagnostics

FACTORY = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 16, 16))

    def forward(self, rows, counts):
        return torch.cat([part @ w for part, w in zip(rows.split(counts.tolist()), self.w)])


class Block(nn.Module):
    def __init__(self, routed):
        super().__init__()
        self.up, self.down, self.routed = nn.Linear(16, 32), nn.Linear(32, 16), routed
        if routed:
            self.experts = Experts()

    def forward(self, x):
        if self.routed:
            rows = x.flatten(0, 1)
            x = self.experts(rows, torch.full((4,), len(rows) // 4, device=x.device)).view_as(x)
        return x + self.down(self.up(x))


class Net(nn.Module):
    def __init__(self, guarded, routed):
        super().__init__()
        self.embed, self.head, self.guarded = nn.Embedding(256, 16), nn.Linear(16, 256), guarded
        self.blocks = nn.ModuleList(Block(routed) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.guarded and x.isnan().any():
            x = x.nan_to_num()
        return self.head(x)


def net(guarded=False, routed=False):
    return Net(guarded, routed)
"""
WRONG = "shard on tp { blocks.*.up = colwise }\n"
EXPERTS = """\
mesh (dp_shard = 8, ep = 2)
fsdp on dp_shard { blocks.* = unit, root = unit }
shard on ep { blocks.*.experts = experts }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(FACTORY)
    return tmp_path


def test_layouts_that_cannot_be_checked_are_reported(folder: Path):
    model = 'model python("net:net", guarded = {})\n'
    [found] = [
        item
        for item in diagnostics(f"{model.format('true')}mesh (dp_shard = 4, tp = 2)\n{WRONG}", folder)
        if item.code == "LP441"
    ]
    assert found.severity == "warning" and "forward failed on the meta device" in found.message
    assert "LP441" not in codes(f"{model.format('true')}mesh (dp_shard = 8)\n{WRONG}", folder)
    assert codes(f"{model.format('false')}mesh (dp_shard = 4, tp = 2)\n{WRONG}", folder) & {"LP411", "LP441"} == {
        "LP411"
    }


def test_experts_that_were_not_seen_are_reported_with_the_reason(folder: Path):
    found = diagnostics(f'model python("net:net", routed = true)\n{EXPERTS}', folder)
    [message] = [item.message for item in found if "is called is not known" in item.message]
    assert message.startswith("the model could not be followed, so how `blocks.0.experts` is called is not known: ")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("mesh (dp_shard = 4, tp = 2)\nshard on tp { model.layers.*.self_attn.o_proj = rowwise }", "LP441"),
        ("mesh (dp_replicate = 4, pp = 2)\npipeline on pp\nreplicate on dp_replicate", "LP518"),
        ("mesh (dp_shard = 4, cp = 2)\nfsdp on dp_shard, cp { root = unit }\ncontext on cp", "LP010"),
    ],
)
def test_eager_experts_of_transformers_are_named_as_the_reason(folder: Path, body: str, code: str):
    config = Path(__file__).parents[3] / "support" / "huggingface" / "qwen3_moe.json"
    model = f'model huggingface("{config}", experts_implementation = "eager")\n'
    [found] = [item for item in diagnostics(f"{model}{body}", folder) if item.code == code]
    assert 'leave `experts_implementation = "eager"` out' in found.help[0]
    assert "torch.nonzero" in found.message and not found.message.endswith("_con")
    assert "example_inputs" not in found.message
    assert found.message.endswith(" ...")


@pytest.mark.parametrize(
    ("kind", "plan", "axis"),
    [
        ("skipped", "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit }\n", "dp_shard"),
        ("skipped", "mesh (dp_replicate = 8)\nreplicate on dp_replicate\n", "dp_replicate"),
        ("skipped", "cluster cpu(devices = 1)\nfsdp on dp_shard { blocks.* = unit }\n", None),
        ("skipped", "cluster cpu(devices = 1)\n", None),
        ("none", "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit }\n", None),
    ],
)
def test_ranks_that_may_decide_differently_are_reported(kind: str, plan: str, axis: str | None):
    text = f'model python("support.models.read_weights:build", kind = "{kind}")\n{plan}'
    found = [item for item in diagnostics(text) if item.code == "LP336"]
    assert len(found) == (axis is not None)
    if axis is not None:
        assert found[0].severity == "warning"
        assert "every rank must call the same modules" in found[0].message
        assert found[0].others[0].text == "8 ranks"


DRAWS = """
import random
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.embed, self.head, self.how = nn.Embedding(256, 16), nn.Linear(16, 256), how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.own = random.Random(0)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            draw = self.own.random if self.how == "own" else random.random
            if self.how == "torch":
                draw = torch.rand(1, device="cpu").item
            if self.how == "scales" or draw() >= 0.1:
                x = block(x)
        return self.head(x) * (draw() if self.how == "scales" else 1)


def net(how):
    return Net(how)
"""
UNITS = "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit }\n"
TENSORS = "mesh (dp_shard = 4, tp = 2)\nfsdp on dp_shard { root = unit }\nshard on tp { blocks.*.0 = colwise }\n"


@pytest.mark.parametrize(
    ("how", "plan", "ranks", "message"),
    [
        ("skips", UNITS, 8, "of `random` on the host, by which it uses `blocks.0.0.weight` or does not"),
        ("skips", "mesh (dp_replicate = 8)\nreplicate on dp_replicate\n", 8, "`blocks.0.0.weight`"),
        ("skips", "cluster cpu(devices = 2)\nmesh (tp = 2)\nshard on tp { blocks.*.0 = colwise }\n", 2, "every rank"),
        ("skips", "cluster cpu(devices = 2)\nmesh (pp = 2)\npipeline on pp (schedule = 1F1B)\n", 0, ""),
        ("skips", "cluster cpu(devices = 1)\n", 0, ""),
        ("torch", UNITS, 8, "of `torch` on the host, by which"),
        ("own", UNITS, 0, ""),
        ("own", TENSORS, 0, ""),
        ("scales", UNITS, 0, ""),
        ("scales", TENSORS, 2, "of `random` on the host: ranks of `tp` compute one result together"),
    ],
)
def test_random_numbers_that_ranks_draw_on_the_host(tmp_path: Path, how: str, plan: str, ranks: int, message: str):
    (tmp_path / "net.py").write_text(DRAWS)
    found = [
        item
        for item in diagnostics(f'model python("net:net", how = "{how}")\n{plan}', tmp_path)
        if item.code == "LP336"
    ]
    assert len(found) == bool(ranks)
    for item in found:
        assert message in item.message
        assert item.help[0].startswith("draw from a generator of the model's own")
        assert item.others[0].text == f"{ranks} ranks"


ENCODER = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embed(tokens), mask=mask))
"""


@pytest.mark.parametrize(("layer", "found"), [("self_attn.out_proj", True), ("linear2", False)])
def test_attention_of_torch_that_cannot_be_followed_refuses_styles_of_its_last_layer(
    tmp_path: Path, layer: str, found: bool
) -> None:
    """torch reads values of a mask to tell whether it is causal; other inputs would not help."""
    (tmp_path / "net.py").write_text(ENCODER)
    styles = f"shard on tp {{ encoder.layers.*.{layer} = rowwise(input = replicate) }}"
    linted = diagnostics(f'model python("net:Net")\nmesh (dp_shard = 4, tp = 2)\n{styles}', tmp_path)
    said = {item.code: item.message for item in linted}
    assert "Tensor.item() cannot be called" in said["LP441"]
    assert "example_inputs" not in said["LP441"]
    assert ("LP420" in said) is found
    if found:
        assert said["LP420"].startswith("`encoder.layers.*.self_attn.out_proj` is never called")
