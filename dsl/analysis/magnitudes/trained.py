"""Parameters that the optimizer updates: not those that the model freezes, nor those that its forward does not use."""

from __future__ import annotations

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.parallelism.shard import is_never_called
from legoai.specs.models.manifests.manifest import Manifest


@fact
def frozen_parameters(analysis: Analysis) -> frozenset[str]:
    """Paths of the parameters that the model's constructor leaves without gradients."""
    manifest = analysis.manifest
    if manifest is None:
        return frozenset()
    return frozenset(
        module.child_path(item.name)
        for module in manifest.modules.values()
        for item in module.parameters
        if item.frozen
    )


@fact
def unused_parameters(analysis: Analysis) -> frozenset[str]:
    """Paths of the parameters that the model's forward was not seen to use.

    They belong to modules that it does not call, and no module reads them directly. They have no gradients, and
    therefore no optimizer state.
    """
    return _unused(analysis.manifest) if analysis.manifest is not None else frozenset()


@fact
def untrained_parameters(analysis: Analysis) -> frozenset[str]:
    """Paths of the parameters without gradients, as far as that is known; a tied one has all of its names."""
    return frozen_parameters(analysis) | unused_parameters(analysis)


def embedding_with(analysis: Analysis, option: str) -> str | None:
    """Return the path of a trained embedding or bag of embeddings with an option such as `sparse`."""
    modules = () if analysis.manifest is None else analysis.manifest.modules.values()
    chosen = (module for module in modules if module.attributes.get(option))
    untrained = untrained_parameters(analysis)
    return next((module.path for module in chosen if module.child_path("weight") not in untrained), None)


def _unused(manifest: Manifest) -> frozenset[str]:
    unused = {
        module.child_path(item.name)
        for path, module in manifest.modules.items()
        if module.parameters and is_never_called(manifest, path)
        for item in module.parameters
    }
    if not unused:
        return frozenset()
    unused -= {
        module.child_path(step.name)
        for module in manifest.modules.values()
        for step in module.flow
        if step.op == "parameter"
    }
    for names in manifest.tied_parameters:
        if not unused.issuperset(names):
            unused.difference_update(names)
    return frozenset(unused)
