"""Compatibility of one plan's checkpoints with another plan, as `legoai.runtime.training.resume` decides on tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.trained import frozen_parameters
from legoai.dsl.analysis.training.optimizer import muon_parameters
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.optimizer import Sgd
from legoai.specs.models.manifests.cache import read_config
from legoai.specs.plan import Plan
from legoai.specs.published.configs import differences, nearest_config
from legoai.specs.record import Record

Verdict = Literal["resumes", "weights", "partly", "unknown"]

VERDICTS: Final[Mapping[Verdict, str]] = {
    "resumes": "a checkpoint resumes, step and optimizer state included",
    "weights": "only the weights load: `--load-weights PATH`, or `--resume-other-plan` with fresh optimizer state",
    "partly": "it is of another model: `--resume-other-plan` loads what has the same name and shape",
    "unknown": "not known, since the model is not",
}

_ADAM: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})
_MOMENTUM: Final = frozenset({"momentum_buffer"})
"""State that `torch.optim` has for a parameter, by name."""


class Loading(Record):
    """Whether the checkpoints of one plan load under another, reasons if they do not, and what changes if they do.

    Attributes:
        verdict: what loads.
        reasons: why not all of it does.
        notes: what changes in a run that resumes.
        same_data: whether such a run reads what the checkpoint's would have read next.
    """

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    same_data: bool = True

    @property
    def words(self) -> str:
        """The verdict as a sentence."""
        if self.verdict == "resumes" and self.same_data:
            return "a checkpoint resumes, step, optimizer state and position in the data included"
        return VERDICTS[self.verdict]


def loading(saved: Analysis, wanted: Analysis) -> Loading:
    """How a checkpoint that ``saved`` wrote loads under ``wanted``.

    The model's tensors must have the same names, shapes and meaning, on any mesh; the optimizer must have the same
    state for each parameter. Buffers of models from factories and Hugging Face are assumed to be saved, since a
    manifest does not record which are.
    """
    moves = tuple(_other_data(saved.plan, wanted.plan))
    notes = (*_notes(saved.plan, wanted.plan), *moves)
    if saved.manifest is None or wanted.manifest is None:
        return Loading("unknown", notes=notes)
    old, new = _tensors(saved), _tensors(wanted)
    if old != new:
        return Loading("partly", (_first_difference(old, new),), notes)
    reasons, more = _of_models(saved, wanted)
    notes += more
    if reasons:
        return Loading("partly", reasons, notes)
    try:
        held, needed = optimizer_state(saved), optimizer_state(wanted)
    except Undecided:
        return Loading("unknown", ("the optimizer has a hole",), notes)
    kinds = [frozenset().union(*state.values()) for state in (held, needed)]
    if kinds[0] != kinds[1]:
        listed = [", ".join(sorted(kind)) or "nothing" for kind in kinds]
        return Loading("weights", (f"the optimizer keeps {listed[1]} of parameters, and kept {listed[0]}",), notes)
    frozen = frozen_parameters(saved)
    thawed = [name for name, state in needed.items() if state and name in frozen]
    if thawed:
        notes += (f"the optimizer starts afresh with {_counted(thawed)}, frozen in the model of the checkpoint",)
    missing = [name for name, state in needed.items() if not state <= held[name] and name not in frozen]
    if missing:
        lacks = ", ".join(sorted(needed[missing[0]] - held[missing[0]]))
        return Loading("weights", (f"a checkpoint has no {lacks} of {_counted(missing)}",), notes)
    names = [one.plan.optimizer.algorithm.name for one in (saved, wanted)]
    if names[0] != names[1]:
        notes += (f"`{names[1]}` goes on with the state of `{names[0]}`",)
    return Loading("resumes", notes=notes, same_data=not moves)


def _tensors(analysis: Analysis) -> dict[str, tuple[int, ...]]:
    assert analysis.manifest is not None
    found = dict(analysis.manifest.parameters())
    if analysis.plan.model.family in FOREIGN:
        for module in analysis.manifest.modules.values():
            found |= {module.child_path(item.name): item.shape for item in module.buffers}
    return found


def _first_difference(old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]) -> str:
    lost, added = [name for name in old if name not in new], [name for name in new if name not in old]
    other = [name for name in old if name in new and old[name] != new[name]]
    if other:
        before, after = (" × ".join(map(str, shapes[other[0]])) or "scalar" for shapes in (old, new))
        return f"{_counted(other)} has another shape: {before} → {after}"
    return f"{_counted(added)} is new" if added else f"{_counted(lost)} is gone"


def _of_models(saved: Analysis, wanted: Analysis) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Differences of models with the same tensors: by which weights mean something else, and those of other numbers."""
    fields, own = _config(saved), _config(wanted)
    found: tuple[list[str], list[str]] = ([], [])
    if fields and own:
        builtin = not {saved.plan.model.family, wanted.plan.model.family} & set(FOREIGN)
        for one in differences(own, fields, builtin=builtin):
            what = f"the model's {one.field} is another: {one.published} → {one.own}"
            found[not one.changes_function].append(what)
    sources = [one.plan.model.source() for one in (saved, wanted)]
    if sources[0] != sources[1] and all(source.kind == "python" for source in sources):
        found[1].append(f"the model's factory is another: {sources[0]} → {sources[1]}")
    return tuple(found[0]), tuple(found[1])


def _config(analysis: Analysis) -> Mapping[str, Any]:
    """The fields of a model's config as its checkpoints record them; empty for one of a factory, which has none."""
    source = analysis.plan.model.source()
    if source.kind == "builtin":
        return nearest_config(source.config())
    if source.kind == "python":
        return {}
    return {**read_config(analysis.directory / source.target), **source.arguments}


def _counted(names: list[str]) -> str:
    more = len(names) - 1
    return f"`{names[0]}`" + (f" (and {more} more)" if more else "")


def optimizer_state(analysis: Analysis) -> dict[str, frozenset[str]]:
    """The optimizer's state of each parameter, by name, as in its checkpoints; frozen ones have none.

    Raises:
        Undecided: the algorithm or a rule is a hole.
    """
    assert analysis.manifest is not None
    algorithm = analysis.plan.optimizer.algorithm
    if isinstance(algorithm, Hole):
        raise Undecided("the optimizer is not decided yet")
    usual = _ADAM
    if isinstance(algorithm, Sgd):
        usual = _MOMENTUM if algorithm.momentum > 0.0 else frozenset()
    by_muon, frozen = muon_parameters(analysis), frozen_parameters(analysis)
    return {
        name: frozenset() if name in frozen else _MOMENTUM if name in by_muon else usual
        for name, _ in analysis.manifest.parameters()
    }


def _notes(saved: Plan, wanted: Plan) -> Iterator[str]:
    """Messages about a run that loads such a checkpoint, and differences in its behaviour."""
    if saved.name != wanted.name:
        yield f"`legoai run` writes into another folder: give `-- --resume runs/{saved.name}`"
    dtypes = [plan.precision.master for plan in (saved, wanted)]
    if not any(isinstance(dtype, Hole) for dtype in dtypes) and dtypes[0] != dtypes[1]:
        yield f"tensors that were saved in {dtypes[0]} are loaded as {dtypes[1]}"


def _other_data(saved: Plan, wanted: Plan) -> Iterator[str]:
    """Messages about other data that a run reads which resumes from such a checkpoint."""
    old, new = (plan.seed.value if plan.seed is not None else 0 for plan in (saved, wanted))
    if old != new:
        yield f"the data goes on in the order of seed {new}, from the same sample number"
    sources = [
        None if plan.data is None else (plan.data.source, plan.data.field, plan.data.tokenizer)
        for plan in (saved, wanted)
    ]
    if sources[0] != sources[1]:
        yield "another corpus is read from the same sample number"
    lengths = [plan.batch.seq_len for plan in (saved, wanted)]
    if not any(length is None or isinstance(length, Hole) for length in lengths) and lengths[0] != lengths[1]:
        yield (
            f"the data goes on from the same sample number in sequences of {lengths[1]} tokens instead of "
            f"{lengths[0]}, which is another position"
        )
