"""`data`: rules about what is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import written
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.models.reads import Images, ImagesWithTexts

_SYNTHETIC: Final = "synthetic"


class DataKind(Check):
    """Data that the model does not read: text for a model of images, or made images for one of text.

    ## Example
    ```
    data (source = "synthetic")
    ```

    ## Use instead
    ```
    data (source = "python")
    ```
    """

    code = "LP694"
    slug = "data-kind"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        data, manifest = analysis.plan.data, analysis.manifest
        if data is None or manifest is None:
            return
        images = isinstance(manifest.reads, Images | ImagesWithTexts)
        if images == (data.source == _SYNTHETIC):
            return
        what = f"the model reads images, and `{data.source}` is text" if images else "`synthetic` makes images, and "
        yield self.at(
            analysis.place(data, "source"),
            what if images else f"{what}the model reads text",
            label="not what the model reads",
            others=[Label(analysis.place(analysis.plan.model, "family"), "the model")],
            help=['write `source = "synthetic"`: no other images are read' if images else
                  'write `source = "python"`, or name a file of text'],
        )  # fmt: skip


class IdleField(Check):
    """The field of a JSONL object where the data are none.

    ## Example
    ```
    data (source = "corpus.txt", field = "body")
    ```

    ## Use instead
    ```
    data (source = "corpus.jsonl", field = "body")
    ```
    """

    code = "LP695"
    slug = "idle-field"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        data = analysis.plan.data
        if data is None or not written(data, "field"):
            return
        suffix = PurePath(data.source).suffix
        folder = suffix == "" and data.source not in ("python", _SYNTHETIC)
        if suffix != ".jsonl" and not folder:
            yield self.at(
                analysis.place(data, "field"),
                f"`field` has no effect: `{data.source}` holds no JSON objects",
                label="of no object",
                others=[Label(analysis.place(data, "source"), "the data")],
                help=["leave it out, or name a file that ends in `.jsonl`"],
            )
