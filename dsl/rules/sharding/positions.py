"""Rules about the positions of tokens on ranks that hold a piece of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import decided, grouped, listed
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.sharding.neighbours import LayoutRule, came_from, named, producer_lines
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.shard import Colwise, Outputs, Rowwise
from legoai.specs.published.configs import BUILTIN_FAMILIES


class PositionsNotTaken(Check):
    """Context parallelism for a model that does not accept the positions of its tokens.

    A rank of `cp` holds tokens from the middle of a sequence, so that their positions are not 0, 1, 2, …: a model that
    counts them itself rotates keys and queries by wrong angles, without an error. The built-in models accept the
    positions as an argument of forward, `positions`, int64 [tokens]; a factory's model can do the same. Those of
    `transformers` do not; for many of them a built-in family computes the same.

    ## Example
    ```
    model   python("torch.nn:Embedding", num_embeddings = 256, embedding_dim = 256)
    cluster h100_sxm
    mesh    (dp_shard = 4, cp = 2)
    fsdp on dp_shard, cp { root = unit }
    context on cp
    ```

    ## Use instead
    ```
    model   llama3("8b")
    cluster h100_sxm
    mesh    (dp_shard = 4, cp = 2)
    fsdp on dp_shard, cp { root = unit }
    context on cp
    ```
    """

    code = "LP311"
    slug = "positions-not-taken"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, use = analysis.manifest, analysis.plan.context
        if use is None or manifest is None or analysis.plan.mesh.cp == 1 or "positions" in manifest.forward:
            return
        if not manifest.reads_tokens:
            return  # there is nothing to shard, which another rule reports
        name = manifest.model_class.rpartition(".")[2]
        yield self.at(
            analysis.span_of(use, "axes"),
            f"`context on cp` gives a rank tokens from the middle of a sequence, and `{name}` is not told their places",
            label="positions would be counted from 0",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), f"forward({', '.join(manifest.forward)})")],
            help=list(_cures(analysis, name)),
        )


def _cures(analysis: Analysis, class_name: str) -> Iterator[str]:
    """Yield what gives the model the positions, where anything can, and what needs none."""
    instead = "use the devices for `dp_shard` or `tp`"
    if analysis.plan.model.family != "huggingface":
        yield "let the model's forward have a parameter `positions`, the places of its tokens, int64 [tokens]"
    elif (family := BUILTIN_FAMILIES.get(class_name)) is not None:
        yield f"write the model as one of the built-in family `{family}`, which takes positions"
    else:
        yield instead
        return
    yield f"or {instead}"


class PlacesCounted(Check):
    """Context parallelism for a model that takes the positions of its tokens, and counts places beside them.

    A rank of `cp` holds tokens from the middle of a sequence, and their positions are an argument of forward,
    `positions`. What forward makes of the length of its tokens instead begins at 0 on every rank: angles of
    `torch.arange(x.shape[1])`, or a table that is cut to that length, as `self.cos[: x.shape[1]]`. The run would train
    another model, without an error.

    Lint runs forward at two lengths, with `positions`, and reports where activations meet what differs from place to
    place and grows with the length. A table that positions index (`self.cos[positions]`) is right, and so is an
    `arange` that forward makes only if it is given no positions. A model without any positions may leave them unused,
    if lint can follow its forward at both lengths.

    Not `angles = torch.arange(q.shape[2])[:, None] * self.frequencies` in attention, but `positions[:, None] *
    self.frequencies`, with the model's `positions` passed on to it.
    """

    code = "LP317"
    slug = "places-counted"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, use = analysis.manifest, analysis.plan.context
        if use is None or manifest is None or analysis.plan.mesh.cp == 1:
            return
        modules = manifest.modules.values()
        if any(module.mixes_tokens for module in modules):
            return  # another rule reports it, and attention that is written out has masks of its own
        found = next((module for module in modules if module.places.by), None)
        if found is None and not manifest.modules[""].places.ignores_positions:
            return
        name = "the model's forward" if found is None or not found.path else f"`{general(manifest, found.path)}`"
        told = (
            "takes `positions` and does not use them"
            if found is None
            else f"counts places from 0 by {found.places.by}, although the model is given `positions`"
        )
        yield self.at(
            analysis.span_of(use, "axes"),
            f"`context on cp` gives a rank tokens from the middle of a sequence, and {name} {told}",
            label="a rank's places do not begin at 0",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), f"forward({', '.join(manifest.forward)})")],
            help=[
                "compute with `positions`, int64 [tokens], where places are needed: write them for "
                "`torch.arange(x.shape[1])`, and `table[positions]` for `table[: x.shape[1]]`",
                "or use the devices for `dp_shard` or `tp`",
            ],
        )


class SequenceCutBeforePositions(LayoutRule, Check):
    """Pieces of the sequence that meet positions which the model counts from the length of these pieces.

    A model that adds `self.table[: x.shape[1]]` to its embedded tokens `x`, or sines of `torch.arange(x.shape[1])`,
    counts places from their length. Where `x` is a rank's shard of the sequence, every shard begins at place 0. The
    models of `transformers` count positions, and make the causal mask, from the length of their embedding's output.
    Tokens may be sharded after that: norms and dropouts inside the blocks accept `sequence`, and the blocks the results
    of `inputs`. What attention applies to whole sequences, as rotary tables to its heads, is right.

    Not `model.embed_tokens = rowwise(input = replicate, output = shard(1))`, but `rowwise(input = replicate, output =
    replicate)`.
    """

    code = "LP425"
    slug = "sequence-cut-before-positions"
    kinds = ("counted",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        found = list(self._embedded(analysis))
        yield from found or self._met(analysis)

    def _met(self, analysis: Analysis) -> Iterator[Diagnostic]:
        """Yield where a model's own forward combines pieces with what it counts."""
        for span, items in self.mismatches(analysis):
            first = items[0]
            module = named(analysis, items)
            behind = " inside of the blocks"
            if first.path:
                behind = f" behind {module}: `outputs(from = replicate, to = shard({first.got.dim}))`"
            yield self.at(
                span,
                f"in {module} a piece of the sequence, `{first.got.describe()}` from "
                f"{came_from(analysis, first.got)}, meets places that are counted from the length of that piece",
                label="every rank would begin at place 0",
                others=producer_lines(first.got, beside=span),
                help=[f"let whole sequences arrive (`replicate`), and cut them{behind}"],
            )

    def _embedded(self, analysis: Analysis) -> Iterator[Diagnostic]:
        """Yield the embeddings of a model of `transformers` that leave pieces of the sequence."""
        manifest, shard = analysis.manifest, analysis.plan.shard_on("tp")
        if (
            analysis.plan.model.family != "huggingface"
            or shard is None
            or manifest is None
            or analysis.plan.mesh.tp == 1
        ):
            return
        decided(shard)
        cut = (
            (path, rule)
            for path, rule in analysis.assigned(shard).by_path.items()
            if path in manifest.modules
            and manifest.modules[path].kind == "embedding"
            and _cuts_sequence(rule.treatment)
        )
        for rule, paths in grouped(cut):
            assert rule.origin.span is not None
            yield self.at(
                rule.origin.span,
                f"{listed(paths)} gives each rank a piece of the sequence, and the model counts places from the length "
                "of that piece",
                label="every rank would begin at place 0",
                others=[Label(analysis.span_of(analysis.plan.model, "family"), "takes no positions")],
                help=["let the embedding's output be `replicate`, and cut the sequence inside of the blocks"],
            )


def _cuts_sequence(treatment: object) -> bool:
    """Whether what leaves the module is cut along dim 1."""
    if isinstance(treatment, Colwise | Rowwise):
        return isinstance(treatment.output, Sharded) and treatment.output.dim == 1
    if isinstance(treatment, Outputs):
        layouts = treatment.target if isinstance(treatment.target, tuple) else (treatment.target,)
        return any(isinstance(layout, Sharded) and layout.dim == 1 for layout in layouts)
    return False
