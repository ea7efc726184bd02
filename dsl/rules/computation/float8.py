"""`precision`: rules about float8 and mxfp8 for linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens
from legoai.dsl.analysis.facts import below, decided, following, grouped, is_within, listed, name_of
from legoai.dsl.analysis.parallelism.float8 import converted_layers, gathered_activations, gathered_weights
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.compile import AotEager, Inductor
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.directives.shard import Colwise, Rowwise


class DeviceHasFloat8(Check):
    """A float8 or mxfp8 rule on a device without such matrix products.

    ## Example
    ```
    cluster a100_sxm80(hosts = 4, fabric = infiniband_hdr)
    precision { layers.*.feed_forward.* = float8 }
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    precision { layers.*.feed_forward.* = float8 }
    ```
    """

    code = "LP611"
    slug = "float8-not-on-device"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision, device = analysis.plan.precision, analysis.device
        if device is None:
            return
        for rule in precision.rules:
            treatment = rule.treatment
            lacks_float8 = isinstance(treatment, Float8) and not device.features.float8
            lacks_mxfp8 = isinstance(treatment, MxFp8) and not device.features.mxfp8
            if not (lacks_float8 or lacks_mxfp8):
                continue
            assert rule.origin.span is not None
            needs = "8.9" if lacks_float8 else "10.0"
            yield self.at(
                rule.origin.span,
                f"`{device.name}` has no {treatment.name} matrix products; they need compute capability {needs}",
                label=f"`{treatment.name}` is not on this device",
                others=[Label(analysis.span_of(analysis.plan.cluster, "device"), f"`{device.name}`")],
                help=[f"devices that have them: {_devices_with(treatment.name)}"],
            )


def _devices_with(feature: str) -> str:
    from legoai.specs.cluster import device, device_names

    return listed([name for name in device_names() if getattr(device(name).features, feature)], limit=8)


class Float8OnLinear(Check):
    """A float8 rule whose path matches no linear layer.

    Only linear layers are converted, so the rule has no effect.

    ## Example
    ```
    precision { layers.*.feed_forward = float8 }
    ```

    ## Use instead
    ```
    precision { layers.*.feed_forward.* = float8 }
    ```
    """

    code = "LP612"
    slug = "float8-not-linear"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest = analysis.manifest
        for rule, paths in grouped(following(analysis, analysis.plan.precision, (Float8, MxFp8)).items()):
            assert manifest is not None
            if any(manifest.modules[path].kind == "linear" for path in paths):
                continue
            inside = [path for path in manifest.modules if any(below(path, held) for held in paths)]
            linear = next((path for path in inside if manifest.modules[path].kind == "linear"), None)
            assert rule.path_origin.span is not None
            kind = manifest.modules[paths[0]].kind
            yield self.at(
                rule.path_origin.span,
                f"`{rule.path}` matches no linear layer, so nothing is computed in {rule.treatment.name}",
                label=f"`{name_of(paths[0])}` is of kind {kind}",
                help=[f"linear layers inside of it have paths such as `{linear}`"] if linear else [],
            )


class Float8Sizes(Check):
    """A float8 layer whose sizes are no multiples of 16, or of 32 for mxfp8.

    A layer with k inputs, n outputs and t tokens multiplies over k in forward, over n for the gradient of its input and
    over t for that of its weight. `torch._scaled_mm` accepts only multiples of 16, and an mxfp8 scale covers 32
    numbers. The sizes are those of a rank's shard under tensor parallelism.

    ## Example
    ```
    mesh (dp_shard = 4, tp = 8)
    shard on tp { output = colwise(output = replicate) }
    precision { output = float8 }
    model llama3("8b", vocab_size = 128200)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 4, tp = 8)
    shard on tp { output = colwise(output = replicate) }
    precision { output = float8 }
    model llama3("8b")
    ```
    """

    code = "LP613"
    slug = "float8-sizes"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        for rule, linear in grouped(converted_layers(analysis).items()):
            assert rule.origin.span is not None
            multiple = 32 if isinstance(rule.treatment, MxFp8) else 16
            tokens = local_tokens(plan)
            if tokens % multiple:
                yield self.at(
                    rule.origin.span,
                    f"{rule.treatment.name} needs a multiple of {multiple} tokens, not a micro batch of {tokens}",
                    label=f"{tokens} is no multiple of {multiple}",
                    others=[Label(analysis.span_of(plan.batch, "micro_batch"), f"{plan.batch.micro_batch} sequences")],
                    help=["change the micro batch or the length of sequences"],
                )
            seen: set[tuple[str, int]] = set()
            for path in linear:
                for noun, size in _sizes(analysis, path):
                    if size % multiple == 0 or (noun, size) in seen:
                        continue
                    seen.add((noun, size))
                    yield self.at(
                        rule.origin.span,
                        f"{rule.treatment.name} needs multiples of {multiple}; `{path}` has {size} {noun} on a rank",
                        label=f"{size} is no multiple of {multiple}",
                        others=[Label(analysis.span_of(plan.mesh, "tp"), f"`tp` = {plan.mesh.tp}")]
                        if plan.mesh.tp > 1
                        else [],
                        help=["leave the layer in high precision with `none`, or shard it less"],
                    )


def _sizes(analysis: Analysis, path: str) -> Iterator[tuple[str, int]]:
    """The input and output features of a linear layer on one rank of `tp`."""
    assert analysis.manifest is not None
    attributes = analysis.manifest.modules[path].attributes
    cut = _tensor_parallel_cut(analysis, path)
    for noun in ("in", "out"):
        size = attributes.get(f"{noun}_features")
        if isinstance(size, int):
            yield f"{noun}put features", size // analysis.plan.mesh.tp if cut == noun else size


def _tensor_parallel_cut(analysis: Analysis, path: str) -> str | None:
    """Whether `shard on tp` cuts a linear layer by its `in` or `out` features."""
    shard = analysis.plan.shard_on("tp")
    if shard is None:
        return None
    decided(shard)
    winners = analysis.assigned(shard).by_path
    style = winners[path].treatment if path in winners else None
    if isinstance(style, Colwise | Rowwise):
        return "out" if isinstance(style, Colwise) else "in"
    raw = winners.get(f"{path}.weight")
    if raw is not None and isinstance(raw.treatment, Sharded):
        return "out" if raw.treatment.dim in (0, -2) else "in"
    return None


class Float8Gather(Check):
    """Float8 layers for which something is gathered in float8, with more than one scale for a tensor.

    Rows of a weight, or of activations, are on different ranks, so torchao casts before it gathers only if one scale is
    shared by all ranks.

    ## Example
    ```
    mesh (dp_shard = rest)
    fsdp blocks on dp_shard
    precision { layers.*.feed_forward.* = float8(rowwise, gather = [weights]) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = rest)
    fsdp blocks on dp_shard
    precision { layers.*.feed_forward.* = float8(gather = [weights]) }
    ```
    """

    code = "LP619"
    slug = "float8-gather"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for rule in analysis.plan.precision.rules:
            treatment = rule.treatment
            if not isinstance(treatment, Float8) or not treatment.gather or treatment.recipe == "tensorwise":
                continue
            assert rule.origin.span is not None
            yield self.at(
                rule.origin.span,
                f"what is cast with the scales of `{treatment.recipe}` cannot be gathered in float8",
                label="more than one scale for a tensor",
                help=["write `float8(tensorwise, …)`, or leave `gather` out"],
            )


_HELP: Final = {"activations": ("all that take the input of one module must be such layers, for it to be cast",)}


class Float8GatherWithoutEffect(Check):
    """Float8 layers for which nothing is gathered that could be cast.

    `fsdp` gathers weights where it shards them over more than one rank. `shard on tp` gathers the input of a
    column-wise layer, and the gradient of a row-wise layer's output. A module that gathers its input for several layers
    casts it if all its readers are such layers.

    ## Example
    ```
    mesh (dp_shard = rest)
    fsdp blocks on dp_shard
    precision { layers.*.feed_forward.* = float8(gather = [weights, activations]) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = rest)
    fsdp blocks on dp_shard
    precision { layers.*.feed_forward.* = float8(gather = [weights]) }
    ```
    """

    code = "LP620"
    slug = "float8-gather-without-effect"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        found = {"weights": gathered_weights(analysis), "activations": gathered_activations(analysis)}
        for rule, linear in grouped(converted_layers(analysis).items()):
            treatment = rule.treatment
            if not isinstance(treatment, Float8) or treatment.recipe != "tensorwise":
                continue
            for what in dict.fromkeys(treatment.gather):
                left = [path for path in linear if path not in found[what]]
                if not left:
                    continue
                assert rule.origin.span is not None
                by = "`fsdp` on several ranks" if what == "weights" else "styles on `tp` that gather for them"
                yield self.at(
                    rule.origin.span,
                    f"no {what} of `{left[0]}` are gathered in float8",
                    label=f"{len(left)} of {len(linear)} layers are not under {by}",
                    help=[f"leave `{what}` out of `gather`, or state what gathers them", *_HELP.get(what, ())],
                )


class Float8WithoutCompile(Check):
    """Float8 layers that are not compiled.

    Scaling and casting are many small kernels. Compiled they melt into the neighbours; eager they usually
    cost more than float8 saves.

    ## Example
    ```
    precision { layers.*.feed_forward.* = float8 }
    ```

    ## Use instead
    ```
    precision { layers.*.feed_forward.* = float8 }
    compile { layers.* = inductor }
    ```
    """

    code = "LP821"
    slug = "float8-without-compile"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if is_traced(analysis):
            return
        compiled = following(analysis, plan.compile, (Inductor, AotEager))
        for rule, linear in grouped(converted_layers(analysis).items()):
            eager = [path for path in linear if not any(is_within(path, held) for held in compiled)]
            if eager:
                assert rule.origin.span is not None
                yield self.at(
                    rule.origin.span,
                    f"{len(eager)} {rule.treatment.name} {'layers are' if eager[1:] else 'layer is'} not "
                    "compiled, and casting eagerly is slow",
                    label=f"`{eager[0]}` runs eagerly",
                    help=["compile the blocks that hold them: `compile { layers.* = inductor }`"],
                )
