"""`shard`: the rule about random numbers that are drawn for a piece of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.layouts.propagation import Mismatch
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.sharding.neighbours import LayoutRule, came_from, named, producer_lines, verb
from legoai.specs.directives.shard import SequenceStyle


class EqualDropsOnPieces(LayoutRule, Check):
    """Dropout, or other random numbers, on the pieces of a tensor that the ranks of `tp` hold.

    The ranks of `tp` read the same tokens, and draw the same random numbers, since what is whole on all of them must
    drop the same elements. Where a rank holds some of the heads, of the features or of the sequence, the same elements
    are dropped of every rank's piece: the elements of different heads, or of different tokens, are not dropped
    independently. Gradients are right for what is dropped.

    A dropout module that has the style `sequence` drops independently on GPUs.

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    fsdp on dp_shard { layers.* = unit }
    shard standard on tp
    ```
    """

    code = "LP440"
    slug = "equal-drops-on-pieces"
    severity = "warning"
    kinds = ("drawn",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        on_cpu = analysis.plan.cluster.device == "cpu"
        for span, items in self.mismatches(analysis):
            # DTensor offsets the random numbers of each piece, but only where the generator of the device has offsets.
            found = [item for item in items if on_cpu or not _is_distributed(item)]
            if not found:
                continue
            first = found[0]
            of_itself = first.got.source is None or first.got.source.path == first.path
            origin = "" if of_itself else f", from {came_from(analysis, first.got)}"
            yield self.at(
                span,
                f"{named(analysis, found)} {verb(analysis, found, 'drops', 'drop')} the same elements of every rank's "
                f"piece{origin}",
                label="every rank draws the same random numbers",
                others=producer_lines(first.got, beside=span),
                help=_cures(analysis, found),
            )


def _is_distributed(item: Mismatch) -> bool:
    """Whether the module gets a DTensor."""
    style = item.rule.treatment if item.rule is not None else None
    return item.got.wrapped or isinstance(style, SequenceStyle)


def _cures(analysis: Analysis, found: list[Mismatch]) -> list[str]:
    assert analysis.manifest is not None
    cures = ["train without this dropout: a probability of 0"]
    modules = [item for item in found if not analysis.manifest.modules[item.path].children and item.got.dim == 1]
    if modules and analysis.plan.cluster.device != "cpu":
        cures.insert(0, f"write `sequence` for {named(analysis, modules)}: each rank drops other elements")
    return cures
