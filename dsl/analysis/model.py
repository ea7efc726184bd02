"""Models that programs can train, and those whose forward cannot be followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.models.manifests.values_read import reads_a_value


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Models of Transformers with known inputs."""
    model, manifest = analysis.plan.model, analysis.manifest
    if model.family == "huggingface" and manifest is not None and manifest.reads is None:
        class_name = manifest.model_class.rpartition(".")[2]
        yield Unsupported(
            analysis.span_of(model, "family"),
            f"it is not known what `{class_name}` is trained on",
            help=(
                "classes that are known end in `ForCausalLM`, `LMHeadModel` or `ForImageClassification`, are "
                "encoder-decoders that end in `ForConditionalGeneration`, or `CLIPModel`",
            ),
        )


def without_tied_embeddings(analysis: Analysis) -> str:
    """How the plan gives the model an output layer of its own."""
    family = analysis.plan.model.family
    if family == "python":
        return "in the factory"
    return "`tie_word_embeddings = false`" if family == "huggingface" else "`tie_embeddings = false`"


def help_to_follow(analysis: Analysis) -> tuple[str, ...]:
    """What makes a forward that cannot be followed one that can; nothing where that is not known."""
    model, manifest = analysis.plan.model, analysis.manifest
    if model.family != "huggingface":
        read = shaped_by_values(analysis) or "counts.tolist()"
        return (f"let forward read no values of tensors, as `{read}` does, or decide by shapes only",)
    chosen = model.arguments.get("experts_implementation")
    has_experts = manifest is not None and any(info.kind == "experts" for info in manifest.modules.values())
    if not has_experts or chosen not in (None, "eager"):
        return ()
    change = (
        'give the model `experts_implementation = "grouped_mm"`'
        if chosen is None  # its file may choose it
        else 'leave `experts_implementation = "eager"` out'
    )
    return (f"{change}: eager experts read how many tokens each of them takes",)


def reads_values(analysis: Analysis) -> bool:
    """Whether forward cannot be followed because it reads values of tensors, by which it may decide what it calls."""
    error = None if analysis.manifest is None else analysis.manifest.flow_error
    return shaped_by_values(analysis) is not None or (error is not None and reads_a_value(error))


def shaped_by_values(analysis: Analysis) -> str | None:
    """The function whose result has a shape that depends on values, so that the model cannot be simulated.

    Eager experts call `torch.nonzero`.
    """
    name = None if analysis.manifest is None else analysis.manifest.shaped_by
    return None if name is None else f"torch.{name}"


def synchronised_norms(analysis: Analysis) -> tuple[str, ...]:
    """The paths of the model's `nn.SyncBatchNorm`s."""
    modules = {} if analysis.manifest is None else analysis.manifest.modules
    return tuple(path for path, info in modules.items() if "synchronised" in info.attributes)


_OF_META: Final = re.compile(
    r"\bmeta\b|data-(in)?dependent|cuda|nvidia|triton|INTERNAL ASSERT|__format__"
    r"|(^|; )(ImportError|ModuleNotFoundError)",
    re.IGNORECASE,
)
"""Errors that a forward raises for there being no values, no GPU, or no kernel on the meta device."""


def refusal(analysis: Analysis) -> str | None:
    """Why the forward of a factory's model failed, where it may fail in a run too; None where it did not.

    A forward that reads values fails on the meta device alone.
    """
    manifest = analysis.manifest
    error = None if manifest is None or analysis.plan.model.family != "python" else manifest.flow_error
    if error is None:
        return None
    raised = error.partition(": ")[2]  # after the words about the meta device
    return None if _OF_META.search(raised) else error
