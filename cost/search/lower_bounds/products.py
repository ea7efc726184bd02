"""Matrix products of a module's forward in order, of which selective checkpointing may keep every second."""

from __future__ import annotations

from legoai.specs.models.manifests.manifest import Manifest


def kept_products(manifest: Manifest, path: str) -> frozenset[str]:
    """The linear layers of a module whose outputs are kept where every second product is; none if not known.

    These are the first, the third and so on.
    """
    return frozenset(_known_products(manifest, path)[::2])


def recomputed_products(manifest: Manifest, path: str) -> frozenset[str]:
    """The linear layers of a module that are recomputed where every second product is kept; none if not known.

    The others before the last one are computed again, since the last one's input, which its backward reads, follows
    from them.
    """
    return frozenset(_known_products(manifest, path)[1:-1:2])


def _known_products(manifest: Manifest, path: str) -> list[str]:
    return (products_of(manifest, path) if manifest.flow_error is None else None) or []


def products_of(manifest: Manifest, path: str) -> list[str] | None:
    """The linear layers that a module runs, in order; None where it may compute other products."""
    module, found = manifest.modules[path], list[str]()
    if module.kind == "linear":
        return [path]
    if (module.children and not module.flow) or module.kind == "experts":
        return None
    for step in module.flow:
        if step.op in ("matmul", "other"):
            return None
        if step.op == "call":
            inside = products_of(manifest, module.child_path(step.name))
            if inside is None:
                return None
            found += inside
    return found
