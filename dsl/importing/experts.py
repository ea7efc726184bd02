"""Mixtures of experts in TorchTitan: the ranks that hold them, and what no plan says of them."""

from __future__ import annotations

import math
from typing import Final

from legoai.dsl.analysis.facts import listed
from legoai.dsl.importing.draft import Draft
from legoai.dsl.importing.keys import GROUPED, MOE
from legoai.dsl.importing.precision import computes_in

_EP: Final = "parallelism.expert_parallel_degree"
_ETP: Final = "parallelism.expert_tensor_parallel_degree"
_TP: Final = "parallelism.tensor_parallel_degree"
_SEQUENCE: Final = "parallelism.enable_sequence_parallel"
_TRAVEL: Final = "tokens travel by all-to-all of `torch.distributed`"
_BESIDE: Final = {
    "parallelism.expert_parallel_comm_backend": _TRAVEL,
    "model.moe_comm_backend": _TRAVEL,
    "model.non_blocking_capacity_factor": "every token that arrives at a rank has room there",
    "debug.moe_force_load_balance": "routers choose the experts of a token",
}
"""Options of experts without an equivalent in plans, and the reason; other values than the usual change a training."""
_RECOMPUTED: Final = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
_GATE: Final = "moe.router.gate"
_USUAL: Final = (None, "standard")
_EXCHANGE: Final = '"_c10d_functional.all_to_all_single.default"'
_TOPK: Final = '"aten.topk.default"'


def check_experts(draft: Draft) -> None:
    """Report layouts of experts that no plan states, list options that none has, and note what differs."""
    config, flavour = draft.config, draft.flavour
    if not flavour.has_experts:
        return
    _check_ranks(draft)
    for name, why in _BESIDE.items():
        value = config.given.get(name)
        if value not in (*_USUAL, config.format.keys[name].default if name in config.format.keys else None):
            draft.lost[name] = why
    # Until June 2026 nothing changed the bias of Qwen3.
    if config.is_current or flavour.has_latent_attention:
        draft.notes.append(
            "TorchTitan balances experts by a bias of their scores, which it changes by 1e-3 after each step "
            "(`load_balance_coeff`); here nothing does"
        )
    if flavour.routing:
        draft.notes.append(flavour.routing)
    if config.is_current and computes_in(draft) == "bf16":
        draft.notes.append("TorchTitan computes the products of routers in fp32; here in bf16")
    if computes_in(draft) != "bf16":
        draft.notes.append(
            f"TorchTitan computes the products of experts in bf16 all the same; here in {computes_in(draft)}"
        )
    schedule = config["parallelism.pipeline_parallel_schedule"].lower()
    if draft.ep > 1 and draft.sizes["pp"] > 1 and schedule == "dualpipev":
        draft.notes.append(
            "TorchTitan overlaps the exchange of tokens with another micro batch under DualPipeV; here it waits"
        )


def crosses_tp(draft: Draft) -> bool:
    """Whether different experts are on ranks of tensor parallelism too."""
    config, tp = draft.config, draft.sizes["tp"]
    apart = config.is_current or config[_ETP] != tp
    return draft.flavour.has_experts and draft.ep > 1 and tp > 1 and apart


def _check_ranks(draft: Draft) -> None:
    """Report experts that no plan divides so, and a number of ranks that does not divide the others'."""
    config, ep, tp = draft.config, draft.ep, draft.sizes["tp"]
    across = crosses_tp(draft)
    if ep > 1 and not config.is_current and config[_ETP] not in (1, tp):
        config.wrong(_ETP, f"TorchTitan takes 1 or the degree of tensor parallelism, which is {tp}")
    elif tp > 1 and not across:
        config.wrong(
            _TP,
            "TorchTitan divides the hidden layer of each expert over the ranks of tensor parallelism, which no plan "
            "states",
            "put different experts on them, by an `expert_parallel_degree` that is a multiple of "
            f"{tp}" + ("" if config.is_current else " and an `expert_tensor_parallel_degree` of 1"),
        )
    elif across and not has_pieces(draft):
        config.wrong(
            _SEQUENCE,
            "experts on the ranks of tensor parallelism take pieces of the sequence, which there are none of here",
            "leave out `enable_sequence_parallel = false`",
        )
    axes = ("dp_shard", "cp", "tp") if across else ("dp_shard", "cp")
    ranks = math.prod(draft.sizes[axis] for axis in axes)
    if (tp == 1 or across) and ranks % ep:
        config.wrong(_EP, f"{ep} ranks for experts do not divide the {ranks} of {listed(axes)}")
    elif across and ep % tp:
        config.wrong(_EP, f"{ep} ranks for experts are no multiple of the {tp} of tensor parallelism")
    elif across:
        draft.notes.append(
            "TorchTitan gathers a mixture's tokens over the ranks of tensor parallelism, each of which sends a part of "
            "them to experts, and divides shared experts over these ranks; here each rank routes its own piece of the "
            "sequence, and gathers nothing"
        )


def has_pieces(draft: Draft) -> bool:
    """Whether ranks of tensor parallelism have pieces of the sequence between layers."""
    config = draft.config
    return not config.format.is_python or bool(config[_SEQUENCE])


def layout_of_experts(draft: Draft) -> list[str]:
    """The statement that puts experts on ranks, if they are on several."""
    return ["", f"shard standard on ep{' (across_tp)' if crosses_tp(draft) else ''}"] if draft.ep > 1 else []


def mesh_of_experts(draft: Draft) -> list[str]:
    """The size of `ep` as the statement of the mesh has it, if experts are on several ranks."""
    return [f"ep = {draft.ep}"] if draft.ep > 1 else []


def kept_of_experts(draft: Draft) -> list[str]:
    """Operators of a mixture whose outputs TorchTitan's selective checkpointing keeps."""
    config = draft.config
    if not draft.flavour.has_experts:
        return []
    if config.given.get(_RECOMPUTED, [_GATE]) == [_GATE]:
        shared = ", so that of shared experts others are kept" if draft.flavour.has_latent_attention else ""
        draft.notes.append(
            "TorchTitan computes the product of a router again, and does not count it among those of which it keeps "
            f"every second; here it counts{shared}"
        )
    exchanged = draft.ep > 1 and (config.is_current or draft.flavour.has_latent_attention)
    if exchanged:
        draft.notes.append("TorchTitan keeps the numbers of tokens that are on the host; here they are copied again")
    return [*([_EXCHANGE] if exchanged else []), *([_TOPK] if config.is_current else [])]


def graph_of_blocks(draft: Draft) -> str:
    """Options with which blocks are compiled: TorchTitan compiles those with experts in parts."""
    if not draft.flavour.has_experts:
        return ""
    breaks = draft.ep > 1 or computes_in(draft) != "bf16"
    draft.notes.append(
        "TorchTitan compiles the parts of a block with experts by themselves; here "
        + ("its graph breaks at the experts" if breaks else "it is one graph")
    )
    return "(fullgraph = false)" if breaks else ""


def why_beside(draft: Draft, name: str) -> str:
    """Why an option that plans do not have changes nothing."""
    key = draft.config.format.keys[name]
    if key.beside != MOE or not draft.flavour.has_experts:
        return key.beside
    return _BESIDE.get(name, GROUPED if name.startswith("quantize") else "no schedule overlaps parts of blocks")


def why_idle(draft: Draft, name: str) -> str:
    """Why an option that plans have changes nothing."""
    why = draft.config.format.keys[name].idle
    return why if why != MOE or not draft.flavour.has_experts else "experts are divided only over several ranks"
