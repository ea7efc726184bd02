"""LP71x, LP828 and LP838: violated requirements and memory of the simulated plan (`legoai check`)."""

from __future__ import annotations

from typing import ClassVar

from legoai.dsl.diagnostics.rule import Rule


class RequirementViolated(Rule):
    """A `require` line that the simulated plan violates.

    `legoai check` simulates one step of the plan and compares every figure with its bound. The diagnostic states by
    how much the bound is violated, and the largest contributor. Figures are estimates: `legoai cost` shows which of
    them rest on measurements, with their errors.

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
    slug = "requirement-violated"
    simulated: ClassVar[bool] = True


class OutOfMemory(Rule):
    """A plan that needs more memory than its device has.

    The memory that PyTorch's allocator reserves, the CUDA context and NCCL's buffers exceed the device's memory, even
    after the allocator has freed all cached blocks. Training would end with `OutOfMemoryError`.

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


class RequirementsConflict(Rule):
    """`require` lines that no values of the plan's holes meet together.

    `legoai solve` searches all assignments of the holes. The diagnostic names the smallest set of requirements that it
    cannot meet: without any one of them there is a solution for the others.

    ## Example
    ```
    model llama3("8b")
    mesh (dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = auto in [none, full] }
    require peak_memory <= 40GiB
    require recompute   <= 1%
    ```

    ## Use instead
    ```
    model llama3("8b")
    mesh (dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = auto in [none, full] }
    require peak_memory <= 40GiB
    require recompute   <= 30%
    ```
    """

    code = "LP716"
    slug = "requirements-conflict"
    simulated: ClassVar[bool] = True


class MemoryLeftByRecomputation(Rule):
    """Full recomputation on a device half of whose memory stays free.

    `full` keeps only a module's input and computes the rest twice, which costs up to a third of the computation. That
    pays where memory is short. The advice is given where recomputation takes at least 5% of the step and the fullest
    rank leaves at least half of its device's memory free. Half is much more than the prediction's error (8% of memory
    on average in published runs) and fragmentation, so that some activations can be kept.

    ## Example
    ```
    model llama3("8b")
    batch (global = 64, micro = 1, seq_len = 8192)
    mesh (dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = full }
    ```

    ## Use instead
    ```
    model llama3("8b")
    batch (global = 64, micro = 1, seq_len = 8192)
    mesh (dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = selective([attention, matmul]) }
    ```
    """

    code = "LP828"
    slug = "memory-left-by-recomputation"
    severity = "advice"
    simulated: ClassVar[bool] = True


class OperatorNotCalled(Rule):
    """An operator in `selective` that keeps nothing, since no module under it calls it.

    An operator is called as the model's code and torch's own decompositions call it: a linear layer with a bias is
    `aten.addmm`, one without is `aten.mm`, and attention on a CPU has another kernel than on a GPU. `legoai cost` lists
    what is saved and what runs again, by name; a product of experts that a device computes group by group, of which it
    lists each `aten.mm`, is called as `aten._grouped_mm`. Only a simulated step shows what a model calls, so that
    `legoai check` reports this, and `legoai lint` does not. Views and others that compute nothing are not looked for,
    and neither are operators of compiled modules, whose kernels compute several. Collectives of one kind count as one.

    ## Example
    ```
    model llama3("8b")
    mesh (dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = selective([attention, "aten.addmm"]) }
    ```

    ## Use instead
    ```
    model llama3("8b")
    mesh (dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    checkpoint { layers.* = selective([attention, "aten.mm"]) }
    ```
    """

    code = "LP838"
    slug = "operator-not-called"
    severity = "warning"
    simulated: ClassVar[bool] = True
