"""LP0xx: files that cannot be read."""

from __future__ import annotations

from legoai.dsl.diagnostics.rule import Rule


class CannotRead(Rule):
    """A plan that cannot be read: no such file, no permission, or a directory without plans.

    A plan is named by its path; by `plan.NAME`, which means `NAME.plan` in the working directory or its `plans/`; or by
    `-`, which is standard input. For `lint` and `fmt` a directory means every `*.plan` in it and below it.
    """

    code = "LP001"
    slug = "cannot-read"


class TooLarge(Rule):
    """A file of more than 4 MiB, which cannot be a plan.

    A plan has some hundred lines. A file of this size is most often a checkpoint or a log that was named by mistake.
    """

    code = "LP002"
    slug = "too-large"
