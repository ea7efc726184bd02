"""LP01x: parts of a plan that cannot be lowered or solved."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class NotLowered(Rule):
    """A statement or option that this version cannot turn into a program.

    The plan is valid, and can be formatted and read. But this statement or option has no lowered form yet, or none for
    the mesh and the other statements of this plan. Nothing is dropped silently: `legoai lint` reports the lines that
    prevent lowering, and no program is written.

    ## Example
    ```
    fsdp on dp_shard { layers.* = unit }
    comm (reorder = true)
    ```

    ## Use instead
    ```
    fsdp on dp_shard { layers.* = unit }
    comm (prefetch = units(forward = 1, backward = 1))
    ```
    """

    code = "LP010"
    slug = "not-lowered"


class UndecidedHole(Rule):
    """A hole in a plan that is to be lowered.

    A program needs every value, and `auto` without an answer has none.

    ## Example
    ```
    mesh (dp_shard = auto in [2, 4], tp = 2)
    ```

    ## Use instead
    Solve the plan, which writes its answers into the text (`auto in [2, 4] -> 4`), or give the value.
    """

    code = "LP011"
    slug = "undecided-hole"


class HoleNotSearched(Rule):
    """A hole that `legoai solve` does not fill.

    Holes are searched if their values affect the simulated cost: mesh axes, the micro batch, the pipeline,
    checkpointing, units of `fsdp`, `loss`, `attention`, `comm`, `compile`, `offload` and `context`. A hole of another
    kind is searched if it lists its values: `auto in [a, b]`; so are styles of a model that reads no tokens. Settings
    that affect what is learned and not what a step costs, such as a learning rate or the global batch, are never
    searched. Values to choose from have no holes themselves. A hole of a base plan is filled when that plan is solved,
    and keeps its answer in this one. `--set` gives a name a value, and opens no hole.

    ## Example
    ```
    optimizer adamw(lr = auto in [3e-4, 1e-3])
    ```

    ## Use instead
    ```
    optimizer adamw(lr = 3e-4)
    ```
    """

    code = "LP012"
    slug = "hole-not-searched"


class NoStepGraph(Rule):
    """A command about the graph of a step, for a plan whose step is not a graph.

    `legoai cost --passes`, `legoai graph --what step` and `legoai lower --dump-graphs` show the effect of passes on the
    graph that `backend = graph` traces. The eager backend uses hooks and has no graph.

    ## Example
    ```
    fsdp on dp_shard { layers.* = unit }
    ```

    ## Use instead
    ```
    fsdp on dp_shard (backend = graph) { layers.* = unit }
    ```
    """

    code = "LP014"
    slug = "no-step-graph"


class NoPipeline(Rule):
    """A picture of a pipeline, for a plan without one.

    `legoai graph --what pipeline` draws what each rank of a pipeline does and when. Without a `pipeline` statement all
    ranks run the same program; `--what timeline` draws one of them.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    pipeline on pp (schedule = 1F1B)
    ```
    """

    code = "LP015"
    slug = "no-pipeline"


class NoLegalAnswers(Rule):
    """A plan whose holes have no legal combination of values.

    With any values of the holes, `legoai lint` reports an error. The diagnostic names the most frequent ones.

    ## Example
    ```
    batch (global = 64, micro = auto in [48, 64], seq_len = 8192)
    mesh  (dp_shard = auto, tp = 4)
    ```

    ## Use instead
    ```
    batch (global = 64, micro = auto, seq_len = 8192)
    mesh  (dp_shard = auto, tp = 4)
    ```
    """

    code = "LP013"
    slug = "no-legal-answers"
