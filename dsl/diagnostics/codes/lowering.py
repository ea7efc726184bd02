"""LP01x: what a plan decides and no program does, and what it leaves undecided."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class NotLowered(Rule):
    """A statement or option that this version cannot turn into a program.

    The plan is a good plan, and it can be formatted and read. What it says here has no lowered form yet, or none for
    the mesh and the other statements of this plan. Nothing is dropped in silence: `legoai lint` reports the lines that
    stand in the way, and no program is made.

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
    """A plan with a hole that is to be lowered.

    A program needs every value. `auto` without an answer is none.

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

    Holes are searched where the simulator can tell one value from another: mesh axes, the micro batch, the pipeline,
    checkpointing, units of `fsdp`, `loss`, `attention`, `comm`, `compile`, `offload` and `context`. A hole of another
    kind is searched if it names its values: `auto in [a, b]`. What decides what is learned and not what a step costs,
    such as a learning rate or the global batch, is never searched, nor is a hole in the file of a base plan.

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
    """A command about the graph of a step, of a plan whose step is none.

    `legoai cost --passes`, `legoai graph --what step` and `legoai lower --dump-graphs` show what passes make of the
    graph that `backend = graph` traces. The hooks of the eager backend have no graph.

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


class NoLegalAnswers(Rule):
    """A plan whose holes have no values that are legal together.

    Whatever the holes are filled with, `legoai lint` reports an error. The diagnostic names those that it reports most.

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
