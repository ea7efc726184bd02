"""`compile`: rules about what a model does that torch's compiler does not trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.compilation.compiled_checkpoints import checkpoints_in_graphs, compiled_after_checkpoint
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below, grouped, is_within, name_of, replacement
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.computation.broken_checkpoints import cures

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest


class BackwardHookCompiled(Check):
    """A module with backward hooks inside of a module that is compiled as one graph.

    These are `register_full_backward_hook`, `register_full_backward_pre_hook` and `register_backward_hook`. torch's
    compiler does not trace them (PyTorch 2.13). Hooks of the compiled module itself stay outside of its graph, unless
    `checkpoint` gives it a list of what is saved: then the call of the module is in the graph, with its hooks.
    """

    code = "LP646"
    slug = "backward-hook-compiled"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        compiled = compiled_modules(analysis)
        if manifest is None or not compiled or is_traced(analysis):
            return
        hooked = [path for path, info in manifest.modules.items() if info.backward_hooks]
        after = compiled_after_checkpoint(analysis)
        for rule, paths in grouped(compiled.items()):
            within = {
                path: [hook for hook in hooked if below(hook, path) or (hook == path and path in after)]
                for path in paths
            }
            pairs = ((path, found[0]) for path, found in within.items() if found)
            path, hook = next(pairs, ("", None))
            if hook is None or not rule.treatment.fullgraph:
                continue
            further = [*cures(analysis, path)]
            inside = "its checkpoint, which is in the graph," if hook == path else f"`{general(manifest, hook)}`"
            yield self.at(
                rule.path_origin.written,
                f"`{name_of(path)}` cannot be one graph: {inside} has backward hooks, which torch's compiler does not "
                "trace",
                label="compiled",
                help=["allow breaks with `fullgraph = false`, or compile modules that hold no hooks", *further],
                fix=None if further else replacement(rule.treatment, "fullgraph", "false"),
            )


class AssignedInCheckpoint(Check):
    """A module that assigns attributes of modules, whose checkpoint lies inside of a compiled graph.

    `self.calls += 1` assigns the attribute, also that of a buffer, as do `nn.utils.parametrizations.spectral_norm` and
    `nn.utils.weight_norm`. torch's compiler traces that in a forward, but not in a checkpoint, which would call it
    again (PyTorch 2.13). Changes of a buffer in place are traced: `self.calls.add_(1)`.

    A checkpoint lies in a graph if its module is inside of a compiled one, or is compiled itself and has a list of what
    is saved. With `full` the compiled module is checkpointed: the checkpoint stays outside.
    """

    code = "LP647"
    slug = "assigned-in-checkpoint"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None:
            return
        checkpointed = checkpointed_modules(analysis)
        assigning = [item for item in checkpoints_in_graphs(analysis).items() if manifest.modules[item[0]].assigned]
        for rule, paths in grouped(assigning):
            if not rule.treatment.fullgraph:
                continue
            path = paths[0]
            attribute = manifest.modules[path].assigned[0]
            yield self.at(
                rule.path_origin.written,
                f"`{name_of(path)}` assigns `{attribute}` in a checkpoint inside of the compiled graph, which torch's "
                "compiler does not trace",
                label="compiled with the checkpoint",
                others=[Label(analysis.rule_span(checkpointed[path]), "recomputes it")],
                help=[*cures(analysis, path), *_in_place(manifest, manifest.modules[path].child_path(attribute))],
            )


class ReadInGraph(Check):
    """A module that reads values of tensors, inside of a module that is compiled as one graph.

    `if x.mean() > 0` decides by a value, and a graph has no branches: it breaks there (PyTorch 2.13). That is known
    of the first read at which lint's run of forward on the meta device fails.
    """

    code = "LP648"
    slug = "read-in-graph"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None or manifest.graph_break is None or is_traced(analysis):
            return
        reader, why = manifest.graph_break
        for rule, paths in grouped(compiled_modules(analysis).items()):
            path = next((path for path in paths if is_within(reader, path)), None)
            if path is None or not rule.treatment.fullgraph:
                continue
            further = [*cures(analysis, path)]
            which = "it" if path == reader else f"`{general(manifest, reader)}`"
            yield self.at(
                rule.path_origin.written,
                f"`{name_of(path)}` cannot be one graph: {which} reads values of tensors ({why})",
                label="compiled",
                help=["allow breaks with `fullgraph = false`, or let forward decide by shapes only", *further],
                fix=None if further else replacement(rule.treatment, "fullgraph", "false"),
            )


def _in_place(manifest: Manifest, attribute: str) -> Iterator[str]:
    """Yield what helps where an attribute is a buffer."""
    owner, _, name = attribute.rpartition(".")
    if owner in manifest.modules and any(buffer.name == name for buffer in manifest.modules[owner].buffers):
        yield f"a change of the buffer in place is traced: `self.{name}.copy_(…)`"
