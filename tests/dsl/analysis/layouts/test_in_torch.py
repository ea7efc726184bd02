"""Diagnostics of layouts agree with PyTorch: clean plans train right, others fail or compute wrong numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from legoai.dsl.lint import lint
from legoai.specs.directives.layouts import Partial, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Inputs, Outputs, Rowwise, SequenceStyle
from support.texts.layout_plans import HEAD, LAYOUT_CODES, SEQUENCE_PARALLEL, WHOLE_SEQUENCE, plan

STRICTER = {
    "sequence with layers.*.attention = inputs(from = replicate, to = replicate)",
    "sequence with layers.*.attention = inputs(from = replicate, to = shard(1))",
    "sequence with layers.*.attention.wq = colwise(input = shard(1))",
    "sequence with output = rowwise(input = replicate)",
}
"""Styles that say what is not so of a DTensor, which knows better: PyTorch goes by the tensor, the linter speaks up."""


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
        "norm": ["sequence", "sequence(local = true)"],
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
            return tp.SequenceParallel(sequence_dim=treatment.dim, use_local_output=treatment.local)
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
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_linter_and_pytorch_agree_on_every_variation(gloo: Callable[[int], Any], step: int) -> None:
    cases = list(variations())[::step]
    reported = []
    treatments = []
    for _, styles in cases:
        linted = lint(
            f"{HEAD}{plan(styles)}",
            "x.plan",
            directory=Path(),
        )
        assert linted.plan is not None
        reported.append([item.code for item in linted.diagnostics if item.code in LAYOUT_CODES])
        shard = linted.plan.shard_on("tp")
        assert shard is not None
        treatments.append({rule.path: rule.treatment for rule in shard.rules})
    ranks = gloo(2)(trains_right, treatments)
    assert "right" in ranks[0]
    wrong = []
    for (name, _), found, *verdicts in zip(cases, reported, *ranks, strict=True):
        if name in STRICTER:
            assert found == ["LP412"]
            assert verdicts == ["right", "right"]
        elif bool(found) == all(verdict == "right" for verdict in verdicts):
            wrong.append(f"{name}: linted {found}, PyTorch: {verdicts[0]}")
    assert not wrong, "\n".join(wrong)
