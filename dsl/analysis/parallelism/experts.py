"""Experts on `ep`: the modules that contain them, and the ranks that hold the same experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.computation.precision import autocast_dtype, has_policy
from legoai.dsl.analysis.facts import decided, is_within, listed, name_of
from legoai.dsl.analysis.model import help_to_follow
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.mesh import replicating_axes, shard_ranks, sharded_axes
from legoai.dsl.analysis.parallelism.shard import tensor_parallel
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.shard import Experts

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo


@fact
def experts(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the modules that rules of `shard on ep` match: those that contain the experts of a layer.

    Raises:
        Undecided: a treatment is a hole.
    """
    shard, manifest = analysis.plan.shard_on("ep"), analysis.manifest
    if shard is None or manifest is None:
        return {}
    decided(shard)
    return {
        path: rule
        for path, rule in analysis.assigned(shard).by_path.items()
        if isinstance(rule.treatment, Experts) and path in manifest.modules and manifest.modules[path].kind == "experts"
    }


@fact
def distributed_experts(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the modules whose experts are distributed over ranks, with their rules."""
    return experts(analysis) if analysis.plan.mesh.ep > 1 else {}


@fact
def limited_experts(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the modules whose experts have a capacity, with their rules."""
    return {path: rule for path, rule in experts(analysis).items() if rule.treatment.capacity_factor is not None}


@fact
def changed_experts(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the modules whose forward a program changes: those distributed over ranks, and those with a capacity."""
    return {**distributed_experts(analysis), **limited_experts(analysis)}


@fact
def crosses_tp(analysis: Analysis) -> bool:
    """Whether different experts are on the ranks of `tp` too.

    Raises:
        Undecided: it depends on a hole.
    """
    shard, mesh = analysis.plan.shard_on("ep"), analysis.plan.mesh
    if mesh.tp == 1 or shard is None:
        return False
    # Of a model that is not known, any rule may match.
    rules = shard.rules if analysis.manifest is None else distributed_experts(analysis).values()
    return any(isinstance(rule.treatment, Experts) and rule.treatment.across_tp for rule in rules)


def axes_of_ep(analysis: Analysis) -> tuple[str, ...]:
    """The axes of the mesh whose ranks `ep` groups.

    Raises:
        Undecided: it depends on a hole.
    """
    return ("dp_shard", "cp", *(("tp",) if crosses_tp(analysis) else ()))


def groups_of_experts(analysis: Analysis) -> tuple[tuple[str, ...], ...]:
    """The axes whose ranks hold all experts together, after those on which `fsdp` replicates parameters, if any."""
    across = ("tp",) if crosses_tp(analysis) else ()
    groups = replicating_axes(analysis), (*sharded_axes(analysis), *across)
    return tuple(group for group in groups if group)


def axes_of_experts(analysis: Analysis) -> tuple[str, ...]:
    """The axes over which `fsdp` replicates and shards experts, by their names in the mesh of `split_off_experts`."""
    names = ["_".join(axes) for axes in groups_of_experts(analysis)]
    return (*names[:-1], f"{names[-1]}_mod_ep")


def ranks_of_experts(analysis: Analysis) -> int:
    """Return the ranks among which `ep` makes groups: those over which `fsdp` shards, and those of `tp` beside them."""
    return shard_ranks(analysis) * (analysis.plan.mesh.tp if crosses_tp(analysis) else 1)


def ranks_of_one_expert(analysis: Analysis) -> int:
    """Return the ranks over which `fsdp` shards the same experts: those of all experts divided by `ep`.

    At least one, even for a plan whose `ep` exceeds the ranks over which `fsdp` shards, which is not supported.
    """
    return max(1, ranks_of_experts(analysis) // analysis.plan.mesh.ep)


def sharded_dim(analysis: Analysis, path: str) -> int | None:
    """The dim on which `fsdp` cuts the experts of a rank: 0, or 1 where they are too few; None where neither fits."""
    assert analysis.manifest is not None
    ranks, groups = ranks_of_one_expert(analysis), analysis.plan.mesh.ep
    shapes = [parameter.shape for parameter in analysis.manifest.modules[path].parameters]
    if all(shape[0] % (groups * ranks) == 0 for shape in shapes):
        return 0
    return 1 if all(len(shape) > 1 and shape[1] % ranks == 0 for shape in shapes) else None


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Experts that have a slice each of every parameter, on groups of the ranks over which `fsdp` shards."""
    yield from _contract(analysis)
    yield from _in_double(analysis)
    found = distributed_experts(analysis)
    if not found:
        return
    yield from _unknown(analysis, found)
    mesh, plan = analysis.plan.mesh, analysis.plan
    shard = plan.shard_on("ep")
    assert shard is not None
    if plan.fsdp is None:
        yield Unsupported(
            analysis.span_of(shard),
            "`ep` groups ranks of `dp_shard` and `cp`, over which no statement shards",
            help=("add `fsdp on dp_shard`",),
        )
    elif math.prod(mesh.size(axis) for axis in axes_of_ep(analysis)) % mesh.ep:
        return  # a rule reports it
    elif ranks_of_experts(analysis) % mesh.ep:
        beside = f", and of `tp` = {mesh.tp}" if crosses_tp(analysis) else ""
        yield Unsupported(
            analysis.span_of(mesh, "ep"),
            f"`ep` = {mesh.ep} does not divide the {ranks_of_experts(analysis)} ranks over which `fsdp` shards{beside}",
        )
    elif (found_on_one := _across_tp_and_not(analysis, found)) is not None:
        yield found_on_one
    else:
        yield from _uneven(analysis, found)
        yield from _groups(analysis, found)
    yield from _on_tp(analysis, found)


ROUTED: Final = ("hidden_states", "top_k_index", "top_k_weights")
"""The arguments of the experts of `transformers`: tokens, the experts of each, and the weights of these."""

_ROUTED_BY_POSITION: Final = ("hidden_states", "router_indices", "routing_weights")
"""The same in GPT-OSS, by its own names, so that a program can replace only a call by position."""

_ROWS: Final = 2
"""Arguments of experts that get rows, sorted by expert, and the number of rows of each expert."""


def is_routed(info: ModuleInfo) -> bool:
    """Whether the experts get tokens with their choices of experts, as those of `transformers` do."""
    return (*info.inputs, *info.keyword_inputs) == ROUTED or info.inputs == _ROUTED_BY_POSITION


def _contract(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield experts that are called in a way that programs do not support."""
    assert analysis.manifest is not None or not changed_experts(analysis)
    for path, rule in changed_experts(analysis).items():
        assert analysis.manifest is not None
        info = analysis.manifest.modules[path]
        given = (*info.inputs, *info.keyword_inputs)
        if is_routed(info) or len(given) == _ROWS:
            continue
        if analysis.manifest.flow_error is not None:
            yield Unsupported(
                analysis.rule_span(rule),
                f"the model could not be followed, so how `{path}` is called is not known: "
                f"{analysis.manifest.flow_error}",
                "the call of experts is not known",
                help_to_follow(analysis),
            )
            return
        calls = f"is called with {listed(given)}" if given else "was not seen to be called"
        yield Unsupported(
            analysis.rule_span(rule),
            f"`{path}` ({info.class_name}) {calls}, and tokens cannot travel to its experts",
            "another way of calling experts",
            (
                "experts take rows sorted by expert, [rows, dim], and the number of rows of each, [experts], and "
                "return [rows, dim]",
                f"or, as those of `transformers`, {listed(ROUTED)}",
            ),
        )
        return


def multiplied_by_group(analysis: Analysis) -> list[str]:
    """The experts of `transformers` that multiply by grouped products."""
    manifest = analysis.manifest
    chosen = analysis.plan.model.arguments.get("experts_implementation", "grouped_mm")
    if manifest is None or chosen != "grouped_mm":
        return []
    return [path for path, info in manifest.modules.items() if info.kind == "experts" and is_routed(info)]


def dtype_of_weights(analysis: Analysis) -> Literal["param", "master"]:
    """Return the entry of `precision` that is the dtype of the weights in computation."""
    return "param" if has_policy(analysis) else "master"


@fact
def compiled_one_by_one(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the compiled modules, each with its rule, whose experts multiply one after another.

    Under torch.compile experts have grouped products only in bf16. Experts that break the graph are not compiled.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    precision, broken = analysis.plan.precision, changed_experts(analysis)
    found = split_by_host(analysis)
    if getattr(precision, dtype_of_weights(analysis)) not in ("bf16", "fp64"):  # fp64 is not supported at all
        found += [path for path in multiplied_by_group(analysis) if path not in broken]
    compiled = compiled_modules(analysis).items()
    return {path: rule for path, rule in compiled if any(is_within(one, path) for one in found)}


def split_by_host(analysis: Analysis) -> list[str]:
    """The experts of built-in models that multiply one after another, by numbers of rows that the host reads.

    Experts on several ranks, and those with a capacity, are left out: they break a graph in every dtype.
    """
    broken = changed_experts(analysis)
    return [path for path in _one_after_another(analysis) if path not in broken]


def _one_after_another(analysis: Analysis) -> list[str]:
    """The experts of built-in models that multiply each by a product of its own: in another dtype than bf16."""
    manifest, precision = analysis.manifest, analysis.plan.precision
    computed = has_policy(analysis) or autocast_dtype(analysis) is not None
    dtype = precision.param if computed else precision.master
    if manifest is None or analysis.plan.model.family in FOREIGN or dtype == "bf16":
        return []
    return [path for path, info in manifest.modules.items() if info.kind == "experts"]


def multiplied_together(analysis: Analysis) -> frozenset[str]:
    """The experts that surely have products of groups or batches, and none of two matrices."""
    manifest, model = analysis.manifest, analysis.plan.model
    found = (
        {} if manifest is None else {path: info for path, info in manifest.modules.items() if info.kind == "experts"}
    )
    if model.family not in FOREIGN:
        return frozenset(found.keys() - _one_after_another(analysis))
    if model.arguments.get("experts_implementation") == "eager":
        return frozenset()
    return frozenset(path for path, info in found.items() if is_routed(info))


def _in_double(analysis: Analysis) -> Iterator[Unsupported]:
    """Experts of `transformers` in fp64, for which there is no grouped product."""
    plan, held = analysis.plan, dtype_of_weights(analysis)
    path = next(iter(multiplied_by_group(analysis)), None)
    if path is not None and getattr(plan.precision, held) == "fp64":
        yield Unsupported(
            analysis.span_of(plan.precision, held),
            f"`{path}` multiplies by grouped products, which have no fp64",
            "no kernel of this dtype",
            ('give the model `experts_implementation = "batched_mm"`, or choose fp32',),
        )


def has_slices(info: ModuleInfo) -> bool:
    """Whether each expert has a slice of every parameter, along dim 0."""
    count = info.attributes.get("n_experts")
    return isinstance(count, int) and all(item.shape[:1] == (count,) for item in info.parameters)


def loads_of_all_tokens(manifest: Manifest, path: str) -> float | None:
    """Return all tokens as a multiple of an expert's mean load; None where the model does not state its choice."""
    around = manifest.modules.get(path.rpartition(".")[0])
    count, chosen = manifest.modules[path].attributes.get("n_experts"), around and around.attributes.get("top_k")
    return count / chosen if isinstance(count, int) and isinstance(chosen, int) and chosen > 0 else None


def _unknown(analysis: Analysis, found: dict[str, PathRule[Any]]) -> Iterator[Unsupported]:
    assert analysis.manifest is not None
    for path, rule in found.items():
        if not has_slices(analysis.manifest.modules[path]):
            yield Unsupported(
                analysis.rule_span(rule),
                f"the {analysis.plan.mesh.ep} ranks of `ep` cannot share the experts of `{path}`: its parameters need "
                "a slice on dim 0 for each expert",
            )
            return


def _across_tp_and_not(analysis: Analysis, found: dict[str, PathRule[Any]]) -> Unsupported | None:
    """Experts of which some are across the ranks of `tp` and some are not: `ep` has one mesh."""
    if not crosses_tp(analysis):
        return None
    for path, rule in found.items():
        if not rule.treatment.across_tp:
            return Unsupported(
                analysis.rule_span(rule),
                f"`{path}` is not on the ranks of `tp`, on which other experts are: `ep` groups the same ranks for all",
                help=("write `across_tp = true` for all experts, or for none",),
            )
    return None


def _uneven(analysis: Analysis, found: dict[str, PathRule[Any]]) -> Iterator[Unsupported]:
    for path, rule in found.items():
        if sharded_dim(analysis, path) is None:
            yield Unsupported(
                analysis.rule_span(rule),
                f"`fsdp` cannot cut the experts of `{path}` evenly over the {ranks_of_one_expert(analysis)} ranks "
                "that hold the same ones, neither by experts nor on dim 1",
                help=("choose a larger `ep`",),
            )
            return


def _groups(analysis: Analysis, found: dict[str, PathRule[Any]]) -> Iterator[Unsupported]:
    """Units that reshard to groups of ranks which the fewer ranks of their experts do not have."""
    holders, fsdp = ranks_of_one_expert(analysis), analysis.plan.fsdp
    units = fsdp_units(analysis)
    for path in found:
        unit = units[owner(analysis, f"{path}.weight")]
        if isinstance(unit.reshard, int) and unit.reshard != holders and fsdp is not None:
            # `fully_shard` makes such groups on a mesh of all ranks; the experts' mesh is one of `ep`.
            why = "does not divide" if holders % unit.reshard else "makes groups of"
            yield Unsupported(
                analysis.span_of(fsdp) if unit.rule is None else analysis.rule_span(unit.rule),
                f"`reshard = {unit.reshard}` {why} the {holders} rank{'s' * (holders > 1)} that "
                f"hold{'s' * (holders == 1)} the same experts of `{path}`",
                "no such groups of ranks",
                (f"add `{path} = unit`, which reshards after forward to all of these ranks",),
            )
            return


def _on_tp(analysis: Analysis, found: dict[str, PathRule[Any]]) -> Iterator[Unsupported]:
    """Styles on `tp` of experts that `ep` moves; parameters of experts cannot be placed on `tp` at all."""
    laid = tensor_parallel(analysis)
    seen: set[int] = set()
    for path, rule in laid.styles.items():
        if path in found and id(rule) not in seen:
            seen.add(id(rule))
            yield Unsupported(
                analysis.rule_span(rule),
                f"`{name_of(path)}` lies on `ep` already, and experts on both `ep` and `tp` are not lowered",
                help=("leave the experts whole on the ranks of `tp`",),
            )
