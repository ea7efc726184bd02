"""Inputs and outputs of a model in training, described without torch: tokens, images, two texts, or images with texts.

| reads | forward | result |
|---|---|---|
| `Tokens` | `tokens` [B, T] | the next token at every position: logits [B, T, vocabulary] |
| `Images` | `images` [B, channels, height, width] | logits [B, classes] |
| `TwoTexts` | `tokens` [B, T], `decoder_tokens` [B, T] | the next token of the second text: logits [B, T, vocabulary] |
| `ImagesWithTexts` | `images` as above, `tokens` [B, T] | similarities [B texts, B images] |

The record of a built-in family or a Hugging Face config is known. A factory's model states it by an attribute `reads`,
one of these records or the mapping that `described` returns, or like the models of `timm` by `pretrained_cfg`; by
default a model reads tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from legoai.specs.record import Record

ReadsKind = Literal["tokens", "images", "two_texts", "images_with_texts"]

SYNTHETIC: Final = "synthetic"
"""The name of made images, which alone are read."""


class InputShape(NamedTuple):
    """One tensor of a micro batch: floating-point numbers of the model's dtype, or else int64."""

    name: str
    shape: tuple[int, ...]
    floating: bool = False


class Tokens(Record, kw_only=True):
    """Token ids, with the next one predicted at every position."""

    kind: ClassVar[ReadsKind] = "tokens"
    has_text: ClassVar[bool] = True

    def inputs(self, samples: int, length: int) -> tuple[InputShape, ...]:
        """Return the inputs of forward, in order; `length` is tokens in a text."""
        return (InputShape("tokens", (samples, length)),)

    def targets(self, samples: int, length: int) -> InputShape:
        """Return the targets of the loss."""
        return InputShape("targets", (samples, length))


class Images(Record, kw_only=True):
    """Images, each of one class."""

    kind: ClassVar[ReadsKind] = "images"
    has_text: ClassVar[bool] = False

    channels: int
    height: int
    width: int
    classes: int

    def inputs(self, samples: int, length: int) -> tuple[InputShape, ...]:
        """Return the inputs of forward, in order; `length` has no meaning."""
        return (InputShape("images", (samples, self.channels, self.height, self.width), floating=True),)

    def targets(self, samples: int, length: int) -> InputShape:
        """Return the targets of the loss."""
        return InputShape("targets", (samples,))


class TwoTexts(Record, kw_only=True):
    """A text to be read whole, and another that is written token by token, as an encoder-decoder does."""

    kind: ClassVar[ReadsKind] = "two_texts"
    has_text: ClassVar[bool] = True

    start: int
    """The token before the second text."""

    def inputs(self, samples: int, length: int) -> tuple[InputShape, ...]:
        """Return the inputs of forward, in order; `length` is tokens of each text."""
        return (
            InputShape("tokens", (samples, length)),
            InputShape("decoder_tokens", (samples, length)),
        )

    def targets(self, samples: int, length: int) -> InputShape:
        """Return the targets of the loss."""
        return InputShape("targets", (samples, length))


class ImagesWithTexts(Record, kw_only=True):
    """Images and their texts, each to be matched with the other among those of a micro batch."""

    kind: ClassVar[ReadsKind] = "images_with_texts"
    has_text: ClassVar[bool] = True

    channels: int
    height: int
    width: int
    vocabulary: int
    end: int
    """The token that ends a text, at whose position the model reads the text's representation."""

    def inputs(self, samples: int, length: int) -> tuple[InputShape, ...]:
        """Return the inputs of forward, in order."""
        return (
            InputShape("images", (samples, self.channels, self.height, self.width), floating=True),
            InputShape("tokens", (samples, length)),
        )

    def targets(self, samples: int, length: int) -> InputShape:
        """Return the targets of the loss: the index of each text's image."""
        return InputShape("targets", (samples,))


Reads: TypeAlias = Tokens | Images | TwoTexts | ImagesWithTexts

_KINDS: Mapping[str, type[Reads]] = {kind.kind: kind for kind in (Tokens, Images, TwoTexts, ImagesWithTexts)}


def described(reads: Reads) -> dict[str, Any]:
    """Return a model's record as plain JSON data."""
    return {"kind": reads.kind, **asdict(reads)}


def reads_from(told: Any) -> Reads:
    """Return the record for the result of `described`, or for a factory author's mapping.

    Raises:
        ValueError: it is none of the records above; the message gives the problem.
    """
    if isinstance(told, Tokens | Images | TwoTexts | ImagesWithTexts):
        return told
    if not isinstance(told, Mapping) or told.get("kind") not in _KINDS:
        raise ValueError(f"`reads` must be a mapping whose `kind` is one of {', '.join(_KINDS)}, not {told!r}")
    made = _KINDS[told["kind"]]
    wanted = {item.name for item in fields(made)}
    values = {name: value for name, value in told.items() if name != "kind"}
    if set(values) != wanted:
        raise ValueError(
            f"`reads` of kind {told['kind']} has the fields {', '.join(sorted(wanted)) or 'none'}, not "
            f"{', '.join(sorted(map(str, values))) or 'none'}"
        )
    for name, value in values.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"`reads`: {name} must be a whole number, not {value!r}")
    return made(**values)
