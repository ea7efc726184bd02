"""`shard`: rules about which style or placement fits which module and parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import by_rule, general, span_of
from legoai.dsl.analysis.facts import is_within, listed
from legoai.dsl.analysis.layouts.tensors import as_list
from legoai.dsl.analysis.model import without_tied_embeddings
from legoai.dsl.analysis.parallelism.shard import (
    DISTRIBUTING,
    Placement,
    inputs_of,
    is_never_called,
    last_module,
    outputs_of,
    placement,
    shard_on_tp,
)
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Partial, Replicated, Sharded
from legoai.specs.directives.shard import (
    Colwise,
    Experts,
    Heads,
    Inputs,
    Outputs,
    Rowwise,
    SequenceStyle,
    Shard,
    Shared,
    conversions,
)
from legoai.specs.units import counted

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo

_PLACEMENTS = (Replicated, Sharded, Partial)
_WHOLE_MODULES = ("model", "block", "attention", "feed_forward", "moe", "container")


class StyleMisplaced(Check):
    """A style on a module of a kind that does not support it.

    `colwise` and `rowwise` shard the weight of a linear layer or an embedding; `sequence` runs a norm or dropout on
    shards of the sequence; `heads` runs a norm over each head; `shared` is for a module without parameters, whose
    result all heads use; `inputs` and `outputs` convert a module's inputs and outputs, so the module must be called;
    `experts` belongs to the experts of a mixture-of-experts layer, on `ep`.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { layers.*.attention_norm = colwise }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise
    }
    ```
    """

    code = "LP407"
    slug = "style-misplaced"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for shard in analysis.plan.shard:
            axis = shard.axes[0]
            for rule, paths in by_rule(analysis, shard):
                if isinstance(rule.treatment, _PLACEMENTS):
                    continue
                wrong = [(path, self._reason(analysis.manifest, path, rule.treatment, axis)) for path in paths]
                found = [(path, reason) for path, reason in wrong if reason is not None]
                if found:
                    path, (message, help) = found[0]
                    more = len({general(analysis.manifest, other) for other, _ in found}) - 1
                    yield self.at(
                        span_of(rule),
                        f"`{rule.treatment.name}` {message.format(path=f'`{general(analysis.manifest, path)}`')}",
                        label=f"this path, and {more} more that it matches" if more else "this path",
                        help=[help],
                    )

    @staticmethod
    def _reason(manifest: Manifest, path: str, style: Any, axis: str) -> tuple[str, str] | None:
        """Return the problem and its remedies; None where the style fits."""
        if isinstance(style, Experts) != (axis == "ep"):
            if isinstance(style, Experts):
                return "moves experts on `ep`, not on `tp`", "write `shard on ep { … = experts }`"
            return "cannot be on `ep`, which takes `experts`", "write the rule under `shard on tp`"
        if path not in manifest.modules:
            kind = "`shard(0)`, `shard(1)` or `replicate`"
            return "is for a module, and {path} is a parameter", f"a parameter takes a placement: {kind}"
        info = manifest.modules[path]
        what = f"{{path}} is {_article(info)}"
        if isinstance(style, Experts):
            if info.kind != "experts":
                return f"is for the experts of a mixture-of-experts layer, and {what}", _experts_help(manifest)
        elif isinstance(style, Colwise | Rowwise):
            if info.kind not in ("linear", "embedding"):
                return (
                    f"cuts a linear layer or an embedding, and {what}",
                    "name the layers inside of it, or another style",
                )
        elif isinstance(style, Heads):
            if info.kind != "norm":
                return f"is for norms over each head, and {what}", "name the norms of its queries and keys"
        elif isinstance(style, Shared):
            if any(item.parameters for name, item in manifest.modules.items() if is_within(name, path)):
                return f"is for a module without parameters, and {what}", "name the module whose result all heads use"
            if is_never_called(manifest, path):
                return "is for the result of a call, and {path} is never called", "name the modules inside of it"
        elif isinstance(style, SequenceStyle):
            if info.kind in ("embedding", "convolution", "experts", *_WHOLE_MODULES):
                return (
                    f"is for norms, dropout and linear layers, and {what}",
                    "name its norms, or use `inputs` for what it receives",
                )
        elif is_never_called(manifest, path):
            return f"converts the {style.name} of a call, and {{path}} is never called", "name the modules inside of it"
        return None


def _article(info: ModuleInfo) -> str:
    kind = info.kind.replace("_", "-").replace("linear", "linear layer").replace("moe", "mixture-of-experts layer")
    noun = f"`{info.class_name}`" if info.kind == "other" else kind
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _experts_help(manifest: Manifest) -> str:
    found = {general(manifest, path) for path, info in manifest.modules.items() if info.kind == "experts"}
    return f"the model's experts are {listed(sorted(found))}" if found else "the model has no experts"


class PlacementMisplaced(Check):
    """A raw placement on a module, on `ep`, or one that the parameter's shape does not allow.

    A module needs a style, which also determines the layouts of its input and output. A placement, `shard(dim)` or
    `replicate`, is for a parameter by its full name, and its dim must be one of the parameter's. Placements are for
    `tp`: on `ep`, `experts` places all parameters of its module.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { layers.*.feed_forward.w1 = shard(0) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise
    }
    ```
    """

    code = "LP408"
    slug = "placement-misplaced"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for shard in analysis.plan.shard:
            for rule, paths in by_rule(analysis, shard):
                if not isinstance(rule.treatment, _PLACEMENTS):
                    continue
                if shard.axes[0] == "ep":
                    yield self.at(
                        span_of(rule),
                        f"`{_written(rule)}` cannot be on `ep`, which takes `experts`",
                        label="placed on `ep`",
                        help=[
                            "write the rule under `shard on tp`; on `ep` all other parameters are whole on each rank",
                            _experts_help(analysis.manifest),
                        ],
                    )
                    continue
                modules = [path for path in paths if path in analysis.manifest.modules]
                if modules:
                    first = general(analysis.manifest, modules[0])
                    yield self.at(
                        span_of(rule),
                        f"`{_written(rule)}` is the placement of a parameter, and `{first}` is a module",
                        label="a module",
                        help=["give the module a style, or name its parameter: " + self._example(analysis, modules[0])],
                    )
                    continue
                yield from self._twice(analysis, shard, rule, paths)
                if isinstance(rule.treatment, Sharded):
                    yield from self._dims(analysis, rule, rule.treatment.dim, paths)

    def _twice(
        self, analysis: Analysis, shard: Shard, rule: PathRule[Any], paths: Sequence[str]
    ) -> Iterator[Diagnostic]:
        assert analysis.manifest is not None
        winners = analysis.assigned(shard).by_path
        for path in paths:
            styled = winners.get(path.rpartition(".")[0])
            if styled is not None and isinstance(styled.treatment, DISTRIBUTING):
                yield self.at(
                    span_of(rule),
                    f"`{styled.treatment.name}` places `{general(analysis.manifest, path)}` already",
                    label="a second placement",
                    others=[Label(span_of(styled), "places all parameters of its module")],
                    help=["keep one of the two"],
                )
                return

    @staticmethod
    def _example(analysis: Analysis, path: str) -> str:
        assert analysis.manifest is not None
        info = analysis.manifest.modules[path]
        names = [f"`{general(analysis.manifest, info.child_path(item.name))}`" for item in info.parameters]
        return names[0] if names else "it has none of its own"

    def _dims(self, analysis: Analysis, rule: PathRule[Any], dim: int, paths: list[str]) -> Iterator[Diagnostic]:
        assert analysis.manifest is not None
        for path in paths:
            module, _, name = path.rpartition(".")
            shape = next(item.shape for item in analysis.manifest.modules[module].parameters if item.name == name)
            if not -len(shape) <= dim < len(shape):
                text = " · ".join(map(str, shape))
                yield self.at(
                    span_of(rule),
                    f"`{general(analysis.manifest, path)}` has no dim {dim}: its shape is {text}",
                    label=f"a parameter of {len(shape)} dim{'s' * (len(shape) > 1)}",
                    help=[f"legal dims are 0 to {len(shape) - 1}, or -1 to -{len(shape)}"],
                )
                return


def _written(rule: PathRule[Any]) -> str:
    treatment = rule.treatment
    return f"shard({treatment.dim})" if isinstance(treatment, Sharded) else str(treatment.name)


class LayoutCount(Check):
    """Lists of layouts for different tensors, or for more than there are.

    `inputs` and `outputs` take one layout for the first tensor, or a list with an entry for each; `none` and missing
    entries at the end leave a tensor unchanged. `from` and `to` must have entries for the same tensors.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention = inputs(from = [shard(1), none, none], to = [replicate, none, none])
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention              = inputs(from = [replicate, none], to = [replicate, none])
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise
    }
    ```
    """

    code = "LP410"
    slug = "layout-count"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for shard in analysis.plan.shard:
            for rule in shard.rules:
                for style in conversions(rule.treatment):
                    yield from self._halves(analysis, style)
        yield from self._against_the_model(analysis)

    def _halves(self, analysis: Analysis, style: Inputs | Outputs) -> Iterator[Diagnostic]:
        source, target = as_list(style.source), as_list(style.target)
        if len(source) != len(target):
            yield self.at(
                analysis.span_of(style, "target"),
                f"`from` gives {counted(len(source), 'layout')} and `to` {len(target)}",
                label=f"{len(target)} of {len(source)}",
                others=[Label(analysis.span_of(style, "source"), counted(len(source), "layout"))],
                help=["give one for each tensor in both, `none` to leave a tensor as it is"],
            )
        elif any((left == "none") != (right == "none") for left, right in zip(source, target, strict=True)):
            yield self.at(
                analysis.span_of(style, "target"),
                "a tensor has a layout on one side and `none` on the other",
                label="`from` and `to` speak of different tensors",
                others=[Label(analysis.span_of(style, "source"), "on this side")],
                help=["write `none` on both sides, or a layout on both"],
            )

    def _against_the_model(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for shard in analysis.plan.shard:
            for rule, paths in by_rule(analysis, shard):
                for style in conversions(rule.treatment):
                    yield from self._counted(analysis, analysis.manifest, style, paths)

    def _counted(
        self, analysis: Analysis, manifest: Manifest, style: Inputs | Outputs, paths: Sequence[str]
    ) -> Iterator[Diagnostic]:
        if not isinstance(style.source, tuple):
            return
        given = len(style.source)
        for path in paths:
            info = manifest.modules.get(path)
            count = _arity(info, style) if info is not None else 0
            if info is not None and count and given > count:
                names = f": {listed(inputs_of(info))}" if style.name == "inputs" else ""
                yield self.at(
                    analysis.span_of(style, "source"),
                    f"`{general(manifest, path)}` has {counted(count, style.name[:-1])}{names}",
                    label=counted(given, "layout"),
                    help=["give one layout for the first, or a list with one for each"],
                )
                return


def _arity(info: ModuleInfo, style: Inputs | Outputs) -> int:
    """Return how many tensors the module takes or returns; 0 where its manifest does not show it."""
    return outputs_of(info) if isinstance(style, Outputs) else len(inputs_of(info))


class LossParallelMisplaced(Check):
    """`loss_parallel` on a layer that does not compute the logits, or whose output does not stay sharded.

    It keeps the logits sharded over the vocabulary, and the loss is computed on the shards. That is possible
    for the layer whose output is the model's, and its output stays `shard(-1)`.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { layers.*.feed_forward.w1 = colwise(loss_parallel = true) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { output = colwise(loss_parallel = true) }
    ```
    """

    code = "LP413"
    slug = "loss-parallel-misplaced"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        shard = analysis.plan.shard_on("tp")
        if analysis.manifest is None or shard is None:
            return
        last = last_module(analysis.manifest)
        for rule, paths in by_rule(analysis, shard):
            style = rule.treatment
            if not isinstance(style, Colwise) or not style.loss_parallel:
                continue
            wrong = [path for path in paths if path != last]
            if wrong and (last is not None or analysis.manifest.modules[""].flow):
                yield self.at(
                    analysis.span_of(style, "loss_parallel"),
                    f"`{general(analysis.manifest, wrong[0])}` does not compute the logits",
                    label="not the last layer",
                    help=[f"the model's last layer is `{last}`"] if last is not None else [],
                )
            elif style.output is not None and not (isinstance(style.output, Sharded) and style.output.dim in (-1, 2)):
                yield self.at(
                    analysis.span_of(style, "output"),
                    "with `loss_parallel` the logits stay sharded over the vocabulary: `shard(-1)`",
                    label="another layout",
                    others=[Label(analysis.span_of(style, "loss_parallel"), "computes the loss on the shards")],
                    help=["leave `output` out, or `loss_parallel`"],
                )


class TiedPlacements(Check):
    """A parameter that two modules share, placed differently at each.

    A tied parameter is one tensor, and has one placement. An embedding by rows (`rowwise`) and an output
    layer by columns (`colwise`) both cut the vocabulary, so they may share their weight.

    ## Example
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 1024)
    mesh  (dp_shard = 16, tp = 2)
    shard on tp { output = colwise(loss_parallel = true) }
    ```

    ## Use instead
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 1024)
    mesh  (dp_shard = 16, tp = 2)
    shard on tp {
      tok_embeddings = rowwise(input = replicate)
      output         = colwise(loss_parallel = true)
    }
    ```
    """

    code = "LP416"
    slug = "tied-placements"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None or shard_on_tp(analysis) is None:
            return
        for group in analysis.manifest.tied_parameters:
            first, *others = ((path, placement(analysis, path)) for path in group)
            for path, other in others:
                yield from self._different(analysis, first, (path, other))

    def _different(
        self, analysis: Analysis, first: tuple[str, Placement], second: tuple[str, Placement]
    ) -> Iterator[Diagnostic]:
        (path, one), (second_path, other) = first, second
        anchor = other.rule or one.rule
        if one.is_like(other) or anchor is None:
            return
        here, there = one.describe(other), other.describe(one)
        both = one.rule is not None and other.rule is not None
        yield self.at(
            analysis.rule_span(anchor),
            f"`{path}` and `{second_path}` are one parameter, but the one is {here} and the other {there}",
            label="places the shared parameter here",
            others=[Label(analysis.rule_span(one.rule), here)] if both and one.rule is not None else [],
            help=[
                "`rowwise` for an embedding and `colwise` for the output layer both cut the vocabulary",
                f"or give the model an output layer of its own ({without_tied_embeddings(analysis)})",
            ],
        )
