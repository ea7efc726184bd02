"""`model`: construction of the model."""

from __future__ import annotations

from dataclasses import fields
from keyword import iskeyword

from legoai.dsl.analysis.magnitudes.flops import DECODERS, flops_per_token, published_peak
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Function, Line, call, data, literal, quoted
from legoai.specs.models.families import FAMILIES, config_values
from legoai.specs.models.manifests.cache import read_config
from legoai.specs.models.reads import SYNTHETIC, Images, ImagesWithTexts, Tokens
from legoai.specs.models.source import ModelSource

_OWN_NAMES = frozenset(
    {
        *("torch", "nn", "legoai", "trainer", "build_model", "build_mesh", "parallelize", "model", "mesh"),
        *("forward_backward", "train_step", "training", "batches", "functools"),
    }
)
"""Names of the program that an imported factory must not shadow."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `build_model`."""
    model = lowering.plan.model
    source = model.source()
    note = lowering.note(model, "family")
    draft.imports.name("torch", "nn")
    body = _MAKERS[source.kind](lowering, source, draft)
    last = body[0]
    draft.functions.append(
        Function("build_model() -> nn.Module", (Line(last.value, last.prefix, note), *body[1:]), None)
    )
    draft.train_with("build_model", "build_model")
    if source.kind == "python":
        draft.train_with("factory", quoted(str(source)), note)
    reads, vocabulary = lowering.manifest.reads, lowering.manifest.vocab_size
    if vocabulary is not None and (reads is None or reads.kind in ("tokens", "two_texts")):
        draft.train_with("vocab_size", literal(vocabulary), note)
    if lowering.plan.data is None and isinstance(reads, Images | ImagesWithTexts):
        draft.train_with("data", quoted(SYNTHETIC), note)  # no other images are read
    _utilization(lowering, draft)


def _utilization(lowering: Lowering, draft: Draft) -> None:
    """Add the figures with which a step's time is compared."""
    plan, peak = lowering.plan, published_peak(lowering.analysis)
    if peak is not None and plan.model.family in DECODERS and plan.batch.seq_len is not None:
        flops = flops_per_token(lowering.manifest, plan.batch.seq_len)
        draft.train_with("flops_per_token", literal(flops), lowering.note(plan.model, "family"))
        draft.train_with("peak_flops", f"{peak / 1e12:.12g}e12", lowering.note(plan.cluster, "device"))


def _builtin(lowering: Lowering, source: ModelSource, draft: Draft) -> tuple[Line, ...]:
    """Spell out every dimension, so that the program does not change with the presets; options only where used."""
    family = FAMILIES[source.target]
    config = draft.imports.name("legoai.specs.models.configs", family.config_class.__name__)
    draft.imports.name(family.module, family.class_name)
    given = source.config()
    unused = {
        item.name for item in fields(given) if "left_out" in item.metadata and getattr(given, item.name) == item.default
    }
    values = {name: literal(value) for name, value in config_values(given).items() if name not in unused}
    return (
        Line(call(config, **values), "config = "),
        Line(f"{family.class_name}(config)", "return "),
    )


def _factory(lowering: Lowering, source: ModelSource, draft: Draft) -> tuple[Line, ...]:
    module, _, attribute = source.target.partition(":")
    arguments = {name: literal(value) for name, value in sorted(source.arguments.items())}
    first = attribute.partition(".")[0]
    if any(map(iskeyword, module.split("."))):
        found = f"{draft.imports.name('importlib', 'import_module')}({quoted(module)})"
        return (Line(call(f"{found}.{attribute}", **arguments), "return "),)
    if first in _OWN_NAMES or first.startswith(("apply_", "build_")):
        draft.imports.module(module)
        return (Line(call(f"{module}.{attribute}", **arguments), "return "),)
    draft.imports.name(module, first)
    return (Line(call(attribute, **arguments), "return "),)


def _huggingface(lowering: Lowering, source: ModelSource, draft: Draft) -> tuple[Line, ...]:
    """Spell out every field of the config file, so that the program needs no other file."""
    reads = lowering.manifest.reads
    assert reads is not None, "see `supports` of the family"
    fields = read_config(lowering.analysis.directory / source.target)
    function = "language_model" if isinstance(reads, Tokens) else "transformers_model"
    draft.imports.name("legoai.specs.models.huggingface", function)
    return (Line(call(function, data({**fields, **source.arguments})), "return "),)


_MAKERS = {"builtin": _builtin, "python": _factory, "huggingface": _huggingface}
