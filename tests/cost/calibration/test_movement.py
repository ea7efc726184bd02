"""Memory-bound kernels that a calibration measures."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from legoai.cost.calibration import movement
from legoai.cost.calibration.timing import out_of_cache
from legoai.cost.kernels.kinds import Movement, MovementKind
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.profiles import from_document, profile, read_document, shipped_file
from legoai.cost.profiles.schema import check
from legoai.specs.profile_file import ProfileError

KINDS = movement._gpu_kinds("cpu")
LISTS = {"copy foreach", "reduction foreach"}
"""Forms that the next calibration measures: no shipped profile has them."""


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "CACHE_BYTES", 2**16)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kernels_of_a_gpu_run_on_operands_of_any_size(kind: str) -> None:
    moved = []
    for size in (2**8, 2**13, 2**15):
        moving = KINDS[kind](size)
        moved.append(moving.bytes)
        if moving.follows:
            run = movement._following(moving)
            assert isinstance(run(), torch.Tensor)
        else:
            out_of_cache(functools.partial(movement._alone, moving), 2**26)()
    assert moved == sorted(set(moved))


def test_a_kernel_continues_with_the_result_of_the_one_before() -> None:
    seen: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def run(last: torch.Tensor | None, held: list[torch.Tensor]) -> torch.Tensor:
        seen.append((last, held[0]))
        return torch.ones(2)

    repeat = movement._following(movement.Moving(bytes=2**15, make=lambda: [torch.zeros(2)], run=run, follows=True))
    results = [repeat() for _ in range(4)]
    lasts, operands = zip(*seen[-3:], strict=True)
    assert [id(last) for last in lasts] == [id(result) for result in results[:3]]
    assert len({id(one) for one in operands}) == 2, "the other operand is not the one of the run before"


def test_measured_forms_are_those_of_shipped_profiles() -> None:
    assert {*KINDS, "loss", "fused"} == set(profile("h100_sxm").movement)
    assert set(profile("h100_sxm").movement) == set(profile("a100_sxm80").movement)
    assert set(profile("cpu").movement) == set(movement.MOVEMENTS)


def test_a_form_that_was_not_measured_runs_as_its_kind() -> None:
    cpu, h100 = profile("cpu"), profile("h100_sxm")
    for form in ("backward", "long", "long backward", "fused"):
        work = Movement(kind="softmax", bytes=2**20, form=form)  # type: ignore[arg-type]
        assert seconds_of(work, cpu) == seconds_of(Movement(kind="softmax", bytes=2**20), cpu)
    plain = seconds_of(Movement(kind="copy", bytes=2**30), h100)[0]
    assert seconds_of(Movement(kind="copy", bytes=2**30, form="unvectorised"), h100)[0] > 1.4 * plain
    assert h100.moving("elementwise", "unvectorised") == h100.movement["unvectorised"]


@pytest.mark.parametrize("kind", ["elementwise", "fill"])
def test_kernels_on_lists_that_were_not_measured_run_as_the_update(kind: MovementKind) -> None:
    h100 = profile("h100_sxm")
    update, _ = h100.moving("optimizer")
    curve, derived = h100.moving(kind, "foreach")
    assert curve is update and f"that of a {kind} was not" in derived
    assert seconds_of(Movement(kind=kind, bytes=2**20, form="foreach"), h100)[1].endswith(", derived")
    document, _ = read_document(shipped_file("h100_sxm"))
    measured = {**document, "movement": {**document["movement"], f"{kind} foreach": document["movement"]["copy"]}}
    check(measured)
    again = from_document(measured)
    assert again.moving(kind, "foreach") == again.movement[f"{kind} foreach"]


def test_a_cpu_is_measured_on_lists_too() -> None:
    kinds = movement._cpu_kinds()
    assert set(kinds) >= LISTS
    for name in LISTS:
        moving = kinds[name](2**12)
        moving.run(None, operands := moving.make())
        if name == "copy foreach":
            half = len(operands) // 2
            assert all(torch.equal(*pair) for pair in zip(operands[:half], operands[half:], strict=True))


def test_unknown_movement_is_refused() -> None:
    document, _ = read_document(shipped_file("cpu"))
    changed = copy.deepcopy(document)
    changed["movement"]["softmax sideways"] = changed["movement"]["softmax"]
    from_document(changed)
    with pytest.raises(ProfileError, match="softmax sideways unknown"):
        check(changed)


def test_small_kernels_on_a_gpu_read_from_its_cache() -> None:
    curve, _ = profile("h100_sxm").moving("elementwise")
    rates = {size: size / curve.seconds(size) for size in (2**20, 2**24, 2**30)}
    assert curve.fastest >= rates[2**24] > rates[2**20]
    assert rates[2**30] == pytest.approx(3.05e12, rel=0.03)
