"""Results of operators that are repeated on the meta device: equal in type to executed ones, and always new tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from legoai.specs.models.manifests.described.recorders.functions import tensors_in
from legoai.specs.models.manifests.described.recorders.remembered_results import RememberedResults
from legoai.specs.models.torch_internals import OperatorMode, storage_of

aten = torch.ops.aten


class Executed(OperatorMode):
    """Notes the operators that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in ("empty_strided", "ones", "transpose"):  # of results that are repeated, and of arguments
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def called(calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], list[str]]:
    """Results of calls within one record of results, and the operators that were executed for them."""
    with Executed() as executed, RememberedResults():
        results = [call() for call in calls]
    return results, executed.names


def types(result: Any) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(item.shape, item.stride(), item.dtype) for item in tensors_in(result)]


X, Y, ROWS = empty(2, 3, 4), empty(4), empty(2, 3, 1)
INTEGERS = empty(2, 3, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: aten.add(X, Y),
        lambda: aten.mul(X.transpose(0, 1), 2.0),
        lambda: aten.native_layer_norm(X, [4], Y, Y, 1e-5),
        lambda: aten.split_with_sizes_copy(X, [1, 2], 1),
        lambda: aten.native_layer_norm_backward(X, X, [4], ROWS, ROWS, Y, None, [True, False, False]),
        lambda: aten.arange(7, device="meta"),
    ],
    ids=["tensor", "stride", "tuple", "list", "tuple with None", "no operands"],
)
def test_second_call_gives_new_tensors_of_equal_types(call: Callable[[], Any]):
    (first, second, third), executed = called([call] * 3)
    assert len(executed) == 1
    assert type(first) is type(second) is type(third)
    assert types(first) == types(second) == types(third) == types(call())
    storages = [storage_of(tensor) for tensor in tensors_in([first, second, third])]
    assert len(set(storages)) == len(storages)
    if isinstance(first, tuple):
        assert [item is None for item in first] == [item is None for item in second]


@pytest.mark.parametrize(
    "call",
    [
        lambda: aten.add_(X, 1.0),
        lambda: aten.view(X, [6, 4]),
        lambda: aten._unsafe_view(X, [6, 4]),
        lambda: aten.bernoulli(X, 0.5),
        lambda: aten.arange(7, device="cpu"),
        lambda: aten.add(torch.ones(3), 1.0),
    ],
    ids=["writes", "view", "view that does not say so", "random", "makes elsewhere", "takes from elsewhere"],
)
def test_what_is_more_than_new_tensors_is_executed_each_time(call: Callable[[], Any]):
    _, executed = called([call] * 3)
    assert len(executed) == 3


def test_numbers_of_other_classes_are_other_calls():
    calls = [lambda: aten.add(INTEGERS, 1), lambda: aten.add(INTEGERS, 1.0), lambda: aten.add(INTEGERS, True)]
    results, _ = called(calls)
    assert [result.dtype for result in results] == [torch.int64, torch.float32, torch.int64]


def test_default_dtype_is_part_of_a_call():
    def in_double() -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return aten.true_divide(INTEGERS, 2)
        finally:
            torch.set_default_dtype(torch.float32)

    results, _ = called([lambda: aten.true_divide(INTEGERS, 2), in_double])
    assert [result.dtype for result in results] == [torch.float32, torch.float64]


def test_failures_are_repeated():
    with RememberedResults():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                aten.mm(empty(2, 3), empty(2, 3))
