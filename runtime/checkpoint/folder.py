"""Checkpoints of one run in a folder: atomic writing, lookup, and removal of old ones.

A checkpoint is written as `step-N.tmp`, and renamed to `step-N` when everything in it is on disk, so that a crash at
any point leaves the last complete one. A run that resumes at an earlier step than the newest saves on a branch of its
own, as `step-N-branch-B`; the last branch is the current one. The start of a branch is recorded at once, so that a run
that crashes before its first checkpoint there continues on the branch.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from legoai.runtime.checkpoint.branches import Branches, read_branches, write_branches
from legoai.runtime.checkpoint.checkpoint import (
    CheckpointMeta,
    Files,
    SavePoint,
    State,
    cause,
    checksum,
    is_newer,
    read_meta,
    verified_meta,
    write_meta,
)
from legoai.runtime.durable import RAISE_LIMIT, is_full, is_too_large, sync, write_durably
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.process_group import gather_objects, group_of_thread, on_every_rank, on_first_rank
from legoai.runtime.wrapped import local_part
from legoai.specs.units import MIB

DRAFT = ".tmp"
"""Ends the name of a folder that is being written or removed."""

_LATE_SECONDS = 10.0
"""For which a file that another host wrote may be invisible on this one."""


class Checkpoints:
    """The checkpoints of one run. All methods are collective: every rank calls them.

    Args:
        root: the folder that holds `step-N` folders; on storage that all ranks see.
        keep: checkpoints kept that have been read back whole; 0 keeps all.

    Attributes:
        branch: on which this run saves.
    """

    def __init__(self, root: Path, *, keep: int = 3) -> None:
        self.root = root
        self.keep = keep
        self.branch = 0
        self._verified: dict[SavePoint, list[tuple[str, int, int]]] = {}

    def points(self) -> list[SavePoint]:
        """Return the checkpoints, complete or not, the newest last; the same on every rank."""
        return on_first_rank(self._points)

    def path(self, point: SavePoint) -> Path:
        """Return the folder of a checkpoint."""
        return self.root / point.name

    def sweep(self) -> None:
        """Remove partially written or partially removed checkpoints; no other run may be using the folder.

        Raises:
            RunError: what has the name of the folder is something else.
        """
        on_first_rank(self._sweep)

    def choose_branch(self, path: Path | None, *, newer_are_damaged: bool = False, asked: str | None = None) -> bool:
        """Choose the branch on which this run saves, and return whether it is a new one.

        Args:
            path: of the checkpoint from which the run continues, here or elsewhere; None where it starts from the
                beginning.
            newer_are_damaged: whether every checkpoint that would be followed before it is known to be damaged.
            asked: the request, such as an option's value, by which this run continues from there, if the folder alone
                would have it continue elsewhere; it is recorded, for :meth:`was_asked`.
        """
        points = self.points()
        own = None if path is None else on_first_rank(lambda: self._point_of(path))
        if newer_are_damaged and path is not None and on_first_rank(lambda: path.resolve() in self._descent()):
            self.branch = on_first_rank(self._last_branch)
            return False
        if not points or (own is not None and own == points[-1] and not newer_are_damaged):
            self.branch, begins = own.branch if own is not None else 0, False
        else:
            self.branch, begins = points[-1].branch + 1, True
        if asked is not None or begins:
            goes_on = own is not None and not begins
            on_first_rank(lambda: self._write_branches(path, asked, goes_on=goes_on))
        return begins

    def was_asked(self, asked: str) -> bool:
        """Return whether the run that last chose a branch here did so by this request, in this job of torchrun."""
        return on_first_rank(lambda: read_branches(self.root.parent).asked == [asked, _job()])

    def save(self, state: State, meta: CheckpointMeta) -> Path:
        """Write a checkpoint, publish it at once, and remove those beyond `keep`.

        Nothing is removed before this checkpoint has been read back completely, and only readable checkpoints count.

        Raises:
            RunError: it could not be written, or the written files are damaged; earlier checkpoints are unchanged.
        """
        point = SavePoint(self.branch, meta.step)
        final, draft = self.path(point), self.root / f"{point.name}{DRAFT}"
        sizes = gather_objects(sum(_local_bytes(tensor) for tensor in state.values()))
        try:
            on_first_rank(lambda: _make_draft(draft, final))
            save_distributed(dict(state), storage_writer=FileSystemWriter(draft), process_group=group_of_thread())
            files: Files = {}
            for part in on_every_rank(lambda: _checksums(_own_files(draft))):
                files |= part
            on_first_rank(lambda: _check_visible(draft, final, files))
            on_first_rank(lambda: self._publish(draft, final, meta, files))
            self._verified.pop(point, None)
            self._remove_oldest(point)
        except (OSError, CheckpointException) as error:
            raise on_first_rank(partial(self._not_written, draft, final, error, sizes)) from error
        return final

    def newest(self, *, warn: Callable[[str], None] = warnings.warn) -> tuple[Path, CheckpointMeta] | None:
        """Return the newest complete checkpoint, or None where there is no checkpoint at all.

        The newest is that of the last branch, then that from which the branch began, and so on; abandoned ones come
        last. For each newer one that is damaged there is a warning on rank 0, and for one that had been abandoned.

        Raises:
            RunError: a checkpoint contains code, or is of a newer format, or all are damaged.
        """
        problems: dict[Path, str] = {}
        say = warn if dist.get_rank() == 0 else lambda _: None
        if ignored := on_first_rank(lambda: read_branches(self.root.parent)).problem:
            say(ignored)
        history, abandoned = on_first_rank(self._candidates)
        for path in (*history, *abandoned):
            try:
                meta = self._verify(path)
            except RunError as error:
                if error.code in (RunErrorCode.CHECKPOINT_UNSAFE, RunErrorCode.CHECKPOINT_NEWER):
                    raise
                there = on_first_rank(partial(os.path.exists, path))  # Path.exists raises for a name that is too long
                problems[path] = error.message if there else "it is gone"
                say(f"checkpoint {path} is skipped: {problems[path]}")
                continue
            if path in abandoned:
                say(f"checkpoint {path} is of a history that the run had left; of that which it followed none is good")
            return path, meta
        if problems:
            raise self._none_is_good(problems)
        return None

    def remove_before(self, path: Path) -> None:
        """Remove checkpoints beyond `keep` that are older than one, which has been read back whole.

        Otherwise a disk that is full of them could not take the next one, after which they are removed. Newer ones stay
        until then: they may be damaged, or of the branch that the run leaves.
        """
        point = on_first_rank(lambda: self._point_of(path))
        if point is not None and self.keep:
            older = [other for other in on_first_rank(self._ordered) if other < point]
            self._keep_best(older, complete=1)

    def _points(self) -> list[SavePoint]:
        if not self.root.is_dir():
            return []
        found = (SavePoint.named(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(point for point in found if point is not None)

    def _candidates(self) -> tuple[list[Path], list[Path]]:
        """Return the checkpoints from which a run may continue, the best first: of its history, and abandoned ones."""
        descent = self._descent()
        left = [path for point in reversed(self._points()) if (path := self.path(point)).resolve() not in descent]
        return [self._as_given(path) for path in descent], left

    def _ordered(self) -> list[SavePoint]:
        """Return the checkpoints that are here in the order of :meth:`_candidates`."""
        history, abandoned = self._candidates()
        here = set(self._points())
        return [point for path in (*history, *abandoned) if (point := self._point_of(path)) in here]

    def _none_is_good(self, problems: dict[Path, str]) -> RunError:
        """Return the error of a run whose checkpoints all have problems; the best come first."""
        here, said = [why for path, why in problems.items() if path.parent == self.root], []
        help = "restore one, or pass --restart to train from the first step; they are left as they are"
        if here:
            many = "the only checkpoint" if len(here) == 1 else f"each of the {len(here)} checkpoints"
            said = [f"{many} in {self.root} is damaged; of the newest: {here[0]}"]
        for path, why in problems.items():
            if path.parent != self.root:
                said += [
                    f"the checkpoint from which the run in {self.root.parent} began, {path}, cannot be read: {why}"
                ]
                help = f"restore one, name another with --resume, or pass {help.partition(' or pass ')[2]}"
        return RunError(RunErrorCode.CHECKPOINT_CORRUPT, "; ".join(said), help=help)

    def _descent(self) -> list[Path]:
        """Return the history of the last branch, the newest first, as paths: its checkpoints, and its start."""
        points, beginnings = self._points(), read_branches(self.root.parent).beginnings
        branch, before, found = self._last_branch(), None, list[Path]()
        while True:
            own = [point for point in points if point.branch == branch and (before is None or point.step <= before)]
            found += (self.path(point).resolve() for point in reversed(own))
            beginning = beginnings.get(branch)
            if beginning is None:
                return found
            path = Path(os.path.realpath(self.root / beginning))  # unlike Path.resolve, also of links in a circle
            point = self._point_of(path)
            if point is None or point.branch >= branch:
                return [*found, path]
            branch, before = point.branch, point.step

    def _as_given(self, path: Path) -> Path:
        return self.root / path.name if path.parent == self.root.resolve() else path

    def _last_branch(self) -> int:
        begun = read_branches(self.root.parent).beginnings
        return max((*begun, *(point.branch for point in self._points())), default=0)

    def _write_branches(self, path: Path | None, asked: str | None, *, goes_on: bool) -> None:
        """Record that the branch starts with, or continues from, a checkpoint; later branches are discarded."""
        known = read_branches(self.root.parent).beginnings
        beginnings = {branch: place for branch, place in known.items() if branch < self.branch + goes_on}
        if path is not None and not goes_on:
            inside = self._point_of(path)
            beginnings[self.branch] = str(path.resolve()) if inside is None else inside.name
        branches = Branches(beginnings=beginnings, asked=None if asked is None else [asked, _job()])
        write_branches(self.root.parent, branches, suffix=DRAFT)

    def _point_of(self, path: Path) -> SavePoint | None:
        found = Path(os.path.realpath(path))
        return SavePoint.named(found.name) if found.parent == self.root.resolve() else None

    def _sweep(self) -> None:
        if (self.root.exists() or self.root.is_symlink()) and not self.root.is_dir():
            raise RunError(
                RunErrorCode.FOLDER_NOT_WRITABLE,
                f"{self.root} is no folder, and the checkpoints are to be in it",
                help="move it away, or choose another --out",
            )
        for entry in self.root.glob(f"step-*{DRAFT}"):
            its = SavePoint.named(entry.name.removesuffix(DRAFT))
            if its is not None and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)

    def _verify(self, path: Path) -> CheckpointMeta:
        meta = verified_meta(path)
        point = SavePoint.named(path.name)
        if point is not None and path == self.path(point):
            self._verified[point] = on_first_rank(lambda: _listed(path))
        return meta

    def _is_complete(self, point: SavePoint) -> bool:
        """Return whether a checkpoint can be read; its files are read once, and then looked at from outside."""
        known = self._verified.get(point)
        try:
            if known is None or known != on_first_rank(lambda: _listed(self.path(point))):
                self._verify(self.path(point))
        except (RunError, OSError):  # such as one of a disk that fails
            return False
        return True

    def _publish(self, draft: Path, final: Path, meta: CheckpointMeta, files: Files) -> None:
        write_meta(draft, meta, files, write_durably)
        _delete(final)  # damaged, if it is there: a run does not save a step twice on one branch
        draft.rename(final)
        sync(self.root)

    def _remove_oldest(self, saved: SavePoint) -> None:
        points = on_first_rank(self._ordered)
        if not self.keep or len(points) <= self.keep:
            return
        try:
            self._verify(self.path(saved))
        except RunError as error:
            raise RunError(
                RunErrorCode.CHECKPOINT_NOT_WRITTEN,
                f"checkpoint {self.path(saved)} was written, but cannot be read back: {error.message}",
                help="look after the disk; earlier checkpoints are as they were",
            ) from error
        self._keep_best(points)

    def _keep_best(self, points: list[SavePoint], *, complete: int = 0) -> None:
        """Remove those of some checkpoints, the best first, that are beyond `keep`, of which complete ones take a part.

        Those of a newer format stay. So abandoned ones go first, and what a branch began from stays with it.
        """
        if complete + len(points) <= self.keep:
            return
        for point in points:
            if complete == self.keep:
                if on_first_rank(partial(is_newer, self.path(point))):
                    continue
                self._verified.pop(point, None)
                try:
                    on_first_rank(partial(self._remove, point))
                except OSError as error:  # the new one is complete, and that is what counts
                    if dist.get_rank() == 0:
                        warnings.warn(f"checkpoint {self.path(point)} cannot be removed: {cause(error)}", stacklevel=2)
            elif self._is_complete(point):
                complete += 1

    def _remove(self, point: SavePoint) -> None:
        """Remove a checkpoint such that a crash on the way leaves a folder that is cleaned up later."""
        doomed = self.root / f"{point.name}{DRAFT}"
        self.path(point).rename(doomed)
        _delete(doomed)

    def _not_written(self, draft: Path, final: Path, error: BaseException, sizes: list[int]) -> RunError:
        """Remove an unfinished draft, and return an error with the reason; the sizes are those of the ranks' files."""
        size, largest = sum(sizes), max(sizes)
        reasons = [*_system_errors(error), *_probe(draft, largest)]
        shutil.rmtree(draft, ignore_errors=True)
        why, help = cause(error), ""
        try:
            free = shutil.disk_usage(self.root if self.root.is_dir() else self.root.parent).free
            fewer = "keep fewer with --keep, " if len(self._points()) > 1 else ""
        except OSError:
            free, fewer = size, ""
        if any(map(is_too_large, reasons)):
            why = f"a file may not be as large there as the largest that it needs, of about {_mebibytes(largest)}"
            help = f"{RAISE_LIMIT}, or choose another --out; earlier checkpoints are as they were"
        elif any(map(is_full, reasons)) or free < size:
            why = (
                f"the disk is full, or its quota; {_mebibytes(free)} are free there, and it needs about "
                f"{_mebibytes(size)}"
            )
            help = f"free space, {fewer}or choose another --out; earlier checkpoints are as they were"
        return RunError(
            RunErrorCode.CHECKPOINT_NOT_WRITTEN, f"checkpoint {final} could not be written: {why}", help=help
        )


def _job() -> str:
    """Return an identifier of this torchrun job, whose failed ranks it restarts."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _listed(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of a checkpoint's files, to detect changes."""
    found = ((entry.name, entry.stat()) for entry in path.iterdir()) if path.is_dir() else ()
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in found)


def _local_bytes(tensor: torch.Tensor) -> int:
    return local_part(tensor).nbytes if isinstance(tensor, DTensor) or dist.get_rank() == 0 else 0


def _mebibytes(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def _system_errors(error: BaseException) -> Iterator[OSError]:
    """Yield the errors of the system behind an error, of any rank."""
    if isinstance(error, CheckpointException):
        for reason, _ in error.failures.values():
            yield from _system_errors(reason)
    elif isinstance(error, OSError):
        yield error


def _probe(folder: Path, size: int) -> Iterator[OSError]:
    """Yield why a small file, or one of a size, cannot be in a folder; torch's writer hides why its own cannot."""
    probe = folder / "probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            file.truncate(size)  # takes no space
    except OSError as error:
        yield error
    else:
        probe.unlink()


def _own_files(draft: Path) -> list[Path]:
    """Return the files that this rank wrote: `__RANK_n.distcp` is torch's name; rank 0 also wrote the metadata."""
    rank = dist.get_rank()
    files = list(draft.glob(f"__{rank}_*.distcp"))
    return [*files, draft / ".metadata"] if rank == 0 else files


def _checksums(files: list[Path]) -> Files:
    return {file.name: (file.stat().st_size, checksum(file)) for file in files}


def _check_visible(draft: Path, final: Path, files: Files) -> None:
    """Check that what every rank wrote is in the folder as this rank sees it; a network's file system may be late.

    Raises:
        RunError: something is not.
    """
    until = time.monotonic() + _LATE_SECONDS
    while absent := [name for name, (size, _) in files.items() if _size(draft / name) != size]:
        if time.monotonic() > until:
            raise RunError(
                RunErrorCode.CHECKPOINT_NOT_WRITTEN,
                f"checkpoint {final} could not be written: {absent[0]}, which another rank wrote, is not there",
                help="give --out a folder on storage that all ranks see",
            )
        time.sleep(0.5)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _make_draft(draft: Path, final: Path) -> None:
    """Create an empty folder in which a checkpoint is written, unless that would replace one of a newer format.

    Raises:
        RunError: it would.
    """
    if is_newer(final):
        read_meta(final)
    _delete(draft)
    draft.mkdir(parents=True)


def _delete(path: Path) -> None:
    """Remove a folder, or a file or a link in its place, if there is one; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
