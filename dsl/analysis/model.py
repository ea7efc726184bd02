"""Models that programs can train."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.unsupported import Unsupported


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
