"""Topics: every word of the language that has a page, as `legoai explain` finds and lists them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import cleandoc
from typing import Final

from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.reporting.reference import (
    OWN_STATEMENTS,
    WORDS,
    keyword_page,
    legal_values,
    option_lines,
    rule_page,
    treatments_in,
    value_text,
)
from legoai.dsl.rules import all_rules
from legoai.specs.cluster import Device, Fabric, device, device_names, fabric, fabric_names
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.base import Directive, Option, Treatment
from legoai.specs.directives.kinds import Choice, Kind, ListOf, parts_of
from legoai.specs.directives.mesh import AXES, Mesh
from legoai.specs.directives.require import METRICS
from legoai.specs.models.configs import ModelConfig
from legoai.specs.models.families import FAMILIES as MODELS
from legoai.specs.models.families import Family, config_values
from legoai.specs.record import Record
from legoai.specs.units import GIB, format_seconds

DEFAULTS: Final = "defaults"


class Topic(Record):
    """A word, the group under which it is listed, one sentence about it, and its page as Markdown."""

    name: str
    group: str
    summary: str
    page: Callable[[], str]


@cache
def topics() -> tuple[Topic, ...]:
    """Every topic, in the order in which they are listed. A word may have several."""
    return (
        *_statements(),
        *_words(),
        *_axes(),
        *_models(),
        *_devices(),
        *_figures(),
        *_treatments(),
        *_layouts(),
        *_options(),
        *_values(),
        *_diagnostics(),
    )


def found(subject: str) -> tuple[Topic, ...]:
    """The topics that ``subject`` names, in any case and without the quotes that a shell may take away."""
    wanted = _plain(subject)
    return tuple(item for item in topics() if wanted in (_plain(item.name), *_short(item)))


def names() -> tuple[str, ...]:
    """Every name that :func:`found` knows, each once."""
    return tuple(dict.fromkeys([DEFAULTS, *(item.name for item in topics())]))


def listing() -> str:
    """All topics by group, one a line; options and treatments, which are many, several a line."""
    groups: dict[str, list[Topic]] = {}
    for item in topics():
        groups.setdefault(item.group, []).append(item)
    parts = []
    for group, items in groups.items():
        width = max(len(item.name) for item in items)
        rows = dict.fromkeys(f"  {item.name:<{width}}  {item.summary}".rstrip() for item in items)
        parts.append("\n".join([group, *rows]))
    return "\n\n".join(parts) + "\n"


def _plain(name: str) -> str:
    return name.lower().replace('"', "").replace("'", "").replace(" ", "")


def _short(item: Topic) -> tuple[str, ...]:
    """Other names of a topic: of a preset without its family, of a diagnostic by its code."""
    if item.group == "Presets":
        return (_plain(item.name).partition("(")[2].rstrip(")"),)
    return (_plain(item.summary.partition(" ")[0]),) if item.group == "Diagnostics" else ()


def _first_sentence(text: str) -> str:
    return " ".join(cleandoc(text).partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."


def _statements() -> Iterator[Topic]:
    for keyword, (_, page) in OWN_STATEMENTS.items():
        yield Topic(keyword, "Statements of the language", _first_sentence(page), partial(keyword_page, keyword))
    for keyword in FAMILIES:
        summary = _first_sentence(family(keyword).__doc__ or "")
        yield Topic(keyword, "Directives", summary, partial(keyword_page, keyword))


def _words() -> Iterator[Topic]:
    for word, (form, page) in WORDS.items():
        yield Topic(word, "Words inside of statements", _first_sentence(page), partial(str, f"`{form}`\n\n{page}\n"))


def _axes() -> Iterator[Topic]:
    for axis in AXES:
        yield Topic(axis, "Axes of the mesh", Mesh.option(axis).doc, partial(_axis_page, axis))


def _axis_page(axis: str) -> str:
    item = Mesh.option(axis)
    users = [keyword for keyword in FAMILIES if (use := family(keyword).axis_use) and axis in use.names]
    parts = [f"`mesh ({axis} = …)`", f"{item.doc} {legal_values(item)}"]
    if users:
        parts.append("Statements on this axis:\n\n" + "\n".join(f"- `{word} on {axis}`" for word in users))
    return "\n\n".join(parts) + "\n"


def _models() -> Iterator[Topic]:
    for name, model in MODELS.items():
        yield Topic(name, "Models", f"{model.doc}.", partial(_model_page, name, model))
    for name, what in (("python", "A model that a Python factory builds."), ("huggingface", "A Hugging Face config.")):
        yield Topic(name, "Models", what, partial(keyword_page, "model"))
    for name, model in MODELS.items():
        for preset, config in model.presets.items():
            title = f'{name}("{preset}")'
            yield Topic(title, "Presets", _dimensions(config), partial(_preset_page, title, config))


def _dimensions(config: ModelConfig) -> str:
    """The dimensions of a preset that are not their defaults."""
    plain = {item.name: item.default for item in config.__dataclass_fields__.values()}
    given = {name: value for name, value in config_values(config).items() if value != plain[name]}
    return ", ".join(f"{name} = {_value(value)}" for name, value in given.items())


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _model_page(name: str, model: Family) -> str:
    presets = [f"- `{preset}`: {_dimensions(config)}" for preset, config in model.presets.items()]
    fields = []
    for item in model.config_class.__dataclass_fields__.values():
        needed = repr(item.default).startswith("<")
        default = "" if needed else f"; by default `{_value(item.default)}`"
        fields.append(f"- `{item.name}`: {item.metadata['doc']}{default}")
    first = next(iter(model.presets))
    return (
        f'`model {name}("{first}", DIMENSION = VALUE, …)`\n\n{model.doc}.\n\n'
        "Presets:\n\n" + "\n".join(presets) + "\n\nDimensions, any of which may be given beside a preset:\n\n"
        "" + "\n".join(fields) + "\n"
    )


def _preset_page(title: str, config: ModelConfig) -> str:
    docs = {item.name: item.metadata["doc"] for item in config.__dataclass_fields__.values()}
    rows = [f"- `{name} = {_value(value)}`: {docs[name]}" for name, value in config_values(config).items()]
    return f"`model {title}`\n\n" + "\n".join(rows) + "\n"


def _devices() -> Iterator[Topic]:
    for name in device_names():
        yield Topic(name, "Devices", f"{device(name).description}.", partial(_device_page, device(name)))
    for name in fabric_names():
        yield Topic(name, "Fabrics", f"{fabric(name).description}.", partial(_fabric_page, fabric(name)))


def _device_page(item: Device) -> str:
    rows = [f"- devices in a host: {item.devices_per_host}"]
    sources = [("features", item.features.source)]
    if item.memory is not None:
        known = [f"{_digits(item.capacity / GIB)} GiB"] if item.capacity else []
        rate = item.memory.bandwidth_bytes_per_second
        rows.append("- memory: " + ", ".join([*known, *([_rate(rate)] if rate else [])]))
        sources.append(("memory", item.memory.source))
    if (rates := item.peak_flops_per_second) is not None:
        by_dtype = ((name, getattr(rates, name)) for name in rates.fields_ if name != "source")
        listed = ", ".join(f"{name} {_digits(rate / 1e12)}" for name, rate in by_dtype if rate)
        rows.append(f"- peak of matrix products, in TFLOP/s: {listed}")
        sources.append(("peak", rates.source))
    for words, link in (("link to its host's other devices", item.link), ("link to its host", item.host_link)):
        if link is not None:
            rows.append(f"- {words}: {link.kind}, {_rate(link.bandwidth_bytes_per_second)} in each direction")
            sources.append((words, link.source))
    if (processor := item.processor) is not None and processor.compute_capability:
        rows.append(f"- compute capability: {processor.compute_capability}")
    features = [name for name in ("float8", "mxfp8", "symmetric_memory") if getattr(item.features, name)]
    rows.append(f"- features: {', '.join(features) or 'none of float8, mxfp8 and symmetric memory'}")
    cited = "\n".join(f"- {what}: {source}" for what, source in sources)
    options = "" if item.kind == "cpu" else "hosts = …, fabric = …"
    form = f"`cluster {item.name}({options or 'devices = …'})`"
    return f"{form}\n\n{item.description}.\n\n" + "\n".join(rows) + f"\n\nSources:\n\n{cited}\n"


def _fabric_page(item: Fabric) -> str:
    rows = []
    if item.bandwidth_bytes_per_second:
        rows.append(f"- bandwidth of a device: {_rate(item.bandwidth_bytes_per_second)} in each direction")
    if item.latency_seconds:
        rows.append(f"- latency of a hop: {format_seconds(item.latency_seconds)}")
    if item.collective_channels:
        rows.append(f"- NCCL's channels of a collective between hosts: {item.collective_channels}")
    rows.append(f"- source: {item.source}")
    return f"`cluster DEVICE(hosts = …, fabric = {item.name})`\n\n{item.description}.\n\n" + "\n".join(rows) + "\n"


def _rate(rate: float) -> str:
    return f"{_digits(rate / 1e12)} TB/s" if rate >= 1e12 else f"{_digits(rate / 1e9)} GB/s"


def _digits(value: float) -> str:
    return f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}".rstrip("0").rstrip(".") if value else "0"


def _figures() -> Iterator[Topic]:
    for name, metric in METRICS.items():
        units = " or ".join(metric.dimensions)
        sign = "<=" if metric.better == "less" else ">="
        word = "minimize" if metric.better == "less" else "maximize"
        page = f"`require {name} {sign} VALUE`, `{word} {name}`\n\n{metric.doc} It is measured in {units}.\n"
        yield Topic(name, "Figures of `require`", metric.doc, partial(str, page))


def _treatments() -> Iterator[Topic]:
    for treatment, holders in _held().items():
        summary = _first_sentence(treatment.__doc__ or "")
        yield Topic(treatment.name, "Treatments and values", summary, partial(_treatment_page, treatment, holders))


def _layouts() -> Iterator[Topic]:
    for keyword in FAMILIES:
        for layout in family(keyword).layouts:
            summary = _first_sentence(layout.__doc__ or "")
            yield Topic(layout.name, "Standard layouts", summary, partial(_layout_page, layout, keyword))


def _layout_page(layout: type[Treatment], keyword: str) -> str:
    inside = f" ({', '.join(f'{item.name} = …' for item in layout.options)})" if layout.options else ""
    form = f"`{keyword} {layout.name} on AXIS{inside}`"
    return "\n\n".join([form, cleandoc(layout.__doc__ or ""), *filter(None, ["\n".join(option_lines(layout))])]) + "\n"


def _held() -> dict[type[Treatment], list[str]]:
    """Every treatment, and where it may stand."""
    held: dict[type[Treatment], list[str]] = {}

    def visit(treatment: type[Treatment], holder: str) -> None:
        known = treatment in held
        if holder not in held.setdefault(treatment, []):
            held[treatment].append(holder)
        if known:
            return
        for item in treatment.options:
            for inner in treatments_in(item.kind):
                visit(inner, f"`{item.name}` of `{treatment.name}`")

    for keyword in FAMILIES:
        declared = family(keyword)
        for treatment in declared.treatments.treatments if declared.treatments else ():
            visit(treatment, f"a rule of `{keyword}`")
        for item in declared.options:
            for treatment in treatments_in(item.kind):
                visit(treatment, _holder(declared, item))
    return held


def _holder(declared: type[Directive], item: Option) -> str:
    return f"`{declared.keyword}`" if item.field == declared.subject else f"`{item.name}` of `{declared.keyword}`"


def _treatment_page(treatment: type[Treatment], holders: list[str]) -> str:
    inside = ", ".join(f"{item.name} = …" for item in treatment.options)
    parts = [f"`{treatment.name}({inside})`" if inside else f"`{treatment.name}`", cleandoc(treatment.__doc__ or "")]
    parts.append(f"It may stand in {', in '.join(holders)}.")
    if treatment.options:
        parts.append("\n".join(option_lines(treatment)))
    return "\n\n".join(parts) + "\n"


def _options() -> Iterator[Topic]:
    for keyword in FAMILIES:
        declared = family(keyword)
        for item in declared.options:
            if keyword != Mesh.keyword:
                yield _option(item, keyword, _holder_of_option(declared, item))
    for treatment in _held():
        for item in treatment.options:
            yield _option(item, treatment.name, f"`{treatment.name}({item.name} = …)`")


def _holder_of_option(declared: type[Directive], item: Option) -> str:
    if item.field == declared.subject:
        return f"`{declared.keyword} {item.name.upper()}`"
    if declared.subject_holds_options and declared.subject is not None:
        return f"`{declared.keyword} {declared.subject.upper()}({item.name} = …)`"
    return f"`{declared.keyword} ({item.name} = …)`"


def _option(item: Option, owner: str, form: str) -> Topic:
    default = "" if item.default is None or item.required else f", by default {value_text(item.default, item.kind)}"
    page = f"{form}\n\n{item.doc} {legal_values(item)}\n"
    return Topic(item.name, "Options", f"of {owner}{default}", partial(str, page))


def _values() -> Iterator[Topic]:
    """Names that are values of options."""
    for keyword in FAMILIES:
        declared = family(keyword)
        for item in declared.options:
            for name in _choices(item.kind):
                yield _named(name, item, _holder_of_option(declared, item))
    for treatment in _held():
        for item in treatment.options:
            for name in _choices(item.kind):
                yield _named(name, item, f"`{treatment.name}({item.name} = …)`")


def _choices(kind: Kind) -> Iterator[str]:
    for part in parts_of(kind):
        if isinstance(part, Choice):
            yield from part.names
        elif isinstance(part, ListOf):
            yield from _choices(part.item)


def _named(name: str, item: Option, form: str) -> Topic:
    page = f"`{name}`: a value of {form}\n\n{item.doc} {legal_values(item)}\n"
    return Topic(name, "Values of options", f"of {form}", partial(str, page))


def _diagnostics() -> Iterator[Topic]:
    for rule in all_rules():
        summary = f"{rule.code} {_first_sentence(rule.__doc__ or '')}"
        yield Topic(rule.slug, "Diagnostics", summary, partial(_diagnostic_page, rule))


def _diagnostic_page(rule: type[Rule]) -> str:
    return f"{rule.code} {rule.slug} ({rule.severity})\n\n{rule_page(rule)}"
