"""First plan of a model on a cluster: the parallelism that lint accepts, with holes for what `legoai solve` decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.mesh import number_of_devices
from legoai.dsl.diagnostics.cascade import OF_THE_WHOLE
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import Announce, lint
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.mesh import AXES
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.reads import Images, ImagesWithTexts
from legoai.specs.record import Record

TOKENS: Final = 2**20
"""Of a step where no batch is given: those of GPT-3 2.7B to 6.7B are 1 to 2 million (Brown et al. 2020, table 2.1)."""
IMAGES: Final = 4096
"""Samples of a step, of models that read no tokens: the batch of ViT's own training (Dosovitskiy et al. 2021)."""
SEQUENCE: Final = 4096
"""Tokens of a sequence where none are given, or as many as the model has positions."""
_LONG: Final = 32768
"""Tokens of a sequence from which on context parallelism is among the choices."""

_STATE_OVER_DEVICE: Final = "LP704"
_COMMENT: Final = "Values that are `auto` are found by `legoai solve --in-place`."
_GROUPS: Final = (
    ("model", "cluster", "batch"),
    ("mesh", "context", "pipeline"),
    ("shard tp", "shard ep", "fsdp"),
    ("checkpoint", "loss"),
    ("precision", "optimizer", "clip", "schedule"),
)
"""Statements in the order of the text, with an empty line between groups."""

Statements = Mapping[str, str]
"""Statements by what they are about: text, or the value of an axis for `mesh AXIS`."""


class FirstPlan(Record):
    """A first plan, or why there is none.

    Attributes:
        text: of the plan; None where it has errors.
        diagnostics: of the plan without its choices, where it has errors; else warnings of the plan.
        files: that the diagnostics are about, by name.
        notes: what was assumed or left out, a sentence each.
    """

    text: str | None
    diagnostics: tuple[Diagnostic, ...]
    files: Mapping[str, PlanFile]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Draft:
    """A plan under construction."""

    name: str
    directory: Path
    announce: Announce | None
    statements: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def text(self, more: Statements | None = None) -> str:
        """The plan with some more statements, or others, not formatted."""
        found = {**self.statements, **(more or {})}
        axes = {axis: found[f"mesh {axis}"] for axis in AXES if f"mesh {axis}" in found}
        found["mesh"] = f"mesh ({', '.join(f'{axis} = {value}' for axis, value in axes.items())})" if axes else ""
        groups = ["\n".join(found[what] for what in group if found.get(what)) for group in _GROUPS]
        return "\n\n".join([f"# {_COMMENT}\nplan {self.name}", *filter(None, groups)]) + "\n"

    def mistakes(self, more: Statements | None = None) -> list[Diagnostic]:
        """Errors and warnings of the plan with some more statements."""
        linted = lint(self.text(more), f"{self.name}.plan", directory=self.directory, announce=self.announce)
        return [item for item in linted.diagnostics if item.severity != "advice"]

    def add(self, what: str, *ways: Statements) -> None:
        """Add the first of some ways to which lint has nothing to say; else note what it says of the last.

        What does not fit in memory may fit with what is added later.
        """
        before, why = {(item.code, item.message) for item in self.mistakes()}, ""
        for way in ways:
            new = [item for item in self.mistakes(way) if (item.code, item.message) not in before]
            found = [item for item in new if item.code not in OF_THE_WHOLE]
            if not found:
                self.statements.update(way)
                return
            why = f"{found[0].message} ({found[0].code})"
        self.notes.append(f"without {what}: {why}")


def first_plan(
    model: str,
    cluster: str,
    *,
    name: str,
    directory: Path,
    batch: int | None = None,
    seq_len: int | None = None,
    announce: Announce | None = None,
) -> FirstPlan:
    """Write the first plan of a model on a cluster.

    Degrees, the micro batch, the pipeline's schedule, what stays unsharded, checkpointing and the form of the loss are
    holes. What a plan cannot be without and nobody has given is assumed, and noted.

    Args:
        model: as a plan's `model` statement states it.
        cluster: as a plan's `cluster` statement states it.
        name: of the plan.
        directory: in which the plan will lie.
        batch: samples of a step.
        seq_len: tokens of a sequence.
        announce: called before a model factory is run.
    """
    statements = {"model": f"model {model}", "cluster": f"cluster {cluster}", "mesh dp_shard": "rest"}
    statements["batch"] = "batch (global = 1, micro = auto, seq_len = 1)"
    draft = _Draft(name, directory, announce, statements)
    linted = lint(draft.text(), f"{name}.plan", directory=directory, announce=announce)
    analysis = linted.analysis
    places = {what: _line_of(draft.text(), what) for what in ("model", "cluster")}
    wrong = [item for item in errors_of(linted.diagnostics) if item.label.span.line in places.values()]
    devices = None if analysis is None else _devices(analysis)
    if wrong or analysis is None or analysis.manifest is None or devices is None:
        return FirstPlan(None, tuple(wrong or errors_of(linted.diagnostics)), linted.files, ())
    length = _state_batch(draft, analysis.manifest, devices, batch, seq_len)
    _state_training(draft, in_half=analysis.device_kind != "cpu")
    _choose(draft, analysis, devices, length)
    if "precision" in draft.statements and "fsdp" in draft.statements:
        draft.statements["precision"] = "precision (param = bf16, reduce = fp32)"
    text = format_text(draft.text(), name).text
    assert text is not None, "lint has read it"
    linted = lint(text, f"{name}.plan", directory=directory)
    if not errors_of(linted.diagnostics):
        most = lint(_most_sharded(draft), f"{name}.plan", directory=directory)
        linted = most if any(item.code == _STATE_OVER_DEVICE for item in most.diagnostics) else linted
    said = tuple(item for item in linted.diagnostics if item.severity != "advice")
    return FirstPlan(None if errors_of(said) else text, said, linted.files, tuple(draft.notes))


def _most_sharded(draft: _Draft) -> str:
    """The plan with every parameter sharded over all devices: what this leaves on one of them, no other degrees lessen.

    Lint says nothing of the memory of a plan whose degrees are open.
    """
    kept = ("model", "cluster", "mesh dp_shard", "batch", "precision", "optimizer")
    statements = {what: draft.statements[what] for what in kept if what in draft.statements}
    statements["batch"] = statements["batch"].replace("= auto", "= 1")
    statements["fsdp"] = (
        draft.statements.get("fsdp", "").replace("dp_replicate, ", "").replace("= auto", "= after_forward")
    )
    return _Draft(draft.name, draft.directory, None, statements).text()


def _line_of(text: str, keyword: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.split()[:1] == [keyword])


def _devices(analysis: Analysis) -> int | None:
    try:
        return number_of_devices(analysis)
    except Undecided:
        return None


def _state_batch(draft: _Draft, manifest: Manifest, devices: int, batch: int | None, seq_len: int | None) -> int:
    """State the batch, given or of about as many tokens or images as published trainings have; return its length."""
    length, tokens = "", 1
    if manifest.reads is None or manifest.reads.has_text or seq_len is not None:
        tokens = min(SEQUENCE, manifest.max_seq_len or SEQUENCE) if seq_len is None else seq_len
        length = f", seq_len = {tokens}"
        if seq_len is None:
            draft.notes.append(f"sequences are taken to have {tokens} tokens; state them with --seq-len")
    samples = batch
    if samples is None:
        wanted = IMAGES if isinstance(manifest.reads, Images | ImagesWithTexts) else TOKENS // tokens
        samples = devices * max(1, round(wanted / devices))
        draft.notes.append(f"the batch is taken to be {samples} samples a step; state it with --batch")
    draft.statements["batch"] = f"batch (global = {samples}, micro = auto{length})"
    return tokens


def _state_training(draft: _Draft, *, in_half: bool) -> None:
    """State precision, optimizer, clipping and schedule as most published trainings of transformers have them."""
    if in_half:
        draft.statements["precision"] = "precision (param = bf16)"
    draft.statements["optimizer"] = "optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)"
    draft.statements["clip"] = "clip (norm = 1.0)"
    draft.statements["schedule"] = "schedule cosine(warmup = 2000, steps = 100000, floor = 0.1)"
    draft.notes.append("optimizer and schedule are a usual choice for training a language model: make them yours")


def _choose(draft: _Draft, analysis: Analysis, devices: int, length: int) -> None:
    """Add parallelism, checkpointing and the loss's form, as far as lint has nothing to say against them."""
    manifest, several = analysis.manifest, (analysis.plan.cluster.hosts or 1) != 1
    assert manifest is not None
    blocks = [f"{item.path}.*" if item.path else "*" for item in manifest.block_lists if len(item) > 1]
    if devices == 1:
        del draft.statements["mesh dp_shard"]
    else:
        draft.add("sharded parameters", *_sharded(blocks, several=several))
        if any(module.kind == "moe" for module in manifest.modules.values()):
            draft.add("expert parallelism", {"mesh ep": "auto", "shard ep": "shard standard on ep"})
        draft.add("tensor parallelism", *_on_tp())
        if several:
            draft.add("pipeline stages", {"mesh pp": "auto", "pipeline": "pipeline on pp (schedule = auto)"})
        if length >= _LONG:
            draft.add("context parallelism", {"mesh cp": "auto", "context": "context on cp"})
    if blocks:
        draft.add("checkpointing", {"checkpoint": f"checkpoint {_block(f'{path} = auto' for path in blocks)}"})
    if manifest.reads_tokens:
        draft.add("another form of the loss", {"loss": "loss auto"})


def _on_tp() -> Iterator[Statements]:
    """Ways to shard layers over `tp`, that which communicates and stores least first."""
    for options in (" (sequence, loss_parallel)", " (sequence)", " (loss_parallel)", ""):
        yield {"mesh tp": "auto", "shard tp": f"shard standard on tp{options}"}


def _sharded(blocks: Sequence[str], *, several: bool) -> Iterator[Statements]:
    """Ways to shard parameters, on several hosts with replicas if possible, by the standard units or by blocks."""
    rules = [f"{path} = unit(reshard = auto)" for path in blocks]
    for axes in ("dp_replicate, dp_shard", "dp_shard") if several else ("dp_shard",):
        replicas = {"mesh dp_replicate": "auto"} if "dp_replicate" in axes else {}
        yield {**replicas, "fsdp": f"fsdp blocks on {axes} {_block(rules)}"}
        for root in (["root = unit"], []) if rules else (["root = unit"],):
            yield {**replicas, "fsdp": f"fsdp on {axes} {_block([*rules, *root])}"}


def _block(rules: Iterable[str]) -> str:
    """Rules in braces, on one line where there is one."""
    found = list(rules)
    return f"{{ {found[0]} }}" if len(found) == 1 else "\n".join(["{", *found, "}"])
