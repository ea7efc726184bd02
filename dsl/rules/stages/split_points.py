"""`pipeline`: rules about where the model is split into stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import listed, replacement, written
from legoai.dsl.analysis.magnitudes.stage_loads import loads_of_ranks, loads_of_starts, most_even
from legoai.dsl.analysis.model import without_tied_embeddings
from legoai.dsl.analysis.repetition.unequal_blocks import help_with_unequal_blocks
from legoai.dsl.analysis.stages.pipeline import (
    block_counts,
    first_modules,
    is_staged,
    lie_apart,
    split_points,
    stage_count,
)
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.pipeline import Even, Pipeline

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest


_COMMON_IDLENESS = 0.25
"""The share of a step that is worth a word: a quarter of the machines would be idle."""
_WORTH_MOVING = 0.05
"""The share of the longest rank's work that another split must save to be advised."""


class UnknownSplit(Check):
    """A split point that is no module of the model.

    ## Example
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [layers.32])
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [layers.16])
    ```
    """

    code = "LP506"
    slug = "unknown-split-point"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for pipeline, manifest, points in _named_split(analysis):
            known = split_points(analysis)
            for path in points:
                if path not in manifest.modules or path == "":
                    near = known.nearest(path)
                    yield self.at(
                        analysis.span_of(pipeline, "split"),
                        f"`{path}` is no module of the model",
                        label="splits before a module that is not there",
                        help=[*([f"did you mean `{near}`?"] if near else []), *_block_names(manifest)],
                    )


class SplitInside(Check):
    """A split point inside of a module that computes as one.

    A stage begins with a block or with a module beside the blocks. Inside of a block more than one tensor is
    alive, and the code of its forward cannot be cut.

    ## Example
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [layers.16.feed_forward])
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [layers.16])
    ```
    """

    code = "LP507"
    slug = "split-inside-block"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for pipeline, manifest, points in _named_split(analysis):
            known = split_points(analysis)
            for path in points:
                if path and path in manifest.modules and path not in known.position:
                    near = known.nearest(path)
                    in_list = near is not None and manifest.modules[near].kind == "container"
                    cure = help_with_unequal_blocks(analysis) if in_list else None
                    holds = any(start.startswith(f"{path}.") for start in known.starts)
                    what = f"lies inside of `{near}`"
                    if holds:
                        is_list = manifest.modules[path].kind == "container"
                        what = "is a list of modules" if is_list else "holds several modules that one may begin with"
                    yield self.at(
                        analysis.span_of(pipeline, "split"),
                        f"a stage cannot begin with `{path}`, which {what}",
                        label="not a place to cut",
                        help=[cure] if cure else [f"did you mean `{near}`?"] if near else [],
                    )


class SplitOrder(Check):
    """Split points out of the model's order, or one that stands twice.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (split = [layers.16, layers.8, layers.24])
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (split = [layers.8, layers.16, layers.24])
    ```
    """

    code = "LP508"
    slug = "split-order"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for pipeline, _, points in _named_split(analysis):
            position = split_points(analysis).position
            known = [path for path in points if path in position]
            ordered = sorted(set(known), key=position.__getitem__)
            text = f"[{', '.join(ordered)}]"
            for before, after in pairwise(known):
                if position[after] > position[before]:
                    continue
                twice = after == before
                yield self.at(
                    analysis.span_of(pipeline, "split"),
                    f"the model is split at `{after}` twice"
                    if twice
                    else f"`{after}` comes before `{before}` in the model, and after it in the split points",
                    label="leaves a stage empty" if twice else "not in the model's order",
                    help=[f"in order: `{text}`"],
                    fix=replacement(pipeline, "split", text) if len(known) == len(points) else None,
                )
                break


class SplitCount(Check):
    """A number of split points that does not make the number of stages.

    Between n stages there are n − 1 split points.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (stages = 4, split = [layers.10, layers.20])
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (stages = 4, split = [layers.8, layers.16, layers.24])
    ```
    """

    code = "LP509"
    slug = "split-count"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline = analysis.plan.pipeline
        if pipeline is None or isinstance(pipeline.split, str | Even) or block_counts(pipeline) is not None:
            return
        stages, points = stage_count(analysis), len(pipeline.split)
        if stages is None or points == stages - 1:
            return
        place = analysis.span_of(pipeline, "stages" if written(pipeline, "stages") else "schedule")
        yield self.at(
            analysis.span_of(pipeline, "split"),
            f"{points} split point{'s' * (points != 1)} make {points + 1} stages, and the pipeline has {stages}",
            label=f"{stages - 1} needed",
            others=[Label(place, f"{stages} stages")],
            help=[f"name {stages - 1} split points, or write `split = even`"],
        )


class EmptyFirstStage(Check):
    """A split before the model's first module, which leaves the first stage empty.

    Split points name the first module of each stage but the first.

    ## Example
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [tok_embeddings])
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [layers.16])
    ```
    """

    code = "LP510"
    slug = "empty-stage"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for pipeline, _, points in _named_split(analysis):
            starts = split_points(analysis).starts
            if points and starts and points[0] == starts[0]:
                yield self.at(
                    analysis.span_of(pipeline, "split"),
                    f"nothing is left for the first stage: `{points[0]}` is the model's first module",
                    label="the first split point",
                    help=["split points name the first module of each stage but the first"],
                )


class BlocksOfStages(Check):
    """Numbers of blocks that do not fit the stages or the model.

    `split` takes a number for each stage, the first and the last among them, and the numbers add up to the model's
    blocks; or it names modules.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (split = [8, 8, 8, 6])
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (split = [9, 8, 8, 7])
    ```
    """

    code = "LP520"
    slug = "blocks-of-stages"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline = analysis.plan.pipeline
        counts = None if pipeline is None else block_counts(pipeline)
        if pipeline is None or counts is None:
            return
        assert not isinstance(pipeline.split, str | Even)
        place, stages = analysis.span_of(pipeline, "split"), stage_count(analysis)
        if len(counts) < len(pipeline.split):
            yield self.at(
                place, "`split` names modules and gives numbers of blocks", label="one or the other",
                help=["name the first module of each stage but the first, or give each stage its number of blocks"],
            )  # fmt: skip
            return
        if stages is not None and len(counts) != stages:
            other = analysis.span_of(pipeline, "stages" if written(pipeline, "stages") else "schedule")
            yield self.at(
                place,
                f"there are {len(counts)} numbers of blocks, and the pipeline has {stages} stages",
                label=f"{stages} numbers needed",
                others=[Label(other, f"{stages} stages")],
            )
        elif analysis.manifest is not None and sum(counts) != (total := len(split_points(analysis).blocks)):
            yield self.at(
                place,
                f"the stages hold {sum(counts)} blocks together, and the model has {total}",
                label=f"add up to {sum(counts)}",
                others=[Label(analysis.span_of(analysis.plan.model, "family"), f"has {total} blocks")],
                help=[
                    f"give the stages {total} blocks together, or write `split = even`"
                    if total >= len(counts)
                    else help_with_unequal_blocks(analysis) or "name the split points: `split = [PATH, …]`"
                ],
            )


class IdleWeights(Check):
    """Weights of embedding and loss under which the blocks are shared as without them.

    Blocks are shared whole: a weight must be worth one to move it.

    ## Example
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = even(loss = 0.25))
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = even(loss = 2))
    ```
    """

    code = "LP830"
    slug = "idle-weights"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, points = analysis.plan.pipeline, first_modules(analysis)
        if pipeline is None or points is None or not isinstance(pipeline.split, Even):
            return
        if points == split_points(analysis).even(len(points) + 1):
            yield self.at(
                analysis.span_of(pipeline, "split"),
                "the blocks are shared as without these weights",
                label="the same as `even`",
                help=["write `split = even`, or larger weights"],
            )


class UnevenStages(Check):
    """Stages so uneven that the ranks wait for the longest for more than a quarter of the step.

    Every rank waits for the one that computes most. Of decoders the operations of forward are counted, those of the
    output layer too, which may be worth several blocks; of other models the blocks. A split that `legoai solve` found
    is not reported: it is fastest among those that fit, by the times of a simulation.

    ## Example
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [layers.1])
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (split = [layers.15])
    ```
    """

    code = "LP829"
    slug = "uneven-stages"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, points = analysis.plan.pipeline, first_modules(analysis)
        if pipeline is None or points is None or _is_solved(analysis, pipeline):
            return
        loads, count = loads_of_ranks(analysis, points), len(points) + 1
        if count % analysis.plan.mesh.pp:
            return  # another rule reports it
        total, most = sum(loads), max(loads, default=0.0)
        waited = 1 - total / (len(loads) * most) if most else 0.0
        if waited <= _COMMON_IDLENESS or count > len(split_points(analysis).blocks):
            return
        text, least = most_even(analysis, count)
        if least > (1 - _WORTH_MOVING) * most:
            return
        *others, last = (f"{load:.3g}" for load in loads)
        beside = loads_of_starts(analysis)[split_points(analysis).starts[-1]]
        head = f", and its last layer is worth {beside:.2g}" if 0 < beside != 1 else ""
        yield self.at(
            analysis.span_of(pipeline, "split"),
            f"the ranks of `pp` compute as much as {', '.join(others)} and {last} blocks, and all wait for the longest",
            label=f"{waited:.0%} of the step is waited for",
            others=[
                Label(
                    analysis.span_of(analysis.plan.model, "family"),
                    f"has {len(split_points(analysis).blocks)} blocks{head}",
                )
            ],
            help=[f"write `split = {text}`: the longest rank then computes {least:.3g} instead of {most:.3g}"],
        )


def _is_solved(analysis: Analysis, pipeline: Pipeline) -> bool:
    """Whether the split or a part of it is an answer of `legoai solve`."""
    place, resolution = analysis.span_of(pipeline, "split"), analysis.resolution
    holes = () if resolution is None else resolution.scope.asked
    return pipeline.origin("split").decider == "solver" or any(hole.is_inside(place) for hole in holes)


def _named_split(analysis: Analysis) -> Iterator[tuple[Pipeline, Manifest, tuple[str, ...]]]:
    """The pipeline, the manifest and the split points, where the plan names them."""
    pipeline, manifest = analysis.plan.pipeline, analysis.manifest
    if pipeline is None or manifest is None or isinstance(pipeline.split, str | Even):
        return
    if block_counts(pipeline) is None:
        yield pipeline, manifest, tuple(str(point) for point in pipeline.split)


def _block_names(manifest: Manifest) -> list[str]:
    ranges = [f"`{item.path}.{item.names[0]}` to `{item.path}.{item.names[-1]}`" for item in manifest.block_lists]
    return [f"the blocks are {' and '.join(ranges)}"] if ranges else []


class TiedAcrossStages(Check):
    """One parameter with two names that are on different stages, or one module in two places that are.

    Each stage has its own copy, and nothing adds the two gradients: the copies diverge without an error.

    ## Example
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 1024)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = 1F1B)
    ```

    ## Use instead
    ```
    model gpt2("xl", tie_embeddings = false)
    batch (global = 256, micro = 1, seq_len = 1024)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = 1F1B)
    ```
    """

    code = "LP515"
    slug = "tied-across-stages"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, manifest = analysis.plan.pipeline, analysis.manifest
        if pipeline is None or manifest is None or not is_staged(analysis):
            return
        of_modules = [(group, "module") for group in manifest.shared_modules]
        groups = [*((group, "parameter") for group in manifest.tied_parameters), *of_modules]
        stages = stage_count(analysis) if groups else None
        if stages is None or stages == 1:
            return
        for group, what in groups:
            if lie_apart(analysis, group):
                yield self.at(
                    analysis.span_of(pipeline),
                    f"{listed(group)} are one {what}, and lie on different stages",
                    label=f"{stages} stages",
                    others=[Label(analysis.span_of(analysis.plan.model, "family"), f"this model shares the {what}")],
                    help=[
                        f"give each place a parameter of its own: {without_tied_embeddings(analysis)}"
                        if what == "parameter"
                        else "give each place a module of its own"
                    ],
                )
