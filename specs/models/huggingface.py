"""Building a Hugging Face model from a config, without its weights, so that it trains as a built-in model does."""

# mypy: no-warn-return-any
from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from legoai.specs.models.configs import Scalar
from legoai.specs.models.inspection import read_config
from legoai.specs.models.manifest import ManifestError


def build(config_file: str | Path, **overrides: Scalar) -> nn.Module:
    """Build the model that a `config.json` describes. Arguments and errors are those of `language_model`."""
    return language_model(read_config(config_file), where=str(config_file), **overrides)


def language_model(fields: Mapping[str, Any], /, *, where: str = "the config", **overrides: Scalar) -> nn.Module:
    """Build the model that the fields of a Hugging Face config describe; call it under `torch.device("meta")`.

    The class is the first of the config's `architectures`, or else the causal language model of its `model_type`. No
    code but that of the installed `transformers` is run, and nothing is downloaded. A causal language model takes token
    ids [B, T] and returns logits [B, T, vocabulary]; its first values are those that `transformers` would draw.

    Args:
        fields: of a config.
        where: what an error calls the config.
        overrides: values of fields to use instead.

    Raises:
        ManifestError: `transformers` is not installed, the config is invalid, or the architecture is unknown.
    """
    try:
        import transformers
    except ImportError as error:
        raise ManifestError(
            "transformers_missing",
            "huggingface(...) needs the transformers package: pip install 'legoai[hf]'",
            str(error),
        ) from error
    config = _config(transformers, where, fields, overrides)
    return _model_class(transformers, where, fields, config)(config)


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
    if not is_language_model(found.__name__):
        return found
    return type(found.__name__, (_FirstValues, _Logits, found), {"__module__": found.__module__})


def is_language_model(class_name: str) -> bool:
    """Whether a class of `transformers` predicts the next token at every position."""
    return class_name.endswith(("ForCausalLM", "LMHeadModel"))


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
        if name not in fields and not hasattr(known, name):
            raise ManifestError("config_invalid", f"a {fields['model_type']} config has no field named {name!r}")
    try:
        return config_class(**{"use_cache": False, **values, **overrides})
    except Exception as error:
        raise ManifestError(
            "config_invalid", f"{where}: transformers refuses the config: {error}", repr(error)
        ) from error


class _Logits(nn.Module):
    """A forward from token ids to logits, in front of the one of `transformers`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the next token at every position: int64 [B, T] to [B, T, vocabulary]."""
        return super().forward(tokens).logits


class _FirstValues(nn.Module):
    """Draws the first values of one module at a time, as `transformers` would for the whole model.

    `_init_weights` of a module may draw the parameters of modules inside of it anew, as GPT-2's attention does with its
    output projection. A copy of the model that stays on the meta device therefore stands in for everything but the
    module in question.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # Not registered as a module: it is never called, moved or sharded.
        self.__dict__["_stand_in"] = copy.deepcopy(self)

    def initialise_module(
        self, path: str, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """Fill a module's own parameters and buffers in place.

        Args:
            path: of the module.
            parameters: whole, by their names in the module; those that are left out are not drawn.
            buffers: by their names in the module.
        """
        stand_in: Any = self.__dict__["_stand_in"]
        around = [path.rsplit(".", count)[0] for count in range(path.count(".") + 1)] if path else []
        module = stand_in.get_submodule(path)
        kept = dict(module._parameters), dict(module._buffers)
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        try:
            for holder in (*around, ""):
                stand_in._init_weights(stand_in.get_submodule(holder))
        finally:
            module._parameters.update(kept[0])
            module._buffers.update(kept[1])
