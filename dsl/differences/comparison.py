"""Comparison of two linted plans: their changes, plans with some of these, and the smallest legal groups of changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.differences.changes import DIGEST, Change, Key, applied, changes
from legoai.dsl.frontend.files.contents import named_files
from legoai.dsl.frontend.resolve import Resolution
from legoai.dsl.frontend.syntax import Let, Statement
from legoai.dsl.lint import Linted, errors, manifest_of
from legoai.specs.directives.model import FOREIGN
from legoai.specs.files import MOST_DATA, read_file
from legoai.specs.plan import Plan
from legoai.specs.record import Record, replace
from legoai.specs.span import Span

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest

_BESIDE: Final = "beside"
"""Marks the change of a file with the same name in both plans and different contents."""


class Side(Record, kw_only=True):
    """One of the compared plans.

    Attributes:
        linted: the plan, without errors.
        directory: folder relative to which files that it names are looked up.
        resolved: the plan with one of its variants.
        shown: names of files in the output, where these differ from those of diagnostics.
    """

    linted: Linted
    directory: Path
    resolved: Callable[[str], Resolution]
    shown: Callable[[str], str] = str

    @property
    def plan(self) -> Plan:
        """The resolved plan."""
        assert self.linted.plan is not None, "a plan that cannot be resolved has an error"
        return self.linted.plan

    @property
    def analysis(self) -> Analysis:
        """The plan with its model."""
        assert self.linted.analysis is not None, "a plan that cannot be resolved has an error"
        return self.linted.analysis

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the plan's model; None where it is not known."""
        return self.analysis.manifest

    def let_of(self, span: Span) -> Let | None:
        """The `let` from which the value at a span is taken or computed; None for a literal value."""
        file = self.linted.files.get(span.file)
        words = re.findall(r"[A-Za-z_]\w*", file.text[span.start : span.end]) if file is not None else []
        lets = {item.name.text: item for item in self.linted.resolution.statements if isinstance(item, Let)}
        return next((lets[word] for word in words if word in lets), None)


class Comparison:
    """Two plans; changes lead from the first to the second.

    Args:
        before: the first plan.
        after: the second plan.
    """

    def __init__(self, before: Side, after: Side) -> None:
        self.before = before
        self.after = after
        self.changes: tuple[Change, ...] = (*_with_names(before, after), *_files(before, after))
        """Changes between the plans themselves."""
        self.in_variants: tuple[Change, ...] = tuple(_in_variants(before, after, self.changes))
        """Further changes in variants of the plans."""
        self._accepted = {(item.code, item.label.span) for side in (before, after) for item in side.linted.suppressed}
        self._candidates: dict[frozenset[Key], Analysis | None] = {}

    @property
    def differs(self) -> bool:
        """Whether there is any change."""
        return bool(self.changes or self.in_variants)

    def candidate(self, chosen: Collection[Change]) -> Analysis | None:
        """The first plan with some of the changes, analysed with its model; None where lint refuses it.

        Diagnostics that comments of either plan suppress are accepted. All changes make the second plan, and none the
        first.
        """
        if not chosen:
            return self.before.analysis
        if len(chosen) == len(self.changes):
            return self.after.analysis
        key = frozenset(change.key for change in chosen)
        if key not in self._candidates:
            self._candidates[key] = self._legal(chosen)
        return self._candidates[key]

    def _legal(self, chosen: Collection[Change]) -> Analysis | None:
        beside = [change for change in chosen if change.key.names[:1] == (_BESIDE,)]
        if beside and len(beside) < sum(change.key.names[:1] == (_BESIDE,) for change in self.changes):
            return None  # a plan is looked up in one folder or in the other
        side = self.after if beside else self.before
        plan = applied(self.before.plan, self.after.plan, [change for change in chosen if change not in beside])
        manifest = self._manifest(plan, side)
        if manifest is None or isinstance(manifest, Diagnostic):
            return None
        like = next((one.analysis for one in (self.before, self.after) if one.manifest is manifest), None)
        analysis = Analysis(
            replace(plan, solved=None),
            manifest,
            side.directory,
            file=self.before.linted.resolution.file.name,
            like=like,
        )
        found = errors(analysis)
        return None if any((item.code, item.label.span) not in self._accepted for item in found) else analysis

    def _manifest(self, plan: Plan, side: Side) -> Manifest | Diagnostic | None:
        """The manifest of a plan between the two; None where that would require running its model."""
        for one in (side, self.before, self.after):
            if one.plan.model == plan.model and (one is side or plan.model.family not in FOREIGN):
                return one.manifest
        if plan.model.family in FOREIGN:
            return None
        return manifest_of(plan, side.linted.resolution, side.directory, None)

    def groups(self) -> list[tuple[Change, ...]]:
        """The changes in groups, each of which is legal when it alone is applied to the first plan.

        A change that is legal alone is a group. Any other is combined with the fewest others that make it legal; groups
        that share a change are merged. In the order of the changes.
        """
        return legal_groups(self.changes, lambda chosen: self.candidate(chosen) is not None)


def legal_groups(items: Sequence[Change], legal: Callable[[Sequence[Change]], bool]) -> list[tuple[Change, ...]]:
    """A partition of ``items`` into legal groups, see :meth:`Comparison.groups`; all items together are legal."""
    alone = [legal([item]) for item in items]
    groups = [{index} for index, good in enumerate(alone) if good]
    waiting = [index for index, good in enumerate(alone) if not good]
    while waiting:
        core = {waiting.pop(0)}
        while True:
            grown = _minimal(core, items, alone, legal)
            met = [group for group in groups if group & grown]
            if all(group <= grown for group in met):
                break
            core = grown.union(*met)
        groups = [group for group in groups if not group & grown] + [grown]
        waiting = [index for index in waiting if index not in grown]
    return [tuple(items[index] for index in sorted(group)) for group in sorted(groups, key=min)]


def _minimal(
    core: set[int], items: Sequence[Change], alone: Sequence[bool], legal: Callable[[Sequence[Change]], bool]
) -> set[int]:
    """A legal set around ``core`` from which no other change can be removed."""

    def good(chosen: set[int]) -> bool:
        return legal([items[index] for index in sorted(chosen)])

    if good(core):
        return core
    chosen = set(range(len(items)))
    legal_alone = {index for index in chosen - core if alone[index]}
    if legal_alone and good(chosen - legal_alone):
        chosen -= legal_alone
    # Rules of other statements are removed first, and of these the most distant: neighbours belong together.
    nearest = min(core)
    for index in sorted(chosen - core, key=lambda index: (-alone[index], -abs(index - nearest))):
        if good(chosen - {index}):
            chosen.remove(index)
    return chosen


def _with_names(before: Side, after: Side) -> Iterator[Change]:
    """The changes of two plans; those of names and files with their places."""
    for change in changes(before.plan, after.plan):
        if change.key.part == "name":
            yield replace(change, before_at=_name_at(before), after_at=_name_at(after))
        elif change.key.part == "file":
            yield replace(
                change,
                key=Key("file", "files", names=(_BESIDE, change.key.names[0])),
                before_at=_file_at(before.plan, change.key.names[0]),
                after_at=_file_at(after.plan, change.key.names[0]),
            )
        else:
            yield change


def _name_at(side: Side) -> Span | None:
    for item in side.linted.resolution.file.statements:
        if isinstance(item, Statement) and item.keyword.text == "plan":
            return item.subject.span if item.subject is not None else item.span
    return None


def _file_at(plan: Plan, name: str) -> Span | None:
    return named_files(plan).get(name)


def _files(before: Side, after: Side) -> Iterator[Change]:
    """Files that both plans name and that have different contents, except those covered by the plans' own hashes."""
    if before.directory == after.directory:
        return
    covered = {name for name, _ in (*before.plan.files, *after.plan.files)}
    old, new = named_files(before.plan), named_files(after.plan)
    for name in old:
        if name not in new or name in covered:
            continue
        texts = _digest(before, name), _digest(after, name)
        if texts[0] != texts[1]:
            yield Change(
                key=Key("file", "files", names=(_BESIDE, name)),
                statement="file",
                what=f'"{name}"',
                kind="changed",
                before=texts[0],
                after=texts[1],
                before_at=old[name],
                after_at=new[name],
            )


def _digest(side: Side, name: str) -> str:
    from hashlib import sha256

    try:
        return f"sha256:{sha256(read_file(side.directory / name, MOST_DATA)).hexdigest()}"[:DIGEST]
    except (OSError, ValueError):
        return "missing"


def _in_variants(before: Side, after: Side, known: Sequence[Change]) -> Iterator[Change]:
    """Changes in variants only. A plan to which a variant was applied has no variants to compare."""
    if before.plan.variant is not None or after.plan.variant is not None:
        return
    said = {(item.key, item.before, item.after) for item in known}
    old, new = before.linted.resolution.variants, after.linted.resolution.variants
    for name in dict.fromkeys((*old, *new)):
        if name not in old or name not in new:
            yield Change(
                key=Key("statement", "variant", names=(name,)),
                statement=f"variant {name}",
                kind="added" if name in new else "removed",
                before="" if name in old else None,
                after="" if name in new else None,
                before_at=old[name].name.span if name in old else None,
                after_at=new[name].name.span if name in new else None,
            )
            continue
        plans = [side.resolved(name).plan for side in (before, after)]
        assert plans[0] is not None and plans[1] is not None, "lint has looked at every variant"
        for item in changes(plans[0], plans[1]):
            if (item.key, item.before, item.after) not in said and item.key.part not in ("name", "file"):
                yield replace(item, variant=name)
