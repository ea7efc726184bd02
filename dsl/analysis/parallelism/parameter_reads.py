"""Parameters that a forward reads without a call of their module, as `F.linear(x, self.proj.weight)` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import below, holders
from legoai.dsl.analysis.parallelism.shard import is_never_called

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import ModuleInfo

CALL_IT: Final = "call the module itself, `block(x)`, not its `forward` or another method by name"
"""What makes a module called that a forward bypasses."""

_OF_SHAPES = ("view_as", "reshape_as", "expand_as")


@fact
def read_from_above(analysis: Analysis) -> dict[str, tuple[str, ...]]:
    """Return the parameters, by path, whose values a forward above their module reads, with the modules that do."""
    manifest = analysis.manifest
    if manifest is None:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for path, info in manifest.modules.items():
        for index, step in enumerate(info.flow):
            if step.op == "parameter" and "." in step.name and _takes_values(info, index):
                parameter = info.child_path(step.name)
                if parameter.rpartition(".")[0] in manifest.modules:
                    found[parameter] = (*found.get(parameter, ()), path)
    return found


@fact
def only_read(analysis: Analysis) -> dict[str, str]:
    """Return the modules that are never called, although a forward above reads their parameters, with that module."""
    manifest = analysis.manifest
    if manifest is None:
        return {}
    return {
        module: readers[0]
        for parameter, readers in read_from_above(analysis).items()
        if is_never_called(manifest, module := parameter.rpartition(".")[0])
    }


@fact
def bypassed(analysis: Analysis) -> dict[str, str]:
    """Return the modules that are never called, although one inside of them is, with the first of those.

    Their forward, or another method of theirs, is called by its name, as `block.forward(x)` is, or modules above call
    what is inside: what is attached to a call of theirs does not happen.
    """
    manifest = analysis.manifest
    found: dict[str, str] = {}
    if manifest is None or manifest.flow_error is not None:
        return found
    never = {path for path in manifest.modules if is_never_called(manifest, path)}
    for path in manifest.modules:
        if path not in never:
            for above in holders(path):
                if above in never:
                    found.setdefault(above, path)
    return {path: found[path] for path in manifest.modules if path in found}


def is_read_from_above(analysis: Analysis, path: str) -> bool:
    """Whether a forward above the module at ``path`` reads parameters of it, or of modules inside of it."""
    return any(
        below(parameter, path) and any(below(path, reader) for reader in readers)
        for parameter, readers in read_from_above(analysis).items()
    )


def _takes_values(info: ModuleInfo, index: int) -> bool:
    """Whether a forward uses more of a parameter than its dtype or shape."""
    return index in info.outputs or any(
        not (step.op == "cast" and step.inputs[0] != index)
        and step.name not in _OF_SHAPES
        and not step.name.startswith("new_")
        and not step.name.endswith("_like")
        for step in info.flow
        if index in step.inputs
    )
