"""Manifests of built-in models, computed from their dimensions without torch.

Each function here states the modules, shapes and flow of one module class of `llama`, `mixtral`, `gpt` and `vit`, in
the form of a manifest; a test compares the result with an inspection of the class. Those of `deepseek` are in a
module of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from legoai.specs.models.configs import DeepSeekConfig, GPTConfig, LlamaConfig, MixtralConfig, ModelConfig, ViTConfig
from legoai.specs.models.families import FAMILIES
from legoai.specs.models.manifests.computed.deepseek import deepseek
from legoai.specs.models.manifests.computed.templates import (
    Flow,
    Templates,
    attended,
    cut_into_heads,
    rotary_decoder,
    rotated,
    routed,
    stacked_experts,
    swiglu,
    through_blocks,
    transformer_block,
)
from legoai.specs.models.manifests.manifest import FORMAT, Manifest
from legoai.specs.models.reads import Images, Reads, Tokens, described
from legoai.specs.models.source import ModelSource


def computed_manifest(source: ModelSource) -> Manifest:
    """Return the manifest of a built-in model.

    Raises:
        ConfigError: the preset or a dimension is wrong.
    """
    config = source.config()
    templates = Templates()
    root = _ROOTS[type(config)](templates, config)
    family = FAMILIES[source.target]
    counted, tied = templates.parameter_count(root), False
    if not isinstance(config, ViTConfig) and config.tie_embeddings:
        counted, tied = counted - config.vocab_size * config.dim, True
    reads: Reads = Tokens()
    if isinstance(config, ViTConfig):
        side = config.image_size
        reads = Images(channels=config.n_channels, height=side, width=side, classes=config.n_classes)
    return Manifest(
        {
            "format": FORMAT,
            "source": str(source),
            "model_class": f"{family.module}.{family.class_name}",
            "parameter_count": counted,
            "reads": described(reads),
            "vocab_size": getattr(config, "vocab_size", None),
            "max_seq_len": getattr(config, "max_seq_len", None),
            "forward": ["images"] if isinstance(config, ViTConfig) else ["tokens", "positions"],
            "flow_error": None,
            "unfit_result": None,
            "unfilled": [],
            "updated": [],
            "tied": [["tok_embeddings.weight", "output.weight"]] if tied else [],
            "shared": [],
            "blocks": ["layers"],
            "templates": templates.made,
            "root": root,
        }
    )


def _rotary_attention(templates: Templates, config: LlamaConfig | MixtralConfig) -> int:
    q_width, kv_width = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    bias = config.qkv_bias or config.attention_bias
    children = [
        ("wq", templates.linear(config.dim, q_width, bias=bias)),
        ("wk", templates.linear(config.dim, kv_width, bias=bias)),
        ("wv", templates.linear(config.dim, kv_width, bias=bias)),
        ("wo", templates.linear(q_width, config.dim, bias=config.attention_bias)),
    ]
    flow = Flow("x", "rope")
    x, rope = 0, 1

    def turned(heads: int) -> int:
        return rotated(flow, heads, flow.step("index", "getitem", rope))

    if config.qk_norm:
        norm = templates.rms_norm(config.head_size, config.norm_eps)
        children += [("q_norm", norm), ("k_norm", norm)]
    q = cut_into_heads(flow, "wq", x)
    q = turned(flow.call("q_norm", q) if config.qk_norm else q)
    k = cut_into_heads(flow, "wk", x)
    k = turned(flow.call("k_norm", k) if config.qk_norm else k)
    v = cut_into_heads(flow, "wv", x)
    q, k, v = (flow.step("reshape", "transpose", heads) for heads in (q, k, v))
    attended(flow, q, k, v)
    attributes = {"n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "head_dim": config.head_size}
    return templates.add("Attention", "attention", attributes=attributes, flow=flow, children=children)


def _grouped_query_decoder(
    templates: Templates, config: LlamaConfig | MixtralConfig, class_name: str, feed_forward: Callable[[], int]
) -> int:
    return rotary_decoder(
        templates,
        config,
        class_name,
        (config.n_layers, feed_forward),
        attention=lambda: _rotary_attention(templates, config),
        rotated_features=config.head_size,
    )


def _llama(templates: Templates, config: LlamaConfig) -> int:
    return _grouped_query_decoder(
        templates, config, "Llama", lambda: swiglu(templates, config.dim, config.hidden_dim, bias=config.mlp_bias)
    )


def _mixtral(templates: Templates, config: MixtralConfig) -> int:
    return _grouped_query_decoder(templates, config, "Mixtral", lambda: _mixture(templates, config))


def _mixture(templates: Templates, config: MixtralConfig) -> int:
    children = [
        ("router", templates.linear(config.dim, config.n_experts, bias=False)),
        ("experts", stacked_experts(templates, config)),
    ]
    flow = Flow("x")

    def choose(logits: int) -> tuple[int, int]:
        best = flow.step("index", "topk", flow.step("softmax", "softmax", logits))
        return flow.step("mul", "div", best, flow.step("reduce", "sum", best)), best

    routed(flow, choose)
    attributes = {"n_experts": config.n_experts, "top_k": config.top_k}
    return templates.add("MoE", "moe", attributes=attributes, flow=flow, children=children)


def _plain_block(templates: Templates, config: GPTConfig | ViTConfig, norm: int, *, bias: bool) -> int:
    """A block of GPT or ViT: attention without rotation, and two layers with GELU between them."""
    layer = templates.linear(config.dim, config.dim, bias=bias)
    flow = Flow("x")
    q, k, v = (flow.step("reshape", "transpose", cut_into_heads(flow, name, 0)) for name in ("wq", "wk", "wv"))
    attended(flow, q, k, v)
    attributes = {"n_heads": config.n_heads, "n_kv_heads": config.n_heads, "head_dim": config.head_size}
    attention = templates.add(
        "Attention",
        "attention",
        attributes=attributes,
        flow=flow,
        children=[(name, layer) for name in ("wq", "wk", "wv", "wo")],
    )
    up = templates.linear(config.dim, config.hidden_dim, bias=bias)
    down = templates.linear(config.hidden_dim, config.dim, bias=bias)
    flow = Flow("x")
    flow.call("down", flow.step("activation", "gelu", flow.call("up", 0)))
    mlp = templates.add("MLP", "feed_forward", flow=flow, children=[("up", up), ("down", down)])
    return transformer_block(
        templates,
        "Block",
        names=("attention", "mlp"),
        norm=norm,
        attention=attention,
        feed_forward=mlp,
        ffn_norm="mlp_norm",
        rotary=False,
    )


def _gpt(templates: Templates, config: GPTConfig) -> int:
    tok_embeddings = templates.embedding(config.vocab_size, config.dim)
    pos_embeddings = templates.embedding(config.max_seq_len, config.dim)
    norm = templates.layer_norm(config.dim, config.norm_eps, bias=config.bias)
    block = _plain_block(templates, config, norm, bias=config.bias)
    children = [
        ("tok_embeddings", tok_embeddings),
        ("pos_embeddings", pos_embeddings),
        ("layers", templates.blocks((config.n_layers, block))),
        ("norm", norm),
        ("output", templates.linear(config.dim, config.vocab_size, bias=False)),
    ]
    flow = Flow("tokens")
    positions = flow.step("other", "arange")
    h = flow.call("tok_embeddings", 0)
    h = flow.step("add", "add", h, flow.call("pos_embeddings", flow.step("reshape", "unsqueeze", positions)))
    flow.call("output", through_blocks(flow, h, config.n_layers))
    return templates.add("GPT", "model", flow=flow, children=children)


def _patch_embedding(templates: Templates, config: ViTConfig) -> int:
    side = config.patch_size
    projection = templates.add(
        "Conv2d",
        "convolution",
        parameters=[("weight", (config.dim, config.n_channels, side, side)), ("bias", (config.dim,))],
        attributes={"in_channels": config.n_channels, "out_channels": config.dim},
        inputs=["input"],
    )
    flow = Flow("images")
    patches = flow.step("reshape", "transpose", flow.step("reshape", "flatten", flow.call("projection", 0)))
    class_token = flow.step("reshape", "expand", flow.step("parameter", "class_token"))
    tokens = flow.step("reshape", "cat", class_token, patches)
    flow.step("add", "add", tokens, flow.step("parameter", "positions"))
    parameters = [("class_token", (1, 1, config.dim)), ("positions", (1, config.n_tokens, config.dim))]
    return templates.add(
        "PatchEmbedding", "other", parameters=parameters, flow=flow, children=[("projection", projection)]
    )


def _vit(templates: Templates, config: ViTConfig) -> int:
    embedding = _patch_embedding(templates, config)
    norm = templates.layer_norm(config.dim, config.norm_eps, bias=True)
    block = _plain_block(templates, config, norm, bias=True)
    children = [
        ("embedding", embedding),
        ("layers", templates.blocks((config.n_layers, block))),
        ("norm", norm),
        ("head", templates.linear(config.dim, config.n_classes, bias=True)),
    ]
    flow = Flow("images")
    h = through_blocks(flow, flow.call("embedding", 0), config.n_layers)
    flow.call("head", flow.step("index", "getitem", h))
    return templates.add("ViT", "model", flow=flow, children=children)


_ROOTS: Mapping[type[ModelConfig], Callable[[Templates, Any], int]] = {
    LlamaConfig: _llama,
    MixtralConfig: _mixtral,
    DeepSeekConfig: deepseek,
    GPTConfig: _gpt,
    ViTConfig: _vit,
}
