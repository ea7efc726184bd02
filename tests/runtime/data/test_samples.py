"""Samples are the same for every degree, continue where they stopped, and can be learned from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from legoai.runtime.data.samples import Data, open_data
from legoai.runtime.data.sequences import SampleBatch
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.loss import matching_cross_entropy, token_cross_entropy
from legoai.specs.models.reads import SYNTHETIC, Images, ImagesWithTexts, Tokens, TwoTexts, described, reads_from

IMAGES = Images(channels=3, height=16, width=8, classes=100)
PAIRS = ImagesWithTexts(channels=1, height=8, width=8, vocabulary=50, end=49)


def stream(data: Data, *, rank: int = 0, degree: int = 1, micro_batch: int = 4, validation: bool = False):
    return data.stream(validation=validation, micro_batch=micro_batch, rank=rank, degree=degree, seed=7)


def joined(batches: list[SampleBatch]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*(batch.inputs for batch in batches), strict=True)]


@pytest.mark.parametrize("reads", [IMAGES, PAIRS])
def test_two_ranks_read_the_samples_of_one(reads: Images | ImagesWithTexts) -> None:
    data = open_data(SYNTHETIC, reads, seq_len=5)
    whole = stream(data, micro_batch=8).next()
    ranks = [stream(data, rank=rank, degree=2).next() for rank in (0, 1)]
    for one, many in zip(whole.inputs, joined(ranks), strict=True):
        assert torch.equal(one, many)
    shapes = [item.shape for item in reads.inputs(8, 5)]
    assert [tuple(item.shape) for item in whole.inputs] == shapes
    assert tuple(whole.targets.shape) == reads.targets(8, 5).shape


def test_stream_continues_from_its_sample_count() -> None:
    data = open_data(SYNTHETIC, IMAGES, seq_len=0)
    first = stream(data)
    batches = [first.next() for _ in range(3)]
    later = stream(data)
    later.consumed = 8
    assert torch.equal(later.next().inputs[0], batches[2].inputs[0])
    assert not torch.equal(batches[0].inputs[0], batches[1].inputs[0])
    assert not torch.equal(stream(data, validation=True).next().inputs[0], batches[0].inputs[0])


def test_synthetic_images_depend_on_their_class() -> None:
    data = open_data(SYNTHETIC, IMAGES, seq_len=0)
    batch = stream(data, micro_batch=64).next()
    assert set(batch.targets.tolist()) == set(range(10))
    means = torch.stack([batch.inputs[0][batch.targets == label].mean(0) for label in range(10)])
    again = stream(data, validation=True, micro_batch=64).next()
    nearest = torch.cdist(again.inputs[0].flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == again.targets).float().mean() > 0.9
    assert data.ignorant_loss(64)[1] == pytest.approx(math.log(10))


def test_synthetic_texts_end_once_and_match_their_image() -> None:
    batch = stream(open_data(SYNTHETIC, PAIRS, seq_len=6), micro_batch=16).next()
    _, texts = batch.inputs
    assert ((texts == PAIRS.end).sum(1) == 1).all() and (texts[:, -1] == PAIRS.end).all()
    assert texts.min() >= 0 and texts.max() < PAIRS.vocabulary
    assert torch.equal(batch.targets, torch.arange(16))


def test_second_text_continues_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = bytes(range(97, 123)) * 40
    (tmp_path / "text.txt").write_bytes(text)
    batch = stream(open_data(str(tmp_path / "text.txt"), TwoTexts(start=3), seq_len=5)).next()
    source, decoder = batch.inputs
    assert (decoder[:, 0] == 3).all()
    assert torch.equal(decoder[:, 1:], batch.targets[:, :-1])
    for row, target in zip(source.tolist(), batch.targets.tolist(), strict=True):
        assert bytes(row + target) in text


def test_text_corpus_for_an_image_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        open_data("python", IMAGES, seq_len=0)
    assert caught.value.code == RunErrorCode.DATA_KIND
    assert "--data synthetic" in caught.value.help


def test_classification_and_matching_losses_equal_references() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 9), torch.randint(9, (6,))
    torch.testing.assert_close(token_cross_entropy(logits, labels), F.cross_entropy(logits, labels))
    texts, images = F.normalize(torch.randn(6, 4), dim=1), F.normalize(torch.randn(6, 4), dim=1)
    similarities = 2.5 * texts @ images.t()
    rows, columns = similarities.exp().sum(1), similarities.exp().sum(0)
    each = [2 * similarities[i, i] - rows[i].log() - columns[i].log() for i in range(6)]
    torch.testing.assert_close(matching_cross_entropy(similarities, torch.arange(6)), -sum(each) / 12)


def test_similarities_of_other_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a micro batch of 2 texts .* returns similarities \[4, 4\]: negatives are"):
        matching_cross_entropy(torch.ones(4, 4), torch.arange(2))


@pytest.mark.parametrize("reads", [Tokens(), IMAGES, PAIRS, TwoTexts(start=0)])
def test_model_inputs_survive_json(reads) -> None:
    assert reads_from(described(reads)) == reads


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"kind": "sounds"}, "must be a mapping whose `kind` is one of"),
        ({"kind": "images", "channels": 3}, "has the fields channels, classes, height, width, not channels"),
        ({**described(IMAGES), "height": "16"}, "height must be a whole number"),
    ],
)
def test_invalid_input_declaration_is_refused(declared: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        reads_from(declared)
