"""What the linter says of layouts is what PyTorch does: plans without findings train right, others fail or go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rule_plans import codes, findings, message

from legoai.dsl.layout import Propagation
from legoai.dsl.lint import lint
from legoai.dsl.tensors import Tensor, agrees
from legoai.specs.directives.layouts import Partial, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Inputs, Outputs, Rowwise, SequenceStyle

PLANS = Path(__file__).parents[3] / "plans"

HEAD = 'plan x\nmodel llama3("tiny")\ncluster h100_sxm\nbatch (global = 64, micro = 1, seq_len = 256)\n'
SEQUENCE_PARALLEL = {
    "tok_embeddings": "rowwise(input = replicate, output = shard(1))",
    "layers.*.attention_norm": "sequence",
    "layers.*.ffn_norm": "sequence",
    "layers.*.attention": "inputs(from = shard(1), to = replicate)",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise(output = shard(1))",
    "layers.*.feed_forward": "inputs(from = shard(1), to = replicate)",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise(output = shard(1))",
    "norm": "sequence",
    "output": "colwise(input = shard(1), loss_parallel = true)",
}
WHOLE_SEQUENCE = {
    "tok_embeddings": "rowwise",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise(loss_parallel = true)",
}
LAYOUT_CODES = {"LP411", "LP412", "LP414", "LP415", "LP417", "LP418", "LP419", "LP420"}

STRICTER = {
    "sequence with layers.*.attention = inputs(from = replicate, to = replicate)",
    "sequence with layers.*.attention = inputs(from = replicate, to = shard(1))",
    "sequence with layers.*.attention.wq = colwise(input = shard(1))",
    "sequence with output = rowwise(input = replicate)",
}
"""Styles that say what is not so of a DTensor, which knows better: PyTorch goes by the tensor, the linter speaks up."""


def plan(styles: dict[str, str], extra: str = "") -> str:
    rules = "\n".join(f"  {path} = {style}" for path, style in styles.items())
    return f"mesh (dp_shard = 4, tp = 2)\nfsdp on dp_shard {{ layers.* = unit }}\n{extra}\nshard on tp {{\n{rules}\n}}"


def variations() -> Iterator[tuple[str, dict[str, str]]]:
    """Both plans, each with one line missing, and each with one line changed."""
    changes = {
        "tok_embeddings": ["rowwise", "rowwise(output = shard(1))", "colwise", "colwise(output = replicate)"],
        "layers.*.attention_norm": ["sequence"],
        "layers.*.attention": [
            "inputs(from = replicate, to = replicate)",
            "inputs(from = replicate, to = shard(1))",
            "outputs(from = shard(1), to = replicate)",
            "outputs(from = replicate, to = shard(1))",
        ],
        "layers.*.attention.wq": ["colwise(output = replicate)", "colwise(input = shard(1))"],
        "layers.*.attention.wv": ["rowwise(input = replicate)"],
        "layers.*.attention.wo": ["rowwise", "rowwise(output = shard(1))", "rowwise(output = partial)", "colwise"],
        "layers.*.feed_forward": ["outputs(from = partial, to = replicate)", "outputs(from = partial, to = shard(1))"],
        "layers.*.feed_forward.w1": ["colwise(output = replicate)"],
        "layers.*.feed_forward.w2": ["rowwise(output = partial)", "rowwise(input = replicate)", "rowwise"],
        "norm": ["sequence"],
        "output": [
            "colwise(output = replicate)",
            "colwise",
            "colwise(loss_parallel = true)",
            "rowwise(input = replicate)",
            "rowwise",
        ],
    }  # fmt: skip
    for name, base in (("sequence", SEQUENCE_PARALLEL), ("whole", WHOLE_SEQUENCE)):
        yield name, base
        for path in base:
            yield f"{name} without {path}", {other: style for other, style in base.items() if other != path}
        for path, styles in changes.items():
            for style in styles:
                if base.get(path) != style:
                    yield f"{name} with {path} = {style}", {**base, path: style}
    partial = {**WHOLE_SEQUENCE, "layers.*.feed_forward.w2": "rowwise(output = partial)"}
    yield (
        "summed where the module ends",
        {**partial, "layers.*.feed_forward": "outputs(from = partial, to = replicate)"},
    )
    yield "only feed-forwards", {path: style for path, style in WHOLE_SEQUENCE.items() if "feed_forward" in path}
    yield "only attention", {path: style for path, style in WHOLE_SEQUENCE.items() if "attention" in path}
    yield (
        "gathered behind the last norm",
        {**SEQUENCE_PARALLEL, "output": "colwise(input = shard(1), output = replicate)"},
    )
    yield (
        "last norm whole",
        {
            **{path: style for path, style in SEQUENCE_PARALLEL.items() if path != "norm"},
            "norm": "inputs(from = shard(1), to = replicate)",
            "output": "colwise(output = replicate)",
        },
    )


def _style(treatment: Any, arity: int, embeds: bool) -> Any:
    import torch.distributed.tensor as dt
    import torch.distributed.tensor.parallel as tp

    def placement(layout: Any) -> Any:
        if layout is None:
            return None
        if isinstance(layout, Sharded):
            return dt.Shard(layout.dim)
        return dt.Partial() if isinstance(layout, Partial) else dt.Replicate()

    match treatment:
        case Colwise():
            return tp.ColwiseParallel(
                input_layouts=placement(treatment.input),
                output_layouts=placement(treatment.output),
                use_local_output=not treatment.loss_parallel,
            )
        case Rowwise():
            return tp.RowwiseParallel(
                input_layouts=placement(treatment.input or (Replicated() if embeds else None)),
                output_layouts=placement(treatment.output),
            )
        case SequenceStyle():
            return tp.SequenceParallel(sequence_dim=treatment.dim)
        case Inputs():
            rest = (None,) * (arity - 1)
            return tp.PrepareModuleInput(
                input_layouts=(placement(treatment.source), *rest),
                desired_input_layouts=(placement(treatment.target), *rest),
            )
        case Outputs():
            return tp.PrepareModuleOutput(
                output_layouts=placement(treatment.source), desired_output_layouts=placement(treatment.target)
            )
    raise AssertionError(treatment)


def _model() -> Any:
    import torch

    from legoai.specs.models.families import resolve_config
    from legoai.specs.models.llama import Llama

    torch.manual_seed(0)
    small = {
        "n_layers": 1,
        "dim": 16,
        "n_heads": 4,
        "n_kv_heads": 2,
        "hidden_dim": 32,
        "vocab_size": 32,
        "max_seq_len": 8,
    }
    return Llama(resolve_config("llama3", None, small)).double()


def _step(model: Any) -> Any:
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    tokens = torch.arange(16).reshape(2, 8) % 32
    logits = model(tokens)
    labels = (tokens * 5 + 3) % 32
    if isinstance(logits, DTensor):
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        return loss.full_tensor()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss


def trains_right(plans: list[dict[str, Any]]) -> list[str]:
    """For each plan, on the calling rank: "right", or how the step differs from that of one process."""
    import logging

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    # A step that fails on this rank fails on the other too, before they communicate.
    logging.disable(logging.ERROR)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    reference = _model()
    expected = _step(reference).detach()
    gradients = {name: item.grad for name, item in reference.named_parameters()}
    verdicts = []
    for styles in plans:
        try:
            model = _model()
            arity = {path: 2 if path.endswith("attention") else 1 for path in styles}
            parallelize_module(
                model, mesh, {path: _style(item, arity[path], "embed" in path) for path, item in styles.items()}
            )
            loss = _step(model)
            verdict = "right"
            if not torch.allclose(loss, expected, rtol=1e-9):
                verdict = f"loss {loss.item()} is not {expected.item()}"
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                if verdict == "right" and not torch.allclose(whole, gradients[name], rtol=1e-7, atol=1e-12):
                    verdict = f"the gradient of {name} is wrong"
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}"[:200]
        verdicts.append(verdict)
    logging.disable(logging.NOTSET)
    return verdicts


@pytest.mark.timeout(120)
def test_the_linter_and_pytorch_agree_on_every_variation(gloo: Callable[[int], Any]) -> None:
    cases = list(variations())
    said = []
    treatments = []
    for _, styles in cases:
        linted = lint(
            f"{HEAD}{plan(styles)}",
            "x.plan",
            directory=Path(),
        )
        assert linted.plan is not None
        said.append([item.code for item in linted.diagnostics if item.code in LAYOUT_CODES])
        shard = linted.plan.shard_on("tp")
        assert shard is not None
        treatments.append({rule.path: rule.treatment for rule in shard.rules})
    ranks = gloo(2)(trains_right, treatments)
    assert "right" in ranks[0]
    wrong = []
    for (name, _), found, *verdicts in zip(cases, said, *ranks, strict=True):
        if name in STRICTER:
            assert found == ["LP412"]
            assert verdicts == ["right", "right"]
        elif bool(found) == all(verdict == "right" for verdict in verdicts):
            wrong.append(f"{name}: linted {found}, PyTorch: {verdicts[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.plan")), ids=lambda path: path.stem)
def test_the_worked_plans_have_no_findings_about_placements(path: Path) -> None:
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


def test_learned_positions_are_added_to_tokens_that_lie_alike() -> None:
    model = 'model gpt3("2.7b", tie_embeddings = true)'
    assert layout_codes(plan(GPT, model)) == set()
    assert layout_codes(plan(GPT_SEQUENCE, model)) == set()
    without = {path: style for path, style in GPT_SEQUENCE.items() if path != "pos_embeddings"}
    assert message(plan(without, model), "LP412") == (
        "in `root` a tensor that lies as `shard(1)` meets one that lies as `replicate`, from `tok_embeddings` and "
        "`pos_embeddings`"
    )


def test_both_lines_and_the_cure_are_told() -> None:
    styles = {**SEQUENCE_PARALLEL, "layers.*.feed_forward": "inputs(from = replicate, to = replicate)"}
    found = next(item for item in findings(plan(styles)) if item.code == "LP412")
    assert (
        found.message == "`layers.*.feed_forward` expects `replicate`, and `shard(1)` arrives from `layers.*.ffn_norm`"
    )
    assert [label.text for label in found.others] == ["leaves its output as `shard(1)`"]
    assert found.help[0] == "write `from = shard(1)`"
    assert found.fix is not None
    assert found.fix.edits[0].replacement == "shard(1)"


def test_an_undecided_layout_is_not_judged() -> None:
    for hole in ("colwise(output = auto)", "auto", "colwise(input = shard(auto))"):
        assert layout_codes(plan({**WHOLE_SEQUENCE, "output": hole})) == set()


def test_one_rank_has_no_pieces() -> None:
    text = plan({"output": "colwise"})
    assert layout_codes(text) == {"LP419"}
    assert layout_codes(text.replace("dp_shard = 4, tp = 2", "dp_shard = 8, tp = 1")) == set()


def test_equal_blocks_are_followed_once_and_unlike_rules_apart() -> None:
    text = HEAD.replace("tiny", "405b")
    styles = {**SEQUENCE_PARALLEL, "layers.100.attention.wo": "rowwise"}
    linted = lint(text + plan(styles), "x.plan", directory=Path())
    assert linted.context is not None
    assert linted.context.layouts is not None
    assert len(linted.context.layouts.findings) == 1
    shard = linted.context.plan.shard_on("tp")
    assert shard is not None
    assert linted.context.manifest is not None
    rules = linted.context.assigned(shard).by_path
    durations = []
    for _ in range(5):
        start = time.process_time()
        Propagation(linted.context.manifest, rules).run()
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
def test_layouts_agree_as_far_as_shapes_are_known(tensor: Tensor, layout: Any, expected: bool | None) -> None:
    assert agrees(tensor, layout) is expected


def follow(model: Any, styles: dict[str, Any]) -> list[tuple[str, str]]:
    """The kinds and places of findings in a module of PyTorch's own making."""
    from legoai.specs.directives.base import Rule
    from legoai.specs.models.describe import describe

    rules = {path: Rule(path=path, treatment=treatment) for path, treatment in styles.items()}
    return [(item.kind, item.path) for item in Propagation(describe(model, "test"), rules).run()]


def meta(build: Callable[[], Any]) -> Any:
    import torch

    with torch.device("meta"):
        return build()


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

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(64, 32)
            self.attention = Attention()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.attention(self.tok(tokens))

    return meta(Model)


def test_a_fused_layer_cannot_be_cut_in_contiguous_pieces() -> None:
    styles = {"attention.qkv": Colwise(), "attention.wo": Rowwise()}
    assert follow(fused_attention(norm=False), styles) == [("fused", "attention")]
    assert (
        follow(fused_attention(norm=False), {**styles, "attention.qkv": Colwise(output=Replicated())})[0][0]
        == "unpaired"
    )


def test_a_norm_of_heads_needs_a_style() -> None:
    styles = {"attention.wq": Colwise(), "attention.wo": Rowwise()}
    assert follow(fused_attention(norm=True), styles) == [("piece", "attention.q_norm")]
    assert follow(fused_attention(norm=True), {**styles, "attention.q_norm": SequenceStyle(dim=2)}) == []


def test_a_mixture_of_experts_follows_its_router() -> None:
    experts = 'model mixtral("tiny")'
    styles = {path: style for path, style in WHOLE_SEQUENCE.items() if "feed_forward" not in path}
    assert layout_codes(plan(styles, experts)) == set()
    sequence = {path: style for path, style in SEQUENCE_PARALLEL.items() if "feed_forward" not in path}
    assert layout_codes(plan(sequence, experts)) == {"LP414"}
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
def test_what_a_module_takes_and_gives_is_said_in_one_rule(style: str, code: str, words: str) -> None:
    """The attention ends in `rowwise(output = shard(1))`, so that its output is no whole tensor."""
    text = f"{HEAD}{plan({**SEQUENCE_PARALLEL, 'layers.*.attention': style})}"
    found = [item for item in lint(text, "x.plan", directory=Path()).diagnostics if item.severity == "error"]
    messages = [item.message for item in found if item.code == code]
    assert any(words in item for item in messages), messages


def test_a_path_with_a_star_is_one_name_and_its_verb_agrees() -> None:
    styles = {path: style for path, style in SEQUENCE_PARALLEL.items() if "norm" not in path}
    found = lint(f"{HEAD}{plan(styles)}", "x.plan", directory=Path()).diagnostics
    messages = [item.message for item in found if item.code == "LP414"]
    assert messages
    for text in messages:
        names, _, verb = text.partition(" no style")[0].rpartition(" ")
        assert verb == ("have" if " and " in names else "has"), text
