"""Suggestions for misspelt words and for other tools' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_SYNONYMS: Final = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float": "fp32", "half": "fp16",
    "data": "dp_shard", "data_parallel": "dp_shard", "dp": "dp_shard", "tensor": "tp", "tensor_parallel": "tp",
    "pipeline": "pp", "context": "cp", "expert": "ep", "sdpa": "default", "ddp": "replicate", "seq_length": "seq_len",
}  # fmt: skip
"""What other tools call a thing, and its name here."""


def closest(word: str, choices: Sequence[str]) -> str | None:
    """The choice that was most likely meant by ``word``, if there is one.

    In this order: another case, another tool's name, a word that goes on or is cut short, one word of several, a slip
    of the finger.
    """
    low = word.lower()
    same = [choice for choice in choices if choice.lower() == low]
    if same:
        return same[0]
    if _SYNONYMS.get(low) in choices:
        return _SYNONYMS[low]
    longer = [choice for choice in choices if len(low) >= 3 and choice.lower().startswith(low)]
    shorter = [choice for choice in choices if len(choice) >= 4 and low.startswith(choice.lower())]
    partial = [choice for choice in choices if len(low) >= 3 and low in choice.lower().split("_")]
    if longer or shorter or partial:
        return min(longer, key=len) if longer else max(shorter, key=len) if shorter else partial[0]
    from difflib import SequenceMatcher

    alike = [(SequenceMatcher(None, low, choice.lower()).ratio(), choice) for choice in choices]
    ratio, best = max(alike, key=lambda pair: pair[0], default=(0.0, ""))
    return best if ratio > 0.65 else None


def suggestion(word: str, choices: Sequence[str]) -> list[str]:
    """The help line for a slip of the finger; empty where nothing is alike."""
    match = closest(word, choices)
    return [f"did you mean `{match}`?"] if match else []
