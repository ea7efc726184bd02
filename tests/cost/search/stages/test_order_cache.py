"""Cache of schedule orders on disk."""

import pytest

from legoai.cost.search.stages.order_cache import Action, kept_or_listed
from legoai.specs.cache import refreshed

HELD = ((0, 2), (1, 3))
LISTED = (
    (Action(0, "F", 0), Action(2, "F", 0), Action(2, "I", 0), Action(2, "W", 0), Action(0, "B", 0)),
    (Action(1, "F", 0), Action(3, "F", 0), Action(3, "B", 0), Action(1, "B", 0)),
)


def refused():
    raise AssertionError("the order is kept")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_or_listed("Interleaved1F1B", HELD, 1, lambda: LISTED) == LISTED
    (found,) = tmp_path.glob("legoai/orders/*.json")
    return found


def test_cached_order_is_not_listed_again(file):
    assert kept_or_listed("Interleaved1F1B", HELD, 1, refused) == LISTED


@pytest.mark.parametrize(
    "other", [("LoopedBFS", HELD, 1), ("Interleaved1F1B", (*HELD, (4, 5)), 1), ("Interleaved1F1B", HELD, 2)]
)
def test_cached_order_of_another_schedule_is_ignored(file, other):
    assert kept_or_listed(*other, lambda: ()) == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text.replace('[0,"F",0]', '[2,"F",0]', 1),
        lambda text: text.replace('[2,"I",0]', '[2,"B",0]'),
        lambda text: text.partition("\n")[2],  # as an earlier version wrote it, without a digest
    ],
)
def test_damaged_cached_order_is_listed_again(file, damage):
    whole = file.read_text()
    file.write_text(damage(whole))
    assert file.read_text() != whole
    assert kept_or_listed("Interleaved1F1B", HELD, 1, lambda: LISTED) == LISTED
    assert kept_or_listed("Interleaved1F1B", HELD, 1, refused) == LISTED


def test_cached_order_is_listed_again_in_a_refresh(file):
    other = (LISTED[0], LISTED[1][:1])
    with refreshed():
        assert kept_or_listed("Interleaved1F1B", HELD, 1, lambda: other) == other
        assert kept_or_listed("Interleaved1F1B", HELD, 1, refused) == other
    assert kept_or_listed("Interleaved1F1B", HELD, 1, refused) == other
