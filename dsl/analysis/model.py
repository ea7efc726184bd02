"""Models that programs can train, and those whose forward cannot be followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.unsupported import Unsupported

_OF_VALUES: Final = ("Tensor.item() cannot", "copy out of meta tensor", "convert meta device", "torch.nonzero()")
"""What torch raises where the value of a tensor on the meta device is read."""


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


def help_to_follow(analysis: Analysis) -> tuple[str, ...]:
    """What makes a forward that cannot be followed one that can; nothing where that is not known."""
    model, manifest = analysis.plan.model, analysis.manifest
    if model.family != "huggingface":
        return ("let forward read no values of tensors, as `counts.tolist()` does, or decide by shapes only",)
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
    return error is not None and any(text in error for text in _OF_VALUES)


def shapes_by_values(analysis: Analysis) -> bool:
    """Whether shapes of the model's tensors depend on values, so that it cannot be simulated: eager experts' do."""
    error = None if analysis.manifest is None else analysis.manifest.flow_error
    return error is not None and "torch.nonzero()" in error  # what torch raises on the meta device
