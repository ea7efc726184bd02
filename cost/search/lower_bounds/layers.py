"""Layers whose matrix products are bounded, with their shapes, and the fastest rates at which they may run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

from legoai.cost.profiles import AttentionModel, ProductModel, Profile
from legoai.cost.search.lower_bounds.local_kernels import AttentionShape, ExpertsShape, LinearShape
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.attention import head_widths
from legoai.dsl.analysis.computation.precision import computes_in_float8
from legoai.dsl.analysis.magnitudes.flops import DECODERS, routed_elements
from legoai.specs.directives.model import FOREIGN
from legoai.specs.models.manifests.manifest import Manifest

Layer: TypeAlias = tuple[str, LinearShape | AttentionShape | ExpertsShape]
"""Path of a layer, and its shape on one device."""


def fastest_rate(model: ProductModel | AttentionModel) -> float:
    """The most floating-point operations per second that a model gives any product or attention.

    Under a power limit the sustained rate is a limit by itself. Else the formula's best rate counts, times the most
    that a measurement or a leaf of the forest lifts it: what is interpolated lies between them. What was observed in a
    run lifts the formula's rate by itself, whatever the limit.
    """
    modelled = _modelled_rate(model)
    if model.observed is None:
        return modelled
    return max(modelled, _formula_rate(model) / math.exp(min(model.observed.ratios, default=0.0)))


def _formula_rate(model: ProductModel | AttentionModel) -> float:
    """The most operations per second of a model's formula."""
    if isinstance(model, AttentionModel):
        return model.curve.peak * max(limit for limit, *_ in model.curve.limits.values())
    return model.curve.peak * model.curve.efficiency * max(rate for *_, rate in model.curve.tiles)


def _modelled_rate(model: ProductModel | AttentionModel) -> float:
    """The most of what was not observed."""
    ratios = [*(model.table.ratios if model.table is not None else ())]
    if model.forest is not None:
        ratios += [value for value, at in zip(model.forest.value, model.forest.feature, strict=True) if at < 0]
    lifted = model.scale * math.exp(min([0.0, *ratios]))
    if isinstance(model, ProductModel) and model.curve.sustained is not None:
        return model.curve.peak * model.curve.sustained
    return _formula_rate(model) / lifted


def rates_of(analysis: Analysis, profile: Profile) -> tuple[float, float]:
    """The fastest rates of linear layers and of attention, whatever the dtype of a part of them."""
    precision = analysis.plan.precision
    names = {precision.param, precision.master}
    if "fp32" in names:
        names.add("tf32")
    if computes_in_float8(precision):
        names |= {"fp8", "mxfp8"}
    products = max((fastest_rate(model) for name, model in profile.products.items() if name in names), default=0.0)
    fused = [fastest_rate(model) for (_, _, name), model in profile.attention.items() if name in names]
    return products, max([products, *fused])


def layers_of(manifest: Manifest, family: str) -> Iterator[Layer]:
    """Layers that multiply every token, with their shapes: linear ones, and the attention and experts of a decoder.

    Args:
        manifest: of the model.
        family: of the model. Of one of another author, its inspection has found out which linear layers these are.
    """
    decoder, foreign = family in DECODERS, family in FOREIGN
    for path, module in manifest.modules.items():
        if module.kind == "linear" and (module.trains_all_tokens or not foreign):
            for weight in module.parameters:
                if len(weight.shape) == 2:
                    yield path, LinearShape(*weight.shape)
        elif module.kind == "attention" and decoder:
            heads = int(module.attributes["n_heads"])
            yield path, AttentionShape(heads, int(module.attributes.get("n_kv_heads", heads)), *head_widths(module))
        elif module.kind == "experts" and decoder:
            yield path, ExpertsShape(routed_elements(manifest, module))
