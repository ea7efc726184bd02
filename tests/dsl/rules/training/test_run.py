"""Settings of a plan's run fit its number of steps."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("steps 5\nsave (every = 5)", False),
        ("steps 5\nsave (every = 6)", True),
        ("steps 5\nevaluate (every = 6)", True),
        ("schedule cosine(steps = 5)\nevaluate (every = 6)", True),
        ("steps 6\nschedule constant\nevaluate (every = 6)", False),
        ("evaluate (every = 1000000)", False),
    ],
)
def test_interval_longer_than_the_run_is_reported(text: str, found: bool) -> None:
    assert ("LP698" in codes(text)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("steps 100\nschedule cosine(steps = 100, warmup = 10)", False),
        ("steps 101\nschedule cosine(steps = 100, warmup = 10)", True),
        ("steps 101\nschedule wsd(steps = 100, warmup = 10, decay = 10)", True),
        ("steps 11\nschedule cosine(steps = 100, warmup = 10)", False),
        ("steps 10\nschedule cosine(steps = 100, warmup = 10)", True),
        ("steps 10\nschedule constant(warmup = 10)", True),
        ("steps 1\nschedule constant", False),
        ("schedule cosine(steps = 100, warmup = 10)", False),
        ("steps 101\nschedule cosine(steps = auto)", False),
    ],
)
def test_run_longer_than_schedule_or_within_warm_up_is_reported(text: str, found: bool) -> None:
    assert ("LP699" in codes(text)) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a.txt", True),
        ("a.txt.gz", True),
        ("a.jsonl", False),
        ("a.JSONL", False),
        ("a.ndjson", False),
        ("a.parquet", False),
        ("a.Parquet", False),
        ("folder", False),
        ("python", True),
        ("hf:a/b-1.5:en", False),
    ],
)
def test_data_field_requires_objects_or_columns(source: str, found: bool) -> None:
    assert ("LP695" in codes(f'data (source = "{source}", field = "body")')) == found


def test_tokenizer_beside_made_images_is_reported() -> None:
    made = 'model vit("tiny")\nbatch (global = 64, micro = 1)\ndata (source = "synthetic"'
    assert "LP695" in codes(f'{made}, tokenizer = "nonexistent.json")')
    assert "LP695" not in codes(f"{made})")
    assert "LP695" not in codes('data (source = "a.txt", tokenizer = "tokenizer.json")')


@pytest.mark.parametrize(
    ("model", "found"),
    [('llama3("8b")', False), ('mixtral("8x7b")', False), ('gpt2("xl")', False), ('gpt3("13b")', False),
     ('vit("b16")', True)],
)  # fmt: skip
def test_published_weights_require_a_weight_map(model: str, found: bool) -> None:
    assert ("LP690" in codes(f'weights (huggingface = "a")\nmodel {model}')) == found
