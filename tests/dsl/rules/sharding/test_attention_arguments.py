"""Attention over the pieces of a sequence: its arguments in a factory's forward are those that the runtime supports."""

from __future__ import annotations

from pathlib import Path

from support.texts.rule_plans import codes, diagnostics

FACTORY = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend


class Attention(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.call = call

    def forward(self, x, mask=None):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.call == "a flat call":
            q, k, v = (part.transpose(1, 2).flatten(2) for part in (q, k, v))
            return attend(q, k, v)
        if self.call == "a call with a mask the second time":
            y = attend(q, k, v, mask)
        else:
            y = eval(self.call)
        return y.transpose(1, 2).reshape(b, t, 16)


class Net(nn.Module):
    def __init__(self, **calls):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        for name, call in calls.items():
            self.add_module(name, Attention(call))

    def forward(self, tokens, positions=None):
        x = self.embed(tokens)
        for child in self.children():
            if isinstance(child, Attention):
                x = child(x) + child(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
        return self.head(x)
"""
SUPPORTED = {
    "plain": "attend(q, k, v)",
    "causal": "attend(q, k, v, None, 0.0, True)",
    "scaled": "attend(q, k, v, is_causal=True, scale=0.5)",
    "dropping_in_evaluation": "attend(q, k, v, dropout_p=0.0 if self.training else 0.1)",
    "grouped": "attend(q, k[:, :2], v[:, :2], enable_gqa=True)",
}
UNSUPPORTED = {
    "masked": ("attend(q, k, v, q.new_ones(t, t).tril().bool())", "a mask"),
    "biased": ("attend(q, k, v, attn_mask=q.new_ones(t, t))", "a mask"),
    "dropping": ("attend(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)", "dropout"),
    "few_keys": ("attend(q, k[:, :, ::2], v[:, :, ::2])", "8 queries and 4 keys"),
    "one_key": ("attend(q, k[:, :1], v[:, :1])", "4 heads of queries and 1 of keys, without `enable_gqa`"),
    "flat": ("a flat call", "tensors of 3 dims"),
    "later": ("a call with a mask the second time", "a mask"),
}


def model(calls: dict[str, str], directory: Path) -> str:
    """Return the statement of a model with an attention for each of these calls."""
    (directory / "net.py").write_text(f"{FACTORY}\n\ndef build():\n    return Net(**{calls!r})\n")
    return 'model python("net:build")\n'


def plan(text: str, options: str = "", ranks: int = 2) -> str:
    mesh = f"mesh (dp_shard = {8 // ranks}, cp = {ranks})\nfsdp on dp_shard, cp {{ root = unit }}\n"
    return f"{text}{mesh}context on cp{options}\n"


def test_arguments_that_pieces_do_not_allow_are_reported(tmp_path: Path) -> None:
    calls = SUPPORTED | {name: call for name, (call, _) in UNSUPPORTED.items()}
    inspected_once = model(calls, tmp_path)
    for options in ("", " (rotate = alltoall)", " (rotate = heads)"):
        found = [item for item in diagnostics(plan(inspected_once, options), tmp_path) if item.code == "LP316"]
        assert [item.message.split("`")[3] for item in found] == list(UNSUPPORTED), options
        for item, (_, given) in zip(found, UNSUPPORTED.values(), strict=True):
            assert item.message.endswith(f"its forward calls `scaled_dot_product_attention` with {given}"), options


def test_heads_are_counted_where_attention_is_called(tmp_path: Path) -> None:
    text = model({"plain": SUPPORTED["plain"]}, tmp_path)
    assert "LP426" in codes(plan(text, " (rotate = heads)", ranks=8), tmp_path)
    assert "LP426" not in codes(plan(text, " (rotate = heads)", ranks=4), tmp_path)
