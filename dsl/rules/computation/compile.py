"""`compile`: rules about modules compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.compilation.graph_breaks import hooked_modules
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.compile import WITHOUT_CUDA_GRAPHS, compiled_modules, graphs_of_gathered
from legoai.dsl.analysis.facts import below, decided, following, grouped, holders, name_of, replacement
from legoai.dsl.analysis.parallelism.async_tp import split_by_async_tp
from legoai.dsl.analysis.parallelism.experts import compiled_one_by_one, dtype_of_weights
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.mesh import devices_per_host
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.computation.broken_checkpoints import cures
from legoai.dsl.rules.devices.mesh import legal_divisors
from legoai.specs.directives.compile import AotEager, Inductor, NotCompiled


class NestedCompile(Check):
    """A compile rule for a module inside of one that is compiled as a whole.

    The outer graph contains the inner module; the inner rule has no effect.

    ## Example
    ```
    compile {
      layers.*              = inductor
      layers.*.feed_forward = inductor(mode = max_autotune)
    }
    ```

    ## Use instead
    ```
    compile { layers.* = inductor(mode = max_autotune) }
    ```
    """

    code = "LP622"
    slug = "nested-compile"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        compiled = compiled_modules(analysis)
        ruled = following(analysis, analysis.plan.compile, (Inductor, AotEager, NotCompiled))
        inner = [
            (path, rule) for path, rule in ruled.items() if any(above in compiled for above in holders(path)) and path
        ]
        for rule, paths in grouped(inner):
            outer = next(above for above in holders(paths[0]) if above in compiled)
            span, over = rule.path_origin.span, compiled[outer].path_origin.span
            assert span is not None
            assert over is not None
            yield self.at(
                span,
                f"the rule for `{rule.path}` has no effect: `{name_of(outer)}` is compiled as a whole",
                label=f"`{paths[0]}` is inside of it",
                others=[Label(over, "compiles what holds it")],
                help=["compile one of the two"],
            )


class CompileOverUnits(Check):
    """A module that is compiled as one graph although units lie inside of it.

    The hooks of FSDP2 cannot be traced: each unit of `fsdp`, and each module whose gradients `replicate` reduces in a
    bucket of their own, breaks the graph, and `fullgraph`, which is the default here, makes that an error. Under tensor
    parallelism the pieces between the breaks fail to compile too (PyTorch 2.13). A module that is a unit itself is
    compiled inside of its hooks.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    compile { root = inductor }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    compile { layers.* = inductor }
    ```
    """

    code = "LP623"
    slug = "compile-over-units"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        units = hooked_modules(analysis)
        for rule, paths in grouped(compiled_modules(analysis).items()):
            sharded = analysis.plan.mesh.tp > 1 and analysis.plan.shard_on("tp") is not None
            if not rule.treatment.fullgraph and not sharded:
                continue
            pair = next(((path, unit) for path in paths for unit in units if below(unit, path)), None)
            if pair is None:
                continue
            maker = units[pair[1]]
            assert rule.origin.span is not None
            assert maker is not None
            further = [] if sharded else [*cures(analysis, pair[0])]
            what = "compiled under tensor parallelism" if sharded else "one graph"
            yield self.at(
                rule.origin.span,
                f"`{name_of(pair[0])}` cannot be {what}: the hooks of the unit `{pair[1]}` break it",
                label="compiled over the units",
                others=[Label(maker, "makes units inside of it")],
                help=[
                    "compile the units instead" + ("" if sharded else ", or allow breaks with `fullgraph = false`"),
                    *further,
                    *(["`fsdp … (backend = graph)` traces the whole step as one graph"] if analysis.plan.fsdp else []),
                ],
                fix=None if sharded or further else replacement(rule.treatment, "fullgraph", "false"),
            )


class CompileUnderGraph(Check):
    """Options of compilation that have no effect under the graph backend, or are not supported by it.

    The step is traced as one graph of known shapes, so it has no graph breaks and no dynamic shapes. The computation of
    a compiled module between two collectives is a region, which is compiled on its own: no region contains a collective
    that `async_tp` could split, and its parameters are gathered to another address each time, which CUDA graphs do not
    allow.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard (backend = graph) { layers.* = unit }
    compile { layers.* = inductor(mode = reduce_overhead) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard (backend = graph) { layers.* = unit }
    compile { layers.* = inductor }
    ```
    """

    code = "LP624"
    slug = "compile-under-graph"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.compile is None or not is_traced(analysis):
            return
        assert plan.fsdp is not None
        traced = Label(analysis.span_of(plan.fsdp, "backend"), "traces the step as one graph")
        if plan.compile.async_tp:
            yield self.at(
                analysis.span_of(plan.compile, "async_tp"),
                "`async_tp` has no effect under `backend = graph`: what is compiled lies between the collectives",
                label="finds no collectives", others=[traced], fix=replacement(plan.compile, "async_tp", "false"),
            )  # fmt: skip
        for rule in plan.compile.rules:
            for option, given, value, why in _without_place(rule.treatment):
                yield self.at(
                    analysis.span_of(rule.treatment, option),
                    f"`{option} = {given}` is not for `backend = graph`: {why}",
                    label="not in the graph", others=[traced], fix=replacement(rule.treatment, option, value),
                )  # fmt: skip


def _without_place(treatment: object) -> Iterator[tuple[str, str, str, str]]:
    """The options that regions of a graph do not have: name, value, the value to write, and the reason."""
    if isinstance(treatment, Inductor):
        moved = "CUDA graphs need parameters that stay where they are, and gathered ones do not"
        if treatment.mode in WITHOUT_CUDA_GRAPHS:
            yield "mode", treatment.mode, WITHOUT_CUDA_GRAPHS[treatment.mode], moved
        if treatment.dynamic:
            yield "dynamic", "true", "false", "its shapes do not vary"
    if isinstance(treatment, Inductor | AotEager) and not treatment.fullgraph:
        yield "fullgraph", "false", "true", "the step is traced as one graph, without breaks"


class CheckpointInsideCompiled(Check):
    """Checkpointed modules inside of a compiled module, under tensor parallelism.

    Compiling what recomputes DTensors fails: a device mesh would have to be saved for the backward pass
    (PyTorch 2.13). A module that is both checkpointed and compiled is not concerned: there the compiled
    module is checkpointed.

    ## Example
    ```
    mesh (tp = 8, dp_replicate = 4)
    shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
    compile { root = inductor }
    checkpoint { layers.* = full }
    ```

    ## Use instead
    ```
    mesh (tp = 8, dp_replicate = 4)
    shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
    compile { layers.* = inductor }
    checkpoint { layers.* = full }
    ```
    """

    code = "LP625"
    slug = "checkpoint-inside-compiled"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.mesh.tp == 1 or plan.shard_on("tp") is None or is_traced(analysis):
            return
        compiled = compiled_modules(analysis)
        inner = (
            (path, rule)
            for path, rule in recomputed_modules(analysis).items()
            if path and any(above in compiled for above in holders(path))
        )
        for rule, paths in grouped(inner):
            outer = compiled[next(above for above in holders(paths[0]) if above in compiled)]
            assert rule.origin.span is not None
            assert outer.origin.span is not None
            yield self.at(
                outer.origin.span,
                f"`{outer.path}` cannot be compiled: `{paths[0]}` inside of it recomputes under tensor parallelism",
                label="compiled",
                others=[Label(rule.origin.span, "checkpointed inside of it")],
                help=["compile the checkpointed modules themselves"],
            )


class AsyncTensorParallel(Check):
    """Asynchronous tensor parallelism without its prerequisites.

    It is a pass of inductor over tensor-parallel graphs, which splits products beside a gather or scatter along the
    sequence: both lie inside of one compiled module, whose own style counts too. Peers share symmetric memory: `tp`
    stays inside of a host.

    ## Example
    ```
    mesh (dp_shard = 4, tp = 8)
    shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
    compile (async_tp = true)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = 8)
    shard standard on tp (sequence)
    compile (async_tp = true) { layers.* = inductor }
    ```
    """

    code = "LP626"
    slug = "async-tp"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.compile is None or not plan.compile.async_tp or is_traced(analysis):
            return
        place = analysis.span_of(plan.compile, "async_tp")
        fix = replacement(plan.compile, "async_tp", "false")
        if plan.mesh.tp == 1 or plan.shard_on("tp") is None:
            what = "`tp` has one rank" if plan.mesh.tp == 1 else "nothing is sharded on `tp`"
            yield self.at(
                place, f"`async_tp` has no effect: {what}", label="nothing to overlap",
                others=[Label(analysis.span_of(plan.mesh, "tp"), f"`tp` = {plan.mesh.tp}")], fix=fix,
            )  # fmt: skip
            return
        device = analysis.device
        if device is not None and not device.features.symmetric_memory:
            yield self.at(
                place, f"`async_tp` needs symmetric memory, which `{device.name}` lacks", label="not on this device",
                others=[Label(analysis.span_of(plan.cluster, "device"), f"`{device.name}`")], fix=fix,
            )  # fmt: skip
        per_host, hosts = devices_per_host(analysis), plan.cluster.hosts
        if per_host is not None and (plan.mesh.tp > per_host or (hosts > 1 and per_host % plan.mesh.tp)):
            yield self.at(
                place,
                f"`async_tp` needs symmetric memory, and groups of `tp` = {plan.mesh.tp} reach over hosts of "
                f"{per_host} devices",
                label="only inside of a host",
                others=[Label(analysis.span_of(plan.mesh, "tp"), f"`tp` = {plan.mesh.tp}")],
                help=[f"sizes of `tp` that stay inside a host are {legal_divisors(per_host)}"],
                fix=fix,
            )
        layouts = analysis.layouts
        if layouts is not None and not layouts.cuts_sequence:
            shard = plan.shard_on("tp")
            assert shard is not None
            yield self.at(
                place, "`async_tp` has no effect: nothing is cut along the sequence, so no gather or scatter is split",
                label="no sequence layouts",
                others=[Label(analysis.span_of(shard), "replicates what enters and leaves")],
                help=["cut the sequence between the layers: `sequence` norms, and `output = shard(1)` of `rowwise`"],
                fix=fix,
            )  # fmt: skip
        decided(plan.compile)
        if not any(isinstance(rule.treatment, Inductor) for rule in plan.compile.rules):
            yield self.at(
                place, "`async_tp` has no effect: no module is compiled by inductor", label="a pass of inductor",
                help=["compile the blocks: `compile (async_tp = true) { layers.* = inductor }`"], fix=fix,
            )  # fmt: skip
        elif layouts is not None and layouts.cuts_sequence and not any(split_by_async_tp(analysis)):
            yield self.at(
                place,
                "`async_tp` has no effect: no module that inductor compiles holds a gather or scatter along the "
                "sequence beside a product",
                label="finds no pair",
                help=["compile the blocks: `compile (async_tp = true) { layers.* = inductor }`"],
                fix=fix,
            )


class CudaGraphsOnCpu(Check):
    """A compile mode that differs from the default on CUDA devices only.

    `reduce_overhead` records CUDA graphs.

    ## Example
    ```
    cluster cpu(devices = 4)
    compile { layers.* = inductor(mode = reduce_overhead) }
    ```

    ## Use instead
    ```
    cluster cpu(devices = 4)
    compile { layers.* = inductor }
    ```
    """

    code = "LP627"
    slug = "cuda-graphs-on-cpu"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, device = analysis.plan, analysis.device
        if plan.compile is None or device is None or device.kind != "cpu":
            return
        for rule in plan.compile.rules:
            if isinstance(rule.treatment, Inductor) and rule.treatment.mode == "reduce_overhead":
                yield self.at(
                    analysis.span_of(rule.treatment, "mode"),
                    f"`reduce_overhead` has no effect: `{device.name}` has no CUDA graphs",
                    label="has no effect",
                    others=[Label(analysis.span_of(plan.cluster, "device"), f"`{device.name}`")],
                    fix=replacement(rule.treatment, "mode", "default"),
                )


class CudaGraphsOfUnits(Check):
    """CUDA graphs of modules whose parameters units of `fsdp` gather.

    `reduce_overhead` and `max_autotune` launch the kernels of a module as one CUDA graph, which contains the addresses
    of parameters. The hooks of units gather parameters again each time, and the graph is recorded again whenever their
    addresses change. The remaining gain is not known: `legoai cost` does not simulate such plans.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    compile { layers.* = inductor(mode = max_autotune) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    compile { layers.* = inductor(mode = max_autotune_no_cudagraphs) }
    ```
    """

    code = "LP636"
    slug = "cuda-graphs-of-units"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp = analysis.plan.fsdp
        for rule, paths in grouped(graphs_of_gathered(analysis).items()):
            assert fsdp is not None
            mode = rule.treatment.mode
            yield self.at(
                analysis.span_of(rule.treatment, "mode"),
                f"`{mode}` records CUDA graphs, and units gather the parameters of `{name_of(paths[0])}` to another "
                "place each time",
                label="recorded anew",
                others=[Label(analysis.span_of(fsdp), "gathers parameters")],
                fix=replacement(rule.treatment, "mode", WITHOUT_CUDA_GRAPHS[mode]),
            )


class CompiledExpertsOneByOne(Check):
    """Compiled experts whose weights are not in bf16.

    Experts multiply all their rows by one grouped product. Under torch.compile that is available in bf16 only; in
    another dtype one expert multiplies after another, and each waits for the host to read its number of rows. `legoai
    cost` does not simulate such plans. Under `backend = graph` the experts of built-in models are not compiled.

    Give weights bf16, or leave what holds the experts uncompiled.

    ## Example
    ```
    model     mixtral("8x7b")
    mesh      (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    precision (param = fp32)
    compile   { layers.* = inductor(fullgraph = false) }
    ```

    ## Use instead
    ```
    model     mixtral("8x7b")
    mesh      (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    precision (param = bf16)
    compile   { layers.* = inductor(fullgraph = false) }
    ```
    """

    code = "LP637"
    slug = "compiled-experts-one-by-one"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision, held = analysis.plan.precision, dtype_of_weights(analysis)
        if is_traced(analysis):
            return
        for rule, paths in grouped(compiled_one_by_one(analysis).items()):
            yield self.at(
                analysis.rule_span(rule),
                f"the compiled experts of `{name_of(paths[0])}` have grouped products in bf16 alone: in "
                f"{getattr(precision, held)} one multiplies after the other",
                label="holds experts",
                others=[Label(analysis.span_of(precision, held), f"weights in {getattr(precision, held)}")],
                help=["give weights bf16, or leave what holds the experts uncompiled"],
            )
