"""`shard on ep`: rules about experts beside other statements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import following, grouped, is_within, name_of
from legoai.dsl.analysis.layouts.tensors import Tensor
from legoai.dsl.analysis.parallelism.experts import (
    changed_experts,
    distributed_experts,
    experts,
    has_slices,
    limited_experts,
    loads_of_all_tokens,
    split_by_host,
)
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.computation.broken_checkpoints import cures
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.compile import AotEager, Inductor
from legoai.specs.models.manifests.manifest import Manifest


class ExpertsInOneGraph(Check):
    """One graph of a module whose experts take a number of tokens that differs from call to call.

    Experts on several ranks, and experts with a capacity, wait for the number of tokens that arrive or are kept. A
    compiled module has a graph break there, which `fullgraph = true`, the default, does not allow. In a checkpoint that
    is compiled with its module, as with `selective`, a break leaves nothing compiled: there `full` is needed, or rules
    for the parts around the experts. Inductor does not take the experts of built-in models in another dtype than bf16
    either, which multiply one after another by the numbers of their rows. Under `backend = graph` no break is needed:
    such experts run operator by operator, and everything around them is compiled.

    ## Example
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 4)
    shard on ep { layers.*.feed_forward.experts = experts }
    compile { layers.* = inductor }
    ```

    ## Use instead
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 4)
    shard on ep { layers.*.feed_forward.experts = experts }
    compile { layers.* = inductor(fullgraph = false) }
    ```
    """

    code = "LP630"
    slug = "experts-in-one-graph"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        found = changed_experts(analysis)
        if is_traced(analysis):
            return
        for path, rule in following(analysis, analysis.plan.compile, (Inductor, AotEager)).items():
            inside = next((item for item in found if is_within(item, path)), None)
            if inside is None or not rule.treatment.fullgraph:
                continue
            yield self.at(
                rule.treatment.origin("fullgraph").span or analysis.rule_span(rule),
                f"`{name_of(path)}` cannot be one graph: how many tokens `{inside}` takes differs from call to call",
                label="one graph",
                others=[Label(analysis.rule_span(found[inside]), "these experts")],
                help=["write `fullgraph = false`", *cures(analysis, path)],
            )
            return
        yield from self._one_by_one(analysis)

    def _one_by_one(self, analysis: Analysis) -> Iterator[Diagnostic]:
        """Experts in one graph of inductor whose numbers of rows decide shapes: its kernels need to know which."""
        precision, found = analysis.plan.precision, split_by_host(analysis)
        for path, rule in following(analysis, analysis.plan.compile, (Inductor,)).items():
            inside = next((item for item in found if is_within(item, path)), None)
            if inside is None or not rule.treatment.fullgraph:
                continue
            yield self.at(
                rule.treatment.origin("fullgraph").span or analysis.rule_span(rule),
                f"`{name_of(path)}` cannot be one graph: in another dtype than bf16 the experts of `{inside}` multiply "
                "one after another, and how many rows each has differs from call to call",
                label="one graph",
                others=[Label(analysis.span_of(precision, "param"), f"`param` = {precision.param}")],
                help=["write `fullgraph = false`, or give weights bf16"],
            )
            return


class ExpertsOfPieces(Check):
    """Experts and the ranks of `tp` that do not fit: with pieces of the sequence, or with whole tokens on each.

    A mixture may compute each rank's piece of the sequence. Different experts are on the ranks of `tp` then, `experts(
    across_tp = true)`: experts that are alike on them would get the gradients of one piece each, and drift apart. Its
    router, and its shared experts, take `sequence(local = true)`, with the dim of the tokens. Where every rank of `tp`
    has all tokens instead, its experts are on all of them, and every rank does the same work.

    ## Example
    ```
    model mixtral("8x7b")
    mesh  (dp_shard = 8, tp = 4, ep = 8)
    fsdp  blocks on dp_shard
    shard standard on tp (sequence)
    shard on ep { layers.*.feed_forward.experts = experts(across_tp = true) }
    ```

    ## Use instead
    ```
    model mixtral("8x7b")
    mesh  (dp_shard = 8, tp = 4, ep = 8)
    fsdp  blocks on dp_shard
    shard standard on tp (sequence) {
      layers.*.feed_forward        = inputs(
        from = shard(1), to = shard(1), local = true, then = outputs(from = shard(1), to = shard(1))
      )
      layers.*.feed_forward.router = sequence(dim = 0, local = true)
    }
    shard on ep { layers.*.feed_forward.experts = experts(across_tp = true) }
    ```
    """

    code = "LP430"
    slug = "experts-of-pieces"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, layouts = analysis.manifest, analysis.layouts
        if manifest is None or analysis.plan.mesh.tp == 1:
            return
        across = {path: rule for path, rule in distributed_experts(analysis).items() if rule.treatment.across_tp}
        mixtures = {} if layouts is None else layouts.mixtures
        for path, rule in across.items():
            got = mixtures.get(path.rpartition(".")[0])
            if got is None and mixtures:
                continue  # of a block that is like another
            if got is None or got.state != "shard" or got.cuts_features or got.wrapped:
                yield self._of_whole(analysis, manifest, path, rule, got)
                return
        for around, got in mixtures.items():
            inside = [path for path in manifest.modules if is_within(path, around)]
            held = next((path for path in inside if manifest.modules[path].kind == "experts"), None)
            if held is None or held in across or got.state != "shard" or got.cuts_features:
                continue
            source = got.source.rule if got.source is not None else None
            shard = analysis.plan.shard_on("tp")
            assert shard is not None, "what arrives was cut on `tp`"
            yield self.at(
                analysis.span_of(shard) if source is None else analysis.rule_span(source),
                f"`{general(manifest, held)}` gets a piece of the sequence, `{got.describe()}`, and is alike on the "
                "ranks of `tp`: its weights would get the gradients of that piece",
                label=f"leaves `{got.describe()}`",
                help=[
                    "put different experts on them: `experts(across_tp = true)` on `ep`, a multiple of `tp`",
                    "or let the whole tensor arrive",
                ],
            )
            return

    def _of_whole(
        self, analysis: Analysis, manifest: Manifest, path: str, rule: PathRule[Any], got: Tensor | None
    ) -> Diagnostic:
        """`across_tp` of experts that are not known to get a piece of the sequence."""
        around = general(manifest, path.rpartition(".")[0])
        if got is not None and got.state == "shard" and got.wrapped:
            problem = "gets a DTensor, and routes plain tensors"
        elif analysis.layouts is None or (got is not None and got.state in ("replicate", "any")):
            problem = f"gets all tokens on each of the {analysis.plan.mesh.tp} ranks of `tp`"
        else:
            problem = "is not known to get a piece of the sequence"
        both = "from = shard(1), to = shard(1)"
        return self.at(
            rule.treatment.origin("across_tp").span or analysis.rule_span(rule),
            f"`across_tp` sends the tokens of each rank's piece of the sequence, and `{around}` {problem}",
            label="experts across `tp`",
            help=[
                f"write `shard standard on tp (sequence, across_tp)`, or `{around} = inputs({both}, local = true, "
                f"then = outputs({both}))`",
                "or leave `across_tp` out: every rank of `tp` then has all experts of its group",
            ],
        )


class IdleAcrossTp(Check):
    """Experts across the ranks of `tp`, of which there is one.

    ## Example
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 8)
    shard on ep { layers.*.feed_forward.experts = experts(across_tp = true) }
    ```

    ## Use instead
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 8)
    shard on ep { layers.*.feed_forward.experts = experts }
    ```
    """

    code = "LP839"
    slug = "idle-across-tp"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.plan.mesh.tp > 1:
            return
        for rule, _ in grouped(experts(analysis).items()):
            if rule.treatment.across_tp:
                yield self.at(
                    rule.treatment.origin("across_tp").span or analysis.rule_span(rule),
                    "`across_tp` has no effect: `tp` has one rank",
                    label="no other ranks",
                    help=["leave it out"],
                )


class IdleCapacity(Check):
    """A capacity of experts that no number of tokens exceeds.

    A token visits an expert at most once. With a factor of at least the number of experts divided by those that a token
    visits, an expert has room for all tokens. Nothing is dropped, and sorting out what is dropped takes time and breaks
    graphs.

    ## Example
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 8)
    shard on ep { layers.*.feed_forward.experts = experts(capacity_factor = 4) }
    ```

    ## Use instead
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 8)
    shard on ep { layers.*.feed_forward.experts = experts(capacity_factor = 1.25) }
    ```
    """

    code = "LP837"
    slug = "idle-capacity"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        if manifest is None:
            return
        for rule, paths in grouped(limited_experts(analysis).items()):
            factor = rule.treatment.capacity_factor
            enough = [loads_of_all_tokens(manifest, path) for path in paths]
            known = [room for room in enough if room is not None]
            if len(known) < len(paths) or factor < max(known):
                continue
            yield self.at(
                rule.treatment.origin("capacity_factor").span or analysis.rule_span(rule),
                f"`capacity_factor = {factor:g}` drops nothing, and takes time: from {max(known):.4g} on it has room "
                "for all tokens, each of which visits an expert at most once",
                label="room for all tokens",
                help=["leave it out, or write a smaller factor such as 1.25"],
            )


class PaddedExperts(Check):
    """Experts in shards over ranks that do not divide their number.

    A unit is cut along dim 0, and the stacked weights of experts have an expert in each slice of it. Where the ranks do
    not divide their number, shards are padded: those of some ranks hold less or nothing, the first ranks hold more than
    their share of weights, gradients and moments, and every gather and reduction carries the padding too. Experts on
    `ep` are cut by experts among its ranks, and along another dim among those that hold the same ones.

    ## Example
    ```
    model   mixtral("8x7b")
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh    (dp_shard = 32)
    fsdp blocks on dp_shard
    ```

    ## Use instead
    ```
    model   mixtral("8x7b")
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh    (dp_shard = 32, ep = 8)
    shard standard on ep
    fsdp blocks on dp_shard
    ```
    """

    code = "LP835"
    slug = "padded-experts"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, manifest = analysis.plan.fsdp, analysis.manifest
        if fsdp is None or manifest is None:
            return
        ranks, placed = shard_ranks(analysis), distributed_experts(analysis)
        for path, info in manifest.modules.items():
            if info.kind != "experts" or path in placed or not has_slices(info):
                continue
            count = info.attributes["n_experts"]
            assert isinstance(count, int), "experts with slices are counted"
            each = -(-count // ranks)
            if each * ranks == count:
                continue
            rule = fsdp_units(analysis)[owner(analysis, f"{path}.weight")].rule
            even = math.gcd(count, ranks)
            help = [f"shard over ranks that divide their number: {even} of `dp_shard` beside `dp_replicate`"]
            if even > 1 and not is_traced(analysis):
                help.insert(0, f"put the experts on `ep`, here `ep = {even}` with `shard standard on ep`")
            yield self.at(
                analysis.span_of(fsdp) if rule is None else analysis.rule_span(rule),
                f"{ranks} ranks do not divide the {count} experts of `{general(manifest, path)}`: their shards are "
                f"padded to {each * ranks / count:.3g} times their size",
                label=f"{each} on the first rank, of a share of {count / ranks:.3g}",
                help=help,
            )
            return
