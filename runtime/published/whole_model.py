"""Description of a full model that maps its tensors to published ones, taken before it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from legoai.runtime.published.transformers_names import published_by_transformers
from legoai.specs.models.configs import ModelConfig
from legoai.specs.published.configs import nearest_config
from legoai.specs.published.names import has_map, published
from legoai.specs.published.pieces import Pieces

Alternatives = Callable[[str, Sequence[int]], Iterator[Pieces]]
"""For a tensor's name and full shape, the published forms, the usual one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """Properties of a model that matter when weights are read from, or exported as, published ones.

    Attributes:
        kind: the class of the model.
        factory: how a plan writes the model where a factory makes it; empty elsewhere.
        config: of a built-in model that has a mapping; otherwise None.
        fields: of the model's config in Hugging Face's format, or of the nearest one; empty where there is none.
        shapes: full shapes of its tensors by name; for tied ones, of the first.
        integers: the names of those that are not of a floating-point dtype, such as counters of batches.
        tied: the names of tied tensors that are left out, with the one that represents them.
        published: mapping of its tensors to published ones; None where it is not known.
    """

    kind: str
    factory: str
    config: ModelConfig | None
    fields: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    integers: frozenset[str]
    tied: Mapping[str, str]
    published: Alternatives | None

    @classmethod
    def of(cls, model: nn.Module, factory: str = "") -> WholeModel:
        """Describe a model that nothing has changed yet, and that may be on the meta device."""
        shapes: dict[str, tuple[int, ...]] = {}
        integers: set[str] = set()
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if first.setdefault(id(tensor), name) == name:
                shapes[name] = tuple(tensor.shape)
                if not tensor.is_floating_point():
                    integers.add(name)
            else:
                tied[name] = first[id(tensor)]
        config: Any = getattr(model, "config", None)
        own = config if type(model).__module__.startswith("legoai.specs.models.") else None
        builtin = own if has_map(own) else None
        found: Alternatives | None = None
        fields: dict[str, Any] = {}
        if own is not None:
            found, fields = None if builtin is None else partial(published, builtin), nearest_config(own)
        elif type(model).__module__.startswith("transformers.") and config is not None:
            found, fields = published_by_transformers(model), config.to_dict()
        return cls(
            kind=type(model).__name__,
            factory=factory,
            config=builtin,
            fields=fields,
            shapes=shapes,
            integers=frozenset(integers),
            tied=tied,
            published=found,
        )
