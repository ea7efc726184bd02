"""The result of a model's forward, compared with what the loss takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from legoai.specs.models.reads import Images, ImagesWithTexts, Reads, TwoTexts


def unfit_result(reads: Reads, inputs: Sequence[Any], result: Any) -> str | None:
    """Why the loss of a model cannot be computed from what its forward returned; None where it can.

    Args:
        reads: inputs and outputs of the model in training.
        inputs: of the forward.
        result: what it returned for them.
    """
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    # The second of two texts is the predicted one, and in `example_inputs` may have a length of its own.
    given = next(iter(tensors[1:] if isinstance(reads, TwoTexts) else tensors), None)
    if not isinstance(result, torch.Tensor):
        return f"forward returns {_words(result)}, and the loss takes one tensor"
    if not result.is_floating_point():
        return f"forward returns {_words(result)}, of which the loss has no gradient"
    if given is None or given.dim() == 0:
        return None
    samples, shape = given.shape[0], tuple(result.shape)
    if isinstance(reads, ImagesWithTexts):
        fits, wanted = shape == (samples, samples), "similarities [texts, images]"
    elif isinstance(reads, Images):
        fits = len(shape) >= 2 and math.prod(shape[:-1]) == samples
        wanted = f"logits [samples, {reads.classes}]"
    else:
        fits = len(shape) >= 2 and math.prod(shape[:-1]) == given.numel()
        wanted = "logits [samples, tokens, vocabulary]"
    if not fits:
        return f"forward returns {_words(result)} for {_words(given)}, and the loss takes {wanted}"
    if isinstance(reads, Images) and shape[-1] < reads.classes:
        return f"forward returns logits of {shape[-1]} classes, and `reads` states {reads.classes}"
    return None


def _words(value: Any) -> str:
    """A result in words: `a tuple of Tensor, None`, `int64 [2, 8]`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list) and value:
        names = ("None" if item is None else type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {', '.join(names)}"
    return "None" if value is None else f"a {type(value).__name__}"
