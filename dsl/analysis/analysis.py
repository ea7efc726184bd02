"""Analysis of a resolved plan on its model: the facts that lint rules, lowering, simulator and search read.

Facts about one family of directives are functions in the module of that family, marked with
:func:`~legoai.dsl.analysis.caching.fact`: each is computed once per analysis, on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from legoai.dsl.analysis.stages.pipeline import stage_of
from legoai.dsl.frontend.kept import Inputs, Kept
from legoai.dsl.frontend.paths import Assignment, Paths, assign, pattern
from legoai.specs.directives.base import Declared, Directive, Divided, PathRule, Staged
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.shard import Unplaced
from legoai.specs.plan import Plan
from legoai.specs.record import replace
from legoai.specs.span import Span

if TYPE_CHECKING:
    from legoai.dsl.analysis.layouts.propagation import Propagation
    from legoai.dsl.frontend.resolve import Resolution
    from legoai.specs.cluster import Device, DeviceKind
    from legoai.specs.models.manifests.manifest import Manifest


T = TypeVar("T")


class Analysis:
    """A resolved plan and its model, with the facts derived from them.

    Args:
        plan: the resolved plan, with the values in effect. Diagnostics use the spans of its values.
        manifest: of the plan's model; None where the model could not be inspected.
        directory: base of relative file names in the plan.
        file: the plan file's name, for diagnostics.
        resolution: from which the plan was resolved; None for a plan without a text of its own.
        like: an analysis of another plan for the same model, whose facts about the model alone are reused.
        kept: cache shared with other plans for the same model, whose facts are reused where they read the same values.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest | None,
        directory: Path = Path(),
        *,
        file: str = "",
        resolution: Resolution | None = None,
        like: Analysis | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._plan = plan.effective
        self._noted: Plan | None = None
        self._inputs: Inputs | None = None
        if kept is not None:
            from legoai.dsl.analysis.noted import read

            self._inputs = Inputs(kept, partial(read, self._plan))
        self.manifest = manifest
        self.directory = directory
        self.file = file if resolution is None else resolution.file.name
        self.resolution = resolution
        self._known: dict[Hashable, Any] = {}
        if like is not None and manifest is not None and like.manifest is manifest:
            self.module_paths = like.module_paths
            self.module_and_parameter_paths = like.module_and_parameter_paths

    @property
    def plan(self) -> Plan:
        """The plan, without statements that are idle."""
        if self._inputs is None or not self._inputs.kept.open:
            return self._plan
        if self._noted is None:
            from legoai.dsl.analysis.noted import noted

            self._noted = noted(self._plan, self._inputs.kept.note)
        return self._noted

    def once(self, what: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, computed once for this analysis, and for analyses that share its cache.

        Args:
            what: key of the result.
            compute: reads the plan through this analysis only. Its result must not be changed.
        """
        if self._inputs is not None:
            return self._inputs.once(what, compute)
        if what not in self._known:
            self._known[what] = compute()
        found: T = self._known[what]
        return found

    def unlike(self, other: Analysis) -> set[Hashable]:
        """Return the keys of another plan's results that may differ for this plan.

        Both must share a cache.
        """
        assert self._inputs is not None and other._inputs is not None
        return self._inputs.unlike(other._inputs)

    @property
    def start(self) -> Span:
        """The span of diagnostics about something missing in the plan."""
        return Span(self.file, 0, 0, 1, 1, 1, 1) if self.resolution is None else self.resolution.start

    def span_of(self, declared: Declared, field: str = "keyword") -> Span:
        """Return the span of the value of ``field``; else of the statement's keyword; else the plan's first line."""
        return declared.span_of(field) or self.start

    def rule_span(self, rule: PathRule[Any]) -> Span:
        """Return the span of a rule's path."""
        return rule.path_origin.span or rule.origin.span or self.start

    @property
    def device(self) -> Device | None:
        """The cluster's device; None where its profile cannot be read."""
        return self.once("device", lambda: self.plan.cluster.described(self.directory))

    @property
    def device_kind(self) -> DeviceKind:
        """The kind of the cluster's device; a GPU where its profile cannot be read."""
        return "cuda" if self.device is None else self.device.kind

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

    @property
    def layouts(self) -> Propagation | None:
        """The layouts on `tp` along the forward; None where nothing is sharded on it, or the model is not known."""
        return self.once("layouts", self._layouts)

    def _layouts(self) -> Propagation | None:
        from legoai.dsl.analysis.layouts.propagation import Propagation

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
        """Return the rule that matches each module, or parameter where rules may name these; without undecided rules.

        A rule with another treatment for its first modules counts as two rules, and one with treatments for pipeline
        stages as one or two for each stage.

        Raises:
            Undecided: a rule depends on stages whose modules are not decided.
        """
        # The statement is stored with its result, so that no other object can reuse its `id`.
        return self.once(("assigned", id(directive)), lambda: (directive, self._assigned(directive)))[1]

    def _assigned(self, directive: Directive) -> Assignment[Any]:
        assert self.manifest is not None
        decided = [rule for rule in directive.rules if not is_open(rule.treatment)]
        found = assign(decided, self.paths_for(directive))
        if any(isinstance(rule.treatment, Unplaced) for rule in decided):
            placed = {path: rule for path, rule in found.by_path.items() if not isinstance(rule.treatment, Unplaced)}
            found = replace(found, by_path=placed)
        if any(isinstance(rule.treatment, Divided | Staged) for rule in decided):
            found = replace(found, by_path=self._parted(found.by_path, self.paths_for(directive)))
        return found

    def _parted(self, by_path: Mapping[str, PathRule[Any]], paths: Paths) -> dict[str, PathRule[Any]]:
        parts: dict[int, Mapping[str, PathRule[Any]]] = {}
        found = {}
        for path, rule in by_path.items():
            if isinstance(rule.treatment, Divided | Staged):
                if id(rule) not in parts:
                    parts[id(rule)] = self.parts_by_path(rule, paths.matching(pattern(rule.path)))
                if path in parts[id(rule)]:
                    found[path] = parts[id(rule)][path]
            else:
                found[path] = rule
        return found

    def parts_by_path(self, rule: PathRule[Any], matched: Sequence[str]) -> dict[str, PathRule[Any]]:
        """Return the modules that a rule matches, in order, each with the applicable part of the rule.

        Raises:
            Undecided: the rule depends on stages whose modules are not decided.
        """
        treatment = rule.treatment
        if isinstance(treatment, Staged):
            stages = {path: stage_of(self, path) for path in matched}
            found: dict[str, PathRule[Any]] = {}
            for stage, one in enumerate(treatment.each):
                own = [path for path in matched if stages[path] == stage]
                found |= self.parts_by_path(replace(rule, treatment=one), own)
            # Equal treatments in several stages count as one rule, so that its blocks have one class.
            alike = {one.treatment: one for one in reversed(found.values())}
            return {path: alike[found[path].treatment] for path in matched if path in found}
        if isinstance(treatment, Divided):
            these, others = parts_of(rule)
            return {path: these if place < treatment.n else others for place, path in enumerate(matched)}
        return dict.fromkeys(matched, rule)

    def paths_for(self, directive: Directive | type[Directive]) -> Paths:
        """The paths that rules of ``directive`` may name."""
        return self.module_and_parameter_paths if directive.names_parameters else self.module_paths


def is_open(treatment: Any) -> bool:
    """Whether a rule's treatment, or a part of it, is a hole, so that nothing is known of its modules."""
    if isinstance(treatment, Staged):
        return isinstance(treatment.each, Hole) or any(map(is_open, treatment.each))
    if isinstance(treatment, Divided):
        return any(isinstance(part, Hole) for part in (treatment.n, treatment.these, treatment.others))
    return isinstance(treatment, Hole)


def parts_of(rule: PathRule[Any]) -> Iterator[PathRule[Any]]:
    """Yield the rule itself; a divided rule as one for its first modules and one for the others, or one per stage."""
    if isinstance(rule.treatment, Staged):
        for one in rule.treatment.each:
            yield from parts_of(replace(rule, treatment=one))
    elif isinstance(rule.treatment, Divided):
        yield replace(rule, treatment=rule.treatment.these)
        yield replace(rule, treatment=rule.treatment.others)
    else:
        yield rule
