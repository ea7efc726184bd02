"""Templates of `deepseek`: latent attention, and a mixture with shared experts; see `computed`."""

from __future__ import annotations

from legoai.specs.models.config_checks import Scalar
from legoai.specs.models.configs import DeepSeekConfig
from legoai.specs.models.manifests.computed.templates import (
    Flow,
    Templates,
    attended,
    rotary_decoder,
    rotated,
    routed,
    stacked_experts,
    swiglu,
)


def deepseek(templates: Templates, config: DeepSeekConfig) -> int:
    """The model."""
    dense, mixed = config.n_dense_layers, config.n_layers - config.n_dense_layers
    runs = [(dense, lambda: swiglu(templates, config.dim, config.dense_hidden_dim))] if dense else []
    return rotary_decoder(
        templates,
        config,
        "DeepSeek",
        *runs,
        (mixed, lambda: _mixture(templates, config)),
        attention=lambda: _latent_attention(templates, config),
        rotated_features=config.rope_head_dim,
    )


def _latent_attention(templates: Templates, config: DeepSeekConfig) -> int:
    queries = config.n_heads * config.head_size
    if config.q_lora_rank:
        children = [
            ("wq_a", templates.linear(config.dim, config.q_lora_rank, bias=False)),
            ("q_norm", templates.rms_norm(config.q_lora_rank, config.norm_eps)),
            ("wq_b", templates.linear(config.q_lora_rank, queries, bias=False)),
        ]
    else:
        children = [("wq", templates.linear(config.dim, queries, bias=False))]
    children += [
        ("wkv_a", templates.linear(config.dim, config.kv_lora_rank + config.rope_head_dim, bias=False)),
        ("kv_norm", templates.rms_norm(config.kv_lora_rank, config.norm_eps)),
        ("wkv_b", templates.linear(config.kv_lora_rank, config.n_heads * config.key_value_size, bias=False)),
        ("k_rope", _shared_key(templates)),
        ("wo", templates.linear(config.n_heads * config.v_head_dim, config.dim, bias=False)),
    ]
    flow = Flow("x", "rope")
    x, rope = 0, 1
    q = flow.call("wq_b", flow.call("q_norm", flow.call("wq_a", x))) if config.q_lora_rank else flow.call("wq", x)
    q = flow.step("reshape", "split", flow.step("reshape", "view", q))
    turned = rotated(flow, q, flow.step("index", "getitem", rope), interleaved=True)
    q = flow.step("reshape", "cat", q, turned)
    latent = flow.step("reshape", "split", flow.call("wkv_a", x))
    kv = flow.step("reshape", "view", flow.call("wkv_b", flow.call("kv_norm", latent)))
    kv = flow.step("reshape", "split", kv)
    shared = flow.call("k_rope", latent, flow.step("index", "getitem", rope))
    shared = flow.step("reshape", "expand", shared)
    q = flow.step("reshape", "transpose", q)
    k = flow.step("reshape", "transpose", flow.step("reshape", "cat", kv, shared))
    attended(flow, q, k, flow.step("reshape", "transpose", kv))
    attributes: dict[str, Scalar] = {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_heads,
        "head_dim": config.head_size,
        "v_head_dim": config.v_head_dim,
        "rope_head_dim": config.rope_head_dim,
    }
    return templates.add("LatentAttention", "attention", attributes=attributes, flow=flow, children=children)


def _shared_key(templates: Templates) -> int:
    flow = Flow("k", "rope")
    rotated(flow, flow.step("reshape", "unsqueeze", 0), 1, interleaved=True)
    return templates.add("SharedKey", "other", flow=flow)


def _mixture(templates: Templates, config: DeepSeekConfig) -> int:
    children = [
        ("router", templates.linear(config.dim, config.n_experts, bias=False)),
        ("experts", stacked_experts(templates, config)),
        ("shared", swiglu(templates, config.dim, config.n_shared_experts * config.hidden_dim)),
    ]
    biased = config.scores == "sigmoid"
    flow = Flow("x")

    def choose(logits: int) -> tuple[int, int]:
        exact = flow.step("cast", "to", logits)
        scores = flow.step("activation", "sigmoid", exact) if biased else flow.step("softmax", "softmax", exact)
        chosen = flow.step("index", "topk", _within_groups(flow, config, flow.step("reshape", "detach", scores)))
        weights = flow.step("index", "gather", scores, chosen)
        if config.normalize_weights:
            weights = flow.step("mul", "div", weights, flow.step("reduce", "sum", weights))
        return flow.step("mul", "mul", weights), chosen

    sums = routed(flow, choose)
    flow.step("add", "add", sums, flow.call("shared", 0))
    attributes: dict[str, Scalar] = {"n_experts": config.n_experts, "top_k": config.top_k}
    buffers = [("selection_bias", (config.n_experts,))] if biased else []
    return templates.add("MoE", "moe", buffers=buffers, attributes=attributes, flow=flow, children=children)


def _within_groups(flow: Flow, config: DeepSeekConfig, scores: int) -> int:
    biased = config.scores == "sigmoid"
    if biased:
        scores = flow.step("add", "add", scores, flow.step("cast", "to", flow.step("buffer", "selection_bias")))
    if config.n_groups == 1:
        return scores
    groups = flow.step("reshape", "view", scores)
    if biased:
        best = flow.step("reduce", "sum", flow.step("index", "topk", groups))
    else:
        best = flow.step("reduce", "amax", groups)
    taken = flow.step("index", "topk", best)
    left_out = flow.step("index", "scatter", flow.step("other", "ones_like", best), taken)
    kept = flow.step("index", "masked_fill", groups, flow.step("reshape", "unsqueeze", left_out))
    return flow.step("reshape", "flatten", kept)
