"""The path of a model that was most likely meant by one that matches nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.suggestion import closest
from legoai.dsl.frontend.paths import pattern, segments_of

_SLICE = re.compile(r"[\[{(]?([0-9]+)\s*-\s*([0-9]+)[\])}]?")
_INDEX = re.compile(r"-?[0-9]+")
_BRACES = re.compile(r"\{([A-Za-z_][\w, ]*)\}")


def nearest(path: str, analysis: Analysis) -> str | None:
    """The pattern with each wrong segment replaced by a name of the model that is like it; None where nothing is.

    Modules of other tools' models (``model.layers.*.self_attn.q_proj``) become the like ones of this model.
    """
    segments = [segment for _, segment in segments_of(path)]
    return next((found for start in _starts(segments, analysis) if (found := _follow(start, analysis))), None)


def _starts(segments: list[str], analysis: Analysis) -> Iterator[list[str]]:
    """The segments, then without a module that holds the whole model in other tools, then inside of such a one."""
    from legoai.dsl.diagnostics.model_names import around

    holders = tuple(around())
    top = _legal([], analysis)
    yield segments
    inner = list(segments)
    while len(inner) > 1 and inner[0] in holders and inner[0] not in top:
        inner = inner[1:]
        yield inner
    for holder in holders:
        if holder in top and segments[0] != holder:
            yield [holder, *inner]


def _follow(segments: list[str], analysis: Analysis) -> str | None:
    known = analysis.module_and_parameter_paths
    found: list[str] = []
    for segment in segments:
        if known.matching(pattern(".".join([*found, segment]))):
            found.append(segment)
            continue
        meant = _segment(segment, _legal(found, analysis))
        if meant is None:
            return None
        found.append(meant)
    return ".".join(found) if known.matching(pattern(".".join(found))) else None


def _legal(above: list[str], analysis: Analysis) -> list[str]:
    """The names of what is directly inside of the first module that ``above`` matches."""
    known = analysis.module_and_parameter_paths
    prefix = next(iter(known.matching(pattern(".".join(above)))), "") if above else ""
    start = f"{prefix}." if prefix else ""

    def inside() -> list[str]:
        return sorted({name[len(start) :].split(".")[0] for name in known.names if name.startswith(start) and name})

    return analysis.once(("names inside of", prefix), inside)


def _segment(segment: str, legal: list[str]) -> str | None:
    """The segment in the words of the model; of several in braces each that it has."""
    braces = _BRACES.fullmatch(segment)
    if braces is None:
        words = _names(segment, legal)
    else:
        words = [word for part in braces[1].split(",") for word in _names(part.strip(), legal) or [""]]
    words = list(dict.fromkeys(words))
    if not words or "" in words:
        return None
    return words[0] if len(words) == 1 else f"{{{', '.join(words)}}}"


def _names(name: str, legal: list[str]) -> list[str]:
    from legoai.dsl.diagnostics.model_names import our_modules

    if name in legal:
        return [name]
    if match := _SLICE.fullmatch(name):
        return [f"{{{match[1]}..{match[2]}}}"]
    numbers = [int(item) for item in legal if item.isdigit()]
    if _INDEX.fullmatch(name) and numbers:
        return [str(max(numbers))]
    like = our_modules(name, legal) or [closest(name, legal) or ""]
    return [item for item in like if item]
