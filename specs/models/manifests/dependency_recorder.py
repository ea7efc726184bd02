"""Recorder of the files and the environment variables that are read while a factory's model is inspected."""

from __future__ import annotations

import functools
import importlib.util
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final

from legoai.specs.models.manifests.dependencies import ALL_NAMES, UNRELATED, fingerprint, is_missing

_MOST_DIGESTED: Final = 1000
"""Files whose content is read for a digest; further ones are known by size and time."""
_Environment: Final = type(os.environ)
_NO_FILES: Final = ("/proc/", "/sys/", "/dev/")


class DependencyRecorder:
    """Notes the files that are opened for reading while entered, and the environment variables that are looked up.

    Files of the standard library, of installed packages and of LegoAI are left out, an editable installation's are not.
    Of each installed package that is imported meanwhile, the time of its first module stands for its release. Left out
    are also files that were written before they are read. Not seen are other processes, and compiled code that opens
    files or reads the environment itself.

    Args:
        package: the factory's top-level package, which counts wherever it is.
    """

    _entered: ClassVar[DependencyRecorder | None] = None
    _hooked: ClassVar[bool] = False

    def __init__(self, package: str) -> None:
        self._package = package
        self._installed = _installed_folders()
        self._files: dict[str, str | None] = {}
        self._written: set[str] = set()
        self._names: dict[str, bool] = {}
        self._known: frozenset[str] = frozenset()
        self._thread = threading.local()
        self._environment: Any = None

    def __enter__(self) -> DependencyRecorder:
        cls = type(self)
        assert cls._entered is None, "one inspection at a time"
        if not cls._hooked:  # a hook cannot be removed
            sys.addaudithook(_hook)
            cls._hooked = True
        self._known = frozenset(sys.modules)
        # Its class changes, since others hold the object: `from os import environ`.
        self._environment = os.environ  # a factory may put another object there
        self._environment.__class__ = _RecordedEnvironment
        cls._entered = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        type(self)._entered = None
        self._environment.__class__ = _Environment
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            own = name.partition(".")[0] == self._package
            if not isinstance(file, str):
                continue
            if own or (name not in self._known and not self._is_installed(file)):
                self._note_file(file)
            elif name not in self._known and "." not in name and file.startswith(_package_folders()):
                self._files[file] = fingerprint(file, digested=False)

    @property
    def files(self) -> list[tuple[str, str]]:
        """The files, and what they held when they were opened. Those that have vanished were temporary."""
        return [
            (path, known)
            for path, known in sorted(self._files.items())
            if known is not None and (is_missing(known) or Path(path).exists())
        ]

    @property
    def environment(self) -> list[str]:
        """The names of environment variables, without those that the factory has set before it read them."""
        return sorted(name for name, is_read in self._names.items() if is_read)

    def note_open(self, path: Any, flags: Any) -> None:
        """Note that a file is about to be opened."""
        if getattr(self._thread, "noting", False) or not isinstance(path, str | bytes | os.PathLike):
            return
        self._thread.noting = True
        try:
            whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - as the path is given, links included
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._written.add(whole)
            elif not whole.startswith(_NO_FILES) and not self._is_installed(whole):
                self._note_file(_source_of(whole))
        finally:
            self._thread.noting = False

    def note_variable(self, name: object, *, is_read: bool) -> None:
        """Note the first use of an environment variable."""
        if isinstance(name, str) and name not in UNRELATED:
            self._names.setdefault(name, is_read)

    def _note_file(self, path: str) -> None:
        if path not in self._files and path not in self._written:
            self._files[path] = fingerprint(path, digested=len(self._files) < _MOST_DIGESTED)

    def _is_installed(self, path: str) -> bool:
        return path.startswith(self._installed)


class _RecordedEnvironment(_Environment):  # type: ignore[misc, valid-type]
    """`os.environ` while a recorder is entered."""

    def __getitem__(self, key: str) -> str:
        _note_variable(key, is_read=True)
        value: str = super().__getitem__(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        _note_variable(key, is_read=False)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        _note_variable(key, is_read=False)
        super().__delitem__(key)

    def __iter__(self) -> Any:
        _note_variable(ALL_NAMES, is_read=True)
        return super().__iter__()


def _note_variable(name: object, *, is_read: bool) -> None:
    recorder = DependencyRecorder._entered
    if recorder is not None:
        recorder.note_variable(name, is_read=is_read)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    recorder = DependencyRecorder._entered
    if event == "open" and recorder is not None:
        recorder.note_open(arguments[0], arguments[2])


def _source_of(path: str) -> str:
    """The module that a file of bytecode was compiled from, else the file itself."""
    try:
        return importlib.util.source_from_cache(path) if path.endswith(".pyc") else path
    except ValueError:
        return path


def _installed_folders() -> tuple[str, ...]:
    """The folders, each with a separator at its end, of Python's library, of installed packages, and of LegoAI."""
    found = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return (*_forms([*found, str(Path(__file__).parents[3])]), *_package_folders())


@functools.cache
def _package_folders() -> tuple[str, ...]:
    """Those of installed packages alone."""
    found = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return _forms([*found, *site.getsitepackages(), site.getusersitepackages()])


def _forms(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple({form + os.sep for folder in folders for form in (folder, os.path.realpath(folder))})
