"""Plans of git revisions: reads them, the plans that they extend, and the files beside them."""

from __future__ import annotations

import errno
import functools
import io
import os
import posixpath
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from legoai.dsl.diagnostics.codes.files import CannotRead
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.files.sources import UnreadableError, decoded
from legoai.specs.files import MOST_TEXT
from legoai.specs.record import Record
from legoai.specs.span import Span

_RANGE: Final = re.compile(r"(?P<first>.*?)(?P<dots>\.\.\.?)(?P<second>.*)")

_OBJECT: Final = re.compile(rb"([0-9a-f]{40,}) (\w+) (\d+)")
"""Git's line about an object: hash, kind and size."""
_SUBMODULE: Final = "160000 "
"""The mode of a submodule in git's list of a tree."""
_NO_FILE: Final = "the revision has no such file"
_SHORT: Final = 12
"""Digits of a commit's hash that name it."""
_GIT_SECONDS = 300.0
"""After which git is taken to wait for something that does not come: a network, a lock, a file system."""


class Revision(Record):
    """A commit of the repository of the working folder: its name as given, and its hash."""

    name: str
    commit: str
    root: Path
    """Of the repository's working tree."""

    def read(self, file: str) -> bytes:
        """The content of a file, by its path from the root of the repository; links are followed in the revision.

        Raises:
            FileNotFoundError: the revision has no such file.
            OSError: it is a folder, or a link that leads to no file of the revision.
        """
        kind, _, content = self._object(file)
        if kind != "blob":
            raise IsADirectoryError(errno.EISDIR, "it is a directory", file)
        return content

    def _object(self, path: str) -> tuple[str, str, bytes]:
        """Kind, hash and content of what stands at a path, also through links.

        Raises:
            OSError: nothing does.
        """
        if "\n" in path or "\0" in path:  # which end what git reads
            raise FileNotFoundError(errno.ENOENT, _NO_FILE, path)
        asked = f"{self.commit}:{path}\n".encode("utf-8", "surrogateescape")
        head, _, content = _git(
            "cat-file", "--batch", "--follow-symlinks", folder=self.root, data=asked
        ).stdout.partition(b"\n")
        found = _OBJECT.fullmatch(head)
        if found is not None:
            return found[2].decode(), found[1].decode(), content[: int(found[3])]
        problem = head.partition(b" ")[0]
        if problem == b"symlink":
            out = content.decode("utf-8", "replace").rstrip("\n")
            raise OSError(errno.EXDEV, f"its symbolic link leads out of the repository, to `{out}`", path)
        if problem == b"loop":
            raise OSError(errno.ELOOP, "its symbolic links lead in a circle", path)
        if problem != b"dangling" and (outer := self._submodule(path)) is not None:
            raise FileNotFoundError(errno.ENOENT, f"`{outer}` is a submodule: compare its plans from within it", path)
        missing = "its symbolic link leads to no file of the revision" if problem == b"dangling" else _NO_FILE
        raise FileNotFoundError(errno.ENOENT, missing, path)

    def _submodule(self, path: str) -> str | None:
        """The submodule in which a path lies, or which it is; the revision has its commit, and none of its files."""
        parts = path.split("/")
        outer = [posixpath.join(*parts[:count]) for count in range(1, len(parts) + 1)]
        listed = _git("ls-tree", "-z", self.commit, "--", *outer, folder=self.root).stdout
        entries = listed.decode("utf-8", "surrogateescape").split("\0")  # also what else is in the outer folders
        submodules = [entry.partition("\t")[2] for entry in entries if entry.startswith(_SUBMODULE)]
        return next((name for name in submodules if name in outer), None)

    def plans(self) -> list[str]:
        """The plans of the revision, by their paths from the root."""
        listed = _git("ls-tree", "-r", "-z", "--name-only", self.commit, folder=self.root).stdout
        return [name for name in listed.decode("utf-8", "replace").split("\0") if name.endswith(".plan")]

    def export(self, folder: str, target: Path, above: Mapping[str, Path] | None = None) -> None:
        """Write the files of a folder, by its path from the root, and of those below it into ``target``.

        A link that leads out of the folder is replaced by what it leads to in the revision. ``above`` are the
        folders that are being written, by their hashes.

        Raises:
            UnreadableError: git cannot.
        """
        import tarfile

        try:
            _, tree, _ = self._object(folder)
        except OSError as error:
            raise _unreadable(
                f"{self.name}:{folder}", f"`{folder}` cannot be read from `{self.name}`: {error.strerror}"
            ) from None
        above = {**(above or {}), tree: target}
        done = _git("archive", "--format=tar", tree, folder=self.root)
        if done.returncode != 0:
            raise _unreadable(f"{self.name}:{folder}", f"`{folder or '.'}` cannot be read from `{self.name}`", done)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                try:
                    archive.extract(member, target, filter="data")
                except tarfile.FilterError:
                    place = posixpath.join(folder, member.name)
                    self._export_linked(place, target / member.name, above)

    def _export_linked(self, path: str, target: Path, above: Mapping[str, Path]) -> None:
        try:
            kind, found, content = self._object(path)
        except OSError:
            return  # a plan that reads the file gets a diagnostic
        if kind == "blob":
            target.write_bytes(content)
        elif found in above:
            target.symlink_to(above[found])
        else:
            target.mkdir()
            self.export(path, target, above)


class RevisionPlan(Record):
    """A plan's text in a revision, with its path from the root of the repository."""

    revision: Revision
    file: str
    text: str

    @property
    def name(self) -> str:
        """Its name in diagnostics: `HEAD~1:plans/tiny.plan`."""
        return f"{self.revision.name}:{self.file}"

    @property
    def folder(self) -> Path:
        """The folder of the plan in the revision, as base of its bases' names: not a folder on disk."""
        return Path(f"{self.revision.name}:") / posixpath.dirname(self.file)

    def read_base(self, path: Path, exported: Path | None = None) -> str:
        """Return the text of a base plan.

        Args:
            path: below :attr:`folder`, or below ``exported``.
            exported: root of a partial export of the repository.

        Raises:
            OSError: the revision has no such file.
            ValueError: it is not UTF-8.
        """
        if exported is not None:
            place = os.path.relpath(path, exported)
        else:
            # A path that leaves the repository has lost the name of the revision.
            place = str(path).removeprefix(self.mark) if str(path).startswith(self.mark) else ".."
        if place.startswith(".."):
            raise FileNotFoundError(errno.ENOENT, "it lies outside of the repository", str(path))
        return self.revision.read(place).decode("utf-8-sig")

    @property
    def mark(self) -> str:
        """Prefix of the paths in :attr:`folder`."""
        return f"{self.revision.name}:/"

    def shown(self, text: str, exported: Path | None = None) -> str:
        """A text in which the files of the revision have the names that git reads: `HEAD:plans/tiny.plan`."""
        name = f"{self.revision.name}:"
        if exported is not None:
            for top in (str(exported), os.path.relpath(exported)):
                text = text.replace(f"{top}/", name)
        return text.replace(self.mark, name)


def ends_of(text: str) -> tuple[str, str] | None:
    """Return the revisions of `REV..REV`, or of `REV...REV`, which begins at their merge base; None for other text.

    Raises:
        UnreadableError: there is no such revision.
    """
    found = _RANGE.fullmatch(text)
    if found is None:
        return None
    first, second = found["first"] or "HEAD", found["second"] or "HEAD"
    if found["dots"] == "...":
        commits = [revision(name).commit for name in (first, second)]
        done = _git("merge-base", *commits)
        if done.returncode != 0:
            raise _unreadable(text, f"`{first}` and `{second}` have no commit in common", done)
        return done.stdout.decode().strip()[:_SHORT], second
    return first, second


def revision(name: str) -> Revision:
    """Return the commit with a name, in the repository of the working folder.

    Raises:
        UnreadableError: the folder is in no repository, or that has no such commit.
    """
    inside = _git("rev-parse", "--show-toplevel")
    if inside.returncode != 0:
        raise _unreadable(name, f"`{name}` cannot be read: the current folder lies in no git repository", inside)
    root = Path(inside.stdout.decode().rstrip("\n"))
    # A name with a leading dash would be an option of git.
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found.returncode != 0:
        listed = _git("for-each-ref", "--format=%(refname:short)").stdout.decode().split()
        raise _unreadable(name, f"there is no revision `{name}`", help=suggestion(name, ["HEAD", *listed]))
    return Revision(name, found.stdout.decode().strip(), root)


def plan_of(revision_name: str, file: str, *, from_root: bool) -> RevisionPlan:
    """Return the plan of a revision.

    Args:
        revision_name: as git reads it.
        file: the plan's path, from the working folder, or as in git's `REV:file`: from the root of the repository,
            unless it begins with `./` or `../`.
        from_root: whether ``file`` follows git's rule.

    Raises:
        UnreadableError: there is no such revision, or it has no such plan.
    """
    found = revision(revision_name)
    here = os.path.relpath(Path.cwd().resolve(), found.root.resolve())
    shown = f"{revision_name}:{file}"
    counts_from_root = from_root and not file.startswith(("./", "../"))
    if counts_from_root:
        place = posixpath.normpath(file)
    else:
        place = posixpath.normpath(posixpath.join(here, os.path.relpath(file)))
    if place.startswith("../"):
        raise _unreadable(shown, f"`{file}` lies outside of the repository")
    try:
        data = found.read(place)
    except OSError as error:
        if error.strerror != _NO_FILE:
            raise _unreadable(shown, f"`{shown}` cannot be read: {error.strerror}") from None
        plans = found.plans()
        elsewhere = posixpath.normpath(posixpath.join(here, file))
        named = str if counts_from_root else functools.partial(_beside, here=here, dotted=from_root)
        help = suggestion(named(place), [named(plan) for plan in plans])
        if from_root and elsewhere in plans:
            help = [f"`REV:FILE` counts from the root of the repository: did you mean `{revision_name}:./{file}`?"]
        raise _unreadable(
            shown, f"`{shown}` cannot be read: `{revision_name}` has no file `{place}`", help=help
        ) from None
    return RevisionPlan(found, place, decoded(data[: MOST_TEXT + 1], f"{revision_name}:{place}"))


def _beside(place: str, *, here: str, dotted: bool) -> str:
    """A path from the root of the repository as one from the working folder; ``dotted`` as in git's `REV:./FILE`."""
    found = posixpath.relpath(place, here)
    return found if found.startswith("../") or not dotted else f"./{found}"


def _git(*arguments: str, folder: Path | None = None, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git, with ``data`` as its standard input. A partial clone may fetch what is read; nobody is asked to log in.

    Raises:
        UnreadableError: git is not installed, or does not answer.
    """
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        return subprocess.run(
            ["git", *arguments], cwd=folder, input=data or b"", env=environment, timeout=_GIT_SECONDS,
            capture_output=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise _unreadable("git", "revisions are read with git, which is not installed") from None
    except subprocess.TimeoutExpired:
        command = " ".join(["git", *arguments])
        raise _unreadable(
            "git",
            f"`{command}` has not answered in {_GIT_SECONDS:g} s",
            help=["run it by hand to see what it waits for"],
        ) from None


def _unreadable(
    name: str, message: str, done: subprocess.CompletedProcess[bytes] | None = None, *, help: Sequence[str] = ()
) -> UnreadableError:
    said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0] if done is not None else ""
    notes = [f"git: {said.removeprefix('fatal: ')}"] if said else []
    return UnreadableError(_diagnostic(name, message, [*help, *notes]))


def _diagnostic(name: str, message: str, help: Sequence[str]) -> Diagnostic:
    return CannotRead.at(Span(name, 0, 0, 1, 1, 1, 1), message, help=help)
