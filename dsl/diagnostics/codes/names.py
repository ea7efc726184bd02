"""LP2xx: unknown names, wrong values, and paths without a match."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class UnknownOption(Rule):
    """An option that the statement or treatment does not have.

    ## Example
    ```
    context on cp (rotation = allgather)
    ```

    ## Use instead
    ```
    context on cp (rotate = allgather)
    ```
    """

    code = "LP204"
    slug = "unknown-option"


class MissingOption(Rule):
    """A statement or treatment without a value that it must have.

    ## Example
    ```
    batch (global = 512, seq_len = 8192)
    ```

    ## Use instead
    ```
    batch (global = 512, micro = 4, seq_len = 8192)
    ```
    """

    code = "LP205"
    slug = "missing-option"


class DuplicateOption(Rule):
    """An option that is given twice.

    ## Example
    ```
    mesh (tp = 4, dp_shard = 4, tp = 8)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = 8)
    ```
    """

    code = "LP206"
    slug = "duplicate-option"


class WrongValue(Rule):
    """A value of the wrong kind, or out of range.

    ## Example
    ```
    clip (norm = "one")
    ```

    ## Use instead
    ```
    clip (norm = 1.0)
    ```
    """

    code = "LP207"
    slug = "wrong-value"


class UnknownName(Rule):
    """A name that is not a legal value here.

    ## Example
    ```
    attention flashh
    ```

    ## Use instead
    ```
    attention flash
    ```
    """

    code = "LP208"
    slug = "unknown-name"


class UnknownLet(Rule):
    """A name in arithmetic or in `--set` that no `let` defines.

    ## Example
    ```
    mesh (dp_shard = hosts * 8)
    ```

    ## Use instead
    ```
    let hosts = 4
    mesh (dp_shard = hosts * 8)
    ```
    """

    code = "LP209"
    slug = "unknown-let"


class NoSuchPath(Rule):
    """A path pattern that matches no module and no parameter of the model.

    Such a rule would silently have no effect.

    ## Example
    ```
    checkpoint { layer.* = full }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = full }
    ```
    """

    code = "LP210"
    slug = "no-such-path"


class AmbiguousRules(Rule):
    """Two equally specific rules that give one module different values.

    The more specific path wins: a literal name over a range, a range over `*`, `*` over `**`. Where neither is more
    specific the plan must say which is meant.

    ## Example
    ```
    checkpoint {
      layers.{0..9}  = full
      layers.{8..15} = none
    }
    ```

    ## Use instead
    ```
    checkpoint {
      layers.{0..7}  = full
      layers.{8..15} = none
    }
    ```
    """

    code = "LP211"
    slug = "ambiguous-rules"


class WrongModel(Rule):
    """A model that no built-in family has: an unknown preset or dimension, or contradictory dimensions.

    ## Example
    ```
    model llama3("9b")
    ```

    ## Use instead
    ```
    model llama3("8b")
    ```
    """

    code = "LP212"
    slug = "wrong-model"


class ModelUnavailable(Rule):
    """A model that could not be built: a missing factory or config, or one that fails.

    Diagnostics about paths and divisibility need the model's modules, so they are missing until this is fixed.
    """

    code = "LP213"
    slug = "model-unavailable"


class CircularLet(Rule):
    """`let` names that depend on each other.

    ## Example
    ```
    let hosts = ranks / 8
    let ranks = hosts * 8
    ```

    ## Use instead
    ```
    let hosts = 4
    let ranks = hosts * 8
    ```
    """

    code = "LP216"
    slug = "circular-let"


class WrongArithmetic(Rule):
    """Arithmetic without a result: values that are no numbers, incompatible units, or a division by zero.

    ## Example
    ```
    let limit = 80GiB - 10%
    ```

    ## Use instead
    ```
    let limit = 80GiB * 0.9
    ```
    """

    code = "LP217"
    slug = "wrong-arithmetic"


class WrongAxis(Rule):
    """A statement on a mesh axis that it cannot use.

    ## Example
    ```
    fsdp on tp { root = unit }
    ```

    ## Use instead
    ```
    fsdp on dp_shard { root = unit }
    ```
    """

    code = "LP219"
    slug = "wrong-axis"


class WrongDomain(Rule):
    """A hole whose domain or answer is not legal here.

    ## Example
    ```
    mesh (dp_shard = 4, tp = auto in [1, 2, 4] -> 8)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = auto in [1, 2, 4, 8] -> 8)
    ```
    """

    code = "LP220"
    slug = "wrong-domain"


class WrongProfile(Rule):
    """A device profile that cannot be read, or that states a figure which no device has."""

    code = "LP222"
    slug = "wrong-profile"


class NoRest(Rule):
    """A `rest` that is not a whole number of devices.

    `rest` is the size of one axis of the mesh: the devices of the cluster over the product of the other axes.

    ## Example
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh (dp_shard = rest, tp = 5)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    mesh (dp_shard = rest, tp = 8)
    ```
    """

    code = "LP225"
    slug = "no-rest"


class FactoryNotRun(Rule):
    """A model from a Python factory that the command line forbids to run.

    `--no-factories` is for untrusted plans: a factory is Python code, and naming it in a plan would run it. Checks
    that need no model are done all the same; those of paths, sizes, memory and `require` lines are not.
    """

    code = "LP226"
    slug = "factory-not-run"
    severity = "advice"


class NoStandardLayout(Rule):
    """A standard layout that the model does not have.

    Families of built-in models, and the most used of Hugging Face, declare their standard layouts: `shard standard on
    tp`, with `sequence` and `loss_parallel` where the family supports them, `shard standard on ep` for mixtures of
    experts, `fsdp blocks on dp_shard`. Models from a factory have none: write the rules.

    ## Example
    ```
    mesh (dp_shard = 32, ep = 4)
    shard standard on ep
    ```

    ## Use instead
    ```
    model mixtral("8x7b")
    mesh  (dp_shard = 32, ep = 8)
    shard standard on ep
    fsdp  blocks on dp_shard
    ```
    """

    code = "LP227"
    slug = "no-standard-layout"


class ReservedName(Rule):
    """A `let` that takes a name of the language.

    A `let` name is replaced by its value wherever a value is expected, so that `attention flash` would mean the value
    of the `let`. The name of an option that is true or false stands for `NAME = true` where it stands alone, as in
    `save (every = 100, asynchronous)`, and is taken too. Names of other options and of statements, such as `hosts` or
    `batch`, are never values, and may be used.

    ## Example
    ```
    let flash = math
    attention flash
    ```

    ## Use instead
    ```
    let kernel = math
    attention kernel
    ```
    """

    code = "LP228"
    slug = "reserved-name"
