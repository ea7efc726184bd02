"""Hugging Face models built from a config without weights, which train as built-in models do."""

# mypy: no-warn-return-any
from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from legoai.specs.loggers import OF_TORCHAO, quiet
from legoai.specs.models.config_checks import Scalar
from legoai.specs.models.manifests.cache import read_config
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.models.reads import Images, ImagesWithTexts, Tokens, TwoTexts

_CORRECT: Final = "correct the file, or give another value by an argument: `huggingface(…, FIELD = VALUE)`"
_SIZES: Final = frozenset(
    {
        "d_model", "hidden_size", "intermediate_size", "n_embd", "n_head", "n_layer", "num_attention_heads",
        "num_hidden_layers", "num_layers", "vocab_size",
    }
)  # fmt: skip
"""Fields with sizes, in the configs of most models."""


def build(config_file: str | Path, **overrides: Scalar) -> nn.Module:
    """Build the model that a `config.json` describes. Arguments and errors are those of `transformers_model`."""
    return transformers_model(read_config(config_file), where=str(config_file), **overrides)


def language_model(fields: Mapping[str, Any], /, *, where: str = "the config", **overrides: Scalar) -> nn.Module:
    """Build a causal language model: token ids [B, T] to logits [B, T, vocabulary]. See `transformers_model`.

    Raises:
        ManifestError: as there, or the class is no causal language model.
    """
    model = transformers_model(fields, where=where, **overrides)
    if not isinstance(model.reads, Tokens):
        raise ManifestError("unknown_architecture", f"{where}: {type(model).__name__} is no causal language model")
    return model


def transformers_model(fields: Mapping[str, Any], /, *, where: str = "the config", **overrides: Scalar) -> nn.Module:
    """Build the model that the fields of a Hugging Face config describe; call it under `torch.device("meta")`.

    The class is the first of the config's `architectures`, or else the causal language model of its `model_type`. No
    code but that of the installed `transformers` is run, and nothing is downloaded. Causal language models, image
    classifiers, encoder-decoders of text and CLIP take and give what `legoai.specs.models.reads` says, and carry it as
    their attribute `reads`; its first values are those that `transformers` would draw. Other classes are built as they
    are, with None there.

    Args:
        fields: of a config; `attn_implementation` chooses an attention of `transformers`, `"eager"` or `"sdpa"`, and
            `experts_implementation` the products of experts, `"grouped_mm"`, `"batched_mm"` or `"eager"`.
        where: what an error calls the config.
        overrides: values of fields to use instead.

    Raises:
        ManifestError: `transformers` is not installed, the config is invalid, the architecture is unknown, or layers
            would be left out at random.
    """
    transformers = _transformers()
    config = _config(transformers, where, fields, overrides)
    dropping = list(_dropping_layers(config.to_dict()))
    if dropping:
        names = ", ".join(f"`{name}`" for name in dropping)
        arguments = ", ".join(f"{name} = 0" for name in dropping)
        raise ManifestError(
            "config_invalid",
            f"{where}: {names} above 0: every rank would leave out other layers at random, and wait for the others",
            "set to 0 " + ("in the file" if "." in arguments else f"by arguments: `huggingface(…, {arguments})`"),
        )
    with quiet(*OF_TORCHAO):  # the module of a class is imported when it is asked for
        model_class = _model_class(transformers, where, fields, config)
    return model_class(config)


def transformers_config(fields: Mapping[str, Any]) -> Any:
    """Return the config object that `transformers` makes of the fields; see `transformers_model`."""
    return _config(_transformers(), "the config", fields, {})


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ManifestError(
            "transformers_missing",
            "huggingface(...) needs the transformers package: pip install 'legoai[hf]'",
            str(error),
        ) from error
    return transformers


def _model_class(transformers: Any, where: str, fields: Mapping[str, Any], config: Any) -> type[nn.Module]:
    architectures = fields.get("architectures") or []
    if architectures:
        found = getattr(transformers, str(architectures[0]), None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ManifestError(
                "unknown_architecture",
                f"{where}: transformers {transformers.__version__} has no model class {architectures[0]!r}",
            )
    else:
        found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if found is None:
            raise ManifestError(
                "unknown_architecture",
                f"{where} names no architecture, and {config.model_type} has no causal language model",
            )
    forward = _forward_of(found, config)
    if forward is None:
        return type(found.__name__, (found,), {"__module__": found.__module__, "reads": None})
    return type(found.__name__, (_FirstValues, forward, found), {"__module__": found.__module__})


def _forward_of(found: type[nn.Module], config: Any) -> type[nn.Module] | None:
    """The forward for a class of `transformers`, by its purpose; None where that is not known."""
    name = found.__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return _Logits
    if name.endswith("ForImageClassification"):
        return _Classes
    of_texts = getattr(found, "main_input_name", "") == "input_ids"  # unlike that of speech or of images
    if name.endswith("ForConditionalGeneration") and config.is_encoder_decoder and hasattr(config, "vocab_size"):
        return _SecondText if of_texts else None
    return _Matches if name == "CLIPModel" else None


def _config(transformers: Any, where: str, fields: Mapping[str, Any], overrides: Mapping[str, Scalar]) -> Any:
    values = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
    try:
        config_class = transformers.CONFIG_MAPPING[fields["model_type"]]
    except KeyError as error:
        raise ManifestError(
            "unknown_architecture",
            f"{where}: transformers {transformers.__version__} knows no model type {fields['model_type']!r}",
        ) from error
    known = config_class()
    for name in overrides:
        if name not in fields and name not in _IMPLEMENTATIONS and not hasattr(known, name):
            close = get_close_matches(name, {**known.to_dict(), **fields}, 1)
            raise ManifestError(
                "config_invalid",
                f"a {fields['model_type']} config has no field named {name!r}",
                f"did you mean `{close[0]}`?" if close else f"the fields are those of `{config_class.__name__}`",
            )
    # `transformers` refuses a whole number, such as a plan writes, for some of its fields that hold fractions.
    given = {
        name: float(value) if type(value) is int and isinstance(getattr(known, name, None), float) else value
        for name, value in overrides.items()
    }
    for fault in _faults({**values, **given}):
        raise ManifestError("config_invalid", f"{where}: {fault}", _CORRECT)
    try:
        # A training uses no cache, whatever the file says: a layer that is recomputed would append its keys once more.
        # It also adds to the dictionaries that it is given.
        return config_class(**copy.deepcopy({**values, "use_cache": False, **given}))
    except Exception as error:
        raise ManifestError(
            "config_invalid",
            f"{where}: transformers refuses the config: {' '.join(str(error).split())}",
            _CORRECT,
        ) from error


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    """What `transformers` takes, but no training can mean."""
    if values.get("quantization_config") is not None:
        yield "`quantization_config` is of quantised weights, which are not trained"
    for name, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            yield f"`{name}` is no number"
        if name in _SIZES and isinstance(value, int) and value <= 0:
            yield f"`{name}` must be positive, and is {value}"


def _dropping_layers(fields: Mapping[str, Any]) -> Iterator[str]:
    """The fields by which a model leaves out layers at random (LayerDrop, Fan et al. 2020), if they are above 0."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _dropping_layers(value))
        elif str(name).endswith("layerdrop") and isinstance(value, int | float) and value > 0:
            yield name


_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Choices of `transformers` that are no fields of a config."""


class _Logits(nn.Module):
    """A forward from token ids to logits, in front of the one of `transformers`."""

    reads = Tokens()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the next token at every position: int64 [B, T] to [B, T, vocabulary]."""
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _whole_sequences():
            return super().forward(tokens).logits


@contextlib.contextmanager
def _whole_sequences() -> Iterator[None]:
    """Have the masks of `transformers` made for whole sequences: without padding, and one sequence in each.

    `transformers` looks for padding and for packed sequences in the values of its tensors, for which the host waits for
    the device in every step. Where tensors have no values it assumes either, and gives attention a mask that the kernel
    for causal attention does not need.
    """
    from transformers import masking_utils

    found = {name: getattr(masking_utils, name, None) for name in ("find_packed_sequence_indices", _ARGUMENTS)}
    instead = {"find_packed_sequence_indices": lambda position_ids: None, _ARGUMENTS: _without_ones(found[_ARGUMENTS])}
    known = [name for name, function in found.items() if function is not None]
    for name in known:
        setattr(masking_utils, name, instead[name])
    try:
        yield
    finally:
        for name in known:
            setattr(masking_utils, name, found[name])


_ARGUMENTS = "_preprocess_mask_arguments"
"""Function of `masking_utils`, of `transformers` 5.24, that takes the arguments of every mask."""


def _without_ones(arguments: Any) -> Any:
    """Return the function without the mask of ones that a decoder makes for itself where it is given none.

    `torch.ones` without a dtype makes a floating-point mask. A model that masks the padding of its inputs compares
    tokens instead, which makes a mask of booleans or integers: it is left as it is.
    """

    def read(config: Any, inputs_embeds: Any, attention_mask: Any, *others: Any, **named: Any) -> Any:
        is_tensor = isinstance(attention_mask, torch.Tensor)
        if is_tensor and attention_mask.ndim == _OF_TOKENS and attention_mask.is_floating_point():
            attention_mask = None
        return arguments(config, inputs_embeds, attention_mask, *others, **named)

    return read


_OF_TOKENS = 2
"""Dimensions of a mask of tokens, [B, T]; one of pairs of tokens has four."""


class _Classes(nn.Module):
    """A forward from images to logits."""

    config: Any

    @property
    def reads(self) -> Images:
        """The images that the config names; of a usual size where it names none, as for a network of convolutions."""
        side = getattr(self.config, "image_size", _USUAL_SIDE)
        height, width = (side, side) if isinstance(side, int) else tuple(side)
        channels = getattr(self.config, "num_channels", 3)
        return Images(channels=channels, height=height, width=width, classes=self.config.num_labels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classify images: [B, channels, height, width] to [B, classes]."""
        return super().forward(pixel_values=images).logits


_USUAL_SIDE = 224


class _SecondText(nn.Module):
    """A forward from a text and the beginning of another to the next tokens of the other."""

    config: Any

    @property
    def reads(self) -> TwoTexts:
        """Two texts; the second begins with the config's start token."""
        named = (getattr(self.config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
        return TwoTexts(start=next((token for token in named if token is not None), 0))

    def forward(self, tokens: torch.Tensor, decoder_tokens: torch.Tensor) -> torch.Tensor:
        """Predict the second text's next tokens: int64 [B, S] and [B, T] to [B, T, vocabulary]."""
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _whole_sequences():
            return super().forward(input_ids=tokens, decoder_input_ids=decoder_tokens).logits


class _Matches(nn.Module):
    """A forward from images and texts to how well each text matches each image."""

    config: Any

    @property
    def reads(self) -> ImagesWithTexts:
        """The images and texts that the config names."""
        images, texts = self.config.vision_config, self.config.text_config
        # An `eos_token_id` of 2 is that of configs before its correction, for which the largest id ends a text.
        end = texts.vocab_size - 1 if texts.eos_token_id == _LARGEST_ENDS else texts.eos_token_id
        side = images.image_size
        return ImagesWithTexts(
            channels=images.num_channels, height=side, width=side, vocabulary=texts.vocab_size, end=end
        )

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compare images [B, channels, height, width] and texts int64 [B, T]: similarities [B texts, B images]."""
        return super().forward(input_ids=tokens, pixel_values=images).logits_per_text

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        scale: Any = module._parameters.get("logit_scale")
        if scale is not None:  # only the constructor knows its value
            nn.init.constant_(scale, self.config.logit_scale_init_value)


_LARGEST_ENDS = 2


class _FirstValues(nn.Module):
    """Draws the initial values of one module at a time, as `transformers` would for the whole model.

    `_init_weights` of a module may draw the parameters of submodules again, as GPT-2's attention does with its output
    projection. A copy of the model that stays on the meta device therefore replaces everything but the module in
    question.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # Not registered as a module: it is never called, moved or sharded.
        self.__dict__["_meta_copy"] = copy.deepcopy(self)

    def initialise_module(
        self, path: str, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """Fill a module's own parameters and buffers in place.

        Args:
            path: of the module.
            parameters: whole, by their names in the module; those that are left out are not drawn.
            buffers: by their names in the module.
        """
        meta_copy: Any = self.__dict__["_meta_copy"]
        around = [path.rsplit(".", count)[0] for count in range(path.count(".") + 1)] if path else []
        module = meta_copy.get_submodule(path)
        kept = dict(module._parameters), dict(module._buffers)
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        try:
            for holder in (*around, ""):
                meta_copy._init_weights(meta_copy.get_submodule(holder))
        finally:
            module._parameters.update(kept[0])
            module._buffers.update(kept[1])
