"""Propagation of layouts on `tp` through a model's forward, and the conflicts between neighbouring modules.

The forward is followed along the manifest's flow. Every tensor is replicated, sharded along a dim, partial (a summand),
or unknown. A style determines the layout in which a module expects its input and that of its output, as the style
classes of ``torch.distributed.tensor.parallel`` do. The layout of each input is compared with the expected one. Where
the flow cannot be followed a layout is unknown, and nothing is reported about it. Equal blocks with equal input layouts
are followed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from legoai.dsl.analysis.layouts.draws import drawn_on_pieces
from legoai.dsl.analysis.layouts.operations import MismatchKind, operation
from legoai.dsl.analysis.layouts.tensors import (
    ANY,
    DTENSOR,
    PLAIN,
    UNKNOWN,
    Source,
    Tensor,
    agrees,
    as_list,
    cut_dim,
    layout_of,
    matched,
    tensor_of,
)
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Layout, Partial, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Experts, Heads, Inputs, Outputs, Rowwise, SequenceStyle, Shared
from legoai.specs.record import Record, replace

if TYPE_CHECKING:
    from legoai.specs.models.manifests.feature_use import FeatureUse
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, Step

PLACEABLE: Final = ("linear", "embedding", "norm")
"""Kinds of modules that compute on DTensors, so that a plan can place their parameters individually."""


class Mismatch(Record, kw_only=True):
    """A conflict of layouts.

    | kind | what happens at ``path`` |
    |---|---|
    | `arrives` | the input has the layout ``got`` where ``wanted`` is expected |
    | `unpaired` | the same, and the remedy is the missing half of a pair of `colwise` and `rowwise` |
    | `piece` | a shard meets full parameters or ``other``, computed from such: their gradients are of the shard only |
    | `summand` | partial tensors meet an operation that is not linear in them, or a full tensor |
    | `mixed` | ``got`` and ``other`` are added or multiplied, and have different layouts |
    | `heads` | attention where only some of queries, keys and values are sharded by heads, or where the sequence is |
    | `attends` | attention of DTensors, which its kernels for a CPU do not support |
    | `fused` | the output of a fused layer is split although each rank has one contiguous shard of it |
    | `over_shard` | an operation over all features, such as their mean, takes the shard ``got`` of them |
    | `norm_dim` | a sequence style shards the dim over which its norm is taken, or that its layer multiplies |
    | `norm_heads` | `sequence` on a norm over the heads of each rank, or `heads` on one over something else |
    | `shared` | a result whose gradient is summed over ranks meets no heads of a rank, or is none that all ranks have |
    | `plain` | a DTensor meets a plain tensor, or a module whose weights are plain tensors |
    | `drawn` | random numbers, as of dropout, are drawn for the shard ``got``, the same on every rank |
    | `counted` | ``got``, a shard of the sequence, meets ``other``, which counts places by the length of a tensor |
    | `result` | the model's output is sharded, or a DTensor |
    """

    kind: MismatchKind
    path: str
    rule: PathRule[Any] | None
    """The consumer's rule, if it has a style."""
    got: Tensor
    wanted: Layout | None = None
    other: Tensor | None = None


class Propagation:
    """Follows one forward of the model under the styles given by module and parameter path."""

    def __init__(self, manifest: Manifest, styles: Mapping[str, PathRule[Any]]) -> None:
        self.manifest = manifest
        self.styles = dict(styles)
        self.mismatches: list[Mismatch] = []
        self.cuts_sequence = False
        """Whether some module expects or leaves a tensor cut along dim 1, the sequence."""
        self.arrived: dict[str, Tensor] = {}
        """Layout of the first argument of each block, and of each called module around the blocks."""
        self.mixtures: dict[str, Tensor] = {}
        """Layout of what each mixture of experts takes, of equal blocks in the first."""
        self._memo: dict[tuple[Any, ...], Tensor] = {}
        self._template = {
            f"{blocks.path}.{blocks.names[index]}" if blocks.path else blocks.names[index]: (blocks.path, number)
            for blocks in manifest.block_lists
            for number, group in enumerate(blocks.groups)
            for index in group
        }
        """For each block a key that equal blocks share."""
        self._below: dict[tuple[str, int], list[str]] = {}

    def run(self) -> list[Mismatch]:
        """Follow the forward from the model's inputs, which are replicated, to its output."""
        self.result(self._apply("", self.given(), whole=True))
        return self.mismatches

    def given(self) -> list[Tensor]:
        """The model's inputs, whole on every rank."""
        rank = 2 if self.manifest.vocab_size is not None else None
        return [Tensor(state="replicate", rank=rank) for step in self.manifest.modules[""].flow if step.op == "input"]

    def _find(
        self,
        kind: MismatchKind,
        path: str,
        got: Tensor,
        *,
        rule: PathRule[Any] | None = None,
        wanted: Layout | None = None,
        other: Tensor | None = None,
    ) -> Tensor:
        self.mismatches.append(Mismatch(kind=kind, path=path, rule=rule, got=got, wanted=wanted, other=other))
        return UNKNOWN

    def _call(self, path: str, arguments: Sequence[Tensor]) -> Tensor:
        """Return the result of calling the module, reused from an equal call where there was one."""
        if arguments:
            self.arrived[path] = arguments[0]
        if path not in self._template:
            return self._apply(path, arguments)
        key = (self._signature(path), *arguments, *(item.learned for item in arguments))
        held = self._memo.get(key)
        if held is None:
            held = self._memo[key] = self._apply(path, arguments)
        return held

    def _signature(self, path: str) -> tuple[Any, ...]:
        """Return a key that is equal for blocks with equal results for equal inputs: their structure and rules."""
        template = self._template[path]
        if template not in self._below:
            self._below[template] = [name[len(path) :] for name in (path, *self._inside(path))]
        return (template, *(id(self.styles.get(f"{path}{name}")) for name in self._below[template]))

    def _inside(self, path: str) -> list[str]:
        """The paths of all parameters and modules below the module."""
        info = self.manifest.modules[path]
        found = [info.child_path(item.name) for item in info.parameters]
        for name in info.children:
            child = info.child_path(name)
            found += [child, *self._inside(child)]
        return found

    def _apply(self, path: str, arguments: Sequence[Tensor], *, whole: bool = False) -> Tensor:
        arguments = self.entering(path, arguments)
        info = self.manifest.modules[path]
        if info.kind == "moe":
            self.mixtures[path] = _first(arguments)
        rule = self.styles.get(path)
        treatment = rule.treatment if rule is not None else None
        shared = next((item for item in arguments if item.shared), None)
        if shared is not None and info.parameters:
            return self._find("shared", path, shared, rule=rule)
        placed = {item.name: info.child_path(item.name) for item in info.parameters}
        rules = {name: self.styles[below] for name, below in placed.items() if below in self.styles}
        if rules:
            result = self._placed(info, rules, _first(arguments))
        elif rule is not None and isinstance(treatment, Colwise | Rowwise) and info.kind in ("linear", "embedding"):
            result = self._cut_layer(info, rule, treatment, _first(arguments))
        elif rule is not None and isinstance(treatment, SequenceStyle):
            result = self._sequence(info, rule, treatment, _first(arguments))
        elif rule is not None and isinstance(treatment, Heads):
            result = self._heads(info, rule, _first(arguments))
        elif rule is not None and isinstance(treatment, Shared):
            result = self._shared(info, rule, arguments)
        elif isinstance(treatment, Experts | Colwise | Rowwise | Replicated | Sharded | Partial):
            result = UNKNOWN  # a style that does not fit the module, or that belongs to another axis
        elif info.flow:
            result = self._flow(info, arguments, whole=whole)
        else:
            result = self._leaf(info, _first(arguments))
        return self.leaving(path, arguments, result)

    def entering(self, path: str, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the layouts of a module's arguments inside it, after its own rule."""
        rule = self.styles.get(path)
        if rule is None or not isinstance(rule.treatment, Inputs):
            return arguments
        return self._inputs(self.manifest.modules[path], rule, rule.treatment, arguments)

    def leaving(self, path: str, arguments: Sequence[Tensor], result: Tensor) -> Tensor:
        """Return the layout of a module's result, after its own rule; ``arguments`` are those inside."""
        info = self.manifest.modules[path]
        rule = self.styles.get(path)
        if result.state == "unknown" and self._is_whole(path, arguments):
            result = Tensor(state="replicate", moved=True, source=Source(path, rule), learned=result.learned)
        if info.kind in ("attention", "feed_forward", "moe"):
            given = _first(arguments)
            if not result.cuts_features:
                # Such a module returns a tensor of its input's shape, even if it rearranges it internally.
                result = replace(result, moved=given.moved, rank=given.rank, width=given.width or result.width)
            elif result.rank is None and not (result.moved or given.moved):
                result = replace(result, rank=given.rank)  # a part of the features has as many dims as all of them
        treatment = rule.treatment if rule is not None else None
        leaving = treatment.then if isinstance(treatment, Inputs) else treatment
        if rule is not None and isinstance(leaving, Outputs):
            result = self._outputs(info, rule, leaving, result)
        return result

    def _is_whole(self, path: str, arguments: Sequence[Tensor]) -> bool:
        """Whether nothing inside is placed, and all inputs are plain and replicated: then so is the result."""
        if not arguments or any(item.state not in ("replicate", "any") or item.wrapped for item in arguments):
            return False
        return bool(path) and not any(inside in self.styles for inside in self._inside(path))

    def _cut_layer(self, info: ModuleInfo, rule: PathRule[Any], style: Colwise | Rowwise, got: Tensor) -> Tensor:
        """A linear layer or an embedding under `colwise` or `rowwise`."""
        embeds = info.kind == "embedding"
        rowwise = isinstance(style, Rowwise)
        default: Layout = Sharded(dim=-1) if rowwise and not embeds else Replicated()
        wanted = style.input if style.input is not None else default
        if got.moved and got.cuts_features and got.width == info.attributes.get("in_features"):
            got = replace(got, moved=False)  # heads laid side by side again
        self._arrives(info, rule, got, wanted, written=style.input is not None)
        leaves: Layout = Replicated() if rowwise else Sharded(dim=-1)
        if style.output is not None:
            leaves = style.output
        rank = got.rank + embeds if got.rank is not None and not got.moved else _rank_of_result(info)
        width = info.attributes.get("embedding_dim" if embeds else "out_features")
        like = Tensor(state="any", rank=rank, width=int(width) if width is not None else None)
        self._note(wanted, leaves)
        in_loss = isinstance(style, Colwise) and style.loss_parallel
        made = tensor_of(leaves, like, Source(info.path, rule), wrapped=in_loss)
        return replace(made, learned=made.state == "replicate")

    def _sequence(self, info: ModuleInfo, rule: PathRule[Any], style: SequenceStyle, got: Tensor) -> Tensor:
        layout = Sharded(dim=style.dim)
        self._note(layout)
        if info.kind == "norm" and got.moved and got.cuts_features and not got.wrapped:
            return self._find("norm_heads", info.path, got, rule=rule)
        rank = got.rank if not got.moved else None if info.kind == "norm" else 2  # at least rows of features
        if info.parameters and rank is not None and style.dim >= rank - 1:
            return self._find("norm_dim", info.path, got, rule=rule, wanted=layout)
        self._arrives(info, rule, got, layout, written=False)
        return tensor_of(layout, got, Source(info.path, rule), wrapped=not style.local)

    def _heads(self, info: ModuleInfo, rule: PathRule[Any], got: Tensor) -> Tensor:
        """A norm over each head, of which a rank has some."""
        size = info.attributes.get("dim")
        of_heads = got.width is None or size is None or int(size) < got.width
        if got.state == "unknown" and not got.wrapped:
            return UNKNOWN
        if got.wrapped or not (got.cuts_features and got.moved and of_heads):
            return self._find("norm_heads", info.path, got, rule=rule)
        return replace(got, source=Source(info.path, rule))

    def _shared(self, info: ModuleInfo, rule: PathRule[Any], arguments: Sequence[Tensor]) -> Tensor:
        """A module whose result is for all heads: computed from whole, plain tensors."""
        other = next((item for item in arguments if item.wrapped or item.state in ("shard", "partial")), None)
        if other is not None:
            return self._find("shared", info.path, other, rule=rule)
        return replace(PLAIN, shared=True, source=Source(info.path, rule))

    def _placed(self, info: ModuleInfo, rules: Mapping[str, PathRule[Any]], got: Tensor) -> Tensor:
        """A module with individually placed parameters: plain and replicated in and out, or DTensors in and out."""
        first = next(iter(rules.values()))
        if info.kind not in PLACEABLE or (got.state == "unknown" and not got.wrapped):
            return UNKNOWN
        if not got.wrapped and got.state in ("shard", "partial"):
            return self._find("arrives", info.path, got, rule=first, wanted=Replicated())
        source = Source(info.path, first)
        if not got.wrapped:
            return self._whole(info, got, source)
        weight = rules.get("weight")
        dims = {"weight": 2 if info.kind != "norm" else 1}
        cut = {name: cut_dim(rule.treatment, dims.get(name, 1)) for name, rule in rules.items()}
        dim = cut.get("weight") if weight is not None else None
        biased = any(item.name == "bias" for item in info.parameters)
        known: Layout | None = None
        if info.kind == "norm":
            if not any(item is not None for item in cut.values()) and not got.cuts_features:
                known = layout_of(got)
        elif info.kind == "linear" and (not biased or cut.get("bias") == dim):
            if got.state == "replicate" and not got.moved and dim in (None, 0):
                known = Replicated() if dim is None else Sharded(dim=-1)
            elif got.cuts_features and not got.moved and dim == 1 and not biased:
                known = Partial()
            elif got.state == "shard" and not got.cuts_features and dim is None:
                known = layout_of(got)
        elif info.kind == "embedding" and got.state == "replicate" and dim in (None, 1):
            known = Replicated() if dim is None else Sharded(dim=-1)
        if known is None:
            return replace(DTENSOR, source=source)
        return tensor_of(known, self._whole(info, got, source), source, wrapped=True)

    def _whole(self, info: ModuleInfo, got: Tensor, source: Source) -> Tensor:
        """The plain result of a layer with replicated weights, for a replicated input."""
        width = info.attributes.get({"linear": "out_features", "embedding": "embedding_dim"}.get(info.kind, "dim"))
        wide = int(width) if width is not None else None
        whole = Tensor(state="replicate", rank=got.rank, width=wide, wrapped=False, source=source, learned=True)
        if info.kind == "embedding":
            return replace(whole, rank=got.rank + 1 if got.rank is not None else _rank_of_result(info))
        return replace(whole, moved=got.moved if info.kind in ("linear", "norm") else True)

    def _inputs(self, info: ModuleInfo, rule: PathRule[Any], style: Inputs, given: Sequence[Tensor]) -> list[Tensor]:
        names = [*info.inputs, *info.keyword_inputs]
        steps = [step.name for step in info.flow if step.op == "input"]
        arguments = list(matched(given, steps, UNKNOWN) if steps else given)
        for name, source, target in zip(names, as_list(style.source), as_list(style.target), strict=False):
            if isinstance(source, str) or isinstance(target, str):
                continue
            place = steps.index(name) if name in steps else 0 if not steps else None
            if place is None or place >= len(arguments):
                continue
            got = arguments[place]
            self._note(source, target)
            self._arrives(info, rule, got, source, written=True)
            taken = tensor_of(target, got, Source(info.path, rule), wrapped=not style.local)
            arguments[place] = replace(taken, learned=got.learned)
        return arguments

    def _outputs(self, info: ModuleInfo, rule: PathRule[Any], style: Outputs, got: Tensor) -> Tensor:
        source, target = as_list(style.source)[0], as_list(style.target)[0]
        if isinstance(source, str) or isinstance(target, str):
            return got
        self._note(source, target)
        self._arrives(info, rule, got, source, written=True)
        return tensor_of(target, got, Source(info.path, rule), wrapped=False)

    def _note(self, *layouts: Layout) -> None:
        self.cuts_sequence |= any(isinstance(item, Sharded) and item.dim == 1 for item in layouts)

    def _arrives(self, info: ModuleInfo, rule: PathRule[Any], got: Tensor, wanted: Layout, *, written: bool) -> None:
        if agrees(got, wanted) is not False or (got.wrapped and not written):
            return
        # Half a pair: a rowwise layer after replicated features, or a colwise layer after sharded ones.
        behind = got.state == "replicate" and isinstance(rule.treatment, Rowwise) and info.kind == "linear"
        kind: MismatchKind = "unpaired" if behind and not written else "arrives"
        self._find(kind, info.path, got, rule=rule, wanted=wanted)

    def _leaf(self, info: ModuleInfo, got: Tensor) -> Tensor:
        """A module without style and without children."""
        if got.state == "unknown":
            return self._find("plain", info.path, got) if got.wrapped and info.parameters else got
        if not info.parameters:
            if got.wrapped and got.state not in ("any", "replicate"):
                return replace(DTENSOR, source=got.source)
            return got if got.state in ("any", "replicate") else UNKNOWN
        if got.state == "partial":
            return self._find("summand", info.path, got)
        if got.state == "shard":
            return self._leaf_on_shard(info, got)
        if got.wrapped:
            return self._find("plain", info.path, got)
        return self._whole(info, got, Source(info.path, None))

    def _leaf_on_shard(self, info: ModuleInfo, got: Tensor) -> Tensor:
        if info.kind == "linear" and got.cuts_features:
            fits = got.moved and got.width != info.attributes.get("in_features")
            return UNKNOWN if fits else self._find("unpaired", info.path, got, wanted=Replicated())
        if info.kind == "norm" and got.cuts_features and not got.moved:
            return self._find("arrives", info.path, got, wanted=Replicated())
        if info.kind in ("linear", "norm", "embedding"):
            return self._find("piece", info.path, got)
        return UNKNOWN

    def _flow(self, info: ModuleInfo, arguments: Sequence[Tensor], *, whole: bool) -> Tensor:
        """Return the result of a module that computes with its children; unknown where they differ."""
        pending = iter(matched(arguments, [step.name for step in info.flow if step.op == "input"], UNKNOWN))
        made: list[Tensor] = []
        uses: dict[int, list[FeatureUse]] = {}
        for use in info.feature_uses:
            uses.setdefault(use.step, []).append(use)
        found: set[tuple[int, str]] = set()
        for place, step in enumerate(info.flow):
            taken, of_step = [made[index] for index in step.inputs], uses.get(place, [])
            features = [made[use.whole] for use in of_step]
            if features and all(item.cuts_features and not item.moved and not item.wrapped for item in features):
                made.append(self._of_pieces(info, of_step[0], features[0], found))
            elif step.op == "input":
                made.append(next(pending))
            elif step.op == "call":
                made.append(self._call(info.child_path(step.name), taken))
            else:
                made.append(self.operation(info, step, taken))
            if made[-1].state == "any" and (dims := info.places.dims_of(place)):  # what a style cuts was counted whole
                made[-1] = replace(made[-1], counted=dims)
        for path, piece in drawn_on_pieces(self.manifest, self.styles, info, made):
            self._find("drawn", path, piece, rule=self.styles.get(path))
        results = [made[index] for index in info.outputs]
        if not results:
            return UNKNOWN
        return results[0] if whole or all(item == results[0] for item in results) else UNKNOWN

    def _of_pieces(self, info: ModuleInfo, use: FeatureUse, got: Tensor, found: set[tuple[int, str]]) -> Tensor:
        """Return the result of an operation on features of which each rank has a contiguous piece."""
        if use.used == "each":
            return replace(got, moved=True, width=None)
        if (use.whole, use.used) not in found:
            self._find("fused" if use.used == "part" else "over_shard", info.path, got)
        found.add((use.whole, use.used))
        return UNKNOWN

    def operation(self, info: ModuleInfo, step: Step, taken: list[Tensor]) -> Tensor:
        """Return the result of a step of a module's own flow, neither an input nor a call, given its arguments."""
        if step.op not in ("parameter", "buffer"):
            return operation(info.path, step, taken, self._find)
        path = info.child_path(step.name)
        if path.rpartition(".")[0] not in self.manifest.modules:
            return UNKNOWN  # of a module that is not below this one
        own = ANY if self._is_single(path) else PLAIN
        distributing = self._distributing(path) if "." in step.name else None
        if distributing is not None:  # of a module that is not called, whose style would convert what it takes
            return replace(DTENSOR, source=Source(path.rpartition(".")[0], distributing))
        if path in self.styles:
            return UNKNOWN
        return replace(own, learned=step.op == "parameter", source=Source(info.path, None))

    def _distributing(self, path: str) -> PathRule[Any] | None:
        """The rule that makes a parameter a DTensor; None where none does."""
        module = path.rpartition(".")[0]
        style = self.styles.get(module)
        if style is not None and isinstance(style.treatment, Colwise | Rowwise | SequenceStyle | Heads):
            return style
        info = self.manifest.modules[module]
        beside = (self.styles.get(info.child_path(item.name)) for item in info.parameters)
        return next((rule for rule in beside if rule is not None), None)

    def module(self, path: str, arguments: Sequence[Tensor]) -> Tensor:
        """The result of a module by the rules for it and inside of it."""
        return self._apply(path, arguments)

    def result(self, tensor: Tensor) -> None:
        """Look at the model's output."""
        rule = tensor.source.rule if tensor.source is not None else None
        treatment = rule.treatment if rule is not None else None
        in_loss = isinstance(treatment, Colwise) and treatment.loss_parallel and tensor.cuts_features
        if (tensor.state in ("shard", "partial") or tensor.wrapped) and not in_loss:
            self._find("result", "", tensor)

    def _is_single(self, path: str) -> bool:
        """Whether the parameter or buffer has one element, which PyTorch accepts beside a DTensor."""
        module, _, name = path.rpartition(".")
        info = self.manifest.modules[module]
        return any(item.name == name and item.numel == 1 for item in (*info.parameters, *info.buffers))


def _rank_of_result(info: ModuleInfo) -> int | None:
    """The number of dims that a module was seen to return; None where that is not known."""
    return len(info.gives) if info.gives is not None else None


def _first(arguments: Sequence[Tensor]) -> Tensor:
    return arguments[0] if arguments else UNKNOWN
