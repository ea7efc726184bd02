"""A TorchTitan config that a Python function makes: its options by name, with their spans.

Fields are those of `Trainer.Config` from February 2026, when configs became functions, to August 2026: degrees, batches
and steps keep their names, components are classes with a config of their own, and batches are counted in tokens since
August.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from legoai.dsl.diagnostics.codes.importing import BrokenConfig, ConfigValue, NotTranslated
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.text import Lines
from legoai.dsl.importing.config import Config, refuse, take, typed
from legoai.dsl.importing.formats import AUGUST_2026, FEBRUARY_2026
from legoai.dsl.importing.python_modules import Module, Modules
from legoai.dsl.importing.python_optimizer import read_optimizer, refuse_no_groups
from legoai.dsl.importing.python_reader import NotFollowedError, Reader
from legoai.dsl.importing.python_values import Made, Unread, Value, items
from legoai.specs.span import Span

_SECTIONS: Final = {
    **{name: name for name in ("metrics", "lr_scheduler", "training", "parallelism", "checkpoint", "compile", "comm")},
    "profiler": "profiling", "profiling": "profiling", "validator": "validation", "debug": "debug",
    "override": "override", "fault_tolerance": "fault_tolerance",
}  # fmt: skip
"""Fields of the trainer's config that hold options, to the sections of them."""

_FIELDS: Final = {
    "hf_assets_path": "model.hf_assets_path",
    "dump_folder": "job.dump_folder",
    "dataloader": "dataloader",
    "tokenizer": "tokenizer",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Options whose names are others than their fields'."""

_TOKENS: Final = "training.num_tokens_per_microbatch_per_dp_rank"
_CONTEXT: Final = "training.max_context_length"
_STEP: Final = "training.num_tokens_per_train_step"
_MICRO_BATCHES: Final = "parallelism.num_pp_microbatches"
_USUAL: Final = {_TOKENS: 16_384, _CONTEXT: 2048, _STEP: -1, _MICRO_BATCHES: 1}
"""Defaults of what counts a batch."""

_GONE: Final = frozenset({"local_batch_size", "global_batch_size", "seq_len"})
"""What counted a batch until August 2026."""

_RECOMPUTED: Final = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
_CONVERTERS: Final = {
    "Float8LinearConverter": ("float8", "quantize.linear.float8"),
    "MXFP8LinearConverter": ("mx", "quantize.linear.mx"),
    "MXLinearConverter": ("mx", "quantize.linear.mx"),
    "Float8GroupedExpertsConverter": ("quantize.grouped_mm.float8", "quantize.grouped_mm.float8"),
    "Float8GroupedMMConverter": ("quantize.grouped_mm.float8", "quantize.grouped_mm.float8"),
    "MXFP8GroupedExpertsConverter": ("quantize.grouped_mm.mx", "quantize.grouped_mm.mx"),
    "MXGroupedMMConverter": ("quantize.grouped_mm.mx", "quantize.grouped_mm.mx"),
}
_PIECES: Final = ("ChunkedLossWrapper", "ChunkedCELoss")
_MOST_LISTED: Final = 40


def read_python(
    text: str, name: str, path: Path | None, function: str | None, settings: Mapping[str, str] | None = None
) -> Config:
    """Return the options of a config that a function of a file returns; nothing is imported or run.

    Args:
        text: of the file.
        name: of the file.
        path: of the file, around which the files lie that it imports from; None where it has none.
        function: its name; None for the only one of the file.
        settings: values that a command line gives instead, by fields.
    """
    config = Config(Lines(text, name), AUGUST_2026)
    try:
        reader = Reader(Modules(Module.of(text, name, path)))
        made = _made(config, reader, function)
        if made is not None:
            _Options(config, reader, made).read(settings or {})
            if "model_spec" not in made.options:
                message = "the config names no model: `model_spec` is not given"
                config.diagnostics.append(ConfigValue.at(made.span, message, label="this config"))
    except SyntaxError as error:
        line = min(max(error.lineno or 1, 1), len(config.lines))
        _break(config, f"`{name}` is no Python: {error.msg}", _line(config.lines, line))
    except (RecursionError, MemoryError):
        _break(config, f"`{name}` is nested too deeply to be read", _line(config.lines, 1))
    except ValueError as error:
        _break(config, f"`{name}` is no Python: {error}", _line(config.lines, 1))
    return config


def _line(lines: Lines, number: int) -> Span:
    start = lines.offset(number)
    return lines.span(start, start + len(lines.line(number)))


def _break(config: Config, message: str, span: Span, *help: str) -> None:
    config.diagnostics.append(BrokenConfig.at(span, message, label="here", help=help))


def _made(config: Config, reader: Reader, function: str | None) -> Made | None:
    """What the function returns; None, after a diagnostic, where that is no config."""
    module = reader.modules.first
    names = list(_functions(module))
    start = _line(config.lines, 1)
    if function is None and len(names) != 1:
        known = f"its functions are {_listed(names)}" if names else "none of its functions returns one"
        _break(config, f"`{config.lines.name}` has {len(names)} configs: name one with --config", start, known)
        return None
    name = config.function = function or names[0]
    if reader.modules.function(module, name) is None:
        help = suggestion(name, names) or ((f"its functions are {_listed(names)}",) if names else ())
        _break(config, f"`{config.lines.name}` has no function `{name}`", start, *help)
        return None
    try:
        found = reader.call(name)
    except NotFollowedError as error:
        config.files = reader.modules.files
        _break(config, f"`{name}` cannot be followed without running it: {error}", error.span)
        return None
    if isinstance(found, Made) and found.name.endswith("Config"):
        return found
    config.files = reader.modules.files
    if isinstance(found, Made):
        origin = reader.modules.origin(reader.modules.of(found.span), found.name)
        message = f"`{name}` returns what `{found.name}` makes, and `{origin}` is in no folder around the file"
        _break(config, message, found.span, "name the file in a checkout, or copy the function beside this one")
        return None
    what = f"a value that is {found.why}" if isinstance(found, Unread) else "no config"
    where = reader.modules.function(module, name)
    assert where is not None
    _break(config, f"`{name}` returns {what}", where[1].span(where[0]))
    return None


def _functions(module: Module) -> Iterator[str]:
    """Functions without arguments that return a config, by their annotation, or by what they call."""
    for name, function in module.functions.items():
        takes = function.args
        required = len(takes.args) + len(takes.posonlyargs) - len(takes.defaults) + takes.kw_defaults.count(None)
        if required or name.startswith("_"):
            continue
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        said = [function.returns] if function.returns is not None else returns
        if any(ast.unparse(one).split("(")[0].rstrip("'\"").endswith("Config") for one in said):
            yield name


def _listed(names: Sequence[str]) -> str:
    more = [] if len(names) <= _MOST_LISTED else [f"{len(names) - _MOST_LISTED} more"]
    return ", ".join([*(f"`{name}`" for name in names[:_MOST_LISTED]), *more])


class _Options:
    """The options of a trainer's config."""

    def __init__(self, config: Config, reader: Reader, trainer: Made) -> None:
        self.config = config
        self.reader = reader
        self.trainer = trainer

    def read(self, settings: Mapping[str, str]) -> None:
        """Record every option, or report it."""
        config = self.config
        if self._is_of_february():
            config.format = FEBRUARY_2026
        for path, text in settings.items():
            self._set(path, text)
        for name, value in self.trainer.options.items():
            self._component(name, value, self.trainer.spans[name])
        if config.is_current and "optimizer" not in self.trainer.options:
            refuse_no_groups(config, self.trainer.span)
        self._batch()
        for part in (self.trainer, *self.trainer.options.values()):
            if isinstance(part, Made) and part.arguments and part.name.endswith("Config"):
                self._lose(part.name, Unread("given without the name of its field"), part.span)
        for span, text in self.reader.skipped:
            first = text.splitlines()[0]
            why = "it is not followed: nothing of a config is run"
            config.diagnostics.append(
                NotTranslated.at(span, f"`{first}` is not translated: {why}", label="not in the plan")
            )
            config.dropped[first] = None, why
        config.files = {name: text for name, text in self.reader.modules.files.items() if name != config.lines.name}

    def _is_of_february(self) -> bool:
        """Whether names are used that were gone by August."""
        parts = {name: one for name, one in self.trainer.options.items() if isinstance(one, Made)}
        return (
            ("training" in parts and not _GONE.isdisjoint(parts["training"].options))
            or ("optimizer" in parts and "lr" in parts["optimizer"].options and "Container" in parts["optimizer"].name)
            or any(one.name == "ActivationCheckpointConfig" for one in parts.values())
            or "model_converters" in parts
        )

    def _set(self, path: str, text: str) -> None:
        """Assign what a command line gives to its field."""
        holder, names = self.trainer, path.split(".")
        span = self.config.place_setting(path, text)
        for name in names[:-1]:
            held = holder.options.get(name)
            if not isinstance(held, Made):
                held = Made("", span)
                holder.put(name, held, span)
            holder = held
        keys = self.config.format.keys
        key = keys.get(_FIELDS.get(path, ".".join([_SECTIONS.get(names[0], names[0]), *names[1:]])))
        value: Value = (int(text) if text.lstrip("-").isdecimal() else text) if path in _USUAL else text
        holder.put(names[-1], value if key is None else typed(key, text), span)

    def _component(self, name: str, value: Value, span: Span) -> None:
        """Record one field of the trainer's config."""
        match name:
            case "model_spec":
                self._model(value, span)
            case "optimizer":
                read_optimizer(config=self.config, value=value, span=span, put=self._put)
            case "activation_checkpoint":
                self._recomputation(value, span)
            case "loss":
                self._loss(value, span)
            case "model_converters":
                held = value.options.get("converters") if isinstance(value, Made) else value
                self._converters(held, name, span)
            case _ if name in _SECTIONS:
                self._section(name, value, span)
            case _:
                self._put(name, value, span, _FIELDS.get(name))

    def _section(self, name: str, value: Value, span: Span) -> None:
        if not isinstance(value, Made):
            self._lose(name, value, span)
            return
        for field, held in value.options.items():
            path = f"{name}.{field}"
            option = _FIELDS.get(path, f"{_SECTIONS[name]}.{field}")
            if path in _FIELDS or option not in self.config.format.removed:
                if path not in _USUAL:
                    self._put(path, held, value.spans[field], option)
                continue
            self.config.places[path] = value.spans[field]
            refuse(self.config, path, _named(held), [f"no field of TorchTitan {self.config.format.version} has it"])

    def _put(self, path: str, value: Value, span: Span, name: str | None = None) -> None:
        """Record an option; a component that is no option's value is named."""
        config = self.config
        config.places[path] = span
        name = name or path
        key = config.format.keys.get(name)
        unread = next((one for one in items(value) if isinstance(one, Unread | Made)), None)
        if unread is not None and key is not None and (not key.beside or key.changes):
            self._lose(path, unread, span)
            return
        if key is not None and key.beside and key.type == "text" and not isinstance(value, str | None):
            value = _named(value)
        take(config, path, value, name)

    def _lose(self, path: str, value: Value, span: Span) -> None:
        """Report a value that is not known, or that is no config of a component."""
        why = value.unread.why if isinstance(value, Made) else value.why if isinstance(value, Unread) else None
        reason = f"its value is {f'`{_named(value)}`' if why is None else why}"
        self.config.dropped[path] = None, reason
        self.config.diagnostics.append(
            NotTranslated.at(span, f"`{path}` is not translated: {reason}", label="not in the plan")
        )

    def _model(self, value: Value, span: Span) -> None:
        if not isinstance(value, Made) or (family := self._family(value)) is None:
            message = "the model is named by a call of `model_registry`, imported from its package"
            self.config.diagnostics.append(ConfigValue.at(span, message, label="another value"))
            return
        options = dict(value.options)
        named = options.pop("flavor", None)
        flavor = named if named is not None or not value.arguments else value.arguments[0]
        self._put("model_spec.name", family, span, "model.name")
        self._put("model_spec.flavor", flavor, span, "model.flavor")
        converters = options.pop("converters", None)
        self._converters(converters, "model_spec.converters", value.spans.get("converters", span))
        for name, held in options.items():
            self._put(f"model_spec.{name}", held, value.spans[name], f"model.{name}")

    def _family(self, value: Made) -> str | None:
        """The package whose registry is called."""
        module = self.reader.modules.of(value.span)
        where, level, name = module.imports.get(value.name, ("", 0, ""))
        if name != "model_registry":
            return None
        parts = [part for part in where.split(".") if part and part != "config_registry"]
        if not parts and level and module.path is not None:
            return module.path.absolute().parents[level - 1].name
        return parts[-1] if parts else None

    def _converters(self, value: Value, path: str, span: Span) -> None:
        names: list[str] = []
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            kind = _kind(one) or _named(one)
            short, section = _CONVERTERS.get(kind, (kind, ""))
            names.append(short)
            if not isinstance(one, Made) or not section or "grouped" in section:
                continue  # no plan converts experts
            for name, held in one.options.items():
                if name != "model_compile_enabled":  # which says again what `compile` does
                    self._put(f"{path}.{name}", held, one.spans[name], f"{section}.{name}")
        if names:
            self._put(path, list(names), span, "model.converters")

    def _recomputation(self, value: Value, span: Span) -> None:
        path = "activation_checkpoint"
        if value is None or isinstance(value, str):
            self._put(path, value or "none", span, f"{path}.mode")
            return
        kind = _kind(value)
        if isinstance(value, Made) and (kind in _RECOMPUTED or kind in ("", "ActivationCheckpointConfig")):
            if kind in _RECOMPUTED:
                self._put(path, _RECOMPUTED[kind], span, f"{path}.mode")
            for name, held in value.options.items():
                said = {"force_recompute_mm_shapes_by_fqns": "per_op_sac_force_recompute_mm_shapes_by_fqns"}
                self._put(f"{path}.{name}", held, value.spans[name], f"{path}.{said.get(name, name)}")
            return
        self._put(path, Unread(f"`{_named(value)}`, which plans do not have"), span, f"{path}.mode")

    def _loss(self, value: Value, span: Span) -> None:
        """The loss: cross entropy, whole or in pieces of the sequence."""
        kind = _kind(value)
        if isinstance(value, Made) and (kind in _PIECES or (not kind and "num_chunks" in value.options)):
            self._put("loss.num_chunks", value.options.get("num_chunks", 8), value.spans.get("num_chunks", span))
            inner = value.options.get("loss_fn")
            if isinstance(inner, Made):
                self._loss(inner, value.spans["loss_fn"])
        elif isinstance(value, Made) and kind == "CrossEntropyLoss":
            self._put("loss", kind, span, "loss.name")
        else:
            self._put("loss", Unread(f"`{_named(value)}`; plans have cross entropy"), span, "loss.name")

    def _batch(self) -> None:
        """Batches that are counted in tokens: those of a micro batch of a rank, and of a step."""
        if not self.config.format.is_python or self.config.format is FEBRUARY_2026:
            self._refuse_mixed()
            return
        found: dict[str, int] = {}
        for path, usual in _USUAL.items():
            section, _, name = path.partition(".")
            held = self.trainer.options.get(section)
            value = held.options.get(name, usual) if isinstance(held, Made) else usual
            if isinstance(held, Made) and name in held.spans:
                self.config.places[path] = held.spans[name]
            if isinstance(value, bool) or not isinstance(value, int) or value == 0 or (value < 0 and path != _STEP):
                shown = value.why if isinstance(value, Unread) else f"`{_named(value)}`"
                message = f"`{path}` takes a whole number of at least 1; this is {shown}"
                self._wrong(path, message)
                return
            found[path] = value
        tokens, context, step, micro_batches = (found[path] for path in _USUAL)
        if tokens % context or (step > 0 and step % context):
            path = _TOKENS if tokens % context else _STEP
            self._wrong(path, f"{found[path]} tokens are no whole number of sequences of {context} (`{_CONTEXT}`)")
            return
        parallelism = self.trainer.options.get("parallelism")
        given = parallelism.options if isinstance(parallelism, Made) else {}
        if _MICRO_BATCHES.rpartition(".")[2] in given:
            take(self.config, _MICRO_BATCHES, micro_batches, "parallelism.pipeline_parallel_microbatches")
        if given.get("pipeline_parallel_degree", 1) == 1:
            micro_batches = 1
        take(self.config, _CONTEXT, context, "training.seq_len")
        take(self.config, _TOKENS, tokens // context * micro_batches, "training.local_batch_size")
        if step > 0:
            take(self.config, _STEP, step // context, "training.global_batch_size")

    def _refuse_mixed(self) -> None:
        """Report names of August beside older ones."""
        for path in _USUAL:
            section, _, name = path.partition(".")
            held = self.trainer.options.get(section)
            if isinstance(held, Made) and name in held.options:
                self.config.places[path] = held.spans[name]
                self._wrong(path, f"`{path}` is an option of August 2026, beside others that were gone by then")

    def _wrong(self, path: str, message: str) -> None:
        span = self.config.places.get(path, _line(self.config.lines, 1))
        self.config.diagnostics.append(ConfigValue.at(span, message, label="this value"))


def _kind(value: Value) -> str:
    """The class whose config a value is; empty where it is none."""
    return value.name.removesuffix(".Config").rpartition(".")[2] if isinstance(value, Made) else ""


def _named(value: Value) -> str:
    """A value as it is shown."""
    return value.name if isinstance(value, Made) else "code" if isinstance(value, Unread) else str(value)
