"""A TorchTitan job config: its options by name, with their spans; those of a TOML file."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from legoai.dsl.diagnostics.codes.importing import BrokenConfig, ConfigValue, UnknownConfigKey
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.statements.merge import OF_SETTING
from legoai.dsl.frontend.text import Lines
from legoai.dsl.importing.formats import AUGUST_2026, DECEMBER_2024, JANUARY_2026, Format
from legoai.dsl.importing.keys import BEFORE_MARCH_2025, RENAMED, Key, Type, Value
from legoai.specs.span import Span

_LARGEST: Final = 2**63 - 1
"""Whole numbers of TOML have 64 bits."""

_HEADER: Final = re.compile(r"\s*\[([^\[\]]+)\]")
_ENTRY: Final = re.compile(r"\s*([\w.\"'-]+)\s*=")
_AT: Final = re.compile(r" \(at line (\d+), column (\d+)\)$")
_WORDS: Final[Mapping[Type, str]] = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "`true` or `false`",
    "text": "a text",
    "texts": "a list of texts",
    "lists of texts": "a list of lists of texts",
}


@dataclass(slots=True)
class Config:
    """The options of a file.

    Attributes:
        lines: of the file.
        format: of the file; that of a TOML file follows from its options.
        given: values of the options that the file gives, by their names in the format's ``keys``.
        written: names that the file uses, by the same.
        diagnostics: about the file.
        places: spans, by names in the file.
        dropped: what is not translated because it has no name or value here: the value and the reason, by name.
        files: texts of other files that were read, by name.
        settings: what a command line gives options, as texts by the names that their spans have.
        function: that makes the config in a Python file.
    """

    lines: Lines
    format: Format = JANUARY_2026
    given: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    places: dict[str, Span] = field(default_factory=dict)
    dropped: dict[str, tuple[Any, str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    function: str = ""

    @property
    def is_old(self) -> bool:
        """Whether the file is of the format before March 2025."""
        return self.format is DECEMBER_2024

    @property
    def is_current(self) -> bool:
        """Whether the file is of the format of August 2026, which is the last one known."""
        return self.format is AUGUST_2026

    @property
    def has_errors(self) -> bool:
        """Whether there are errors that prevent a plan."""
        return bool(errors_of(self.diagnostics))

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option, or TorchTitan's default where the file does not give it."""
        assert not self.format.keys[name].beside, f"{name} is not translated"
        return self.given.get(name, self.default(name))

    def default(self, name: str) -> Value:
        """TorchTitan's default, in the time of the file's format."""
        return self.format.keys[name].default

    def without(self, name: str) -> Config:
        """The same file, with TorchTitan's default for one of its options."""
        given = {key: value for key, value in self.given.items() if key != name}
        return replace(self, given=given, diagnostics=[], places={}, dropped={})

    def span_of(self, name: str) -> Span:
        """Return the span of the option; the beginning of the file where it has none."""
        return self.places.get(self.written.get(name, name), Span(self.lines.name, 0, 0, 1, 1, 1, 1))

    def place_setting(self, path: str, text: str) -> Span:
        """Record what a command line gives an option, and return its span."""
        line = Lines(f"{path}={text}".replace("\n", " "), f"{OF_SETTING}{path}")
        self.settings[line.name] = line.text
        return line.span(0, len(line.text))

    def wrong(self, name: str, message: str, *help: str) -> None:
        """Report the value of an option."""
        label = "this value" if name in self.given else "nothing is given here"
        self.diagnostics.append(ConfigValue.at(self.span_of(name), message, label=label, help=help))


def read_config(text: str, name: str, settings: Mapping[str, str] | None = None) -> Config:
    """Return the options of a TOML file's text; report unknown options, and values of the wrong type.

    ``settings`` are values that a command line gives instead, by the names of their options.
    """
    config = Config(Lines(text, name))
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # includes numbers and nesting beyond what Python can read
        config.diagnostics.append(_broken(config.lines, str(error)))
        return config
    config.places = dict(_places(config.lines))
    entries = dict(_flat(tables))
    for path, text_of_value in (settings or {}).items():
        name_of_key = RENAMED.get(path, path)
        same = [other for other in entries if RENAMED.get(other, other) == name_of_key]
        key = JANUARY_2026.keys.get(name_of_key)
        entries = {other: value for other, value in entries.items() if other not in same}
        entries[path] = text_of_value if key is None else typed(key, text_of_value)
        config.places[path] = config.place_setting(path, text_of_value)
    if any(path in BEFORE_MARCH_2025 for path in entries):
        config.format = DECEMBER_2024
    for path, value in entries.items():
        take(config, path, value)
    return config


def typed(key: Key, text: str) -> Any:
    """The value that a text on a command line means for an option; the text where it is no such value."""
    if text == "None" and _takes_none(key):
        return None
    if key.type in ("text", "lists of texts"):
        return text
    if key.type == "texts":
        return [part for part in re.split(r"[\s,]+", text.strip("[]")) if part]
    if key.type == "boolean":
        return {"true": True, "false": False}.get(text.lower(), text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def take(config: Config, path: str, value: Any, name: str | None = None) -> None:
    """Record one entry of a file, or report it.

    ``path`` is its name in the file, and ``name`` that of the option where the two differ.
    """
    keys = config.format.keys
    name = name or path
    name = name if name in keys else None if config.format.is_python else RENAMED.get(name)
    place = config.places.get(path, config.span_of(path))
    if name is None:
        refuse(config, path, value, suggestion(path, [*keys, *([] if config.format.is_python else RENAMED)]))
        return
    if name in config.written:
        message = f"`{path}` is another name of `{config.written[name]}`, which is given too"
        config.diagnostics.append(ConfigValue.at(place, message, label="given twice"))
        return
    config.written[name] = path
    problem = _problem(keys[name], value)
    if problem is not None:
        message = f"`{path}` takes {problem}, not `{_shown(value)}`"
        config.diagnostics.append(
            ConfigValue.at(place, message, label="this value", help=_unquoted(config, name, value))
        )
        return
    config.given[name] = value


def refuse(config: Config, path: str, value: Any, help: Iterable[str] = ()) -> None:
    """Report an entry of a file that is no option."""
    place = config.places.get(path, config.span_of(path))
    message = f"TorchTitan has no option `{path}`"
    config.diagnostics.append(UnknownConfigKey.at(place, message, label="not read", help=tuple(help)))
    config.dropped[path] = value, "TorchTitan has no such option"


def _takes_none(key: Key) -> bool:
    """Whether the option may be None: where that is its default or a value, or nothing of a plan depends on it."""
    return key.takes_none or key.default is None or bool(key.beside and not key.changes)


def _problem(key: Key, value: Any) -> str | None:
    """Describe the values that the option accepts; None where it accepts the given one."""
    if value is None and _takes_none(key):
        return None
    if not _fits(key.type, value):
        return _WORDS[key.type]
    if key.choices and value not in key.choices:
        return f"one of {', '.join(f'`{_shown(choice)}`' for choice in key.choices)}"
    least, most = (-_LARGEST - 1, _LARGEST) if isinstance(value, int) else (None, None)
    least, most = least if key.least is None else key.least, most if key.most is None else key.most
    if least is not None and value < least:
        return f"at least {least}"
    if most is not None and value > most:
        return f"at most {most}"
    return None


def _unquoted(config: Config, name: str, value: Any) -> list[str]:
    """Suggest the number or the boolean that a text in quotes has, where the option takes that."""
    key = config.format.keys[name]
    if not isinstance(value, str) or key.type not in ("integer", "number", "boolean"):
        return []
    meant = typed(key, value)
    if meant is None or _problem(key, meant) is not None:
        return []
    return [f"write `{meant if config.format.is_python else _shown(meant)}` without quotes"]


def _fits(type: Type, value: Any) -> bool:
    if type == "boolean" or isinstance(value, bool):
        return type == "boolean" and isinstance(value, bool)
    if type in ("integer", "number"):
        if isinstance(value, int):
            return True
        return type == "number" and isinstance(value, float) and math.isfinite(value)
    if type == "text":
        return isinstance(value, str)
    inner: Type = "text" if type == "texts" else "texts"
    return isinstance(value, list) and all(_fits(inner, item) for item in value)


def _shown(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _places(lines: Lines) -> Iterator[tuple[str, Span]]:
    """Yield the position of each entry: TOML's own parser keeps none, and an entry begins on a line."""
    section, start = "", 0
    for number in range(1, len(lines) + 1):
        line = lines.line(number)
        header, entry = _HEADER.match(line), _ENTRY.match(line)
        if header is not None:
            section = _bare(header[1]) + "."
        elif entry is not None:
            yield (
                section + _bare(entry[1]),
                lines.span(start + entry.start(1), start + len(line.split("#")[0].rstrip())),
            )
        start = lines.text.find("\n", start) + 1


def _bare(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def _broken(lines: Lines, message: str) -> Diagnostic:
    found = _AT.search(message)
    reason = _AT.sub("", message)
    offset = len(lines.text)
    if found is not None:
        before = sum(len(line) + 1 for line in lines.text.split("\n")[: int(found[1]) - 1])
        offset = min(before + int(found[2]) - 1, len(lines.text))
    return BrokenConfig.at(
        lines.span(offset, min(offset + 1, len(lines.text))),
        f"`{lines.name}` is no TOML: {reason[:1].lower()}{reason[1:]}",
        label="here",
    )
