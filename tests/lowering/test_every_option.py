"""Every option of every directive changes the program, or is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import check
from legoai.lowering.emit import EMITTERS
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives import kinds as k
from legoai.specs.directives.base import Calls, Declared, Directive, Divided, PathRule, Treatment
from legoai.specs.directives.checkpoint import Full
from legoai.specs.plan import Plan
from legoai.specs.span import Origin, Span
from support.texts.plans import FULL, lowered, manifest_of, resolved, without_hash

BASE = resolved(FULL)

PATHS = {
    "shard": ("layers.0.attention.wq", "layers.0.attention", "layers.0.attention_norm", "layers.0.attention.wq.weight"),
    "fsdp": ("layers.*", "root"),
    "checkpoint": ("layers.*",),
    "comm": ("layers.*",),
    "precision": ("layers.*.feed_forward.*",),
    "compile": ("layers.*", "root"),
    "optimizer": ("layers.*.attention_norm", "layers.0.attention.wq.weight"),
}
"""Where a treatment of each family can stand; it must show in one of these places."""

SAYS_NOTHING = {
    ("pipeline", "stages", 2): "one for each rank, as without it",
    ("pipeline", "microbatches", 2): "all that the batch gives, as without it",
    ("precision", "gradient", "fp32"): "the dtype of the stored parameters, in which gradients accumulate anyway",
    ("checkpoint", "every", "n", 1): "the same as `full`",
    ("checkpoint", "preserve_rng", False): "what built-in models do by themselves",
    ("save", "asynchronous", False): "written while the training waits, as without it",
    ("comm", "bucket", "by", "module"): "what a unit is by itself; a module that is none is refused",
}
"""Values that mean what is so without them."""


def values(kind: k.Kind) -> Iterator[Any]:
    """Some legal values of a kind: all where there are few."""
    if isinstance(kind, k.Choice):
        yield from kind.names
    elif isinstance(kind, k.Listed):
        yield from (name for name in kind.names() if name not in ("profile", "python", "huggingface"))
    elif isinstance(kind, k.Integer):
        yield from (kind.minimum or 1, (kind.minimum or 1) + 1)
    elif isinstance(kind, k.Number):
        yield from (0.25, 0.5)
    elif isinstance(kind, k.Boolean):
        yield from (False, True)
    elif isinstance(kind, k.Text):
        yield from ("some.text", "other.text")
    elif isinstance(kind, k.Size):
        yield 2**20
    elif isinstance(kind, k.Fraction):
        yield 0.5
    elif isinstance(kind, k.ModulePath):
        yield "layers.1"
    elif isinstance(kind, k.ListOf):
        for value in values(kind.item):
            yield (value,) * (kind.length or 1)
    elif isinstance(kind, k.Either):
        for item in kind.kinds:
            yield from values(item)
    elif isinstance(kind, Calls):
        for treatment in kind.treatments:
            yield from varied(treatment)
    else:
        raise AssertionError(f"no values for {kind!r}")


def smallest(declared: type[Declared]) -> dict[str, Any]:
    """Values for the options that must be given."""
    return {item.field: next(values(item.kind)) for item in declared.options if item.required}


def varied(treatment: type[Treatment]) -> Iterator[Treatment]:
    """The treatment with each of its options at each value, the others at their defaults."""
    given = smallest(treatment)
    yield treatment(**given)
    for item in treatment.options:
        for value in values(item.kind):
            yield treatment(**{**given, item.field: value})


def changed(directive: Directive, **values: Any) -> Directive:
    """A copy with other values."""
    fields = {item.field: getattr(directive, item.field) for item in directive.options}
    kept = {"axes": directive.axes, "rules": directive.rules, "arguments": directive.arguments}
    return type(directive)(**{**fields, **kept, "origins": directive.origins, **values})


def in_plan(keyword: str) -> Directive:
    """The base plan's statement, or the smallest one where it has none."""
    found = BASE.shard[0] if keyword == "shard" else getattr(BASE, keyword)
    if found is not None:
        return found
    declared = family(keyword)
    axes = declared.axis_use.names[:1] if declared.axis_use is not None else ()
    return declared(**smallest(declared), axes=axes)


def with_directive(directive: Directive) -> Plan:
    if directive.keyword == "replicate":
        mesh = changed(BASE.mesh, dp_replicate=2, dp_shard=1)
        return replace(BASE, mesh=mesh, fsdp=None, replicate=directive)
    if directive.keyword == "context":
        fsdp = changed(BASE.fsdp, axes=("dp_shard", "cp"))
        return replace(BASE, mesh=changed(BASE.mesh, cp=2), fsdp=fsdp, context=directive)
    if directive.keyword == "pipeline":
        return replace(BASE, mesh=changed(BASE.mesh, pp=2), pipeline=directive)
    value = (directive,) if directive.keyword == "shard" else directive
    return replace(BASE, **{directive.keyword: value})


def text_or_refusal(plan: Plan) -> str | None:
    """The program without comments and hash, and its options without effect; None if lint reports an error."""
    if plan.cluster == BASE.cluster:
        plan = replace(plan, cluster=changed(plan.cluster, devices=plan.mesh.world_size))
    analysis = Analysis(plan, manifest_of(plan.model.source()), file="tiny.plan")
    found = list(check(analysis))
    if any(item.severity == "error" for item in found):
        return None
    idle = sorted({item.message for item in found if item.severity == "warning"})
    return "\n".join([re.sub(r"  # .*", "", without_hash(lowered(plan))), *idle])


def shows(plan: Plan, before: str | None) -> bool:
    """Whether the plan's program is another one than that before, or refused."""
    text = text_or_refusal(plan)
    return text is None or text != before


def rule_of(path: str, treatment: Treatment) -> PathRule[Any]:
    """A rule as a person writes it, in the plan's first line."""
    written = Origin("human", Span("tiny.plan", 0, 0, 1, 1, 1, 1))
    return PathRule(path=path, treatment=treatment, origin=written, path_origin=written)


def options() -> Iterator[tuple[str, str, Any]]:
    for keyword in FAMILIES:
        if keyword == "model":
            continue
        directive = in_plan(keyword)
        for item in directive.options:
            current = getattr(directive, item.field)
            for value in values(item.kind):
                if value != current:
                    yield keyword, item.field, value


def treatments() -> Iterator[tuple[str, Treatment]]:
    for keyword in FAMILIES:
        declared = family(keyword)
        if declared.treatments is not None:
            for treatment in declared.treatments.treatments:
                for value in varied(treatment):
                    yield keyword, value


def test_every_family_is_in_the_application_order():
    assert set(EMITTERS) == set(FAMILIES)
    order = [
        key for key in EMITTERS if key in ("mesh", "pipeline", "shard", "context", "checkpoint", "compile", "fsdp")
    ]
    assert order == ["mesh", "pipeline", "shard", "context", "checkpoint", "compile", "fsdp"]


@pytest.mark.parametrize("keyword", [keyword for keyword in FAMILIES if keyword != "model"])
def test_every_option_value_changes_the_program_or_is_refused(keyword: str):
    seen = 0
    directive = in_plan(keyword)
    before = text_or_refusal(BASE if _has(keyword) else with_directive(directive))
    for name, field, value in options():
        if name != keyword or (keyword, field, value) in SAYS_NOTHING:
            continue
        seen += 1
        assert shows(with_directive(changed(directive, **{field: value})), before), (
            f"{keyword}: {field} = {value!r} is dropped"
        )
    assert seen or not family(keyword).options


def _has(keyword: str) -> bool:
    return bool(BASE.shard) if keyword == "shard" else getattr(BASE, keyword) is not None


@pytest.mark.parametrize("keyword", PATHS)
def test_every_treatment_option_changes_the_program_or_is_refused(keyword: str):
    directive = in_plan(keyword)
    plain_texts: dict[tuple[str, Treatment | None], str | None] = {}
    for name, treatment in treatments():
        if name != keyword or _says_nothing(keyword, treatment):
            continue
        plain = _plain(keyword, treatment)
        found = []
        for path in PATHS[keyword]:
            others = tuple(rule for rule in directive.rules if rule.path != path)
            after = with_directive(changed(directive, rules=(*others, rule_of(path, treatment))))
            if (path, plain) not in plain_texts:
                rules = others if plain is None else (*others, rule_of(path, plain))
                plain_texts[path, plain] = text_or_refusal(with_directive(changed(directive, rules=rules)))
            before = plain_texts[path, plain]
            if before is not None:
                found.append(shows(after, before))
        # Where even the treatment with its defaults is refused in all places, there is nothing that could be dropped.
        assert any(found) or not found, f"{keyword}: {treatment!r} is dropped"


def _plain(keyword: str, treatment: Treatment) -> Treatment | None:
    """Reference of the treatment: none for one with defaults, itself with defaults for one with a value."""
    declared = type(treatment)
    default = declared(**smallest(declared))
    if keyword == "checkpoint" and treatment.name == "none":
        return Full()
    return None if default == treatment else default


def _says_nothing(keyword: str, treatment: Treatment) -> bool:
    if treatment.name == "none" and keyword in ("compile", "precision", "shard"):
        return True  # a rule that excepts modules from a wider rule
    if isinstance(treatment, Divided) and treatment.these == treatment.others:
        return True  # whatever the number is, which lint says
    default = type(treatment)(**smallest(type(treatment)))
    if treatment.name in ("inputs", "outputs") and treatment != default:
        return all(_first(getattr(treatment, field)) == getattr(default, field) for field in ("source", "target"))
    return any(
        (keyword, treatment.name, item.field, getattr(treatment, item.field)) in SAYS_NOTHING
        for item in treatment.options
    )


def _first(layouts: Any) -> Any:
    """A list of one layout says the same as the layout."""
    return layouts[0] if isinstance(layouts, tuple) else layouts


def test_every_family_with_treatments_is_tested():
    assert set(PATHS) == {keyword for keyword in FAMILIES if family(keyword).treatments is not None}


def test_every_model_dimension_changes_the_program():
    base = text_or_refusal(BASE)
    changes = {
        "dim": 256,
        "n_layers": 3,
        "n_kv_heads": 8,
        "vocab_size": 512,
        "rope_theta": 1000.0,
        "tie_embeddings": True,
    }
    for name, value in changes.items():
        model = changed(BASE.model, arguments={name: value})
        text = text_or_refusal(replace(BASE, model=model))
        assert text is None or text != base, name
