"""Styles on `tp` to choose from for each module, and the modules of a model for which there is a choice.

The styles listed for a module fit its kind, as for `StyleMisplaced`. Which of them fit the neighbouring modules is
decided by :mod:`legoai.dsl.analysis.layouts.propagation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.parallelism.shard import is_never_called, last_module
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.paths import Paths, pattern
from legoai.dsl.frontend.syntax import Auto, Let
from legoai.dsl.frontend.values.arguments import Reader
from legoai.dsl.frontend.values.scope import Scope
from legoai.specs.directives.base import Treatment
from legoai.specs.directives.shard import Shard

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo

NONE: Final = "none"
_LINEAR: Final = (
    NONE,
    "colwise",
    "colwise(input = shard(1))",
    "colwise(output = replicate)",
    "colwise(input = shard(1), output = replicate)",
    "colwise(output = shard(1))",
    "rowwise",
    "rowwise(output = shard(1))",
    "rowwise(input = replicate)",
    "rowwise(input = replicate, output = shard(1))",
)
_LOGITS: Final = (*_LINEAR, "colwise(loss_parallel = true)", "colwise(input = shard(1), loss_parallel = true)")
_EMBEDDING: Final = (
    NONE,
    "rowwise(input = replicate)",
    "rowwise(input = replicate, output = shard(1))",
    "colwise(output = replicate)",
    "colwise(output = shard(1))",
)
_NORM: Final = (NONE, "sequence", "heads")
_AROUND: Final = (
    NONE,
    "inputs(from = shard(1), to = replicate)",
    "inputs(from = replicate, to = replicate)",
    "inputs(from = shard(1), to = replicate, local = true)",
    "inputs(from = shard(1), to = replicate, local = true, then = outputs(from = replicate, to = shard(1)))",
    "inputs(from = replicate, to = shard(1), local = true)",
    "outputs(from = replicate, to = shard(1))",
    "outputs(from = shard(1), to = replicate)",
)
_HOLDING: Final = ("attention", "feed_forward", "moe")
"""Kinds of modules before which a layout is usually changed, once for all layers inside."""


def styles_for(manifest: Manifest, paths: Paths, path: str) -> tuple[str, ...]:
    """The styles that a rule for this pattern may have, as a plan writes them: those that fit all its modules.

    Empty where it matches a parameter, or nothing.
    """
    lists = {_styles_of(manifest, name) for name in paths.matching(pattern(path))}
    first = next(iter(lists), ())
    return tuple(item for item in first if all(item in other for other in lists))


@lru_cache
def style_of(text: str) -> Treatment:
    """A style that is listed, from its text."""
    [statement] = parse(f"let style = auto -> {text}", "a style").file.statements
    assert isinstance(statement, Let) and isinstance(statement.value, Auto) and Shard.treatments is not None
    style, _ = Reader(Scope({}), []).value(statement.value, Shard.treatments)
    assert isinstance(style, Treatment)
    return style


def _styles_of(manifest: Manifest, path: str) -> tuple[str, ...]:
    if path not in manifest.modules:
        return ()
    info = manifest.modules[path]
    if is_never_called(manifest, path) or _is_routed(manifest, path):
        return (NONE,)
    if info.kind == "linear":
        return _LOGITS if path == last_module(manifest) else _LINEAR
    return {"embedding": _EMBEDDING, "norm": _NORM}.get(info.kind, _AROUND)


def _is_routed(manifest: Manifest, path: str) -> bool:
    """Whether the module is in a mixture of experts, whose tokens `tp` does not follow."""
    return any(manifest.modules[above].kind == "moe" for above in holders(path))


def open_paths(manifest: Manifest, decided: frozenset[str]) -> Iterator[str]:
    """Patterns of the modules that are worth a choice, one for the equal modules of a class of blocks.

    Args:
        manifest: of the model.
        decided: modules that have rules already.
    """
    found: dict[tuple[str, int], list[str]] = {}
    for path, info in manifest.modules.items():
        if path not in decided and _is_worth(manifest, path, info):
            found.setdefault((general(manifest, path), manifest.template_of(path)), []).append(path)
    alike = [written for written, _ in found]
    for (written, _), members in found.items():
        matching = sum(_matches(written, path) for path in manifest.modules)
        if alike.count(written) == 1 and matching == len(members):
            yield written
        else:
            yield from members


def _is_worth(manifest: Manifest, path: str, info: ModuleInfo) -> bool:
    if not path or is_never_called(manifest, path) or _is_routed(manifest, path):
        return False
    return info.kind in ("linear", "embedding", "norm") or (info.kind in _HOLDING and bool(info.children))


def _matches(written: str, path: str) -> bool:
    return pattern(written).matches(path)
