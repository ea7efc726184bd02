"""What a check sees: the resolved plan, the model's manifest, the cluster, and where everything stands in the text."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legoai.dsl.frontend.paths import Assignment, Paths, assign
from legoai.dsl.frontend.resolve import Resolution
from legoai.specs.directives.base import Declared, Directive, PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.plan import Plan
from legoai.specs.span import Span

if TYPE_CHECKING:
    from legoai.dsl.analysis.layout import Propagation
    from legoai.specs.cluster import Device
    from legoai.specs.models.manifest import Manifest


class Analysis:
    """Everything that is known about a plan before it is simulated."""

    def __init__(self, plan: Plan, resolution: Resolution, manifest: Manifest | None, directory: Path) -> None:
        self.plan = plan
        self.resolution = resolution
        self.manifest = manifest
        """None where the model could not be looked at; checks that need it find nothing then."""
        self.directory = directory
        self._assignments: dict[int, Assignment[Any]] = {}
        self.distinct: dict[int, list[tuple[str, PathRule[Any]]]] = {}
        """By a statement's identity, what ``legoai.dsl.analysis.blocks.distinct`` found for it."""

    def place(self, declared: Declared, field: str = "keyword") -> Span:
        """Where the value of ``field`` stands; else the statement's keyword; else the plan's first line."""
        return declared.place(field) or self.resolution.start

    @cached_property
    def device(self) -> Device | None:
        """The cluster's device; None where its profile cannot be read."""
        from legoai.specs.cluster import CatalogueError, device

        use = self.plan.cluster
        try:
            if use.device == "profile":
                from legoai.specs.device_file import load_device  # imports pydantic

                return load_device(self.directory / use.profile) if isinstance(use.profile, str) else None
            return device(use.device)
        except CatalogueError:
            return None

    @cached_property
    def module_paths(self) -> Paths:
        """The paths of the model's modules, as ``named_modules()`` prints them."""
        assert self.manifest is not None
        return Paths(list(self.manifest.modules))

    @cached_property
    def module_and_parameter_paths(self) -> Paths:
        """The paths of the model's modules, then those of its parameters."""
        assert self.manifest is not None
        return Paths([*self.manifest.modules, *self.manifest.parameter_paths()])

    @cached_property
    def layouts(self) -> Propagation | None:
        """The layouts on `tp` along the forward; None where nothing is sharded on it, or the model is not known."""
        from legoai.dsl.analysis.layout import Propagation

        shard = self.plan.shard_on("tp")
        size = self.plan.mesh.tp
        if shard is None or self.manifest is None or (not isinstance(size, Hole) and size == 1):
            return None
        if any(isinstance(rule.treatment, Hole) for rule in shard.rules):
            return None
        found = Propagation(self.manifest, self.assigned(shard).by_path)
        found.run()
        return found

    def assigned(self, directive: Directive) -> Assignment[Any]:
        """Which rule of ``directive`` each module follows, and for `shard` each parameter; without undecided rules."""
        assert self.manifest is not None
        held = self._assignments.get(id(directive))
        if held is None:
            decided = [rule for rule in directive.rules if not isinstance(rule.treatment, Hole)]
            paths = self.module_and_parameter_paths if directive.keyword == "shard" else self.module_paths
            held = self._assignments[id(directive)] = assign(decided, paths)
        return held
