"""Loading of manifests: computed, from the user's cache, or by an inspection of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource


def load_manifest(
    source: ModelSource,
    *,
    base_directory: str | Path,
    steps: bool = False,
    announce: Callable[[str], None] | None = None,
    cache_directory: str | Path | None = None,
    timeout: float = 120.0,
) -> Manifest:
    """Compute the manifest of a built-in model; look up or create that of another.

    The manifest of a factory's model, or that of a config file, is cached; entries are dropped when the model's source
    text or config changes. Otherwise a subprocess builds the model on the meta device, which for `python(...)` runs the
    author's factory.

    Args:
        source: the model.
        base_directory: the plan's directory; a Hugging Face path is relative to it, and a factory is searched there
            first.
        steps: whether to look for what differs between the steps of a training (`Manifest.step_changes`), which takes
            a quarter of the time more.
        announce: called with a one-line description before a subprocess starts.
        cache_directory: by default `legoai/manifests` under the user's cache directory.
        timeout: seconds that the subprocess may take.

    Raises:
        ConfigError: a built-in model's preset or fields are wrong.
        ManifestError: the model could not be inspected.
    """
    if source.kind == "builtin":
        from legoai.specs.models.manifests.computed.builtin import computed_manifest

        return computed_manifest(source)

    from legoai.specs.models.manifests.cache import cached_or_inspected

    return cached_or_inspected(
        source,
        base_directory=Path(base_directory),
        steps=steps,
        announce=announce,
        cache_directory=None if cache_directory is None else Path(cache_directory),
        timeout=timeout,
    )
