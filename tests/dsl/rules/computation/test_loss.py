"""Rule about the pieces of a loss; a loss that it allows is exact with a sharded vocabulary too."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, message


@pytest.mark.parametrize(("pieces", "legal"), [(2, True), (32, True), (33, False)])
def test_loss_chunks_are_limited_by_tokens_per_rank(pieces: int, legal: bool) -> None:
    plan = f"mesh (cp = 8)\ncontext on cp\nloss chunked({pieces})"  # 256 tokens over 8 ranks
    assert ("LP641" not in codes(plan)) is legal


def test_chunked_loss_of_a_vision_model_is_refused() -> None:
    vision = 'model vit("b16")\nbatch (global = 64, micro = 1, seq_len = 197)\nloss {}'
    assert "one answer for each image" in message(vision.format("chunked(4)"), "LP641")
    assert "LP641" not in codes(vision.format("fused"))


def test_chunked_loss_takes_logits_with_a_dim_of_the_sequence() -> None:
    model = 'model python("support.models.heads:build", kind = "{}")\nloss chunked(4)'
    assert "LP641" not in codes(model.format("plain"))
    assert "have 2 dims" in message(model.format("flat"), "LP641")


@pytest.mark.parametrize("form", ["eager", "fused", "chunked(4)"])
def test_every_loss_form_supports_loss_parallel(form: str) -> None:
    """Compiled and chunked cross entropy over `loss_parallel` equal one process: tried over gloo."""
    assert "LP641" not in codes(f"mesh (tp = 8)\nshard on tp {{ output = colwise(loss_parallel = true) }}\nloss {form}")
