"""`shard`: the rule about `overlap` where there is nothing to overlap."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import by_rule, general
from legoai.dsl.analysis.facts import decided
from legoai.dsl.analysis.parallelism.overlap import idle, overlaps
from legoai.dsl.analysis.parallelism.shard import shard_on_tp, tensor_parallel
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check


class NothingToOverlap(Check):
    """`overlap` where no column-wise layers gather their own input along the sequence.

    It is for layers under sequence parallelism that need the whole sequence, of which each rank has a shard. They save
    their shard, and gather the others again in backward. For a layer that gathers its own input write
    `colwise(input = shard(1), overlap = backward)`; for layers that read the same input write
    `inputs(from = shard(1), to = replicate, overlap = backward)` for the module around them. Nothing but these layers
    may read that input, since it stays sharded inside the module.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.feed_forward          = inputs(from = replicate, to = replicate, overlap = backward)
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      tok_embeddings                  = rowwise(input = replicate, output = shard(1))
      layers.*.{attention, ffn}_norm  = sequence
      layers.*.attention              = inputs(from = shard(1), to = replicate, overlap = backward)
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise(output = shard(1))
      layers.*.feed_forward           = inputs(from = shard(1), to = replicate, overlap = backward)
      layers.*.feed_forward.{w1, w3}  = colwise
      layers.*.feed_forward.w2        = rowwise(output = shard(1))
      norm                            = sequence
      output                          = colwise(input = shard(1), overlap = backward, loss_parallel = true)
    }
    ```
    """

    code = "LP428"
    slug = "nothing-to-overlap"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        shard = shard_on_tp(analysis)
        if analysis.manifest is None or shard is None:
            return
        decided(shard)
        styles = tensor_parallel(analysis).styles
        for rule, paths in by_rule(analysis, shard):
            if not overlaps(rule.treatment):
                continue
            for path in paths:
                why = idle(analysis, path) if path in styles else None
                if why is not None:
                    yield self.at(
                        analysis.span_of(rule.treatment, "overlap"),
                        f"`{general(analysis.manifest, path)}` {why}, so that there is nothing to overlap in backward",
                        label="no effect here",
                        help=["leave `overlap` out, or let `colwise` layers alone gather, along the sequence"],
                    )
                    break
