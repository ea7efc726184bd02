"""Rules about context parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.rule_plans import codes, diagnostics, message

USE = "fsdp on dp_shard { layers.* = unit }\n"


@pytest.mark.parametrize(
    ("length", "ranks", "balance", "fits"),
    [
        (256, 4, "head_tail", True),
        (252, 4, "head_tail", False),
        (252, 4, "none", True),
        (250, 4, "none", False),
        (24, 4, "head_tail", True),
        (20, 4, "head_tail", False),
    ],
)
def test_sequence_must_divide_evenly(length: int, ranks: int, balance: str, fits: bool) -> None:
    batch = f"batch (global = 64, micro = 1, seq_len = {length})\n"
    text = f"{batch}{USE}mesh (dp_shard = {8 // ranks}, cp = {ranks})\ncontext on cp (balance = {balance})"
    assert ("LP405" not in codes(text)) == fits


def test_pytorch_load_balancer_raises_for_refused_lengths() -> None:
    """PyTorch's own balancer asks for twice the ranks."""
    import torch
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    _HeadTailLoadBalancer(256, 4, torch.device("cpu"))._generate_indices()
    with pytest.raises(AssertionError):
        _HeadTailLoadBalancer(252, 4, torch.device("cpu"))._generate_indices()


def test_nearest_legal_length_is_suggested() -> None:
    text = f"batch (global = 64, micro = 1, seq_len = 252)\n{USE}mesh (dp_shard = 2, cp = 4)\ncontext on cp"
    found = next(item for item in diagnostics(text) if item.code == "LP405")
    assert found.help == ("`seq_len` must be a multiple of 8, such as 248",)
    assert [label.text for label in found.others] == ["4 ranks", "two pieces for each rank, by default"]


@pytest.mark.parametrize(("model", "fits"), [('llama3("8b")', True), ('gpt2("small")', True), ('vit("b16")', False)])
def test_context_parallel_requires_token_sequences(model: str, fits: bool) -> None:
    assert ("LP310" not in codes(f"model {model}\n{USE}mesh (dp_shard = 4, cp = 2)\ncontext on cp")) == fits


@pytest.mark.parametrize(
    ("ranks", "tp", "rotate", "fits"),
    [
        (8, 1, "heads", True),
        (16, 1, "heads", False),
        (16, 1, "alltoall", True),
        (2, 4, "heads", True),
        (4, 4, "heads", False),
        (4, 4, "allgather", True),
    ],
)
def test_head_exchange_divides_heads_left_by_tensor_parallel(ranks: int, tp: int, rotate: str, fits: bool) -> None:
    """An 8B model has eight key/value heads."""
    shard = "shard standard on tp\n" if tp > 1 else ""
    mesh = f"mesh (dp_shard = 1, cp = {ranks}, tp = {tp})\ncluster h100_sxm(hosts = {ranks * tp // 8 or 1})\n"
    text = f'model llama3("8b")\nbatch (global = 64, micro = 1, seq_len = 8192)\n{USE}{mesh}{shard}'
    assert ("LP426" not in codes(f"{text}context on cp (rotate = {rotate})")) == fits


def test_head_exchange_divides_unsharded_heads_by_cp_only() -> None:
    text = f'model llama3("8b")\nbatch (global = 64, micro = 1, seq_len = 8192)\n{USE}'
    partly = (
        "mesh (dp_shard = 1, cp = 8, tp = 2)\nshard on tp { layers.*.feed_forward.w1 = colwise(output = replicate) }\n"
    )
    assert "LP426" not in codes(f"{text}{partly}\ncontext on cp (rotate = heads)")


@pytest.mark.parametrize(("options", "fits"), [("rotate = heads", True), ("rotate = heads, balance = none", True),
                                               ("rotate = heads, balance = head_tail", False)])  # fmt: skip
def test_head_exchange_refuses_load_balancing(options: str, fits: bool) -> None:
    text = f'model llama3("8b")\nbatch (global = 64, micro = 1, seq_len = 8192)\n{USE}mesh (dp_shard = 2, cp = 4)\n'
    assert ("LP427" not in codes(f"{text}context on cp ({options})")) == fits


SHIFTED = """
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x):
        {shift}
        x = self.proj(x)[:, None]
        return functional.scaled_dot_product_attention(x, x, x)[:, 0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, positions=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


@pytest.mark.parametrize(("shift", "found"), [("x = functional.pad(x, (0, 0, 1, 0))[:, :-1]", True), ("pass", False)])
def test_tokens_are_combined_by_attention_alone(tmp_path: Path, shift: str, found: bool) -> None:
    (tmp_path / "net.py").write_text(SHIFTED.replace("{shift}", shift))
    plan = 'model python("net:Net")\nmesh (dp_shard = 4, {})\nfsdp on dp_shard { layers.* = unit }\n'
    cut = plan.replace("{}", "cp = 2").replace("on dp_shard", "on dp_shard, cp") + "context on cp"
    assert ("LP318" in codes(cut, tmp_path)) is found
    if found:
        assert "`layers.*` combines tokens by `pad`" in message(cut, "LP318", tmp_path)
    assert "LP318" not in codes(plan.replace("{}", "tp = 2"), tmp_path)
