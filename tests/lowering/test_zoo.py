"""Plans of `transformers` models are clean, and lower in full, mixed and half precision."""

from __future__ import annotations

import pytest

from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support import ROOT
from support.marks import slow_but

ZOO = ROOT / "plans" / "zoo"
PLANS = sorted(path.stem for path in ZOO.glob("*.plan"))
VARIANTS = (None, "full", "half", "checkpointed", "full_checkpointed", "half_checkpointed")
READS = {"clip_l14_336": "ImagesWithTexts", "convnextv2_huge": "Images", "vit_h14": "Images", "t5_large": "TwoTexts"}


def test_plans_of_seven_models_exist():
    assert len(PLANS) == 7
    assert set(READS) < set(PLANS)


@pytest.mark.parametrize("name", slow_but(PLANS, "convnextv2_huge"))
def test_plan_is_clean_and_lowers_in_every_variant(name: str):
    path = ZOO / f"{name}.plan"
    for variant in VARIANTS:
        linted = lint(path.read_text(), path.name, directory=ZOO, variant=variant)
        # A comment that accepts a diagnostic of one variant suppresses nothing in the others.
        assert [item.message for item in linted.diagnostics if item.code != "LP903"] == []
        assert linted.analysis is not None
        text = lower(linted.analysis).text
        assert ("checkpoint_wrapper(" in text) is (variant is not None and "checkpointed" in variant)
        assert ("autocast_dtype=torch.bfloat16" in text) is (variant in (None, "checkpointed"))
        assert ("master_dtype=torch.bfloat16" in text) is (variant is not None and variant.startswith("half"))
        assert (f"reads={READS.get(name)}(" in text) is (name in READS)
