"""LP2xx: unknown, missing, repeated and misplaced statements, base plans, and variants."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class UnknownStatement(Rule):
    """A statement whose keyword the language does not have.

    ## Example
    ```
    shards on tp { output = colwise }
    ```

    ## Use instead
    ```
    shard on tp { output = colwise }
    ```
    """

    code = "LP201"
    slug = "unknown-statement"


class MissingStatement(Rule):
    """A plan without a statement that every plan must have.

    A plan must have a name, a model, a cluster and a batch; all other statements have defaults.

    ## Use instead
    ```
    plan tiny

    model   llama3("tiny")
    cluster cpu(devices = 1)
    batch   (global = 16, micro = 4, seq_len = 256)
    ```
    """

    code = "LP202"
    slug = "missing-statement"


class DuplicateStatement(Rule):
    """Two statements that decide the same thing in one file.

    A decision is stated once. A plan that `extends` another and a `variant` may replace a statement; within one
    file the second of two would silently override the first. `shard` may occur once for each axis. A figure has one
    bound from each side, in each dimension; a `let` with another value may give two bounds the same dimension.

    ## Example
    ```
    mesh (dp_shard = 4)
    mesh (tp = 8)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = 8)
    ```
    """

    code = "LP203"
    slug = "duplicate-statement"


class CannotExtend(Rule):
    """A plan that `extends` a file that cannot be read, or that extends itself.

    The file's path is relative to the plan that extends it.
    """

    code = "LP214"
    slug = "cannot-extend"


class UnknownVariant(Rule):
    """`--variant` with a name that the plan does not have."""

    code = "LP215"
    slug = "unknown-variant"


class MisplacedPart(Rule):
    """A value, an axis, options or a block at a statement that takes none, or a missing one.

    ## Example
    ```
    mesh on tp (dp_shard = 4, tp = 8)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = 8)
    ```
    """

    code = "LP218"
    slug = "misplaced-part"


class PlanNotFirst(Rule):
    """A plan whose first statement is not `plan NAME`."""

    code = "LP221"
    slug = "plan-not-first"


class WrongUnset(Rule):
    """An `unset` without anything to remove, or of a required statement.

    `unset` removes a statement of the base plan, or in a variant one of the plan; as the value of a rule it
    removes the rule of the same path.

    ## Example
    ```
    variant whole_gradients { unset clip }
    ```

    ## Use instead
    ```
    clip (norm = 1.0)

    variant whole_gradients { unset clip }
    ```
    """

    code = "LP223"
    slug = "wrong-unset"


class BasesDisagree(Rule):
    """Two base plans that decide the same statement differently, where the plan itself does not decide it.

    A plan may extend several base plans. A statement that only one of them has, or that is equal in all, takes effect;
    no base takes precedence over another.

    Write the statement in the plan itself: it replaces both. `unset` removes both.
    """

    code = "LP224"
    slug = "bases-disagree"
