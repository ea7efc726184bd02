"""Buffers that forward updates: running statistics of batch normalisation, and those changed by the model's code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from legoai.specs.models.manifests.described.recorders.updated_buffers import UpdatedBuffers

STATISTICS = ["running_mean", "running_var"]


class Norm(nn.Module):
    """Batch normalisation by a function, of statistics of its own."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.statistics = training
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.statistics)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: nn.BatchNorm2d(3), [*STATISTICS, "num_batches_tracked"]),
        (lambda: nn.BatchNorm2d(3).eval(), []),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), []),
        (lambda: nn.InstanceNorm2d(3, track_running_stats=True), STATISTICS),
        (lambda: Norm(training=True), STATISTICS),
        (lambda: Norm(training=False), []),
    ],
)
def test_running_statistics_are_updated_in_training(build, expected: list[str], device: str):
    model, inputs = build().to(device), (torch.zeros(2, 3, 4, 4, device=device),)
    with torch.no_grad(), UpdatedBuffers(model, inputs) as updated:
        model(*inputs)
    assert updated.names == expected and not updated.unsaved


def _lerp(model, x):
    model.kept.lerp_(x.mean((0, 1)), 0.1)


def _lerp_data(model, x):
    model.kept.data.lerp_(x.mean((0, 1)), 0.1)


def _lerp_list(model, x):
    torch._foreach_lerp_([model.kept], [x.mean((0, 1))], 0.1)


def _store(model, x):
    model.kept[:2] = x[0, 0, :2]


def _replace(model, x):
    model.kept = model.kept.lerp(x.mean((0, 1)), 0.1)


def _normalise(model, x):
    F.batch_norm(x.transpose(1, 2), model.kept, None, training=True)


def _count(model, x):
    model.kept.add_(1)


def _count_again(model, x):
    model.kept = model.kept + x.shape[0]


def _table(model, x):
    model.kept = torch.arange(x.shape[1] + x.shape[2], device=x.device)


def _table_in_place(model, x):
    model.kept.copy_(torch.outer(torch.ones_like(x[0, 0]), model.other).cos()[:, 0])


def _longer_table(model, x):
    model.kept = torch.cat([model.kept, model.other.to(x.dtype)])[: x.shape[1]]


def _last_values(model, x):
    model.kept = x.mean((0, 1))


def _another_table(model, x):
    return x + model.kept


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("update", "is_state", "is_changed"),
    [
        *((update, True, True) for update in (_lerp, _lerp_data, _lerp_list, _store, _replace, _normalise)),
        *((update, True, True) for update in (_count, _count_again)),
        *((update, False, True) for update in (_table, _table_in_place, _longer_table, _last_values)),
        (_another_table, False, False),
    ],
)
def test_buffers_that_are_not_saved_are_updated_by_what_does_not_follow_from_shapes(
    update, is_state: bool, is_changed: bool, persistent: bool
):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(4), persistent=persistent)
            self.register_buffer("other", torch.zeros(4), persistent=False)

        def forward(self, x):
            update(self, x)
            return x + self.other

    model, inputs = Model().to("meta"), (torch.zeros(2, 3, 4, device="meta"),)
    with torch.no_grad(), UpdatedBuffers(model, inputs) as updated:
        model(*inputs)
    assert updated.names == (["kept"] if (is_changed if persistent else is_state) else [])
    assert updated.unsaved == ([] if persistent else updated.names)


def test_a_buffer_that_another_module_saves_is_saved():
    saved = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": nn.Module(), "b": saved}).to("meta")
    model["a"].register_buffer("mean", saved.running_mean, persistent=False)
    inputs = (torch.zeros(2, 4, device="meta"),)
    with torch.no_grad(), UpdatedBuffers(model, inputs) as updated:
        saved(*inputs)
    assert updated.names == ["b.running_mean", "b.running_var", "b.num_batches_tracked"] and not updated.unsaved
