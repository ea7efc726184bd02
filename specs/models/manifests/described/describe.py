"""Manifest of a model that was built on the meta device."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from legoai.specs.models.config_checks import Scalar
from legoai.specs.models.first_values import FirstValues, unfilled_by
from legoai.specs.models.manifests.counted_places import raw_places
from legoai.specs.models.manifests.described.flow import Call
from legoai.specs.models.manifests.described.followed import Followed, follow, reads_of, require_positions_for_inputs
from legoai.specs.models.manifests.described.recorders.shape_recorder import outside_of_blocks
from legoai.specs.models.manifests.manifest import FORMAT, Manifest, ModuleKind
from legoai.specs.models.reads import Tokens, described
from legoai.specs.models.torch_internals import BatchNorm, Dropout, has_backward_hooks, has_hooks

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WITHOUT_FLOW: tuple[ModuleKind, ...] = ("linear", "embedding", "norm", "convolution")

# Attribute names in model code for the figures of a manifest; the first match is used.
_N_HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head", "nhead")
_N_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "n_kv_head")
_HEAD_DIM = ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "d_head")
_V_HEAD_DIM = ("v_head_dim",)
_ROPE_HEAD_DIM = ("rope_head_dim", "qk_rope_head_dim")
_WIDTH = ("dim", "hidden_size", "n_embd", "d_model", "embed_dim")
_N_EXPERTS = ("n_experts", "num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("top_k", "num_experts_per_tok", "n_experts_per_token", "moe_top_k")
_VOCAB_SIZE = ("vocab_size", "n_vocab")
_MAX_SEQ_LEN = ("max_seq_len", "max_position_embeddings", "n_positions", "block_size", "max_seq_length")


def describe(
    model: nn.Module,
    source: str,
    first_values: FirstValues | None = None,
    *,
    shapes: bool = False,
    steps: bool = False,
) -> Manifest:
    """Return the manifest of a model on the meta device, by running its forward there.

    Args:
        model: on the meta device. Forward gets `model.example_inputs()` where that exists, else inputs by `reads`.
        source: the model as a plan writes it.
        first_values: from its constructor; without, all parameters are assumed to be initialised.
        shapes: whether to note uses of features, and by another forward of another size the shapes that modules take
            and give.
        steps: whether to note what differs between the steps of a training.

    Raises:
        ManifestError: the model's `reads` is invalid, or its forward does not take by position what that states.
    """
    require_positions_for_inputs(model)
    unfilled = [] if first_values is None else _unfilled(model, first_values)
    paths = {module: path for path, module in model.named_modules()}
    blocks = [paths[block] for container in _block_lists(model) for block in container.children()]
    is_staged = shapes and isinstance(reads_of(model), Tokens)  # it may be, by a pipeline
    noted = outside_of_blocks(model, blocks) if is_staged else {}
    outside = {above for path in blocks for above in _above(path)}
    routed = [module for module in model.modules() if _experts(module) is not None or _holds_experts(module)]
    hooked = () if first_values is None else first_values.hooked
    followed = follow(model, noted, routed, outside if is_staged else (), outside, steps=steps)
    return _Describer(model, followed, shapes=shapes).manifest(source, unfilled, hooked)


def _unfilled(model: nn.Module, first_values: FirstValues) -> list[str]:
    """Return parameters and buffers for which `legoai.runtime.initialize.materialize` would find no value."""
    by_model: Any = model.initialise_module if hasattr(type(model), "initialise_module") else None
    found = []
    for path, module in model.named_modules():
        for tensors, method in ((module._parameters, "reset_parameters"), (module._buffers, "init_buffers")):
            if hasattr(type(module), method) and (by_model is None or method == "init_buffers"):
                continue
            left = []
            for name, tensor in tensors.items():
                whole = f"{path}.{name}" if path else name
                if tensor is not None and not first_values.holds(whole, tensor.shape):
                    left.append(name)
            if left and by_model is not None:
                left = unfilled_by(by_model, path, module, left)
            found += [f"{path}.{name}" if path else name for name in left]
    return found


class _Describer:
    def __init__(self, model: nn.Module, followed: Followed, *, shapes: bool) -> None:
        self.model = model
        self.shapes = shapes
        self.followed = followed
        self.paths = {module: path for path, module in model.named_modules()}
        self.block_lists = _block_lists(model)
        self.blocks = {child for container in self.block_lists for child in container.children()}
        self.templates: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}

    def manifest(self, source: str, unfilled: list[str], hooked: tuple[str, ...]) -> Manifest:
        root = self._template(self.model)
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        reads = reads_of(self.model)
        raw = {
            "format": FORMAT,
            "source": source,
            "model_class": f"{type(self.model).__module__}.{type(self.model).__qualname__}",
            "parameter_count": sum(parameter.numel() for parameter in self.model.parameters()),
            "reads": None if reads is None else described(reads),
            "vocab_size": _integer(_VOCAB_SIZE, self.model, config) or self._embedded_vocabulary(),
            # Relative positions reach any distance, whatever length a config names.
            "max_seq_len": None if _relative(config) else _integer(_MAX_SEQ_LEN, self.model, config),
            "forward": list(inspect.signature(self.model.forward).parameters),
            "flow_error": self.followed.error,
            "unfit_result": self.followed.unfit,
            "unfilled": unfilled,
            "updated": list(self.followed.updated),
            "tied": self._tied(),
            "shared": list(self._shared()),
            "blocks": [self.paths[container] for container in self.block_lists],
            "templates": self.templates,
            "root": root,
        }
        if self.shapes and self.followed.mixed_dtypes:
            raw["mixed_dtypes"] = self.followed.mixed_dtypes
        if hooked or self.followed.plain_tensors:
            raw["left_on_meta"] = {"hooked": hooked, "tensors": self.followed.plain_tensors}
        if self.followed.attribute_reads:
            raw["attribute_reads"] = self.followed.attribute_reads
        if self.followed.step_changes is not None:
            raw["step_changes"] = self.followed.step_changes
        if self.followed.updated_unsaved:
            raw["updated_unsaved"] = list(self.followed.updated_unsaved)
        if self.followed.sparse_gradients:
            raw["sparse_gradients"] = self.followed.sparse_gradients
        if self.followed.graph_break is not None:
            raw["graph_break"] = self.followed.graph_break
        if self.followed.shaped_by is not None:
            raw["shaped_by"] = self.followed.shaped_by
        if self.followed.host_draws is not None:
            raw["host_draws"] = self.followed.host_draws
        # Through JSON, so that a fresh manifest equals one that was stored.
        return Manifest.from_json(json.dumps(raw))

    def _template(self, module: nn.Module) -> int:
        """Number of the template of a module; equal modules share one."""
        children: list[list[Any]] = []
        for name, child in module._modules.items():
            path = f"{self.paths[module]}.{name}" if self.paths[module] else name
            if child is not None and self.paths[child] == path:
                _append_child(children, name, self._template(child))
        kind = self._kind(module)
        call = self.followed.calls.get(self.paths[module], Call(inputs=(), keyword_inputs=()))
        followed = not (kind in _WITHOUT_FLOW and not children)
        raw: dict[str, Any] = {
            "class": type(module).__name__,
            "kind": kind,
            "parameters": [[name, list(p.shape)] for name, p in module._parameters.items() if p is not None],
            "buffers": [[name, list(b.shape)] for name, b in module._buffers.items() if b is not None],
            "attributes": self._attributes(module, kind),
            "inputs": call.inputs,
            "keyword_inputs": call.keyword_inputs,
            "flow": [[step.op, step.name, step.inputs] for step in call.flow] if followed else [],
            "outputs": call.outputs if followed else [],
            "children": children,
        }
        frozen = [name for name, p in module._parameters.items() if p is not None and not p.requires_grad]
        if frozen:
            raw["frozen"] = frozen
        other = {name: p.dtype for name, p in module._parameters.items() if p is not None and not p.is_floating_point()}
        if other:
            raw["dtypes"] = {name: str(dtype).removeprefix("torch.") for name, dtype in other.items()}
        strided = [name for name, p in module._parameters.items() if p is not None and not p.is_contiguous()]
        if strided:
            raw["strided"] = strided
        if call.random or (isinstance(module, Dropout) and module.p > 0):
            raw["random"] = True
        pieces = self.followed.pieces
        if self.paths[module] in pieces.mixing:
            raw["mixes_tokens"] = pieces.mixing[self.paths[module]]
        steps = self.followed.counted_steps.get(self.paths[module], {}) if self.shapes and followed else {}
        if places := raw_places(pieces.places(self.paths[module], steps)):
            raw["places"] = places
        if self.shapes and self.paths[module] in self.followed.changes:
            raw["changes"] = self.followed.changes[self.paths[module]]
        prefix = f"{self.paths[module]}." if self.paths[module] else ""
        for name, by_module in (
            ("changed_parameters", self.followed.changed_parameters),
            ("assigned", self.followed.assigned),
        ):
            if found := by_module.get(self.paths[module]):
                raw[name] = [path.removeprefix(prefix) for path in found]
        if has_backward_hooks(module):
            raw["backward_hooks"] = True
        if self.shapes and children and _is_of_torch(type(module)):
            raw["torch_forward"] = True
        if self.shapes and followed and call.feature_uses:
            raw["feature_uses"] = call.feature_uses
        if self.paths[module] in self.followed.layers_of_all_tokens:
            raw["trains_all_tokens"] = True
        if self.shapes and call.attention_calls:
            raw["attention_calls"] = call.attention_calls
        for name, shape in zip(("takes", "gives"), self.followed.shapes.get(self.paths[module], ()), strict=False):
            if shape is not None:
                raw[name] = shape
        text = json.dumps(raw)
        if text not in self.numbers:
            self.numbers[text] = len(self.templates)
            self.templates.append(raw)
        return self.numbers[text]

    def _kind(self, module: nn.Module) -> ModuleKind:
        name = type(module).__name__
        if module is self.model:
            return "model"
        if module in self.blocks:
            return "block"
        for kind, types in _KIND_OF_TYPE.items():
            if isinstance(module, types):
                return kind
        if name.endswith("Norm"):
            return "norm"
        if _experts(module) is not None:
            return "moe"
        if _holds_experts(module):
            return "experts"
        if re.search(r"attention|attn", name, re.IGNORECASE):
            return "attention"
        if re.search(r"feedforward|mlp|ffn", name, re.IGNORECASE):
            return "feed_forward"
        return "container" if isinstance(module, _CONTAINERS) else "other"

    def _attributes(self, module: nn.Module, kind: ModuleKind) -> dict[str, Scalar]:
        config = getattr(module, "config", None)
        found: dict[str, Scalar | None] = {}
        if isinstance(module, nn.Linear):
            found = {
                "in_features": module.in_features,
                "out_features": module.out_features,
                "bias": module.bias is not None,
            }
            if has_hooks(module):
                found["hooks"] = True
            found["result_use"] = self.followed.result_uses.get(self.paths[module])
        elif isinstance(module, nn.RNNBase):
            found = {"recurrent": True}
        elif isinstance(module, nn.Embedding):
            found = {"num_embeddings": module.num_embeddings, "embedding_dim": module.embedding_dim}
        elif isinstance(module, _CONVOLUTIONS):
            found = {"in_channels": module.in_channels, "out_channels": module.out_channels}
        elif kind == "norm":
            weight = module._parameters.get("weight")
            eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
            found = {"dim": weight.numel() if weight is not None else None, "eps": eps}
            if isinstance(module, nn.SyncBatchNorm):
                found["synchronised"] = True
        elif kind == "attention":
            n_heads = _integer(_N_HEADS, module, config)
            width = _integer(_WIDTH, module, config)
            head_dim = _integer(_HEAD_DIM, module, config)
            found = {
                "n_heads": n_heads,
                "n_kv_heads": _integer(_N_KV_HEADS, module, config) or n_heads,
                "head_dim": head_dim or (width // n_heads if width and n_heads else None),
                "v_head_dim": _integer(_V_HEAD_DIM, module, config),
                "rope_head_dim": _integer(_ROPE_HEAD_DIM, module, config),
            }
        elif kind == "moe":
            holders = (module, *module.children(), config)
            found = {"n_experts": _integer(_N_EXPERTS, *holders), "top_k": _integer(_TOP_K, *holders)}
        elif kind == "experts":
            stacked = next((len(p) for p in module._parameters.values() if p is not None and p.ndim == 3), None)
            found = {"n_experts": _integer(_N_EXPERTS, module, config) or stacked}
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            chosen = {name: getattr(module, name) for name in ("max_norm", "sparse", "scale_grad_by_freq")}
            found |= {name: value for name, value in chosen.items() if value not in (None, False)}
        if module is self.model and self.followed.calls_compiled:
            found["calls_compiled"] = True
        return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str)}

    def _tied(self) -> list[list[str]]:
        places: dict[nn.Parameter, list[str]] = {}
        for module, path in self.paths.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
        return [group for group in places.values() if len(group) > 1]

    def _shared(self) -> Iterator[list[str]]:
        """Yield the paths of each module with parameters that several modules hold, without those inside of it."""
        places: dict[nn.Module, list[str]] = {}

        def visit(module: nn.Module, path: str) -> None:
            found = places.setdefault(module, [])
            found.append(path)
            if len(found) == 1:
                for name, child in module._modules.items():
                    if child is not None:
                        visit(child, f"{path}.{name}" if path else name)

        visit(self.model, "")
        for module, paths in places.items():
            if len(paths) > 1 and next(module.parameters(), None) is not None:
                yield paths

    def _embedded_vocabulary(self) -> int | None:
        """Size of the embedding that the model's first input goes to."""
        call = self.followed.calls.get("")
        for step in call.flow if call is not None else ():
            if step.op == "call" and step.inputs == (0,):
                module = self.model.get_submodule(step.name)
                return module.num_embeddings if isinstance(module, nn.Embedding) else None
        return None


_KIND_OF_TYPE: Mapping[ModuleKind, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "embedding": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, BatchNorm),
    "convolution": _CONVOLUTIONS,
    "attention": (nn.MultiheadAttention,),
}


def _append_child(children: list[list[Any]], name: str, template: int) -> None:
    """Add [name, template], or extend the last run [first, last, template] of consecutive numbers."""
    if name.isdecimal() and str(int(name)) == name:
        if children and len(children[-1]) == 3 and children[-1][1:] == [int(name) - 1, template]:
            children[-1][1] = int(name)
        else:
            children.append([int(name), int(name), template])
    else:
        children.append([name, template])


def _block_lists(model: nn.Module) -> list[nn.Module]:
    """Outermost containers whose elements are of one class and have children themselves."""
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        children = list(module.children())
        one_class = len({type(child) for child in children}) == 1
        if isinstance(module, _CONTAINERS) and one_class and all(child._modules for child in children):
            found.append(module)
            return
        for child in children:
            search(child)

    search(model)
    return found


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the modules around one, the model's own last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _is_of_torch(module_class: type[nn.Module]) -> bool:
    """Whether instances compute by a forward that `torch.nn` defines."""
    forward = module_class.forward
    return forward is not nn.Module.forward and str(getattr(forward, "__module__", "")).startswith("torch.nn.")


def _relative(config: Any) -> bool:
    """Whether attention adds a bias by distance, as that of T5 does."""
    return hasattr(config, "relative_attention_num_buckets")


def _experts(module: nn.Module) -> nn.Module | None:
    """Return the experts of a routed feed-forward."""
    return next((child for name, child in module._modules.items() if name == "experts"), None)


def _holds_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of experts."""
    return type(module).__name__.endswith("Experts")


def _integer(names: tuple[str, ...], *holders: object) -> int | None:
    """Return the first of `names` that the first possible of `holders` has as an integer."""
    for holder in holders:
        for name in names:
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if type(value) is int:
                return value
    return None
