"""Translation of a TorchTitan job config to a plan.

TorchTitan's treatment of an option is taken from its source at the version of the file's format (`formats.py`):
`models/llama3/infra/parallelize.py`, `distributed/pipeline_parallel.py`, `components/lr_scheduler.py`,
`components/quantization/float8.py` and `distributed/activation_checkpoint.py`, their predecessors in `parallelisms/` in
2024, and `distributed/fsdp.py`, `components/loss.py` and `models/common/` in August 2026.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final

from legoai.dsl.diagnostics.codes.importing import NotTranslated
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.importing.config import Config
from legoai.dsl.importing.draft import Draft
from legoai.dsl.importing.experts import (
    check_experts,
    crosses_tp,
    graph_of_blocks,
    has_pieces,
    kept_of_experts,
    layout_of_experts,
    mesh_of_experts,
    why_beside,
    why_idle,
)
from legoai.dsl.importing.models import flavour_of, model_statement
from legoai.dsl.importing.pipelines import options_of, schedule_of
from legoai.dsl.importing.precision import add_precision, computes_in, in_float8
from legoai.dsl.importing.training import add_training
from legoai.specs.directives.pipeline import SPLIT_BACKWARD
from legoai.specs.record import Record

_REDUCE_SCATTER: Final = '"_c10d_functional.reduce_scatter_tensor.default"'
"""The collective of tensor parallelism whose result TorchTitan keeps; it gathers again."""


class Unused(Record):
    """An option without an equivalent statement.

    Attributes:
        name: in the file.
        value: in the file.
        why: reason.
        changes: whether it changes the training; then there is also a diagnostic.
    """

    name: str
    value: Any
    why: str
    changes: bool


class Imported(Record):
    """Result of an import.

    Attributes:
        text: of the plan, in the canonical layout; None where there are errors.
        diagnostics: about the config.
        unused: options without an equivalent statement, in the file's order.
        notes: differences between the plan and TorchTitan, a sentence each.
        version: of TorchTitan whose config format the file has.
    """

    text: str | None
    diagnostics: tuple[Diagnostic, ...]
    unused: tuple[Unused, ...]
    notes: tuple[str, ...]
    version: str


def degrees(config: Config) -> dict[str, int]:
    """Return the sizes of the mesh's axes as the file gives them; -1 for the remaining devices."""
    found = {
        "pp": config["parallelism.pipeline_parallel_degree"],
        "dp_replicate": config["parallelism.data_parallel_replicate_degree"],
        "dp_shard": config["parallelism.data_parallel_shard_degree"],
        "cp": config["parallelism.context_parallel_degree"],
        "tp": config["parallelism.tensor_parallel_degree"],
    }
    if config["training.data_parallel_type"] == "ddp":
        found["dp_replicate"], found["dp_shard"] = found["dp_shard"], 1
    return found


def devices_of(config: Config) -> int | None:
    """Return the product of the degrees; None where one of them is the remainder."""
    found = degrees(config)
    return None if min(found.values()) < 1 else math.prod(found.values())


def translated(config: Config, *, plan: str, cluster: str, devices: int) -> Imported:
    """Translate a config to a plan.

    Args:
        config: the config; its diagnostics grow.
        plan: the plan's name.
        cluster: the value of its `cluster` statement.
        devices: that this cluster has.
    """
    version = config.format.version
    draft = _drafted(config, cluster, devices)
    if draft is None:
        return Imported(text=None, diagnostics=tuple(config.diagnostics), unused=(), notes=(), version=version)
    dropped = (Unused(name=name, value=value, why=why, changes=True) for name, (value, why) in config.dropped.items())
    unused = (*_unused(draft), *_without_effect(draft, cluster, devices), *dropped)
    config.diagnostics += [
        NotTranslated.at(
            config.span_of(item.name), f"`{item.name}` is not translated: {item.why}", label="not in the plan"
        )
        for item in unused
        if item.changes and item.name not in config.dropped
    ]
    text = _laid_out(draft, config, plan)
    return Imported(
        text=text, diagnostics=tuple(config.diagnostics), unused=unused, notes=tuple(draft.notes), version=version
    )


def _drafted(config: Config, cluster: str, devices: int) -> Draft | None:
    """Return the plan's statements; None, after diagnostics, where there can be none."""
    flavour = flavour_of(config)
    sizes = None if config.has_errors else _sizes(config, devices)
    if flavour is None or sizes is None:
        return None
    draft = Draft(config, flavour, sizes)
    _write(draft, cluster)
    return None if config.has_errors else draft


def _laid_out(draft: Draft, config: Config, plan: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in PurePath(config.lines.name).name)
    source = f"`{config.function}` of {shown}" if config.function else shown
    head = f"# From {source}, a TorchTitan config, as TorchTitan {config.format.version} reads it.\nplan {plan}\n\n"
    made = format_text(head + "\n".join(draft.lines) + "\n", f"{plan}.plan")
    assert made.text is not None, made.diagnostics
    return made.text


def _sizes(config: Config, devices: int) -> dict[str, int] | None:
    """The sizes of the mesh's axes on so many devices; None, after a diagnostic, where they do not fit."""
    found = degrees(config)
    left = [axis for axis, size in found.items() if size == -1]
    fixed = math.prod(size for size in found.values() if size > 0)
    if left:
        found[left[0]] = max(1, devices // fixed)
    if math.prod(found.values()) == devices and min(found.values()) > 0:
        return found
    given = ", ".join(f"{axis} = {size}" for axis, size in degrees(config).items())
    config.wrong(
        "parallelism.data_parallel_shard_degree",
        f"degrees of {given} do not make {devices} devices",
        "name the devices with --cluster, such as --cluster 'h100_sxm(hosts = 8, fabric = infiniband_ndr)'",
    )
    return None


def _write(draft: Draft, cluster: str) -> None:
    config, sizes = draft.config, draft.sizes
    draft.lines += [model_statement(config, draft.flavour), f"cluster {cluster}"]
    pipeline = _batch(draft)
    check_experts(draft)
    used = [*(f"{axis} = {size}" for axis, size in sizes.items() if size > 1), *mesh_of_experts(draft)]
    draft.lines += ["", f"mesh ({', '.join(used)})"] if used else []
    _tensor_parallel(draft)
    draft.lines += layout_of_experts(draft)
    _data_parallel(draft)
    draft.lines += pipeline
    if sizes["cp"] > 1:
        rotate = config["parallelism.context_parallel_rotate_method"]
        balancer = config["parallelism.context_parallel_load_balancer"]
        if balancer == "ptrr":
            draft.lost["parallelism.context_parallel_load_balancer"] = "sequences are balanced by head and tail"
        balance = "none" if balancer is None else "head_tail"
        draft.lines.append(f"context on cp (rotate = {rotate}, balance = {balance})")
    draft.lines.append("")
    _checkpoint(draft)
    if draft.flavour.has_latent_attention:
        if _masks_documents(config):
            draft.notes.append("TorchTitan attends by FlexAttention; here PyTorch chooses among its other kernels")
    elif computes_in(draft) == "bf16":  # in fp32 PyTorch chooses another kernel by itself
        draft.lines.append("attention flash")
    if _masks_documents(config):
        draft.notes.append("TorchTitan masks attention between the documents of a row; here a row is one context")
    # Beside a pipeline TorchTitan records none.
    if config.is_current and sizes["pp"] == 1 and not config.given.get("training.disable_cuda_graphs", False):
        draft.notes.append("TorchTitan records a step as a CUDA graph; here the host launches its kernels")
    if config["training.enable_cpu_offload"] and draft.sharded:
        draft.lines.append("offload (parameters = all)")
    compiled = _compiled(draft)
    draft.lines.append("")
    add_precision(draft)
    draft.lines += compiled
    add_training(draft)


def _masks_documents(config: Config) -> bool:
    """Whether attention is within documents: not with the kernel `sdpa`, which was the usual one in February 2026."""
    kernel = config.given.get("model.attn_backend") or ("flex" if config.is_current else "sdpa")
    chosen = re.search(r"_(flex|varlen)(_attn)?$", config["model.flavor"])
    # Until August 2026 flavours of DeepSeek chose it, all but the smallest.
    by_flavour = (
        not config.is_current and config["model.name"] == "deepseek_v3" and config["model.flavor"] != "debugmodel"
    )
    return kernel != "sdpa" or chosen is not None or by_flavour


def _batch(draft: Draft) -> list[str]:
    """Add `batch`, and return the statement of the pipeline."""
    config, sizes = draft.config, draft.sizes
    local, pp = config["training.local_batch_size"], sizes["pp"]
    ranks = sizes["dp_replicate"] * sizes["dp_shard"]
    whole = config["training.global_batch_size"]
    whole = local * ranks if whole == -1 else whole
    if whole < 1 or whole % (local * ranks):
        config.wrong(
            "training.global_batch_size",
            f"a global batch of {whole} is no multiple of {local} for each of {ranks} data-parallel ranks",
        )
    micro, pipeline = local, []
    if pp > 1:
        micro = _micro_batch(config, local, pp)
        schedule = schedule_of(config)
        options = options_of(config, schedule, ranks=pp, layers=draft.flavour.layers) if schedule is not None else None
        several = [f"microbatches = {local // micro}"] if whole > local * ranks else []
        pipeline = [f"pipeline on pp ({', '.join([f'schedule = {schedule}', *(options or []), *several])})"]
    draft.micro = micro
    draft.lines.append(f"batch (global = {whole}, micro = {micro}, seq_len = {config['training.seq_len']})")
    return pipeline


def _micro_batch(config: Config, local: int, pp: int) -> int:
    """Samples of one micro batch of a pipeline."""
    count = config["parallelism.pipeline_parallel_microbatches"]
    if count is None and config.is_old:
        count = pp
    size = config["parallelism.pipeline_parallel_microbatch_size"] if count is None else max(1, local // count)
    if local % (size if count is None else count):
        name = "pipeline_parallel_microbatch_size" if count is None else "pipeline_parallel_microbatches"
        config.wrong(f"parallelism.{name}", f"a local batch of {local} does not split into such micro batches")
    return int(size)


def _tensor_parallel(draft: Draft) -> None:
    config = draft.config
    if draft.sizes["tp"] < 2:
        return
    parallel = not config["parallelism.disable_loss_parallel"] and config["training.enable_loss_parallel"]
    chosen = {"sequence": has_pieces(draft), "loss_parallel": parallel, "across_tp": crosses_tp(draft)}
    options = ", ".join(name for name, is_chosen in chosen.items() if is_chosen)
    draft.lines += ["", f"shard standard on tp{f' ({options})' if options else ''}"]


def _data_parallel(draft: Draft) -> None:
    sizes, axes = draft.sizes, draft.sharded
    if axes:
        replicated = ["dp_replicate"] if sizes["dp_replicate"] > 1 else []
        units = "\n".join(f"  {unit}" for unit in _units(draft))
        draft.lines += ["", f"fsdp on {', '.join([*replicated, *axes])} {{\n{units}\n}}", ""]
    elif sizes["dp_replicate"] > 1:
        if sizes["tp"] * sizes["pp"] > 1 and not draft.config.is_current:
            draft.config.wrong(
                "parallelism.data_parallel_replicate_degree",
                "TorchTitan replicates beside tensor or pipeline parallelism only what FSDP shards",
                "choose a `data_parallel_shard_degree` above 1",
            )
        # In August 2026 FSDP replicates too, with a unit for each block; before, DDP does, with such buckets.
        draft.lines += ["", f"replicate on dp_replicate{'' if draft.config.is_current else ' (bucket = 100MiB)'}", ""]
        if draft.config.is_current and sizes["pp"] == 1:
            draft.notes.append(
                "TorchTitan reduces the gradients of each block by themselves; here those of smaller blocks than a "
                "bucket together"
            )


def _units(draft: Draft) -> Iterator[str]:
    """Units of FSDP, and when each is resharded."""
    config, staged = draft.config, draft.sizes["pp"] > 1
    policy = config["parallelism.fsdp_reshard_after_forward"]
    kept = "unit(reshard = after_backward)"
    usual = kept if policy == "never" or (policy == "default" and staged) else "unit"
    if config.is_old:
        yield f"layers.* = {usual}"
        if usual == "unit" and policy != "always":
            yield f"layers.{draft.flavour.layers - 1} = {kept}"
    elif draft.flavour.tied:
        yield f"layers.* = {usual}"
        draft.notes.append("TorchTitan gathers the tied weight for embedding and output each; here the root does once")
    else:
        yield f"tok_embeddings = {usual}"
        yield f"layers.* = {usual}"
        yield f"output = {'unit' if policy == 'always' else kept}"
        draft.notes.append("TorchTitan makes one unit of `norm` and `output`; here `norm` belongs to the root")
    yield "root = unit"


def _checkpoint(draft: Draft) -> None:
    config = draft.config
    mode = config["activation_checkpoint.mode"]
    treatment = ""
    if mode == "full":
        treatment = "full"
    elif mode == "memory_budget":
        treatment = _budget(draft, config["activation_checkpoint.memory_budget"])
    elif mode == "selective":
        treatment = _selective(draft, config["activation_checkpoint.selective_ac_option"])
    draft.lines += [f"checkpoint {{ layers.* = {treatment} }}"] if treatment else []
    # A compiler drops what nothing needs.
    is_compiled = config["compile.enable"] and "model" in config["compile.components"]
    stops = config.is_old or is_compiled or config.given.get("activation_checkpoint.early_stop")
    if mode in ("full", "selective") and not stops:
        draft.notes.append(
            "TorchTitan recomputes a block to its end; here recomputation stops as soon as everything is there again"
        )


def _budget(draft: Draft, amount: float) -> str:
    """What the compiler may save of a block; nothing of the plan where it saves all that it would."""
    config = draft.config
    if not (config["compile.enable"] and "model" in config["compile.components"]):
        config.wrong("activation_checkpoint.mode", "a memory budget is the compiler's, and needs compilation")
    if amount in (0, 1):
        return "" if amount else "full"
    if draft.sizes["cp"] > 1:
        draft.lost["activation_checkpoint.memory_budget"] = (
            "a budget is not lowered beside ranks of `cp`: write `checkpoint { layers.* = full }` or `selective([…])`"
        )
        return ""
    return f"budget({amount})"


def _selective(draft: Draft, option: str) -> str:
    if re.fullmatch("[0-9]{1,6}", option):
        if int(option) < 2:
            return "full"
        if draft.sizes["pp"] > 1:
            draft.notes.append(
                f"TorchTitan recomputes every block of that number of a rank, `every({int(option)})` of all"
            )
        return f"every({int(option)})"
    if option != "op":
        draft.config.wrong(
            "activation_checkpoint.selective_ac_option", f"`{option}` is neither `op` nor the number of a stride"
        )
    if draft.config.is_current and not draft.flavour.has_latent_attention:
        draft.notes.append(
            "TorchTitan has one matrix product for `wq`, `wk` and `wv`, whose output it keeps; here that of `wk` is "
            "recomputed"
        )
    kept = ["attention", "alternate_matmul", *([_REDUCE_SCATTER] if draft.sizes["tp"] > 1 else [])]
    kept += kept_of_experts(draft)
    if in_float8(draft.config) and draft.config.is_old:
        draft.notes.append(
            "from November 2024 to February 2025 TorchTitan kept the outputs of `aten.max` and `aten.abs` too, the "
            "latter as large as what is cast to float8; here both are recomputed"
        )
    elif in_float8(draft.config):
        kept.append('"aten.max.default"')  # from which scales are computed
    return f"selective([{', '.join(kept)}])"


def _compiled(draft: Draft) -> list[str]:
    """The form of the loss is added; the statement of compilation is returned."""
    config = draft.config
    enabled, components = config["compile.enable"], config["compile.components"]
    backend = config["compile.backend"] if enabled else "inductor"
    is_async = config["parallelism.enable_async_tensor_parallel"] and draft.sizes["tp"] > 1
    if backend not in ("inductor", "aot_eager"):
        draft.lost["compile.backend"] = f"`compile` has no backend `{backend}`"
        enabled = False
    if is_async and not (enabled and "model" in components):
        config.wrong("parallelism.enable_async_tensor_parallel", "asynchronous tensor parallelism needs compilation")
    pieces = config["loss.num_chunks"] if config.format.is_python else 1
    if pieces > 1:
        splits = draft.sizes["pp"] > 1 and config["parallelism.pipeline_parallel_schedule"] in SPLIT_BACKWARD
        if splits:
            draft.notes.append("TorchTitan computes the last layer in pieces too; here its backward is split")
        if enabled and "loss" in components:
            draft.notes.append("TorchTitan compiles the loss of a piece; here its operators run one by one")
        draft.lines.append(f"loss chunked({pieces}{'' if splits else ', last_layer = true'})")
    elif enabled and "loss" in components and not config.is_old:  # until 2025 the loss was not compiled
        draft.lines.append("loss fused")
    else:
        draft.lines.append("loss eager")
    if not enabled or "model" not in components:
        return []
    return [f"compile {'(async_tp = true) ' if is_async else ''}{{ layers.* = {backend}{graph_of_blocks(draft)} }}"]


def _unused(draft: Draft) -> Iterator[Unused]:
    """The given options that became no statement, and why."""
    config = draft.config
    for name, value in config.given.items():
        key, written = config.format.keys[name], config.written[name]
        if name in draft.lost:
            yield Unused(name=written, value=value, why=draft.lost[name], changes=True)
        elif key.beside:
            default = value in (None, config.default(name)) or (
                name == "model.norm_type" and re.search("rmsnorm", str(value))
            )
            changes = key.changes and not default
            why = why_beside(draft, name) if changes or not key.changes else "it has its default, which changes nothing"
            yield Unused(name=written, value=value, why=why, changes=changes)


def _without_effect(draft: Draft, cluster: str, devices: int) -> Iterator[Unused]:
    """Yield the given options that a plan could express, but that do not change it."""
    config = draft.config
    for name, value in config.given.items():
        if config.format.keys[name].beside or name in draft.lost or value == config.default(name):
            continue
        without = _drafted(config.without(name), cluster, devices)
        if without is not None and without.lines == draft.lines:
            why = why_idle(draft, name)
            yield Unused(name=config.written[name], value=value, why=why, changes=False)
