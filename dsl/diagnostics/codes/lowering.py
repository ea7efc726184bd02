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
    fsdp on dp_shard (backend = graph) { layers.* = unit }
    ```

    ## Use instead
    ```
    fsdp on dp_shard { layers.* = unit }
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
