"""Assumptions of an estimate, as sentences for the plan's author."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from legoai.cost.kernels.convolutions import is_unmeasured
from legoai.cost.kernels.kinds import ALIGNED
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.kernel_time import estimate, knows_narrow_rates
from legoai.cost.profiles import Profile
from legoai.cost.trace.records import Kernel
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import ramp_stages
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.compilation.graph_breaks import first_graph_break
from legoai.dsl.analysis.computation.compile import AUTOTUNED
from legoai.dsl.analysis.facts import listed, name_of
from legoai.dsl.analysis.magnitudes.bounds import unaligned_layers, unaligned_vocabulary
from legoai.dsl.analysis.offload import offloads_some
from legoai.dsl.analysis.parallelism.float8 import converted_layers
from legoai.lowering.profile import ProfileKey, UnusableProfileError, saved_profile
from legoai.runtime.errors import RunErrorCode
from legoai.specs.directives.compile import Inductor
from legoai.specs.directives.precision import Float8
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

_UNMEASURED: Final = "the passes over the graph decide by predicted times, as the first steps of a run do"

_ROW_SCALES: Final = (
    "products in float8 with scales of rows are as fast as those with scales of tensors, and no profile has measured "
    "them: by CUTLASS's kernels, which PyTorch calls but on Hopper with CUDA 12.9 or newer, published steps took 8 "
    "to 25% longer than predicted"
)
_SLOW_ACCUMULATION: Final = (
    "products in float8 of backward are as fast as those of forward, though they add up in single precision "
    "(`use_fast_accum = False` of torchao), and no profile has measured them: by pytorch/ao#2377 they take 1.1 to 1.2 "
    "times as long"
)
_HOPPER: Final = "9.0"
"""The compute capability of GPUs whose tensor cores add up products in float8 with fewer bits than single precision."""
_NOTABLE: Final = 0.03
"""Share of a step from which on an unmeasured kernel is stated."""
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""The number of a block in a path."""


def of_full_batch(plan: Plan) -> Iterator[str]:
    """Yield the differences between a step of a growing batch and the simulated one."""
    stages = ramp_stages(plan)
    if stages:
        yield f"steps are of the full batch of {plan.batch.global_batch}: the first {stages[-1][0]} have smaller ones"


def of_kernels(plan: Plan, manifest: Manifest, directory: Path, profile: Profile) -> Iterator[str]:
    """Yield what is unknown about kernels: of odd sizes, and those that compilation chooses or leaves out."""
    analysis = Analysis(plan, manifest, directory)
    broken = first_graph_break(analysis)
    if broken is not None:
        yield (
            f"the graph of `{name_of(broken[0])}` breaks at `{broken[1]}`: what lies between the modules inside of it "
            "that have no break runs operator by operator, though the compiler would fuse it"
        )
    if "calls_compiled" in manifest.modules[""].attributes:
        yield "functions that the model itself compiles by `@torch.compile` run operator by operator"
    recurrent = [general(manifest, path) for path, info in manifest.modules.items() if "recurrent" in info.attributes]
    if recurrent and analysis.device_kind == "cuda":
        yield (
            f"recurrent layers ({listed(list(dict.fromkeys(recurrent)))}) run token by token, operator by operator, "
            "where cuDNN has kernels for a whole sequence: these take less time"
        )
    rules = () if plan.compile is None else plan.compile.rules
    compiled = [rule.treatment for rule in rules if isinstance(rule.treatment, Inductor)]
    yield from _of_unaligned(analysis, profile, compiled=bool(compiled))
    recipes = _float8_recipes(analysis)
    if recipes - {"tensorwise"}:
        yield _ROW_SCALES
    if "tensorwise" in recipes and analysis.device is not None and analysis.device.compute_capability == _HOPPER:
        yield _SLOW_ACCUMULATION
    if any(module.kind == "experts" for module in manifest.modules.values()):
        yield "tokens are routed evenly to experts; where they are not, the busiest rank takes more time and memory"
    if offloads_some(analysis, "parameters"):
        yield "the optimizer's step on the host takes as long as on the processor of the profile `cpu`"
    if offloads_some(analysis, "activations"):
        yield "host memory does not count offloaded activations"
    if plan.offload is not None and plan.offload.optimizer == "adaptive":
        yield "host memory does not count optimizer state that is offloaded as the memory limit asks for"
    for mode in sorted({one.mode for one in compiled}.intersection(AUTOTUNED)):
        yield f"matrix products under `{mode}` are those of the library: which others are faster, only a device tells"


def _of_unaligned(analysis: Analysis, profile: Profile, *, compiled: bool) -> Iterator[str]:
    """Yield what is unknown about products of rows that do not begin at multiples of 16 bytes."""
    held, layers = unaligned_vocabulary(analysis), unaligned_layers(analysis)
    products = [f"products of logits over {held:,} tokens, not a multiple of 8,"] if held is not None else []
    if layers:
        names = listed(list(dict.fromkeys(_INDEX.sub("*", name_of(path)) for path in layers)))
        products.append(f"products of {names}, whose features are not a multiple of 8,")
    for which in products:
        if not knows_narrow_rates(profile):
            yield f"{which} are as fast as those of a multiple"
        elif compiled:
            yield f"{which} are padded where inductor compiles them, which it decides by a measurement"


def _float8_recipes(analysis: Analysis) -> set[str]:
    """The recipes of layers that a device other than a processor computes in float8."""
    if analysis.device is None or analysis.device.kind == "cpu":
        return set()
    treatments = (rule.treatment for rule in converted_layers(analysis).values())
    return {one.recipe for one in treatments if isinstance(one, Float8)}


def of_profile(plan: Plan, device: str) -> Iterator[str]:
    """Yield whether the graph passes decide by predicted or measured times, where the plan wants measured ones."""
    if plan.comm is None or plan.comm.profile != "measured":
        return
    try:
        found = saved_profile(ProfileKey.of_plan(plan, device=device))
    except UnusableProfileError as error:
        yield f"{error} [{RunErrorCode.PROFILE_UNUSABLE}]: {_UNMEASURED}"
        return
    if found is None:
        yield f"no run of this plan, or of one that is traced alike, has measured a profile: {_UNMEASURED}"
    else:
        yield f"the passes over the graph decide by what a run measured on {found.hardware}"


def of_convolutions(steps: Mapping[int, Iterable[Item]], machine: Machine, step_time: float) -> Iterator[str]:
    """Yield which convolutions take a share of the step by rates that were measured in another layout.

    Args:
        steps: the items of one step by global rank.
        machine: whose profile has the rates.
        step_time: seconds.
    """
    if machine.device.kind == "cpu":
        return
    for items in steps.values():
        kernels = [kernel for item in items for kernel in _unmeasured_convolutions(item)]
        share = sum(estimate(kernel, machine.profile)[0] for kernel in kernels) / step_time
        if share > _NOTABLE:
            modules = dict.fromkeys(_INDEX.sub("*", name_of(kernel.module)) for kernel in kernels)
            yield (
                f"{share:.0%} of the step are convolutions of images with channels last, whose channels are not a "
                f"multiple of {ALIGNED} bytes ({listed(list(modules))}): they are as fast as with channels "
                "first, but cuDNN has faster kernels for some, which no profile has measured"
            )
            return


def _unmeasured_convolutions(item: Item) -> Sequence[Kernel]:
    if isinstance(item, Instance):
        return item.segment.summary(_unmeasured_of_segment)
    return (item,) if isinstance(item, Kernel) and is_unmeasured(item) else ()


def _unmeasured_of_segment(segment: Segment) -> Sequence[Kernel]:
    return tuple(record for record in segment.records if isinstance(record, Kernel) and is_unmeasured(record))


def of_machine(machine: Machine) -> tuple[str, ...]:
    """Return the assumptions made for constants that a profile does not state."""
    told = {
        "dispatch_seconds": "the host is never the bottleneck",
        "compute_slowdown": "communication takes nothing from computation beside it",
        "context_bytes": "the device's context takes no memory",
        "nccl_communicator_bytes": "communicators take no memory",
    }
    if machine.device.kind == "cpu":
        told = {"dispatch_seconds": told["dispatch_seconds"], "compute_slowdown": told["compute_slowdown"]}
    return tuple(
        f"{words}: the profile of {machine.profile.name} does not state {name}"
        for name, words in told.items()
        if machine.constant(name) is None
    )
