"""Layout mismatches are found at the module where they occur, with the lines that cause them and a fix."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legoai.dsl.analysis.layouts.propagation import Propagation
from legoai.dsl.analysis.layouts.tensors import Tensor, agrees
from legoai.dsl.lint import lint
from legoai.specs.directives.layouts import Partial, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Heads, Rowwise, SequenceStyle
from support import ROOT
from support.texts.layout_plans import HEAD, LAYOUT_CODES, SEQUENCE_PARALLEL, WHOLE_SEQUENCE, plan
from support.texts.rule_plans import codes, diagnostics, message

PLANS = ROOT / "plans"


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.plan")), ids=lambda path: path.stem)
def test_worked_plans_have_no_placement_diagnostics(path: Path) -> None:
    linted = lint(path.read_text(encoding="utf-8"), str(path), directory=PLANS)
    found = [f"{item.code} {item.message}" for item in linted.diagnostics if item.code.startswith(("LP3", "LP4"))]
    assert found == []


def layout_codes(text: str) -> set[str]:
    return codes(text) & LAYOUT_CODES


GPT = {
    "layers.*.attention.{wq, wk, wv}": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "tok_embeddings": "rowwise",
    "output": "colwise(loss_parallel = true)",
}

GPT_SEQUENCE = {
    **GPT,
    "tok_embeddings": "rowwise(output = shard(1))",
    "pos_embeddings": "rowwise(output = shard(1))",
    "layers.*.{attention_norm, mlp_norm}": "sequence",
    "layers.*.{attention, mlp}": "inputs(from = shard(1), to = replicate)",
    "layers.*.attention.wo": "rowwise(output = shard(1))",
    "layers.*.mlp.down": "rowwise(output = shard(1))",
    "norm": "sequence",
}


def test_learned_positions_have_the_layout_of_the_tokens() -> None:
    model = 'model gpt3("2.7b", tie_embeddings = true)'
    assert layout_codes(plan(GPT, model)) == set()
    assert layout_codes(plan(GPT_SEQUENCE, model)) == set()
    without = {path: style for path, style in GPT_SEQUENCE.items() if path != "pos_embeddings"}
    assert message(plan(without, model), "LP412") == (
        "in `root` a tensor in layout `shard(1)`, from `tok_embeddings`, is combined with one in layout `replicate`, "
        "from `pos_embeddings`"
    )


@pytest.mark.parametrize(
    ("module", "style", "says"),
    [
        ("attention.wo", "colwise(input = shard(1))", "expects `shard(1)`, and `shard(-1)` arrives"),
        ("mlp.down", "colwise(input = shard(1))", "expects `shard(1)`, and `shard(-1)` arrives"),
        ("mlp.up", "rowwise(output = shard(1))", "expects `shard(-1)`, and `shard(1)` arrives"),
    ],
)
def test_layout_mismatch_with_learned_positions_is_reported(module: str, style: str, says: str) -> None:
    styles = {**GPT_SEQUENCE, f"layers.*.{module}": style}
    found = [item.message for item in diagnostics(plan(styles, 'model gpt3("2.7b")')) if item.code == "LP412"]
    assert any(says in message for message in found), found


def test_attention_output_sharded_by_feature_differs_from_sequence_sharding() -> None:
    styles = {
        "layers.*.attention.wo": "colwise",
        "layers.*.attention": "outputs(from = shard(1), to = replicate)",
        "output": "colwise(output = replicate)",
    }
    for model in ('model llama3("tiny")', 'model mixtral("tiny")', 'model gpt3("125m", n_layers = 2)'):
        assert message(plan(styles, model), "LP412").startswith(
            "`layers.*.attention` expects `shard(1)`, and `shard(-1)` arrives from"
        )
        fits = {**styles, "layers.*.attention": "outputs(from = shard(-1), to = replicate)"}
        assert layout_codes(plan(fits, model)) == set()


def test_both_lines_and_the_fix_are_reported() -> None:
    styles = {**SEQUENCE_PARALLEL, "layers.*.feed_forward": "inputs(from = replicate, to = replicate)"}
    found = next(item for item in diagnostics(plan(styles)) if item.code == "LP412")
    assert (
        found.message == "`layers.*.feed_forward` expects `replicate`, and `shard(1)` arrives from `layers.*.ffn_norm`"
    )
    assert [label.text for label in found.others] == ["leaves its output as `shard(1)`"]
    assert found.help[0] == "write `from = shard(1)`"
    assert found.fix is not None
    assert found.fix.edits[0].replacement == "shard(1)"


def test_undecided_layout_has_no_layout_diagnostics() -> None:
    for hole in ("colwise(output = auto)", "auto", "colwise(input = shard(auto))"):
        assert layout_codes(plan({**WHOLE_SEQUENCE, "output": hole})) == set()


def test_axis_of_one_rank_shards_nothing() -> None:
    text = plan({"output": "colwise"})
    assert layout_codes(text) == {"LP419"}
    assert layout_codes(text.replace("dp_shard = 4, tp = 2", "dp_shard = 8, tp = 1")) == set()


def test_equal_blocks_are_propagated_once_and_blocks_with_other_rules_separately() -> None:
    text = HEAD.replace("tiny", "405b")
    styles = {**SEQUENCE_PARALLEL, "layers.100.attention.wo": "rowwise"}
    linted = lint(text + plan(styles), "x.plan", directory=Path())
    assert linted.analysis is not None
    assert linted.analysis.layouts is not None
    assert len(linted.analysis.layouts.mismatches) == 1
    shard = linted.analysis.plan.shard_on("tp")
    assert shard is not None
    assert linted.analysis.manifest is not None
    rules = linted.analysis.assigned(shard).by_path
    durations = []
    for _ in range(5):
        start = time.process_time()
        Propagation(linted.analysis.manifest, rules).run()
        durations.append(time.process_time() - start)
    assert min(durations) < 0.06  # about 2 ms where nothing else runs


@pytest.mark.parametrize(
    ("tensor", "layout", "expected"),
    [
        (Tensor(state="replicate"), Replicated(), True),
        (Tensor(state="replicate"), Sharded(dim=1), False),
        (Tensor(state="shard", dim=1), Sharded(dim=1), True),
        (Tensor(state="shard", dim=2, rank=3), Sharded(dim=-1), True),
        (Tensor(state="shard", dim=-1, rank=3), Sharded(dim=2), True),
        (Tensor(state="shard", dim=-1), Sharded(dim=2), None),
        (Tensor(state="shard", dim=1, moved=True), Sharded(dim=2), None),
        (Tensor(state="shard", dim=1, rank=3), Sharded(dim=-1), False),
        (Tensor(state="partial"), Partial(), True),
        (Tensor(state="partial"), Replicated(), False),
        (Tensor(state="any"), Sharded(dim=0), None),
        (Tensor(state="unknown"), Replicated(), None),
    ],
)
def test_layout_agreement_depends_on_known_shapes(tensor: Tensor, layout: Any, expected: bool | None) -> None:
    assert agrees(tensor, layout) is expected


def follow(model: Any, styles: dict[str, Any]) -> list[tuple[str, str]]:
    """The kinds and places of diagnostics in a module of PyTorch's own making."""
    from legoai.specs.directives.base import PathRule
    from legoai.specs.models.manifests.described.describe import describe

    rules = {path: PathRule(path=path, treatment=treatment) for path, treatment in styles.items()}
    return [(item.kind, item.path) for item in Propagation(describe(model, "test"), rules).run()]


def meta(build: Callable[[], Any]) -> Any:
    import torch

    with torch.device("meta"):
        return build()


def embedded(attention: Callable[[], Any]) -> Any:
    """An embedding and an attention, on the meta device."""
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(64, 32)
            self.attention = attention()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.attention(self.tok(tokens))

    return meta(Model)


def fused_attention(norm: bool) -> Any:
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads, self.head_dim = 4, 8
            self.qkv = nn.Linear(32, 96)
            self.wq = nn.Linear(32, 32)
            self.q_norm = nn.RMSNorm(8)
            self.wo = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            if norm:
                q = self.q_norm(self.wq(x).view(b, t, -1, 8)).transpose(1, 2)
                k = v = q
            else:
                q, k, v = (part.view(b, t, -1, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
            return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))

    return embedded(Attention)


def test_fused_layer_refuses_contiguous_sharding() -> None:
    styles = {"attention.qkv": Colwise(), "attention.wo": Rowwise()}
    assert follow(fused_attention(norm=False), styles) == [("fused", "attention")]
    assert (
        follow(fused_attention(norm=False), {**styles, "attention.qkv": Colwise(output=Replicated())})[0][0]
        == "unpaired"
    )


def attention_with(part: str) -> Any:
    """Attention whose keys or queries meet something that is the same for all heads."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads, self.head_dim = 4, 8
            self.wq, self.wk, self.wo = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 32)
            self.shared = nn.Linear(32, 4 if part == "copied" else 1)
            self.scale = nn.Parameter(torch.ones(8))
            self.register_buffer("table", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q = self.wq(x).view(b, t, -1, 8).transpose(1, 2)
            half = self.wk(x).view(b, t, -1, 4).transpose(1, 2)
            k = half.new_empty(*half.shape[:-1], 8)
            k[..., :4].copy_(half)
            k[..., 4:].copy_(self.shared(x).view(b, 1, t, 4) if part == "copied" else half)
            if part == "gate":
                q = q * torch.sigmoid(self.shared(x)).unsqueeze(1)
            if part in ("scale", "table"):
                q = q * getattr(self, part)
            return self.wo(F.scaled_dot_product_attention(q, k, q).transpose(1, 2).reshape(b, t, -1))

    return embedded(Attention)


@pytest.mark.parametrize(
    ("part", "found"), [("copied", True), ("gate", True), ("scale", True), ("table", False), ("none", False)]
)
def test_weight_over_all_heads_with_sharded_heads_is_reported(part: str, found: bool) -> None:
    styles = {"attention.wq": Colwise(), "attention.wk": Colwise(), "attention.wo": Rowwise()}
    assert follow(attention_with(part), styles) == ([("piece", "attention")] if found else [])
    assert follow(attention_with(part), {}) == []


def test_a_norm_of_heads_needs_a_style() -> None:
    styles = {"attention.wq": Colwise(), "attention.wo": Rowwise()}
    assert follow(fused_attention(norm=True), styles) == [("piece", "attention.q_norm")]
    assert follow(fused_attention(norm=True), {**styles, "attention.q_norm": Heads()}) == []
    by_sequence = {**styles, "attention.q_norm": SequenceStyle(dim=2)}
    assert follow(fused_attention(norm=True), by_sequence) == [("norm_heads", "attention.q_norm")]


def test_a_mixture_of_experts_follows_its_router() -> None:
    experts = 'model mixtral("tiny")'
    styles = {path: style for path, style in WHOLE_SEQUENCE.items() if "feed_forward" not in path}
    assert layout_codes(plan(styles, experts)) == set()
    sequence = {path: style for path, style in SEQUENCE_PARALLEL.items() if "feed_forward" not in path}
    assert layout_codes(plan(sequence, experts)) == {"LP414", "LP420"}
    gathered = {**sequence, "layers.*.feed_forward": "inputs(from = shard(1), to = replicate)"}
    assert layout_codes(plan(gathered, experts)) == {"LP420"}
    whole = {**sequence, "layers.*.feed_forward": "inputs(from = shard(1), to = replicate, local = true)"}
    assert layout_codes(plan(whole, experts)) == {"LP412"}
    both = "inputs(from = shard(1), to = replicate, local = true, then = outputs(from = replicate, to = shard(1)))"
    assert layout_codes(plan({**sequence, "layers.*.feed_forward": both}, experts)) == set()


@pytest.mark.parametrize(
    ("style", "code", "words"),
    [
        ("inputs(from = replicate, to = replicate, then = outputs(from = replicate, to = shard(1)))", "LP412",
         "`layers.*.attention` expects `replicate`, and `shard(1)` arrives"),
        ("inputs(from = shard(1), to = replicate, then = outputs(from = replicate, to = shard(1)))", "LP412",
         "`layers.*.attention` expects `replicate`, and `shard(1)` arrives"),
        ("inputs(from = shard(1), to = replicate, then = outputs(from = shard(1), to = partial))", "LP415", "summands"),
        ("inputs(from = shard(1), to = replicate, then = outputs(from = [shard(1), none], to = [replicate, none]))",
         "LP410", "has 1 output"),
    ],
)  # fmt: skip
def test_inputs_and_outputs_of_a_module_are_declared_in_one_rule(style: str, code: str, words: str) -> None:
    """The attention ends in `rowwise(output = shard(1))`, so that its output is no whole tensor."""
    text = f"{HEAD}{plan({**SEQUENCE_PARALLEL, 'layers.*.attention': style})}"
    found = [item for item in lint(text, "x.plan", directory=Path()).diagnostics if item.severity == "error"]
    messages = [item.message for item in found if item.code == code]
    assert any(words in item for item in messages), messages


def test_message_verb_agrees_with_the_number_of_paths() -> None:
    styles = {path: style for path, style in SEQUENCE_PARALLEL.items() if "norm" not in path}
    found = lint(f"{HEAD}{plan(styles)}", "x.plan", directory=Path()).diagnostics
    messages = [item.message for item in found if item.code == "LP414"]
    assert messages
    for text in messages:
        names, _, verb = text.partition(" no style")[0].rpartition(" ")
        assert verb == ("have" if " and " in names else "has"), text


def test_mixed_dtensor_diagnostic_names_the_style_that_produced_it() -> None:
    styles = {"layers.*.feed_forward.w1": "colwise(loss_parallel = true)"}
    assert codes(plan(styles)) & {"LP413", "LP420"} == {"LP413"}  # its consequence
    accepted = {path: f"{style}  # legoai: ignore[LP413]" for path, style in styles.items()}
    assert message(plan(accepted), "LP420") == (
        "in `layers.*.feed_forward` a DTensor from `layers.*.feed_forward.w1` meets a plain tensor from "
        "`layers.*.feed_forward.w3`"
    )
