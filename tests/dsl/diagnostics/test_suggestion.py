"""Suggestions are made for likely typing errors, and not for words that share a section or a digit."""

from __future__ import annotations

import pytest

from legoai.dsl.diagnostics.suggestion import closest
from legoai.dsl.importing.formats import AUGUST_2026, JANUARY_2026
from legoai.dsl.importing.keys import RENAMED

TOML = (*JANUARY_2026.keys, *RENAMED)
PYTHON = tuple(AUGUST_2026.keys)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("training.stepz", "training.steps"),
        ("traning.steps", "training.steps"),
        ("training.seqlen", "training.seq_len"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("training.precision", "training.mixed_precision_param"),
        ("training.weight_decay", "optimizer.weight_decay"),
        ("parallelism.tensor_parallel", "parallelism.tensor_parallel_degree"),
        ("training.gradient_clip", None),
        ("training.clip_grad", None),
        ("training.lr", None),
        ("optimizer.momentum", None),
        ("model.dim", None),
    ],
)
@pytest.mark.parametrize("options", [TOML, PYTHON], ids=["TOML", "Python"])
def test_options_of_a_config_are_alike_by_what_is_behind_their_section(
    word: str, meant: str | None, options: tuple[str, ...]
):
    assert closest(word, options) == meant


@pytest.mark.parametrize("word", ["layers.32", "layers.40", "layers.1000", "40"])
def test_numbers_are_not_alike_for_their_digits(word: str):
    names = [str(number) for number in range(16)]
    assert closest(word, ["tok_embeddings", *(f"layers.{name}" for name in names), *names]) is None
