"""LP71x: budgets that a plan breaks, found when it is simulated (`legoai check`)."""

from __future__ import annotations

from typing import ClassVar

from legoai.dsl.diagnostics.rule import Rule


class BrokenBudget(Rule):
    """A `require` line that the simulated plan does not keep.

    `legoai check` simulates one step of the plan and compares every figure with its bound. The finding says by how
    much the bound is missed, and what contributes most. Figures are estimates: `legoai cost` shows which of them rest
    on measurements, and how good those are.

    ## Example
    ```
    model llama3("8b")
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    require peak_memory <= 20GiB
    ```

    ## Use instead
    ```
    model llama3("8b")
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = full }
    require peak_memory <= 30GiB
    ```
    """

    code = "LP711"
    slug = "broken-budget"
    simulated: ClassVar[bool] = True


class OutOfMemory(Rule):
    """A plan that needs more memory than its device has.

    What torch reserves and what lies outside of it (the device's context, the buffers of NCCL) is more than the device
    has, also after the allocator gave back all that it had cached. Training would end with `OutOfMemoryError`.

    ## Example
    ```
    model llama3("8b")
    batch (global = 256, micro = 8, seq_len = 8192)
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    ```

    ## Use instead
    ```
    model llama3("8b")
    batch (global = 256, micro = 1, seq_len = 8192)
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = full }
    ```
    """

    code = "LP712"
    slug = "out-of-memory"
    simulated: ClassVar[bool] = True
