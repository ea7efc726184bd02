"""`fsdp`: rules about which modules are units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import by_rule, general, span_of
from legoai.dsl.analysis.facts import below, grouped, name_of
from legoai.dsl.analysis.parallelism.fsdp import FsdpUnit, fsdp_units, has_own_parameters, owner
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.parallelism.parameter_reads import CALL_IT, read_from_above
from legoai.dsl.analysis.parallelism.shard import is_never_called
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.fsdp import Unit

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest

_HELD_CONTAINERS = ("ModuleList", "ModuleDict")


class UnitOnContainer(Check):
    """A unit on a list or dictionary of modules, which is never called.

    A unit is gathered when its module is called. `fully_shard` refuses a `ModuleList` and a `ModuleDict`.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers = unit, root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP324"
    slug = "unit-on-container"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, manifest = analysis.plan.fsdp, analysis.manifest
        if fsdp is None or manifest is None:
            return
        for rule, paths in by_rule(analysis, fsdp):
            for path in paths if isinstance(rule.treatment, Unit) else ():
                info = manifest.modules[path]
                if info.class_name in _HELD_CONTAINERS:
                    yield self.at(
                        span_of(rule),
                        f"`{general(manifest, path)}` is a `{info.class_name}`, which is never called",
                        label="not a module that is called",
                        help=[f"make each of its modules a unit: `{path}.* = unit`"],
                    )
                    break


class WeightsReadFromAbove(Check):
    """A unit whose parameters are used without a call of its module, while they are sharded.

    A unit gathers its parameters when its module is called, and frees them afterwards. `nn.MultiheadAttention` passes
    the weights of its `out_proj` to a function and never calls it; an output layer may be computed as
    `F.linear(x, self.embed.weight)`. Those weights belong in the unit of the module that reads them. A unit that is
    called before, and stays gathered until backward, may be read.

    The same holds for a module of which only the forward or another method is called by its name, as `block.forward(x)`
    is, and for one whose parent calls what is inside of it.
    """

    code = "LP335"
    slug = "weights-read-from-above"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, units = analysis.manifest, fsdp_units(analysis)
        if manifest is None:
            return
        found: dict[str, tuple[str, str]] = {}
        for parameter, readers in read_from_above(analysis).items() if len(units) > 1 else ():
            unit = owner(analysis, parameter)
            reader = next((path for path in readers if below(unit, path)), None)
            if reader is not None and (units[unit].is_resharded_after_forward or is_never_called(manifest, unit)):
                found.setdefault(unit, (parameter, reader))
        yield from self._bypassed(analysis, manifest, units)
        ruled = ((path, rule) for path, unit in units.items() if path in found and (rule := unit.rule) is not None)
        for rule, paths in grouped(ruled):
            parameter, reader = found[paths[0]]
            yield self.at(
                span_of(rule),
                f"`{name_of(reader)}` reads `{parameter}` without a call of the unit `{paths[0]}`: it is sharded then",
                label="not gathered there",
                help=[f"leave it in the unit of `{name_of(reader)}`"],
            )

    @staticmethod
    def _used_inside(analysis: Analysis, manifest: Manifest) -> dict[str, str]:
        """The units that are never called, each with the first module that computes with parameters of the unit."""
        found: dict[str, str] = {}
        for path, info in manifest.modules.items():
            if info.parameters and not is_never_called(manifest, path):
                unit = owner(analysis, info.child_path(info.parameters[0].name))
                if (
                    unit
                    and is_never_called(manifest, unit)
                    and manifest.modules[unit].class_name not in _HELD_CONTAINERS
                ):
                    found.setdefault(unit, path)
        return found

    def _bypassed(self, analysis: Analysis, manifest: Manifest, units: Mapping[str, FsdpUnit]) -> Iterator[Diagnostic]:
        found = self._used_inside(analysis, manifest) if len(units) > 1 else {}
        ruled = ((path, rule) for path, unit in units.items() if path in found and (rule := unit.rule) is not None)
        for rule, paths in grouped(ruled):
            inside = found[paths[0]]
            yield self.at(
                span_of(rule),
                f"the unit `{paths[0]}` is never called, although `{inside}` inside of it is: it is sharded then",
                label="not gathered there",
                help=[CALL_IT, "or make units of the modules inside of it that are called"],
            )


class EmptyUnit(Check):
    """A unit that holds no parameters: its module has none, or deeper units hold them all.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.*.attention           = unit
      layers.*.attention.{wq, wk}  = unit
      layers.*.attention.{wv, wo}  = unit
      root                         = unit
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.*.attention = unit
      root               = unit
    }
    ```
    """

    code = "LP323"
    slug = "empty-unit"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, manifest = analysis.plan.fsdp, analysis.manifest
        if fsdp is None or manifest is None:
            return
        units = fsdp_units(analysis)
        for rule, paths in by_rule(analysis, fsdp):
            if not isinstance(rule.treatment, Unit):
                continue
            empty = [
                path
                for path in paths
                if manifest.modules[path].class_name not in _HELD_CONTAINERS
                and not has_own_parameters(manifest, path, units)
            ]
            if empty:
                deeper = has_own_parameters(manifest, empty[0], ())
                yield self.at(
                    span_of(rule),
                    f"the unit `{general(manifest, empty[0])}` is empty: "
                    + ("deeper units hold all its parameters" if deeper else "the module has no parameters"),
                    label="holds nothing",
                    help=["delete it" if len(empty) == len(paths) else "make the path more specific"],
                )


class TiedAcrossUnits(Check):
    """A parameter that two modules share, in two units, or a module with parameters that lies in two.

    A unit's parameters are gathered and freed together, so a shared parameter must lie in one unit.
    `fully_shard` refuses it otherwise. A shared module may be a unit of its own.

    ## Example
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 1024)
    mesh  (dp_shard = 32)
    fsdp on dp_shard {
      layers.*       = unit
      tok_embeddings = unit
      root           = unit
    }
    ```

    ## Use instead
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 1024)
    mesh  (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit
      root     = unit
    }
    ```
    """

    code = "LP325"
    slug = "tied-across-units"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, manifest = analysis.plan.fsdp, analysis.manifest
        if fsdp is None or manifest is None:
            return
        units = fsdp_units(analysis)
        shared = [group for group in manifest.shared_modules if not _in_own_units(analysis, manifest, group[0])]
        for group in (*manifest.tied_parameters, *shared):
            unit_of = {path: owner(analysis, path) for path in group}
            if len(set(unit_of.values())) == 1:
                continue
            what = "module" if group in shared else "parameter"
            first, other = group[0], next(path for path in group if unit_of[path] != unit_of[group[0]])
            rules = [units[unit_of[path]].rule for path in (first, other)]
            spans = list(dict.fromkeys(span_of(rule) for rule in rules if rule is not None))
            yield self.at(
                spans[0] if spans else analysis.span_of(fsdp),
                f"`{first}` and `{other}` are one {what}, and lie in the units `{unit_of[first] or 'root'}` and "
                f"`{unit_of[other] or 'root'}`",
                label="a unit of its own",
                others=[Label(span, "another unit") for span in spans[1:2]],
                help=[
                    "leave both modules in the unit above them"
                    if what == "parameter"
                    else f"make `{group[0]}` a unit of its own, or leave all of its places in one unit",
                    f"or give the model a {what} for each",
                ],
            )


def _in_own_units(analysis: Analysis, manifest: Manifest, module: str) -> bool:
    """Whether a module is a unit, or units inside of it own all of its parameters."""
    parameters = (path for path in manifest.parameter_paths() if path.startswith(f"{module}."))
    return all(f"{owner(analysis, path)}.".startswith(f"{module}.") for path in parameters)


class BlocksWithoutUnits(Check):
    """Blocks of the model that are in no unit of their own, so that all of them are gathered at once.

    Parameters outside deeper units belong to `root`. It is gathered before the first layer computes and kept until the
    end: nothing is overlapped, and the memory is that of the full model.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP804"
    slug = "blocks-without-units"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, manifest = analysis.plan.fsdp, analysis.manifest
        if fsdp is None or manifest is None or shard_ranks(analysis) == 1:
            return
        units = fsdp_units(analysis)
        for blocks in manifest.block_lists:
            prefix = f"{blocks.path}." if blocks.path else ""
            held = {path[len(prefix) :].partition(".")[0] for path in units if path.startswith(prefix)}
            left = [name for name in blocks.names if name not in held]
            if len(left) < 2:
                continue
            all_of_them = len(left) == len(blocks)
            yield self.at(
                analysis.span_of(fsdp),
                f"{'all' if all_of_them else len(left)} blocks of `{blocks.path or 'root'}` are gathered at once, "
                "since no unit holds them",
                label="no unit for each block",
                help=[f"add `{prefix}* = unit`"],
            )
