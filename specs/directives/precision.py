"""`precision`: the dtypes in which numbers are stored, computed and reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Choice, ListOf
from legoai.specs.dtypes import TORCH_DTYPES

_DTYPE = Choice(tuple(TORCH_DTYPES))


class Float8(Treatment):
    """Linear layers in float8 with dynamic scaling (torchao)."""

    name: ClassVar[str] = "float8"

    recipe: str = option(
        Choice(("tensorwise", "rowwise", "rowwise_with_gw_hp")),
        doc="One scale for a tensor, or one for each row.",
        default="tensorwise",
    )
    gather: tuple[str, ...] = option(
        ListOf(Choice(("weights", "activations"))),
        doc=(
            "What is gathered for these layers in float8, half of the bytes: `weights` by `fsdp`, which casts each "
            "rank's piece, with scales that are computed once at the start of a step; `activations`, and their "
            "gradients, by `shard on tp`. Only with one scale for a tensor."
        ),
        default=(),
    )


class MxFp8(Treatment):
    """Linear layers in mxfp8: float8 with a shared scale for each block of 32 numbers (torchao, Blackwell)."""

    name: ClassVar[str] = "mxfp8"


class HighPrecision(Treatment):
    """The dtype of the statement's options."""

    name: ClassVar[str] = "none"


class Precision(Directive):
    """Mixed precision: dtypes of stored parameters, computation and reduction; float8 for linear layers by path."""

    keyword: ClassVar[str] = "precision"
    treatments: ClassVar[Calls | None] = Calls((Float8, MxFp8, HighPrecision))
    absent: ClassVar[Mapping[str, Any] | None] = {}

    master: str = option(_DTYPE, doc="Parameters as stored and as the optimizer updates them.", default="fp32")
    param: str = option(_DTYPE, doc="Parameters and activations in forward and backward.", default="bf16")
    reduce: str = option(_DTYPE, doc="Gradients while they are reduced.", default="fp32")
    output: str | None = option(_DTYPE, doc="What a unit's forward returns; by default what it computes.", default=None)
    gradient: str | None = option(
        _DTYPE,
        doc=(
            "Gradients accumulated over micro batches; by default in the dtype of `master`, or, where they are reduced "
            "once for several micro batches, under a pipeline or `comm (reduce = last_micro_batch)`, in that of "
            "`reduce`."
        ),
        default=None,
    )
