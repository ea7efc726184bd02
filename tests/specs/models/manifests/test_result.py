"""The result of forward, compared with what the loss takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.result import unfit_result
from legoai.specs.models.reads import Images, ImagesWithTexts, Tokens, TwoTexts

IDS = torch.zeros(2, 8, dtype=torch.int64)
PIXELS = torch.zeros(2, 3, 4, 4)
IMAGES = Images(channels=3, height=4, width=4, classes=10)
MATCHED = ImagesWithTexts(channels=3, height=4, width=4, vocabulary=16, end=0)


@pytest.mark.parametrize(
    ("reads", "inputs", "result", "words"),
    [
        (Tokens(), (IDS,), torch.zeros(2, 8, 16), None),
        (Tokens(), (IDS,), torch.zeros(16, 16), None),
        (Tokens(), (IDS,), (torch.zeros(2, 8, 16), None), "a tuple of Tensor, None, and the loss takes one tensor"),
        (Tokens(), (IDS,), {"loss": torch.zeros(())}, "a dict, and"),
        (Tokens(), (IDS,), None, "None, and"),
        (Tokens(), (IDS,), IDS, "int64 [2, 8], of which the loss has no gradient"),
        (Tokens(), (IDS,), torch.zeros(()), "float32 [] for int64 [2, 8], and the loss takes logits"),
        (Tokens(), (IDS,), torch.zeros(2, 16), "[samples, tokens, vocabulary]"),
        (TwoTexts(start=0), (IDS, IDS), torch.zeros(2, 8, 16), None),
        (TwoTexts(start=0), (IDS, IDS[:, :4]), torch.zeros(2, 4, 16), None),
        (TwoTexts(start=0), (IDS, IDS), torch.zeros(2, 4, 16), "[samples, tokens, vocabulary]"),
        (IMAGES, (PIXELS,), torch.zeros(2, 10), None),
        (IMAGES, (PIXELS,), torch.zeros(2, 1, 12), None),
        (IMAGES, (PIXELS,), torch.zeros(2, 5), "logits of 5 classes, and `reads` states 10"),
        (IMAGES, (PIXELS,), torch.zeros(2, 5, 10), "[samples, 10]"),
        (MATCHED, (PIXELS, IDS), torch.zeros(2, 2), None),
        (MATCHED, (PIXELS, IDS), torch.zeros(2, 8), "similarities [texts, images]"),
        (Tokens(), (), torch.zeros(2, 8, 16), None),
    ],
)
def test_result_is_what_the_loss_takes(reads, inputs, result, words: str | None):
    found = unfit_result(reads, inputs, result)
    assert found is None if words is None else words in found


class Head(nn.Linear):
    def __init__(self, beside: bool) -> None:
        super().__init__(4, 16, device="meta")
        self.beside = beside

    def forward(self, tokens, targets=None):
        logits = super().forward(torch.zeros(*tokens.shape, 4))
        return (logits, None) if self.beside else logits


@pytest.mark.parametrize("beside", [False, True])
def test_manifest_says_that_a_result_is_unfit(beside: bool):
    assert (describe(Head(beside), "head").unfit_result is not None) == beside
