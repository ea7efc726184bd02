"""What a rule is: a code, a name, a page of documentation, and for most a check of the resolved plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from legoai.dsl.diagnostics import Diagnostic, Fix, Label, Severity
from legoai.specs.span import Span

if TYPE_CHECKING:
    from legoai.dsl.context import Context


class Rule:
    """A finding that the tool can make. The class's docstring is the rule's page, as ``legoai explain CODE`` prints it.

    The docstring's first line says what the rule finds; then come "What it does", "Why it is wrong" (or "Why it
    matters"), "Example" and "Use instead".
    """

    code: ClassVar[str]
    slug: ClassVar[str]
    severity: ClassVar[Severity] = "error"
    simulated: ClassVar[bool] = False
    """Whether it takes a simulation to find it, which `legoai check` runs and linting does not."""

    @classmethod
    def at(
        cls,
        span: Span,
        message: str,
        *,
        label: str = "",
        others: Sequence[Label] = (),
        help: Sequence[str] = (),
        fix: Fix | None = None,
    ) -> Diagnostic:
        """A finding of this rule at ``span``."""
        return Diagnostic(
            cls.code, cls.slug, cls.severity, message, Label(span, label), tuple(others), tuple(help), fix
        )


class Check(Rule):
    """A rule that looks at the resolved plan."""

    def check(self, context: Context) -> Iterator[Diagnostic]:
        """Every finding. A check that meets an undecided value stops there (see ``legoai.specs.directives.hole``)."""
        raise AssertionError(f"{type(self).__name__} checks nothing")


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
