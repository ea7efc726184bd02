"""`shard on ep`: rules about experts beside other statements."""

from __future__ import annotations

import math
from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import following, grouped, is_within, name_of
from legoai.dsl.analysis.parallelism.experts import (
    changed_experts,
    distributed_experts,
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
from legoai.specs.directives.compile import AotEager, Inductor


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
