"""Manifest of a model, readable without torch: modules, shapes, heads, experts, repeated blocks and data flow.

The `Manifest` of a built-in model is computed from its dimensions (`legoai.specs.models.manifests.computed.builtin`).
That of another model is made by running its constructor and its forward on the meta device in a subprocess
(`legoai.specs.models.inspect`), and cached. `load_manifest` finds or makes it and never imports torch.

    manifest = load_manifest(ModelSource(kind="builtin", target="llama3", preset="8b"), base_directory=".")
    manifest.modules["layers.0.attention.wq"].attributes["out_features"]   # 4096
    [list.path for list in manifest.block_lists]                           # ["layers"]

`manifest.modules` maps every path of `named_modules()`, in that order, to a `ModuleInfo`; the model itself is
`""`. Looking one up costs microseconds: equal blocks are stored once and expanded on demand.

A module that computes with its children has a *flow*: the steps of its forward, first its own inputs
(`op == "input"`), then in order of execution each call of a descendant (`op == "call"`, `name` is its path relative
to the module) and each tensor operation that lies on the way from inputs and parameters to the outputs. A
step lists the earlier steps whose results it takes, so that a layout can be followed from module to module:

    0 input x    1 input rope    2 call attention_norm (0)    3 call attention (2, 1)    4 add (0, 3) ...

Every text and number here is data about a model; nothing in a manifest is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from legoai.specs.models.config_checks import Scalar
from legoai.specs.models.manifests.attention_call import AttentionCall, calls_from
from legoai.specs.models.manifests.block_list import BlockList
from legoai.specs.models.manifests.changes import NO_CHANGES, ChangesByDtype, changes_from
from legoai.specs.models.manifests.counted_places import NO_PLACES, CountedPlaces, places_from
from legoai.specs.models.manifests.feature_use import FeatureUse
from legoai.specs.models.manifests.host_draws import draws_from
from legoai.specs.models.manifests.left_on_meta import left_from
from legoai.specs.models.manifests.mixed_dtypes import mixed_from
from legoai.specs.models.manifests.shapes import Shape, shape_from
from legoai.specs.models.reads import Reads, Tokens, reads_from

FORMAT = 30
"""Version of the serialised form; a cached manifest of another version is recreated."""

ModuleKind = Literal[
    "model", "block", "attention", "feed_forward", "moe", "experts", "linear", "embedding", "norm", "convolution",
    "container", "other",
]  # fmt: skip
"""What a module is: `model` is the root, `block` an element of a list of repeated blocks, `container` a list,
dictionary or sequence of modules, `moe` a routed feed-forward and `experts` its stacked experts."""

StepOp = Literal[
    "input",
    "parameter",
    "buffer",
    "call",
    "add",
    "mul",
    "matmul",
    "attention",
    "activation",
    "normalize",
    "softmax",
    "reduce",
    "reshape",
    "index",
    "cast",
    "other",
]
"""Operation of a step of a flow. `add` is any sum or difference, `mul` any product or quotient, `reshape` anything that
only rearranges elements, `index` anything that selects, gathers or scatters."""

ManifestErrorKind = Literal[
    "factory_not_found",
    "factory_raised",
    "not_a_module",
    "timeout",
    "transformers_missing",
    "config_missing",
    "config_invalid",
    "unknown_architecture",
    "inspection_failed",
]


class ManifestError(ValueError):
    """A model could not be inspected.

    Attributes:
        kind: what went wrong; see `ManifestErrorKind`.
        message: one sentence for the author of a plan.
        detail: one line more, such as where in the factory it went wrong; may be empty.
    """

    def __init__(self, kind: ManifestErrorKind, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.kind: ManifestErrorKind = kind
        self.message = message
        self.detail = detail


class TensorInfo(NamedTuple):
    """A parameter or buffer that belongs to a module directly."""

    name: str
    shape: tuple[int, ...]
    frozen: bool = False
    """Of a parameter: whether the model's constructor leaves it without a gradient (`requires_grad_(False)`)."""
    dtype: str = ""
    """Of a parameter: its dtype, such as `complex64`, where it is not one of real floating-point numbers."""
    contiguous: bool = True
    """Of a parameter: whether torch calls it contiguous (`is_contiguous()`)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Step(NamedTuple):
    """One step of a module's forward; see the module docstring."""

    op: StepOp
    name: str
    """`input`: the argument's name; `parameter`, `buffer`: its name; `call`: the descendant's path relative to the
    module; otherwise the torch function's name."""
    inputs: tuple[int, ...]
    """Indices of the earlier steps whose results are its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """One module of a model."""

    path: str
    """Name in `named_modules()`; `""` is the model itself."""
    class_name: str
    kind: ModuleKind
    parameters: tuple[TensorInfo, ...]
    """Parameters that belong to the module directly, in order of registration. A tied parameter is listed at
    each of its places; see `Manifest.tied_parameters`."""
    buffers: tuple[TensorInfo, ...]
    attributes: Mapping[str, Scalar]
    """What the kind gives meaning to. `linear`: in_features, out_features, bias; hooks; result_use, what forward does
    with the model's result before it returns it. `embedding`: num_embeddings, embedding_dim; max_norm, sparse and
    scale_grad_by_freq where set, also of an `nn.EmbeddingBag`. `norm`: dim, eps; synchronised, of an
    `nn.SyncBatchNorm`. `attention`: n_heads, n_kv_heads, head_dim; v_head_dim where values have another width,
    rope_head_dim where some features are rotated, those of keys shared by all heads. `moe`: n_experts, top_k.
    `experts`: n_experts. `convolution`: in_channels, out_channels. `other`: recurrent, of an `nn.RNNBase`. `model`:
    calls_compiled, where forward calls what its author compiles. A name is absent when it could not be told."""
    children: tuple[str, ...]
    """Names of the direct children, in order of registration."""
    position: int
    """Index among the parent's children; 0 for the model itself."""
    inputs: tuple[str, ...]
    """Names of the arguments that forward received by position, in order; empty when it was never called."""
    keyword_inputs: tuple[str, ...]
    """Names of the tensor arguments that forward received by keyword."""
    flow: tuple[Step, ...]
    """Steps of forward; empty for modules without children that compute nothing of their own kind to follow, such
    as a linear layer, and for modules that were never called."""
    outputs: tuple[int, ...]
    """Indices of the steps whose results forward returned."""
    random: bool = False
    """Whether forward itself, without its children, draws random numbers in training, as dropout with p > 0 does."""
    mixes_tokens: str = ""
    """The first function, other than attention, with which forward itself combines tokens of a sequence; noted for
    models of other authors that take positions."""
    places: CountedPlaces = NO_PLACES
    """What forward counts, from the length of what it is given."""
    feature_uses: tuple[FeatureUse, ...] = ()
    """Operations on some or all features of a linear layer; noted, as `takes` is, for models of other authors."""
    attention_calls: tuple[AttentionCall, ...] = ()
    """Calls of scaled dot-product attention in forward itself, each once; noted likewise."""
    trains_all_tokens: bool = False
    """Whether a linear layer takes all tokens in one call, and gives both gradients back; noted likewise."""
    changes: ChangesByDtype = NO_CHANGES
    """What is changed in place; noted for models of other authors."""
    changed_parameters: tuple[str, ...] = ()
    """Parameters that forward itself changes: names relative to the module, or whole paths of those not below it."""
    assigned: tuple[str, ...] = ()
    """Attributes of modules that its call assigns, with its hooks and modules inside; names as `changed_parameters`."""
    backward_hooks: bool = False
    """Whether hooks are called with the gradients of its results or inputs."""
    torch_forward: bool = False
    """Whether a module with children computes by a forward of `torch.nn`; noted for models of other authors."""
    takes: Shape | None = None
    """Shape of the first argument, if that is one tensor whose lengths are multiples of the samples and tokens; like
    `gives` noted for models of other authors that read tokens, and there for all modules but those inside of blocks."""
    gives: Shape | None = None
    """Shape of the result, likewise."""

    def child_path(self, name: str) -> str:
        """Path of the descendant that is called `name` relative to this module."""
        return f"{self.path}.{name}" if self.path else name


class _Template:
    """The part of a manifest that equal modules share: everything but the path."""

    __slots__ = ("_places", "children", "fields")

    def __init__(self, raw: Mapping[str, Any]) -> None:
        frozen, dtypes, strided = raw.get("frozen", ()), raw.get("dtypes", {}), raw.get("strided", ())
        self.fields: dict[str, Any] = {
            "class_name": raw["class"],
            "kind": raw["kind"],
            "parameters": tuple(
                TensorInfo(name, tuple(shape), name in frozen, dtypes.get(name, ""), name not in strided)
                for name, shape in raw["parameters"]
            ),
            "buffers": tuple(TensorInfo(name, tuple(shape)) for name, shape in raw["buffers"]),
            "attributes": raw["attributes"],
            "inputs": tuple(raw["inputs"]),
            "keyword_inputs": tuple(raw["keyword_inputs"]),
            "flow": tuple(Step(op, name, tuple(inputs)) for op, name, inputs in raw["flow"]),
            "outputs": tuple(raw["outputs"]),
            "random": raw.get("random", False),
            "mixes_tokens": raw.get("mixes_tokens", ""),
            "places": places_from(raw.get("places")),
            "feature_uses": tuple(FeatureUse(*use) for use in raw.get("feature_uses", ())),
            "attention_calls": calls_from(raw.get("attention_calls", ())),
            "changes": changes_from(raw.get("changes")),
            "changed_parameters": tuple(raw.get("changed_parameters", ())),
            "assigned": tuple(raw.get("assigned", ())),
            "backward_hooks": raw.get("backward_hooks", False),
            "trains_all_tokens": raw.get("trains_all_tokens", False),
            "torch_forward": raw.get("torch_forward", False),
            "takes": shape_from(raw.get("takes")),
            "gives": shape_from(raw.get("gives")),
        }
        # A child is [name, template], a run of equal ones with consecutive numbers [first, last, template].
        self.children: list[tuple[str, int]] = []
        for child in raw["children"]:
            if len(child) == 2:
                self.children.append((child[0], child[1]))
            else:
                self.children += [(str(number), child[2]) for number in range(child[0], child[1] + 1)]
        self.fields["children"] = tuple(name for name, _ in self.children)


class _Modules(Mapping[str, ModuleInfo]):
    """Paths in `named_modules()` order to module information, expanded from templates on demand."""

    def __init__(self, raw_templates: list[Mapping[str, Any]], root: int) -> None:
        self._raw = raw_templates
        self._templates: dict[int, _Template] = {}
        self._root = root
        self._made: dict[str, ModuleInfo] = {}

    def _template(self, number: int) -> _Template:
        if number not in self._templates:
            self._templates[number] = _Template(self._raw[number])
        return self._templates[number]

    def _find(self, path: str) -> tuple[int, int] | None:
        """Template number and position among siblings of the module at `path`."""
        return self._places.get(path)

    def template_of(self, path: str) -> int:
        """Number of the template that the module at `path` shares with its equals."""
        found = self._find(path)
        if found is None:
            raise KeyError(path)
        return found[0]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Template number and position among siblings of every path, in order."""
        below: dict[int, list[tuple[str, tuple[int, int]]]] = {}

        def collect(number: int) -> list[tuple[str, tuple[int, int]]]:
            if number not in below:
                paths: list[tuple[str, tuple[int, int]]] = []
                for position, (name, child) in enumerate(self._template(number).children):
                    paths.append((name, (child, position)))
                    paths += [(f"{name}.{rest}", place) for rest, place in collect(child)]
                below[number] = paths
            return below[number]

        return {"": (self._root, 0), **dict(collect(self._root))}

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        return tuple(self._places)

    def parameter_paths(self) -> Iterator[str]:
        """Every parameter's path, in the order of the modules."""
        for path, (number, _) in self._places.items():
            for parameter in self._template(number).fields["parameters"]:
                yield f"{path}.{parameter.name}" if path else parameter.name

    def __getitem__(self, path: str) -> ModuleInfo:
        made = self._made.get(path)
        if made is None:
            found = self._find(path)
            if found is None:
                raise KeyError(path)
            number, position = found
            made = ModuleInfo(path=path, position=position, **self._template(number).fields)
            self._made[path] = made
        return made

    @cached_property
    def _all(self) -> dict[str, ModuleInfo]:
        return {path: self[path] for path in self._places}

    def items(self) -> ItemsView[str, ModuleInfo]:
        """Every path with its module; the mapping's own view would look each of them up again."""
        return self._all.items()

    def values(self) -> ValuesView[ModuleInfo]:
        """Every module, in the order of the paths."""
        return self._all.values()

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._find(path) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class Manifest:
    """A model's modules, shapes, repeated blocks and data flow."""

    state: str = ""
    """Digest of all that is known to determine a model of another author; set by the cache that it is read from."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """Read the serialised form, `raw`, of a manifest.

        Raises:
            ValueError: `raw` is not a manifest of this `FORMAT`.
        """
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"expected a model manifest of format {FORMAT}")
        try:
            self._raw, self._modules = raw, _Modules(raw["templates"], raw["root"])
            self.source: str = raw["source"]
            """The model as a plan writes it, such as `llama3("8b")`."""
            self.model_class: str = raw["model_class"]
            """Dotted name of the model's class."""
            self.parameter_count: int = raw["parameter_count"]
            """Number of elements of all parameters; a tied parameter counts once."""
            self.tied_parameters: tuple[tuple[str, ...], ...] = tuple(tuple(group) for group in raw["tied"])
            """Groups of parameter paths that are one parameter, each in order of `named_parameters()`."""
            self.shared_modules: tuple[tuple[str, ...], ...] = tuple(tuple(group) for group in raw["shared"])
            """Groups of paths that lead to one module with parameters, of which :attr:`modules` has the first."""
            self.unfilled: tuple[str, ...] = tuple(raw["unfilled"])
            """Parameters and buffers that neither the constructor nor a method of their module or the model fills."""
            self.updated: tuple[str, ...] = tuple(raw["updated"])
            """Buffers that the model's forward changes in training, apart from tables that it computes."""
            self.updated_unsaved: tuple[str, ...] = tuple(raw.get("updated_unsaved", ()))
            """Those of :attr:`updated` that are not saved with the model."""
            self.mixed_dtypes = mixed_from(raw.get("mixed_dtypes", ()))
            """Operators that get tensors of two dtypes where parameters are in half precision, in order."""
            self.attribute_reads: tuple[tuple[str, str, str], ...] = tuple(map(tuple, raw.get("attribute_reads", ())))
            """Modules around blocks, one of equal ones, with one inside and the attribute of that which they read."""
            self.step_changes: str | None = raw.get("step_changes")
            """What differs between the steps of a training, or None; only looked for where that was asked for."""
            self.sparse_gradients: tuple[str, ...] = tuple(raw.get("sparse_gradients", ()))
            """Parameters for which forward asks a sparse gradient."""
            self.graph_break: tuple[str, str] | None = tuple(raw["graph_break"]) if "graph_break" in raw else None
            """A module whose own forward reads a value, so that it is not compiled as one graph, and torch's reason."""
            self.left_on_meta = left_from(raw.get("left_on_meta", {}))
            self.host_draws = draws_from(raw.get("host_draws"))
            self.vocab_size: int | None = raw["vocab_size"]
            self.max_seq_len: int | None = raw["max_seq_len"]
            """Longest sequence the model's positions allow, in tokens."""
            self.reads: Reads | None = None if raw["reads"] is None else reads_from(raw["reads"])
            """Inputs and outputs of forward; None for a class of `transformers` whose training is not known."""
            self.forward: tuple[str, ...] = tuple(raw["forward"])
            """Names of the parameters of the model's forward, without `self`."""
            self.flow_error: str | None = raw["flow_error"]
            """Why forward could not be followed, or None. If set, flows and inputs may be missing."""
            self.shaped_by: str | None = raw.get("shaped_by")
            """The function at which that failed, such as `bincount`, if the shape of its result depends on values."""
            self.unfit_result: str | None = raw["unfit_result"]
            """Why the loss cannot be computed from what forward returns, or None."""
            self.block_lists: tuple[BlockList, ...] = tuple(self._block_list(path) for path in raw["blocks"])
            """Containers of repeated blocks, outermost only, in order."""
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"damaged model manifest: {error!r}") from error

    @property
    def modules(self) -> Mapping[str, ModuleInfo]:
        """Every module by path, in `named_modules()` order; the model itself is `""`."""
        return self._modules

    @property
    def reads_tokens(self) -> bool:
        """Whether forward takes one sequence of token ids, as far as is known; unknown inputs are refused as such."""
        return self.reads is None or isinstance(self.reads, Tokens)

    def template_of(self, path: str) -> int:
        """A number that the module at `path` shares with those that are equal to it but for their paths."""
        return self._modules.template_of(path)

    def parameter_paths(self) -> Iterator[str]:
        """Yield the path of every parameter, as :meth:`parameters` does but without making the modules."""
        yield from self._modules.parameter_paths()

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the path and shape of every parameter, each place of a tied one included."""
        for module in self._modules.values():
            for parameter in module.parameters:
                yield module.child_path(parameter.name), parameter.shape

    def is_shared(self, path: str) -> bool:
        """Whether the module at ``path`` has parameters and other places too."""
        return any(path == group[0] for group in self.shared_modules)

    def repeats(self, path: str) -> bool:
        """Whether the module at ``path`` holds a child, one with parameters, that it or another holds already."""
        return any(place.rpartition(".")[0] == path for group in self.shared_modules for place in group[1:])

    def to_json(self) -> str:
        """Write the compact serialised form; equal manifests give equal text."""
        return json.dumps(self._raw, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read the result of `to_json`.

        Raises:
            ValueError: the text is not a manifest of this `FORMAT`.
        """
        return cls(json.loads(text))

    def _block_list(self, path: str) -> BlockList:
        names = self._modules[path].children
        groups: dict[int, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(self._modules.template_of(f"{path}.{name}" if path else name), []).append(index)
        return BlockList(path=path, names=names, groups=tuple(tuple(group) for group in groups.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self._raw == other._raw

    def __hash__(self) -> int:
        return hash((self.source, self.parameter_count))

    def __repr__(self) -> str:
        return f"Manifest({self.source}, {len(self.modules)} modules, {self.parameter_count:,} parameters)"
