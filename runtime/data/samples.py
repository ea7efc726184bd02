"""Samples of a training for every kind of model input.

Text is read from a corpus. PyTorch and Python come with no images, so that these are synthetic, under the name
`synthetic`: a program can be tried and its numbers compared. Synthetic samples can be learned, but have no meaning.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from legoai.runtime.data.corpus import Corpus, open_corpus
from legoai.runtime.data.sequences import MicroBatch, SampleBatch, TokenStream
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.initialize import seed_of
from legoai.specs.directives.run import HF_DATASET
from legoai.specs.models.reads import SYNTHETIC, Images, ImagesWithTexts, Reads, TwoTexts

CLASSES = 10
"""Most classes of synthetic images: a thousand of them would take long to learn."""

PATTERNS = 64
"""Different images with their own texts."""

_CELLS = 4
"""A pattern is of so many by so many cells of one colour."""


class Stream(Protocol):
    """The micro batches of one rank, one after another."""

    consumed: int
    """Number of samples that all ranks together have read."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far; 0 where the data have no end."""

    def next(self) -> MicroBatch:
        """Return this rank's next micro batch, and count those of all ranks as consumed."""

    def skip(self, batches: int) -> None:
        """Count micro batches of all ranks as consumed without reading them."""


class Data(Protocol):
    """Data of a run.

    Attributes:
        name: as given on the command line.
        key: of the data in this machine's cache.
        digest: the same on every machine that has the same data.
        tokens: one more than the largest token that a text can have; None where there is no text.
        unit: name of a token.
        left_out: as of `Corpus`.
        note: as of `Corpus`.
    """

    name: str
    key: str
    digest: str
    tokens: int | None
    unit: str
    left_out: str
    note: str

    def stream(self, *, validation: bool, micro_batch: int, rank: int, degree: int, seed: int | None) -> Stream:
        """Return a rank's stream; one without seed is in the data's own order."""

    def size(self) -> str:
        """Description of its amount, for the user."""

    def largest_token(self) -> int:
        """The largest token of a text."""

    def ignorant_loss(self, micro_batch: int) -> tuple[str, float]:
        """Description and loss in nats of a trivial predictor."""


def check_vocabulary(data: Data, vocabulary: int | None) -> None:
    """Check that the model's vocabulary includes every token of the data.

    Raises:
        RunError: it does not.
    """
    if vocabulary is None or data.tokens is None or vocabulary >= data.tokens:
        return
    if (largest := data.largest_token()) >= vocabulary:
        raise RunError(
            RunErrorCode.VOCABULARY,
            f"{data.name} has the {data.unit} {largest}, and the model's vocabulary has {vocabulary} tokens, from 0",
            help=f"give the model a vocabulary of {data.tokens}",
        )


def check_equal(data: Data, key: str) -> Data:
    """Check that a dataset is the one of rank 0, and return it; it may have changed on the Hub between two hosts.

    Files of several hosts may have different times, so that their keys are not compared.

    Raises:
        RunError: it is another one.
    """
    if data.name.startswith(HF_DATASET) and data.key != key:
        raise RunError(
            RunErrorCode.DATA_DIFFERS,
            f"{data.name} is another dataset on this host than on that of rank 0",
            help="name its revision, as in NAME@REVISION, or give the hosts one folder as HF_HOME",
        )
    return data


def open_data(
    source: str,
    reads: Reads,
    *,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    field: str = "text",
    tokenizer: str = "",
    built: str = "",
    vocabulary: int | None = None,
) -> Data:
    """Open data for a model with the given inputs.

    Args:
        source: as of `open_corpus`, or `synthetic` where images are read.
        reads: the model's inputs.
        seq_len: tokens in a text.
        dtype: of images.
        field: as of `open_corpus`.
        tokenizer: as of `open_corpus`.
        built: as of `open_corpus`.
        vocabulary: as of `check_vocabulary`.

    Raises:
        RunError: there is nothing of that name, the model has other inputs, or not all tokens.
    """
    if not isinstance(reads, Images | ImagesWithTexts):
        corpus = open_corpus(source, field=field, tokenizer=tokenizer, built=built, vocabulary=vocabulary)
        data = TextData(corpus, reads, seq_len=seq_len)
        check_vocabulary(data, vocabulary)
        return data
    if source != SYNTHETIC:
        raise RunError(
            RunErrorCode.DATA_KIND,
            f"the model reads images of {reads.height} by {reads.width}, and {source!r} is text",
            help="pass --data synthetic to train on made patterns; no other images are read",
        )
    return SyntheticData(reads, seq_len=seq_len, dtype=dtype)


class TextData:
    """A corpus, for a model that predicts the next token of a text, or of a second text given a first."""

    tokens: int | None

    def __init__(self, corpus: Corpus, reads: Reads, *, seq_len: int) -> None:
        self.corpus = corpus
        self.name, self.key, self.digest = corpus.name, corpus.key, corpus.digest
        self.tokens, self.unit = corpus.vocabulary, corpus.unit
        self.left_out, self.note = corpus.left_out, corpus.note
        self._reads = reads
        self._seq_len = seq_len

    def stream(self, *, validation: bool, micro_batch: int, rank: int, degree: int, seed: int | None) -> Stream:
        """Return a rank's stream of windows over the training or the validation part."""
        two = isinstance(self._reads, TwoTexts)
        inner = TokenStream(
            self.corpus.validation if validation else self.corpus.train,
            seq_len=2 * self._seq_len if two else self._seq_len,
            micro_batch=micro_batch,
            rank=rank,
            degree=degree,
            seed=seed,
            name=f"the validation part of {self.name}" if validation else self.name,
        )
        return ContinuationStream(inner, start=self._reads.start) if isinstance(self._reads, TwoTexts) else inner

    def size(self) -> str:
        """Description of its amount, for the user."""
        return f"{len(self.corpus.train):,} tokens"

    def largest_token(self) -> int:
        """The largest token of both parts."""
        return self.corpus.largest_token()

    def ignorant_loss(self, micro_batch: int) -> tuple[str, float]:
        """Description and loss of a predictor that knows the tokens' frequencies."""
        return "knowing only how often each token occurs", self.corpus.unigram_entropy()


class ContinuationStream:
    """Windows of a text in halves: the first is the encoder's input, the second is predicted token by token.

    Args:
        windows: of twice the length of a half.
        start: the token before the second half.
    """

    def __init__(self, windows: TokenStream, *, start: int) -> None:
        self._windows = windows
        self._start = start

    @property
    def consumed(self) -> int:
        """Number of samples that all ranks together have read."""
        return self._windows.consumed

    @consumed.setter
    def consumed(self, samples: int) -> None:
        self._windows.consumed = samples

    @property
    def epoch(self) -> float:
        """Passes over the corpus so far."""
        return self._windows.epoch

    def next(self) -> SampleBatch:
        """Return the first halves, the second ones after the start token, and the second ones as targets."""
        first, second = self._windows.next().tokens.chunk(2, dim=1)
        start = torch.full((len(second), 1), self._start, dtype=torch.int64)
        return SampleBatch(
            inputs=(first.contiguous(), torch.cat((start, second[:, :-1]), dim=1)), targets=second.contiguous()
        )

    def skip(self, batches: int) -> None:
        """Count micro batches of all ranks as consumed without reading them."""
        self._windows.skip(batches)


class SyntheticData:
    """Synthetic images: each class or text has a pattern of coloured cells, of which every image is a noisy copy."""

    name = SYNTHETIC
    tokens: int | None = None
    unit = "token"
    left_out = note = ""

    def __init__(self, reads: Images | ImagesWithTexts, *, seq_len: int, dtype: torch.dtype) -> None:
        self._reads = reads
        self._seq_len = seq_len
        self._dtype = dtype
        self.key = self.digest = f"{SYNTHETIC}:1:{reads}:{seq_len}"
        self.patterns = min(reads.classes, CLASSES) if isinstance(reads, Images) else PATTERNS

    def stream(self, *, validation: bool, micro_batch: int, rank: int, degree: int, seed: int | None) -> Stream:
        """Return a rank's stream; those of training and validation have other noise."""
        return SyntheticStream(
            self,
            micro_batch=micro_batch,
            rank=rank,
            degree=degree,
            name=f"{'validation' if validation else 'training'} {seed}",
        )

    def size(self) -> str:
        """Description of its amount, for the user."""
        return f"made patterns, {self.patterns} of them"

    def largest_token(self) -> int:
        """None has any."""
        return 0

    def ignorant_loss(self, micro_batch: int) -> tuple[str, float]:
        """Description and loss of a guess among all classes, or all images of a micro batch."""
        if isinstance(self._reads, Images):
            return "knowing only which classes occur", math.log(self.patterns)
        return "guessing", math.log(micro_batch)

    def image(self, pattern: int, sample: str) -> torch.Tensor:
        """Return a noisy copy of a pattern, [channels, height, width]: cells and noise are of variance 1."""
        reads = self._reads
        cells = torch.randn(reads.channels, _CELLS, _CELLS, generator=_generator(f"pattern {pattern}"))
        rows, columns = (torch.arange(size) * _CELLS // size for size in (reads.height, reads.width))
        noise = torch.randn(reads.channels, reads.height, reads.width, generator=_generator(sample))
        return (cells[:, rows][:, :, columns] + noise).to(self._dtype)

    def text(self, pattern: int) -> torch.Tensor:
        """Return the tokens of a pattern's text, int64 [seq_len], with an end token."""
        reads = self._reads
        assert isinstance(reads, ImagesWithTexts)
        others = [token for token in (0, reads.vocabulary - 1) if token != reads.end]
        tokens = torch.randint(reads.vocabulary, (self._seq_len,), generator=_generator(f"text {pattern}"))
        tokens[tokens == reads.end] = others[0]
        tokens[-1] = reads.end
        return tokens

    def batch(self, samples: NDArray[np.int64], name: str) -> SampleBatch:
        """Return samples by their indices in the order of a stream of this name."""
        names = [f"{name} {sample}" for sample in samples]
        chosen = [seed_of(0, f"class {sample}") % self.patterns for sample in names]
        images = torch.stack([self.image(pattern, sample) for pattern, sample in zip(chosen, names, strict=True)])
        if isinstance(self._reads, Images):
            return SampleBatch(inputs=(images,), targets=torch.tensor(chosen))
        texts = torch.stack([self.text(pattern) for pattern in chosen])
        return SampleBatch(inputs=(images, texts), targets=torch.arange(len(chosen)))


class SyntheticStream:
    """A stateful stream of synthetic samples; sample k of the order is the same for every degree and rank."""

    epoch = 0.0

    def __init__(self, data: SyntheticData, *, micro_batch: int, rank: int, degree: int, name: str) -> None:
        self._data = data
        self._micro_batch = micro_batch
        self._rank = rank
        self._degree = degree
        self._name = name
        self.consumed = 0

    def next(self) -> SampleBatch:
        """Return this rank's next micro batch, and count those of all ranks as consumed."""
        first = self.consumed + self._rank * self._micro_batch
        self.skip(1)
        return self._data.batch(np.arange(first, first + self._micro_batch, dtype=np.int64), self._name)

    def skip(self, batches: int) -> None:
        """Count micro batches of all ranks as consumed without making them."""
        self.consumed += batches * self._degree * self._micro_batch


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(0, name))
