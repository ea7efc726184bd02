"""Reads `[tool.legoai]` of the nearest pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.parsing.suppress import NEVER_ACCEPTED, suppressible
from legoai.specs.files import MOST_TEXT, RefusedFileError, read_file


class ConfigurationError(ValueError):
    """A configuration is invalid; the message names the file and the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A project's settings for `lint`, `check` and `fmt`. Options on the command line override them."""

    format: str | None = None
    """The format of diagnostics."""
    select: tuple[str, ...] = ()
    """Codes, prefixes of codes, or names of the only rules to report; all where it is empty."""
    ignore: tuple[str, ...] = ()
    """Codes, beginnings of codes, or names of rules that are not reported."""
    strict: bool = False
    """Whether warnings fail as errors do."""
    exclude: tuple[str, ...] = ()
    """Files and folders that are left out of directories: patterns, relative to ``folder``."""
    folder: Path | None = None
    """The folder of the configuration file; None where there is none."""


def find_configuration(directory: Path) -> Configuration:
    """Return the configuration of a directory: the table `[tool.legoai]` of the nearest pyproject.toml that has one.

    Raises:
        ConfigurationError: the file cannot be read, or has unknown entries.
    """
    for folder in (directory, *directory.parents):
        file = folder / "pyproject.toml"
        try:
            text = read_file(file, MOST_TEXT)
        except RefusedFileError as error:
            raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
        except OSError:
            continue
        # Parsing TOML takes a tenth of the time of linting a plan, and most of these files have no such table.
        if b"legoai" in text and (table := _table(text, file)) is not None:
            return replace(read_configuration(table, str(file)), folder=folder)
    return Configuration()


def read_configuration(table: Mapping[str, Any], place: str) -> Configuration:
    """Check the table of the file ``place``.

    Raises:
        ConfigurationError: an unknown key, or a value of the wrong kind.
    """
    from legoai.dsl.diagnostics.suggestion import suggestion
    from legoai.dsl.reporting.output import FORMATS

    known = tuple(item.name for item in fields(Configuration) if item.name != "folder")
    lists = {"select": "codes", "ignore": "codes", "exclude": "patterns"}
    for key, value in table.items():
        if key not in known:
            help = suggestion(key, known) or [f"keys are {', '.join(f'`{name}`' for name in known)}"]
            raise ConfigurationError(f"{place}: [tool.legoai] has no key `{key}`; {help[0]}")
        if key == "format" and value not in FORMATS:
            raise ConfigurationError(f"{place}: `format` must be one of {', '.join(FORMATS)}, not {value!r}")
        if key == "strict" and not isinstance(value, bool):
            raise ConfigurationError(f"{place}: `strict` must be true or false, not {value!r}")
        if key in lists and not (isinstance(value, list) and all(isinstance(x, str) and x for x in value)):
            raise ConfigurationError(f"{place}: `{key}` must be a list of {lists[key]}, not {value!r}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    for key in ("select", "ignore"):
        if wrong := unknown_selectors(values.get(key, ())):
            raise ConfigurationError(f"{place}: `{key}`: {wrong}")
    return Configuration(**values)


def unknown_selectors(selectors: Iterable[str]) -> str | None:
    """Return the problem with the first selector that matches no rule; None where each matches one."""
    from legoai.dsl.diagnostics.suggestion import suggestion
    from legoai.dsl.rules import all_rules

    rules = [(rule.code, rule.slug) for rule in all_rules()]
    for selector in selectors:
        if not selects(selector, rules):
            help = suggestion(selector.upper(), [code for code, _ in rules])
            help = help or suggestion(selector.lower(), [slug for _, slug in rules])
            return f"no rule has the code or name `{selector}`" + (f"; {help[0]}" if help else "")
    return None


def never_ignored(selectors: Iterable[str]) -> list[str]:
    """Return the selectors that match only rules whose diagnostics are always reported, each of which matches one."""
    from legoai.dsl.rules import all_rules

    rules = [(rule.code, rule.slug) for rule in all_rules()]
    return [
        selector
        for selector in selectors
        if all(code.startswith(NEVER_ACCEPTED) for code, slug in rules if selects(selector, [(code, slug)]))
    ]


def selects(selector: str, rules: Iterable[tuple[str, str]]) -> bool:
    """Whether ``selector`` matches any of the ``rules``, each a code and a name.

    A selector is a code, the beginning of codes such as `LP8`, or a name such as `unused-let`.
    """
    return bool(selector) and any(code.startswith(selector.upper()) or slug == selector.lower() for code, slug in rules)


def reported(item: Diagnostic, choice: Configuration) -> bool:
    """Whether to report a diagnostic. Diagnostics that leave no plan are always reported."""
    if not suppressible(item):
        return True
    rule = (item.code, item.slug)
    selected = not choice.select or any(selects(selector, [rule]) for selector in choice.select)
    return selected and not any(selects(selector, [rule]) for selector in choice.ignore)


def _table(text: bytes, file: Path) -> Mapping[str, Any] | None:
    import tomllib

    try:
        document = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    tool = document.get("tool", {})
    table = tool.get("legoai") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigurationError(f"{file}: `tool.legoai` must be a table")
    return table
