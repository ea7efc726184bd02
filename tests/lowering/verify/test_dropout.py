"""Dropout is disabled wherever a model calls it, compiled and recomputed too."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from legoai.lowering.verify.dropout import without_dropout

FORMS = {
    "dropout": F.dropout,
    "dropout by name": lambda x, p: F.dropout(x, training=True, p=p),
    "dropout by default": lambda x, p: F.dropout(x),
    "dropout1d": lambda x, p: F.dropout1d(x[0], p, True)[None],
    "dropout2d": lambda x, p: F.dropout2d(x, p, True),
    "dropout3d": lambda x, p: F.dropout3d(x, p, True),
    "alpha": lambda x, p: F.alpha_dropout(x, p, True),
    "feature alpha": lambda x, p: F.feature_alpha_dropout(x, p, True),
    "operator": lambda x, p: torch.dropout(x, p, True),
    "operator in place": lambda x, p: torch.dropout_(x.clone(), p, True),
    "native": lambda x, p: torch.native_dropout(x, p, True)[0],
    "attention": lambda x, p: F.scaled_dot_product_attention(x, x, x, None, p),
    "attention by name": lambda x, p: F.scaled_dot_product_attention(x, x, x, dropout_p=p),
}


class Dropping(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return FORMS[self.form](x * scale, 0.5)


def undropped(model: nn.Module) -> nn.Module:
    """The model with a class of its own, since that is changed."""
    model.__class__ = type("Dropping", (type(model),), {"forward": type(model).forward})
    return without_dropout(model, [""])


@pytest.mark.parametrize("form", FORMS)
def test_functions_drop_nothing(form: str):
    x = torch.rand(1, 2, 4, 8, requires_grad=True)
    model = undropped(Dropping(form))
    wanted = FORMS["attention"](x, 0.0) if "attention" in form else x
    torch.testing.assert_close(model(x), wanted)
    assert not torch.equal(Dropping(form)(x), wanted)
    assert "scale" in inspect.signature(model.forward).parameters
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    if "attention" not in form:
        torch.testing.assert_close(x.grad, torch.ones_like(x))


def test_modules_drop_nothing():
    model = nn.Sequential(nn.Dropout(0.5), nn.FeatureAlphaDropout(0.5), nn.TransformerEncoderLayer(8, 2, 8, 0.5))
    forward = nn.TransformerEncoderLayer.forward
    without_dropout(model, ["0", "1", "2"])
    x = torch.rand(4, 2, 8)
    assert torch.equal(model(x), model(x))
    assert nn.TransformerEncoderLayer.forward is forward
