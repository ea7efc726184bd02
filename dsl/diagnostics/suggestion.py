"""Suggestions for misspelt words and for other tools' names."""

from __future__ import annotations

from collections.abc import Sequence


def closest(word: str, choices: Sequence[str]) -> str | None:
    """Return the choice that was most likely meant by ``word``, if there is one.

    In this order: another case, another tool's name, a longer or shorter form, one word of several, the same of what
    is behind a section that both have, a typing error.
    """
    low = word.lower()
    same = [choice for choice in choices if choice.lower() == low]
    if same:
        return same[0]
    from legoai.dsl.diagnostics.vocabulary import our_word

    if (ours := our_word(word, choices)) is not None:
        return ours
    section, dot, name = word.rpartition(".")
    if name.lower() in choices:
        return name.lower()
    if name.isdecimal():  # which is not alike another number for its digits
        choices = [choice for choice in choices if not choice.rpartition(".")[2].isdecimal()]
    longer = [choice for choice in choices if len(low) >= 3 and choice.lower().startswith(low)]
    shorter = [choice for choice in choices if len(choice) >= 4 and low.startswith(choice.lower())]
    partial = [choice for choice in choices if len(low) >= 3 and low in choice.lower().split("_")]
    if longer or shorter or partial:
        return min(longer, key=len) if longer else max(shorter, key=len) if shorter else partial[0]
    inside = {
        choice.removeprefix(section + dot): choice for choice in choices if dot and choice.startswith(section + dot)
    }
    if (match := closest(name, tuple(inside)) if inside else None) is not None:
        return inside[match]
    alike = [(_likeness(low, choice.lower()), choice) for choice in choices]
    ratio, best = max(alike, key=lambda pair: pair[0], default=(0.0, ""))
    return best if ratio > 0.65 else None


def _likeness(word: str, choice: str) -> float:
    """The likeness of two words, at most 1; of words with dots not more than that of what is behind the last ones.

    A section alone, such as `training.`, would make most options of it alike.
    """
    from difflib import SequenceMatcher

    name, other = word.rpartition(".")[2], choice.rpartition(".")[2]
    whole = SequenceMatcher(None, word, choice).ratio()
    return min(whole, SequenceMatcher(None, name, other).ratio()) if "." in word and "." in choice else whole


def suggestion(word: str, choices: Sequence[str]) -> list[str]:
    """Return the help line for a typing error, or for another tool's name; empty where nothing is similar."""
    match = closest(word, choices)
    return [f"did you mean `{match}`?"] if match else []


def translation(word: str, choices: Sequence[str]) -> list[str]:
    """Return help on a word that is none of ``choices``: the likely choice, or the equivalent of another tool's."""
    from legoai.dsl.diagnostics.vocabulary import our_form, our_word

    ours, form = our_word(word, choices), our_form(word)
    if form is None or word.lower() in (choice.lower() for choice in choices):
        return suggestion(word, choices)
    keyword = form.partition("is written `")[2].partition(" ")[0]
    if ours is None or (keyword in choices and keyword != ours):
        return [form]  # a whole statement, where statements are expected
    return [f"did you mean `{ours}`?", *([form] if f"`{ours}" in form else [])]


def option_elsewhere(word: str) -> list[str]:
    """Return help on an unknown word that is an option of exactly one statement."""
    from legoai.specs.directives import FAMILIES, family

    owners = [keyword for keyword in FAMILIES if any(item.name == word for item in family(keyword).options)]
    return [f"`{word}` is an option of `{owners[0]}`"] if len(owners) == 1 else []
