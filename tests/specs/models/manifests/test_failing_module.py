"""The module in whose forward a model fails on the meta device."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

from legoai.specs.models.manifests.described.forwards import failing_module
from legoai.specs.models.manifests.described.forwards.failing_module import FailingModule


class Branching(nn.Module):
    def forward(self, x):
        return x if x.mean() > 0 else -x


def failed(model: nn.Module) -> FailingModule:
    found = FailingModule(model, [""])
    with torch.device("meta"), pytest.raises(RuntimeError) as caught, found:
        model(torch.ones(2, 8))
    found.note(caught.value)
    return found


def test_the_innermost_module_that_reads_a_value_breaks_the_graph():
    path, why = failed(nn.Sequential(nn.Identity(), nn.Sequential(Branching()))).graph_break() or ("", "")
    assert (path, why.split()[0]) == ("1.0", "Data-dependent")
    assert FailingModule(nn.Identity(), []).graph_break() is None


def test_a_module_is_not_traced_for_long(monkeypatch):
    def trace(*_):
        try:
            while True:
                pass
        except TimeoutError:
            return

    monkeypatch.setattr(failing_module, "_LONGEST", 0.05)
    monkeypatch.setattr(failing_module, "why_not_one_graph", trace)
    before = signal.getsignal(signal.SIGVTALRM)
    assert failed(nn.Sequential(Branching())).graph_break() is None
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
