"""`data`, `weights`, `save`, `evaluate` and `steps`: rules about what is trained on, and how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import written
from legoai.dsl.analysis.training.schedule import floor_share, run_steps, warmup_steps
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.kinds import either_of
from legoai.specs.directives.run import HF_DATASET, JSON_LINES, PARQUET
from legoai.specs.directives.schedule import Constant
from legoai.specs.models.reads import SYNTHETIC, Images, ImagesWithTexts


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
        if images == (data.source == SYNTHETIC):
            return
        what = f"the model reads images, and `{data.source}` is text" if images else "`synthetic` makes images, and "
        yield self.at(
            analysis.span_of(data, "source"),
            what if images else f"{what}the model reads text",
            label="not what the model reads",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), "the model")],
            help=['write `source = "synthetic"`: no other images are read' if images else
                  'write `source = "python"`, or name a file of text'],
        )  # fmt: skip


class IdleField(Check):
    """A field or column of data that have none, or a tokenizer beside made images.

    `field` names the field of a JSONL object, or the column of a Parquet file or a dataset. `synthetic` makes images,
    which no tokenizer reads.

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
        if data is None:
            return
        if data.source == SYNTHETIC and data.tokenizer and written(data, "tokenizer"):
            yield self.at(
                analysis.span_of(data, "tokenizer"),
                f"`tokenizer` has no effect: `{SYNTHETIC}` makes images",
                label="of no text",
                others=[Label(analysis.span_of(data, "source"), "the data")],
                help=["leave it out, or name a file of text where the model reads text"],
            )
        if not written(data, "field") or data.source.startswith(HF_DATASET):
            return
        suffix, with_fields = PurePath(data.source).suffix.lower(), (*sorted(JSON_LINES), PARQUET)
        folder = suffix == "" and data.source not in ("python", SYNTHETIC)
        if suffix not in with_fields and not folder:
            yield self.at(
                analysis.span_of(data, "field"),
                f"`field` has no effect: `{data.source}` is not read as JSON objects or columns",
                label="of no object",
                others=[Label(analysis.span_of(data, "source"), "the data")],
                help=[f"leave it out, or name a file that ends in {either_of([f'`{end}`' for end in with_fields])}"],
            )


class UnmappedWeights(Check):
    """Published weights for a model whose tensors have no known published names.

    The mapping is known for `llama3`, `mixtral`, `deepseek`, `gpt2` and `gpt3`, and for classes of `transformers`. A
    model of another class can start with the weights of a checkpoint of its own, by `--load-weights`.

    ## Example
    ```
    model vit("tiny")
    data (source = "synthetic")
    weights (huggingface = "vit-base")
    ```

    ## Use instead
    ```
    model llama3("8b")
    weights (huggingface = "llama-3.1-8b")
    data (source = "python")
    ```
    """

    code = "LP690"
    slug = "unmapped-weights"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        weights, manifest, model = analysis.plan.weights, analysis.manifest, analysis.plan.model
        if weights is None or manifest is None or manifest.model_class.startswith(_MAPPED):
            return
        yield self.at(
            analysis.span_of(weights, "huggingface"),
            f"which published tensors are those of {manifest.model_class} is not known",
            label="has no map to this model",
            others=[Label(analysis.span_of(model, "family"), "the model")],
            help=['write `model huggingface("config.json")` with the config of the weights, or leave `weights` out: '
                  "`--load-weights` takes a checkpoint of this model"],
        )  # fmt: skip


_MAPPED: Final = (
    "legoai.specs.models.llama.",
    "legoai.specs.models.mixtral.",
    "legoai.specs.models.deepseek.",
    "legoai.specs.models.gpt.",
    "transformers.",
)
"""Prefixes of the classes with a known mapping to published files."""


class IdleInterval(Check):
    """Checkpoints or validations so far apart that the run ends before the first.

    After its last step a run saves a checkpoint anyway, and validates nothing.

    ## Example
    ```
    steps 500
    evaluate (every = 1000)
    ```

    ## Use instead
    ```
    steps 500
    evaluate (every = 100)
    ```
    """

    code = "LP698"
    slug = "idle-interval"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, steps = analysis.plan, run_steps(analysis.plan)
        for statement, what in ((plan.save, "checkpoint"), (plan.evaluate, "validation")):
            if statement is None or steps is None or statement.every <= steps:
                continue
            yield self.at(
                analysis.span_of(statement, "every"),
                f"`every` has no effect: a run of {steps} steps ends before the first {what}",
                label=f"more than {steps}",
                others=[_end(analysis)],
                help=[f"write at most {steps}, or leave the statement out"],
            )


class StepsBesideSchedule(Check):
    """A run that continues after its schedule has ended, or that ends in its warm-up.

    After its last step a schedule keeps its final learning rate, 0 without a floor.

    ## Example
    ```
    steps 2000
    schedule cosine(warmup = 100, steps = 1000)
    ```

    ## Use instead
    ```
    steps 2000
    schedule cosine(warmup = 100, steps = 2000)
    ```
    """

    code = "LP699"
    slug = "steps-beside-schedule"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        schedule, steps = plan.schedule, plan.steps
        if steps is None:
            return
        warmup = warmup_steps(schedule)
        if not isinstance(schedule.form, Constant) and steps.count > schedule.form.steps:
            last = floor_share(plan) * plan.optimizer.algorithm.lr
            yield self.at(
                analysis.span_of(steps, "count"),
                f"the last {steps.count - schedule.form.steps} of {steps.count} steps have a learning rate of {last:g}",
                label="goes on",
                others=[Label(analysis.span_of(schedule.form, "steps"), "the schedule ends here")],
                help=["let both end together, or write `constant`"],
            )
        elif warmup > 0 and steps.count <= warmup:
            yield self.at(
                analysis.span_of(steps, "count"),
                f"a run of {steps.count} steps ends in the warm-up, which takes {warmup}",
                label="ends before the full learning rate",
                others=[Label(analysis.span_of(schedule.form, "warmup"), "the warm-up")],
                help=["train for more steps, or shorten the warm-up"],
            )


def _end(analysis: Analysis) -> Label:
    plan = analysis.plan
    if plan.steps is not None:
        return Label(analysis.span_of(plan.steps, "count"), "the run ends here")
    return Label(analysis.span_of(plan.schedule.form, "steps"), "the run ends here")
