"""A record behaves as a frozen, slotted dataclass does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import pytest

from legoai.specs.record import Record, replace

T = TypeVar("T")


class Point(Record):
    kind: ClassVar[str] = "point"
    x: int
    y: int = 0


class Named(Record, Generic[T], kw_only=True):
    name: str = "none"
    value: T


class Point3(Point):
    z: int = 1


@dataclass(frozen=True, slots=True)
class Reference:
    x: int
    y: int = 0


def test_records_construct_compare_hash_and_print_like_dataclasses():
    for make in (Point, Reference):
        assert make(1) == make(1, 0) == make(x=1, y=0)
        assert make(1) != make(2)
        assert hash(make(1)) == hash(make(1))
        assert make(1) != (1, 0)
        with pytest.raises(AttributeError):
            make(1).x = 2
        with pytest.raises((AttributeError, TypeError)):
            make(1).other = 2
        with pytest.raises(AttributeError):
            del make(1).x
        for wrong in [((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})]:
            with pytest.raises(TypeError):
                make(*wrong[0], **wrong[1])
    assert repr(Point(1)) == repr(Reference(1)).replace("Reference", "Point")


def test_records_match_copy_and_pickle():
    for record in (Point(1, 2), Named(value=3), Point3(1)):
        assert copy.deepcopy(record) == record
        assert pickle.loads(pickle.dumps(record)) == record
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_fields_can_be_keyword_only():
    assert Named(value=3).name == "none"
    with pytest.raises(TypeError):
        Named("a", 3)


def test_subclass_adds_fields_and_compares_unequal():
    assert Point3(1, 2) == Point3(1, 2, 1)
    assert Point3(1, 2) != Point(1, 2)
    assert Point3.kind == "point"
    assert Point3.fields_ == ("x", "y", "z")


def test_replace_keeps_other_fields():
    assert replace(Point(1, 2), y=5) == Point(1, 5)
    assert replace(Named(value=1), value="a") == Named(value="a")
    with pytest.raises(TypeError):
        replace(Point(1), z=1)


def test_dataclasses_functions_accept_records():
    assert dataclasses.replace(Point3(1, 2), y=5) == Point3(1, 5)
    assert dataclasses.replace(Named(value=1), value="a") == Named(value="a")
    assert [field.name for field in dataclasses.fields(Point3)] == ["x", "y", "z"]
    assert dataclasses.asdict(Named(value=Point(1))) == {"name": "none", "value": {"x": 1, "y": 0}}
    assert dataclasses.is_dataclass(Point)


def test_records_have_no_dict():
    assert not hasattr(Point(1), "__dict__")
    assert not hasattr(Point3(1), "__dict__")
