"""`compile` beside `checkpoint`: rules about graph breaks inside of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.compilation.compiled_checkpoints import compiled_after_checkpoint
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.compilation.graph_breaks import break_inside, broken_checkpoints
from legoai.dsl.analysis.facts import is_within, modules_inside, name_of
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.checkpoint import Selective
from legoai.specs.directives.hole import Undecided


class UncompiledCheckpoint(Check):
    """A compiled module of whose checkpoint nothing is compiled, since the graph breaks inside of it.

    A graph breaks at experts on several ranks or with a capacity, at units of `fsdp` and buckets of `replicate` inside
    of the module, at backward hooks, and where values of tensors are read; in a checkpoint also where attributes are
    assigned. With `fullgraph = false` what lies between the breaks is compiled, but not inside of a checkpoint: torch
    traces a checkpoint as a whole or not at all, and where it does not, its compiler is disabled for all that the
    checkpoint calls (PyTorch 2.13). The checkpointed module runs as without `compile`.

    A checkpoint lies in a graph if its module is inside of a compiled one, or is compiled itself and has a list of what
    is saved. With `full` the compiled module is checkpointed: its graphs lie inside of the checkpoint.

    ## Example
    ```
    model      mixtral("8x7b")
    mesh       (dp_shard = 32, ep = 8)
    shard standard on ep
    fsdp blocks on dp_shard
    checkpoint { layers.* = selective([attention, matmul]) }
    compile    { layers.* = inductor(fullgraph = false) }
    ```

    ## Use instead
    ```
    model      mixtral("8x7b")
    mesh       (dp_shard = 32, ep = 8)
    shard standard on ep
    fsdp blocks on dp_shard
    checkpoint { layers.*.attention = selective([attention, matmul]) }
    compile    { layers.*.attention = inductor }
    ```
    """

    code = "LP668"
    slug = "uncompiled-checkpoint"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        checkpointed, seen = checkpointed_modules(analysis), set[tuple[int, int]]()
        for path, broken in broken_checkpoints(analysis).items():
            key = id(broken.rule), id(checkpointed[path])
            if broken.rule.treatment.fullgraph or key in seen:
                continue
            seen.add(key)
            at = "" if broken.inside == path else f" at `{name_of(broken.inside)}`"
            yield self.at(
                analysis.rule_span(broken.rule),
                f"nothing of `{name_of(path)}` is compiled: its checkpoint has a graph break{at}",
                label="has no effect there",
                others=[Label(analysis.rule_span(checkpointed[path]), "recomputes it")],
                help=list(cures(analysis, path)),
            )


def cures(analysis: Analysis, compiled: str) -> Iterator[str]:
    """Yield what lets a compiled module be compiled where the graph may break; nothing without a checkpoint in it.

    Args:
        analysis: of the plan.
        compiled: path of the module, or of the one in it that is checkpointed.
    """
    try:
        broken = broken_checkpoints(analysis)
    except Undecided:  # the caller's diagnostic holds for any answer
        return
    path = next((path for path in broken if is_within(path, compiled)), None)
    if path is None:
        return
    assert analysis.manifest is not None
    name = general(analysis.manifest, path)
    itself = path in compiled_after_checkpoint(analysis)
    how = "" if itself else f", and compile `{name}` instead of what holds it"
    yield f"recompute `{name}` by `full`{how}: then the compiled graphs lie inside of the checkpoint, and may break"
    if not isinstance(checkpointed_modules(analysis)[path].treatment, Selective):
        return
    children = (f"{path}.{child}" if path else child for child in analysis.manifest.modules[path].children)
    parts = [child for child in children if break_inside(analysis, child) is None]
    part = max(parts, key=lambda part: len(modules_inside(analysis, part)), default=None)
    if part is not None:
        yield f"or checkpoint and compile parts of it without a break, such as `{general(analysis.manifest, part)}`"
