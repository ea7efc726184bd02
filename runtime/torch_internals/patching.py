"""Scoped patches: attributes that have another value while a context is entered."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, MutableMapping
from typing import Any, Final

import torch

from legoai.runtime.torch_internals.patch_record import Patch
from legoai.runtime.torch_internals.table import PATCHES

_INHERITED: Final = object()
_MISSING: Final = object()
_left_out: Final[set[str]] = set()


@contextlib.contextmanager
def left_out(*paths: str) -> Iterator[None]:
    """Disable patches of the table while entered, to test their effect, or whether a new torch still needs them.

    Raises:
        KeyError: the table does not list one of them.
    """
    assert all(PATCHES[path].kind not in ("module", "setting") for path in paths), "not placed by this module"
    _left_out.update(paths)
    try:
        yield
    finally:
        _left_out.difference_update(paths)


@contextlib.contextmanager
def patched(path: str, value: Any) -> Iterator[None]:
    """Replace something of torch while entered, unless the installed one does without.

    Args:
        path: of the table, `module:name` or `module:Class.name`.
        value: the replacement; a `staticmethod` or `property` where the original is one.

    Raises:
        KeyError: the table does not list it.
        AttributeError: this version of torch does not have it.
    """
    patch = PATCHES[path]
    owner, name = locate(patch)
    if path in _left_out or not is_needed(patch):
        yield
        return
    with patched_attribute(owner, name, value):
        yield


@contextlib.contextmanager
def patched_item(path: str, key: Any, value: Any) -> Iterator[None]:
    """Replace, or add, one item of a mapping of torch that the table lists, while entered."""
    mapping: MutableMapping[Any, Any] = original(path)
    if path in _left_out:
        yield
        return
    before = mapping.get(key, _MISSING)
    mapping[key] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del mapping[key]
        else:
            mapping[key] = before


@contextlib.contextmanager
def restored_items(path: str, *keys: Any) -> Iterator[None]:
    """On exit, restore items of a mapping of torch that the table lists to their values on entry."""
    mapping: MutableMapping[Any, Any] = original(path)
    before = {key: mapping[key] for key in keys if key in mapping}
    try:
        yield
    finally:
        for key in keys if path not in _left_out else ():
            mapping.pop(key, None)
        mapping.update(before if path not in _left_out else {})


def override(instance: Any, path: str, function: Any) -> None:
    """Replace a method of one object of torch, for as long as the object lives.

    Args:
        instance: of the class that the path names, or of one that inherits from it.
        path: of the table, `module:Class.method`.
        function: with the parameters of the bound method.

    Raises:
        KeyError: the table does not list it.
        TypeError: the object is of another class.
    """
    owner, name = locate(PATCHES[path])
    if not isinstance(instance, owner):
        raise TypeError(f"{path} is no method of {type(instance).__name__}")
    getattr(owner, name)
    if path not in _left_out:
        setattr(instance, name, function)


def original(path: str) -> Any:
    """Return the current value of a patched name; a `staticmethod` or `property` as the class holds it."""
    owner, name = locate(PATCHES[path])
    return inspect.getattr_static(owner, name)


def is_needed(patch: Patch) -> bool:
    """Whether the installed torch needs a patch."""
    version = torch.__version__
    between = (not patch.since or version >= patch.since) and (not patch.until or version < patch.until)
    return between and (patch.build != "cuda" or torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]


def locate(patch: Patch) -> tuple[Any, str]:
    """Return the module or class that holds a patched name, and the name; imports the module."""
    module, _, qualified = patch.path.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = qualified.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


@contextlib.contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, or of a class or module of LegoAI, while entered.

    An inherited attribute of a class is shadowed meanwhile. For classes and modules of torch, use `patched`.

    Raises:
        AttributeError: there is none of this name.
    """
    getattr(owner, name)
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
