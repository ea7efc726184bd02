"""Recurrent layers, which torch's compiler does not trace."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes

MODEL = 'model python("support.models.recurrent:build", layer = "{}")\n'


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN", "Own"])
@pytest.mark.parametrize(
    ("treatment", "is_refused"),
    [
        ("mixer = inductor", True),
        ("mixer = aot_eager(fullgraph = false)", True),
        ("root = aot_eager", True),
        ("root = aot_eager(fullgraph = false)", False),
        ("{embedding, head} = inductor", False),
    ],
)
def test_compiled_modules_hold_no_recurrent_layer(layer: str, treatment: str, is_refused: bool):
    assert ("LP645" in codes(f"{MODEL.format(layer)}compile {{ {treatment} }}")) is is_refused


@pytest.mark.parametrize("treatment", ["mixer = inductor", "root = inductor"])
def test_cells_are_compiled(treatment: str):
    assert "LP645" not in codes(f"{MODEL.format('GRUCell')}compile {{ {treatment} }}")
