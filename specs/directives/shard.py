"""`shard`: styles and placements of modules and parameters on `tp`, and of experts on `ep`."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import AxisUse, Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Boolean, Choice, Integer, Number
from legoai.specs.directives.layouts import LAYOUT, LAYOUTS, Layout, Partial, Replicated, Sharded

_OVERLAP = Choice(("none", "backward"))


class Colwise(Treatment):
    """Cuts a linear layer by output features, an embedding by embedding dim (`ColwiseParallel`)."""

    name: ClassVar[str] = "colwise"

    input: Layout | None = option(
        LAYOUT, doc="Layout in which the input arrives; `replicate` by default.", default=None
    )
    output: Layout | None = option(
        LAYOUT, doc="Layout in which the output leaves; `shard(-1)` by default.", default=None
    )
    loss_parallel: bool = option(
        Boolean(),
        doc="Keep the logits sharded over the vocabulary and compute the loss on the shards. Only for the last layer.",
        default=False,
    )
    overlap: str = option(
        _OVERLAP,
        doc=(
            "`backward`, with `input = shard(1)`: the layer keeps its input as it arrives, and gathers it again in "
            "backward while it computes the input's gradient; that is summed over the ranks while it computes the "
            "weight's."
        ),
        default="none",
    )


class Rowwise(Treatment):
    """Cuts a linear layer by input features, an embedding by rows of its table (`RowwiseParallel`)."""

    name: ClassVar[str] = "rowwise"

    input: Layout | None = option(
        LAYOUT,
        doc="Layout in which the input arrives; `shard(-1)` by default, `replicate` for an embedding.",
        default=None,
    )
    output: Layout | None = option(
        LAYOUT, doc="Layout in which the output leaves; `replicate` by default.", default=None
    )


class SequenceStyle(Treatment):
    """Runs a norm, dropout or a whole linear layer on a sequence in pieces (`SequenceParallel`).

    Its parameters are replicated, and their gradients summed over the ranks.
    """

    name: ClassVar[str] = "sequence"

    dim: int = option(Integer(minimum=0), doc="The sequence dim of the activations.", default=1)
    local: bool = option(
        Boolean(),
        doc="Give the next module a plain tensor, this rank's piece, not a DTensor, which no pipeline sends.",
        default=False,
    )


class Heads(Treatment):
    """Runs a norm over each head, such as Qwen3's `q_norm`, on this rank's heads.

    Its parameters are replicated, and their gradients summed over the ranks, each of which sees other heads. Nothing
    is communicated for the activations.
    """

    name: ClassVar[str] = "heads"


class Shared(Treatment):
    """Marks the result of a module without parameters as one for all heads, of which each rank has some.

    The rotated key of DeepSeek's latent attention is such a result. It is computed whole on every rank, where it meets
    the heads of the rank. Its gradient is summed over the ranks, as DTensor's `to_local(grad_placements = [Partial()])`
    does.
    """

    name: ClassVar[str] = "shared"


class Outputs(Treatment):
    """Changes the layout of a module's outputs (`PrepareModuleOutput`)."""

    name: ClassVar[str] = "outputs"

    source: Layout | tuple[Layout | str, ...] = option(
        LAYOUTS, name="from", doc="Layout in which outputs leave the module: one for the first, or a list."
    )
    target: Layout | tuple[Layout | str, ...] = option(
        LAYOUTS, name="to", doc="Layout in which the next module wants them."
    )


class Inputs(Treatment):
    """Changes the layout of a module's inputs (`PrepareModuleInput`), and of its outputs where `then` says so.

    A module inside of which nothing is placed on `tp`, such as a mixture of experts, has plain weights and takes plain
    tensors: `local = true`.
    """

    name: ClassVar[str] = "inputs"

    source: Layout | tuple[Layout | str, ...] = option(
        LAYOUTS,
        name="from",
        doc="Layout in which inputs arrive: one for the first, or a list, `none` to leave one.",
    )
    target: Layout | tuple[Layout | str, ...] = option(LAYOUTS, name="to", doc="Layout in which the module wants them.")
    local: bool = option(
        Boolean(),
        doc="Give the module plain tensors, this rank's part of them, in place of DTensors.",
        default=False,
    )
    overlap: str = option(
        _OVERLAP,
        doc=(
            "`backward`, from `shard(1)` to `replicate`: the `colwise` layers that read the input, and nothing else "
            "may, keep it as it arrives, and gather it again in backward while they compute its gradient; that is "
            "summed over the ranks while they compute those of their weights."
        ),
        default="none",
    )
    then: Outputs | None = option(
        Calls((Outputs,)),
        doc="What becomes of the module's outputs (`PrepareModuleInputOutput`); by default they leave as they are.",
        default=None,
    )


class Experts(Treatment):
    """Puts different experts on different ranks; tokens travel to them and back by all-to-all. Only on `ep`.

    An expert with a capacity takes the first rows of each rank's micro batch, by position; what it drops goes on by the
    residual stream.
    """

    name: ClassVar[str] = "experts"

    capacity_factor: float | None = option(
        Number(above=0.0),
        doc=(
            "Room of an expert in one rank's micro batch, as a multiple of the mean load; tokens beyond are dropped. "
            "None drops nothing."
        ),
        default=None,
    )
    across_tp: bool = option(
        Boolean(),
        doc=(
            "Different experts on the ranks of `tp` too, which `ep` groups beside those of `dp_shard` and `cp`: each "
            "sends the tokens of its own piece of the sequence."
        ),
        default=False,
    )


def conversions(style: object) -> tuple[Inputs | Outputs, ...]:
    """The changes of layout that a style is: those of the inputs, of the outputs, or both; none of another style."""
    if isinstance(style, Inputs):
        return (style,) if style.then is None else (style, style.then)
    return (style,) if isinstance(style, Outputs) else ()


class Unplaced(Treatment):
    """Leaves a module as it is, also where a more general rule would give it a style."""

    name: ClassVar[str] = "none"


Style = Colwise | Rowwise | SequenceStyle | Heads | Shared | Inputs | Outputs | Experts | Replicated | Sharded | Partial


class Standard(Treatment):
    """The usual styles of the model's family, which `legoai fmt --expand` and `legoai explain` show.

    Rules beside it replace its rules for the same paths; `PATH = unset` takes one away.
    """

    name: ClassVar[str] = "standard"

    sequence: bool = option(
        Boolean(), doc="Norms and the residual stream in pieces of the sequence (sequence parallel).", default=False
    )
    loss_parallel: bool = option(
        Boolean(), doc="Keep the logits sharded over the vocabulary, and compute the loss on the shards.", default=False
    )
    overlap: bool = option(
        Boolean(),
        doc="With `sequence`, `overlap = backward` for all that gathers an input of `colwise` layers.",
        default=False,
    )
    across_tp: bool = option(
        Boolean(),
        doc=(
            "On `ep`: `experts(across_tp = true)`. On `tp`, with `sequence`: mixtures that take a piece of the "
            "sequence each, as such experts need."
        ),
        default=False,
    )


class Shard(Directive):
    """Placements on one axis: a style for each module path, or a raw placement for each parameter path.

    On `tp`, a module takes a style, and a parameter (`layers.*.attention.wq.weight = shard(0)`) a placement. A linear
    layer, an embedding or a norm of which a parameter is placed computes on DTensors: given a plain tensor, which it
    takes for the whole, it gives back a plain one, gathered; given a DTensor, one. Its other parameters are replicated.
    On `ep`, the experts of a mixture-of-experts layer take `experts`. A module may take `inputs` or `outputs` beside
    the styles of its parts. `shard standard on tp (sequence, loss_parallel)` takes the styles that are usual for the
    model. `shard auto on tp` leaves the style of every module that none of its rules names to `legoai solve`, which
    writes a rule for each.
    """

    keyword: ClassVar[str] = "shard"
    axis_use: ClassVar[AxisUse | None] = AxisUse(("tp", "ep"))
    treatments: ClassVar[Calls | None] = Calls(
        (Colwise, Rowwise, SequenceStyle, Heads, Shared, Inputs, Outputs, Experts, Replicated, Sharded, Unplaced)
    )
    names_parameters: ClassVar[bool] = True
    layouts: ClassVar[tuple[type[Treatment], ...]] = (Standard,)
    rules_may_be_open: ClassVar[bool] = True
    repeats_by_axis: ClassVar[bool] = True
