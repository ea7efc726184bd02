"""Lower bound of a block's memory-bound kernels: norms, gates, sums, rotary embeddings and casts.

A simulated candidate on one tensor-parallel and one context-parallel rank shows how many bytes these move for each
token. Ranks that share a block's tokens or features move no fewer together, so that in another candidate each kernel
takes no less than the profile says of its rank's share. Fused kernels move less: nothing is known of compiled blocks.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.estimate import Estimate
from legoai.cost.kernels.kinds import Movement, MovementForm, MovementKind
from legoai.cost.kernels.work import kind_of, work_of
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.profiles import Profile
from legoai.cost.search.lower_bounds.local_kernels import Pass, kernel_gap
from legoai.cost.search.lower_bounds.shared_work import COPIES
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.records import Kernel, Mark, Record, TensorType
from legoai.cost.trace.segments import Instance, Segment
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens
from legoai.dsl.analysis.computation.precision import computes_in_float8, has_policy
from legoai.dsl.analysis.facts import below
from legoai.dsl.analysis.magnitudes.flops import FEATURES_KNOWN
from legoai.dsl.analysis.parallelism.overlap import possibly_overlapped
from legoai.specs.directives.base import describe
from legoai.specs.dtypes import DTYPE_BYTES, ITEM_BYTES
from legoai.specs.models.manifests.manifest import Manifest

_DECIDE: Final = ("model", "attention", "precision")
"""Statements on which the kernels of a block depend, beside degrees and batch."""


_COUNTED_COPIES: Final = ("aten._to_copy", "aten.cat")
"""Copies that compute something, so that no layout of what they read makes them idle."""

_SUM: Final = 3
"""Tensors that a sum of two reads and writes."""

_Key: TypeAlias = tuple[str, MovementKind, MovementForm, str, float]
"""Phase, kind, form, rate and bytes for a token of equal kernels."""


class Moved(NamedTuple):
    """Equal kernels of a block in one micro batch: when they run, of what kind, and what each moves for a token."""

    phase: str
    kind: MovementKind
    form: MovementForm
    rate: str
    bytes: float
    kernels: int


def repeated_blocks(manifest: Manifest | None) -> tuple[str, ...]:
    """The paths of a model's blocks, if all of them are equal; else none."""
    if manifest is None or len(manifest.block_lists) != 1 or len(manifest.block_lists[0].groups) != 1:
        return ()
    return manifest.block_lists[0].paths


def moved_of(found: Estimate, analysis: Analysis) -> list[Moved]:
    """Bytes that the blocks of a simulated candidate moved; none where others may move fewer."""
    plan, blocks = analysis.plan, repeated_blocks(analysis.manifest)
    mesh, [rank, *others] = plan.mesh, found.ranks
    if not blocks or others or mesh.tp > 1 or mesh.cp > 1 or not _tells(analysis):
        return []
    above = blocks[0].rpartition(".")[0]
    tokens = local_tokens(plan)
    counts: Counter[_Key] = Counter()
    batches = 0
    known: dict[int, _Kernels] = {}
    one_each = _OneEach(tokens, plan.batch.micro_batch)
    instances: Counter[tuple[int, str]] = Counter()  # below that path, by what they are of and by module
    for item in rank.trace.between(rank.span):
        of = item.segment if isinstance(item, Instance) else item
        kernels = known.get(id(of))
        if kernels is None:  # a segment is looked at once, however often it is repeated
            records = of.records if isinstance(of, Segment) else (of,)
            kernels = known[id(of)] = _kernels_of(records, one_each)
        batches += kernels.batches
        for module in kernels.of_modules:
            if below(item.path(module) if isinstance(item, Instance) else module, above):
                instances[id(of), module] += 1
    for (place, module), times in instances.items():
        for key, count in known[place].of_modules[module].items():
            counts[key] += times * count
    each = max(1, batches) * len(blocks)
    return [Moved(*key, count // each) for key, count in sorted(counts.items()) if count >= each]


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What some records move of tensors that have features of every token, by module, and micro batches they begin."""

    of_modules: Mapping[str, Counter[_Key]]
    batches: int


def _kernels_of(records: Iterable[Record], one_each: _OneEach) -> _Kernels:
    found: defaultdict[str, Counter[_Key]] = defaultdict(Counter)
    batches = 0
    for record in records:
        if isinstance(record, Mark):
            batches += record.name.startswith(MICRO_BATCH)
        elif isinstance(record, Kernel) and record.phase in ("forward", "backward") and record.module:
            key = one_each.key(record)
            if key is not None:
                found[record.module][key] += 1
    return _Kernels(found, batches)


class _OneEach:
    """What kernels move, of which segments that are like each other have the same.

    Args:
        tokens: of a micro batch on a rank.
        sequences: likewise.
    """

    def __init__(self, tokens: int, sequences: int) -> None:
        self.tokens, self.sequences = tokens, sequences
        self._known: dict[int, _Key | None] = {}

    def key(self, kernel: Kernel) -> _Key | None:
        """What a kernel of a trace moves for a token; None where that is nothing."""
        place = id(kernel)
        if place not in self._known:
            self._known[place] = self._key(kernel)
        return self._known[place]

    def _key(self, kernel: Kernel) -> _Key | None:
        counts = kind_of(kernel.op) not in COPIES or kernel.op in _COUNTED_COPIES
        work = work_of(kernel) if counts else None
        size = _moved_by_tokens(kernel, self.tokens, self.sequences) if isinstance(work, Movement) else 0.0
        if not isinstance(work, Movement) or size <= 0:
            return None
        return kernel.phase, work.kind, work.form, work.rate, size / self.tokens


def _moved_by_tokens(kernel: Kernel, tokens: int, sequences: int) -> float:
    """Bytes that a kernel moves of tensors that have features of every token."""
    others = sum(
        math.prod(one.shape) * ITEM_BYTES.get(one.dtype, 0)
        for one in (*kernel.inputs, *kernel.outputs)
        if not _has(one, tokens, sequences)
    )
    # What is written in place is an input that counts twice.
    return max(0.0, kernel.bytes_read + kernel.bytes_written - 2.0 * others)


def _has(tensor: TensorType, tokens: int, sequences: int) -> bool:
    """Whether a tensor has features of every token, and not of every position or every feature alone."""
    first, *rest = tensor.shape or (0,)
    return first == sequences and 1 not in rest and len(rest) > 1 and math.prod(rest) * first % tokens == 0


def _tells(analysis: Analysis) -> bool:
    plan = analysis.plan
    return plan.model.family in FEATURES_KNOWN and plan.compile is None and not computes_in_float8(plan.precision)


def key_of(analysis: Analysis) -> str | None:
    """What decides what blocks move for a token; None where nothing is known of that.

    Raises:
        Undecided: it depends on a hole.
    """
    plan = analysis.plan
    if not _tells(analysis) or not repeated_blocks(analysis.manifest):
        return None
    body = {name: describe(getattr(plan, name)) for name in _DECIDE}
    use = plan.cluster
    return json.dumps([use.device, use.profile, plan.batch.length, has_policy(analysis), body], sort_keys=True)


class MovedSeconds(NamedTuple):
    """Least seconds of what a block moves in one micro batch, and of what is moved again where it is recomputed."""

    once: Pass
    again: float


def seconds_of_block(moved: Iterable[Moved], analysis: Analysis, profile: Profile) -> MovedSeconds:
    """Least seconds of what a block moves in one micro batch on a rank.

    Recomputation ends when all is there that backward reads: then a sum may be left out, and the largest counts as it.
    Layers that hide their communication in backward add up the gradients of their input in their products.

    Args:
        moved: by the block in a candidate that was simulated.
        analysis: of a plan whose mesh and micro batch are decided.
        profile: of the device.
    """
    share, gap = local_tokens(analysis.plan) / analysis.plan.mesh.tp, kernel_gap(profile)
    took, largest, left_out = {"forward": 0.0, "backward": 0.0}, 0.0, _sums_in_products(analysis)
    for one in moved:
        work = Movement(kind=one.kind, bytes=int(one.bytes * share), form=one.form, rate=one.rate)
        seconds = gap + seconds_of(work, profile)[0]
        summed = min(one.kernels, _equal_sums(one, left_out))
        took[one.phase] += (one.kernels - summed) * seconds
        largest = max(largest, seconds if one.phase == "forward" else 0.0)
    return MovedSeconds(Pass(took["forward"], took["backward"]), took["forward"] - largest)


def _sums_in_products(analysis: Analysis) -> Counter[int]:
    """How many sums of two gradients of a block's tensors no kernel of their own may compute, by features."""
    assert analysis.manifest is not None
    most: Counter[int] = Counter()
    for block in repeated_blocks(analysis.manifest):
        found: Counter[int] = Counter()
        for path, layers in possibly_overlapped(analysis).items():
            if below(path, block) and layers:
                found[int(analysis.manifest.modules[layers[0]].attributes["in_features"])] += len(layers) - 1
        most |= found
    return most


def _equal_sums(one: Moved, sums: Counter[int]) -> int:
    """The number of these among equal kernels of a block: each reads two tensors and writes one."""
    if one.phase != "backward" or one.kind != "elementwise":
        return 0
    size = _SUM * DTYPE_BYTES.get(one.rate, 0)
    return sum(count for features, count in sums.items() if abs(one.bytes - size * features) < 1)
