"""Manifests of built-in models, computed from their dimensions without torch.

Each function here states the modules, shapes and flow of one module class of `llama`, `mixtral`, `gpt` and `vit`, in
the form of a manifest; a test compares the result with an inspection of the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from legoai.specs.models.configs import GPTConfig, LlamaConfig, MixtralConfig, ModelConfig, Scalar, ViTConfig
from legoai.specs.models.families import FAMILIES
from legoai.specs.models.manifest import FORMAT, Manifest, ModuleKind, StepOp
from legoai.specs.models.reads import Images, Reads, Tokens, described
from legoai.specs.models.source import ModelSource

_Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a module's own parameters or buffers."""

_Children = Iterable[tuple[str, int] | tuple[int, int, int]]
"""Names and templates of a module's children; equal ones with numbers for names are one [first, last, template]."""


def computed_manifest(source: ModelSource) -> Manifest:
    """Return the manifest of a built-in model.

    Raises:
        ConfigError: the preset or a dimension is wrong.
    """
    config = source.config()
    templates = _Templates()
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
            "unfilled": [],
            "tied": [["tok_embeddings.weight", "output.weight"]] if tied else [],
            "blocks": ["layers"],
            "templates": templates.made,
            "root": root,
        }
    )


class _Flow:
    """Steps of a forward, in execution order."""

    def __init__(self, *inputs: str) -> None:
        self.inputs = inputs
        self.steps: list[list[Any]] = [["input", name, []] for name in inputs]

    def step(self, op: StepOp, name: str, *inputs: int) -> int:
        """Add a step with the results of earlier ones as arguments, and return its number."""
        self.steps.append([op, name, list(inputs)])
        return len(self.steps) - 1

    def call(self, name: str, *inputs: int) -> int:
        """Add the call of a child."""
        return self.step("call", name, *inputs)


class _Templates:
    """The templates of a manifest, shared by equal modules."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def add(
        self,
        class_name: str,
        kind: ModuleKind,
        *,
        parameters: _Shapes = (),
        buffers: _Shapes = (),
        attributes: Mapping[str, Scalar] | None = None,
        inputs: Sequence[str] = (),
        flow: _Flow | None = None,
        children: _Children = (),
    ) -> int:
        """Return the number of a module's template; its children come first. A flow returns its last step."""
        steps = [] if flow is None else flow.steps
        raw = {
            "class": class_name,
            "kind": kind,
            "parameters": [[name, list(shape)] for name, shape in parameters],
            "buffers": [[name, list(shape)] for name, shape in buffers],
            "attributes": dict(attributes or {}),
            "inputs": list(inputs if flow is None else flow.inputs),
            "keyword_inputs": [],
            "flow": steps,
            "outputs": [len(steps) - 1] if steps else [],
            "children": [list(child) for child in children],
        }
        key = repr(raw)
        if key not in self._numbers:
            self._numbers[key] = len(self.made)
            self.made.append(raw)
        return self._numbers[key]

    def parameter_count(self, number: int) -> int:
        """Number of elements of the parameters of a module and those below it."""
        template = self.made[number]
        own: int = sum(math.prod(shape) for _, shape in template["parameters"])
        for child in template["children"]:
            times = 1 if len(child) == 2 else child[1] - child[0] + 1
            own += times * self.parameter_count(child[-1])
        return own

    def linear(self, in_features: int, out_features: int, *, bias: bool) -> int:
        parameters = [("weight", (out_features, in_features)), *([("bias", (out_features,))] if bias else [])]
        attributes = {"in_features": in_features, "out_features": out_features, "bias": bias}
        return self.add("Linear", "linear", parameters=parameters, attributes=attributes, inputs=["input"])

    def embedding(self, count: int, dim: int) -> int:
        attributes = {"num_embeddings": count, "embedding_dim": dim}
        return self.add(
            "Embedding", "embedding", parameters=[("weight", (count, dim))], attributes=attributes, inputs=["input"]
        )

    def rms_norm(self, dim: int, eps: float) -> int:
        return self.add(
            "RMSNorm", "norm", parameters=[("weight", (dim,))], attributes={"dim": dim, "eps": eps}, inputs=["x"]
        )

    def layer_norm(self, dim: int, eps: float, *, bias: bool) -> int:
        parameters = [("weight", (dim,)), *([("bias", (dim,))] if bias else [])]
        return self.add(
            "LayerNorm", "norm", parameters=parameters, attributes={"dim": dim, "eps": eps}, inputs=["input"]
        )

    def blocks(self, count: int, block: int) -> int:
        return self.add("ModuleDict", "container", children=[(0, count - 1, block)])


def _rotated(flow: _Flow, x: int, rope: int) -> int:
    """`decoder.apply_rotary` of heads, by the rows of the table for their positions."""
    table = flow.step("index", "getitem", rope)
    table = flow.step("reshape", "view_as_real", table)
    table = flow.step("reshape", "unsqueeze", table)
    cos = sin = flow.step("reshape", "unbind", table)
    left = right = flow.step("reshape", "chunk", x)
    one = flow.step("add", "sub", flow.step("mul", "mul", left, cos), flow.step("mul", "mul", right, sin))
    other = flow.step("add", "add", flow.step("mul", "mul", right, cos), flow.step("mul", "mul", left, sin))
    return flow.step("cast", "type_as", flow.step("reshape", "cat", one, other), x)


def _heads(flow: _Flow, layer: str, x: int) -> int:
    """A linear layer of attention, its output cut into heads."""
    return flow.step("reshape", "view", flow.call(layer, x))


def _attended(flow: _Flow, q: int, k: int, v: int) -> None:
    """Attention to keys and values, each with heads before positions, and the layer after it."""
    mixed = flow.step("attention", "scaled_dot_product_attention", q, k, v)
    mixed = flow.step("reshape", "transpose", mixed)
    flow.call("wo", flow.step("reshape", "reshape", mixed))


def _rotary_attention(templates: _Templates, config: LlamaConfig | MixtralConfig) -> int:
    q_width, kv_width = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    bias = config.qkv_bias or config.attention_bias
    children = [
        ("wq", templates.linear(config.dim, q_width, bias=bias)),
        ("wk", templates.linear(config.dim, kv_width, bias=bias)),
        ("wv", templates.linear(config.dim, kv_width, bias=bias)),
        ("wo", templates.linear(q_width, config.dim, bias=config.attention_bias)),
    ]
    flow = _Flow("x", "rope")
    x, rope = 0, 1
    if config.qk_norm:
        norm = templates.rms_norm(config.head_size, config.norm_eps)
        children += [("q_norm", norm), ("k_norm", norm)]
    q = _heads(flow, "wq", x)
    q = _rotated(flow, flow.call("q_norm", q) if config.qk_norm else q, rope)
    k = _heads(flow, "wk", x)
    k = _rotated(flow, flow.call("k_norm", k) if config.qk_norm else k, rope)
    v = _heads(flow, "wv", x)
    q, k, v = (flow.step("reshape", "transpose", heads) for heads in (q, k, v))
    _attended(flow, q, k, v)
    attributes = {"n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "head_dim": config.head_size}
    return templates.add("Attention", "attention", attributes=attributes, flow=flow, children=children)


def _swiglu(templates: _Templates, config: LlamaConfig) -> int:
    children = [
        ("w1", templates.linear(config.dim, config.hidden_dim, bias=config.mlp_bias)),
        ("w2", templates.linear(config.hidden_dim, config.dim, bias=config.mlp_bias)),
        ("w3", templates.linear(config.dim, config.hidden_dim, bias=config.mlp_bias)),
    ]
    flow = _Flow("x")
    gate = flow.step("activation", "silu", flow.call("w1", 0))
    flow.call("w2", flow.step("mul", "mul", gate, flow.call("w3", 0)))
    return templates.add("FeedForward", "feed_forward", flow=flow, children=children)


def _experts(templates: _Templates, config: MixtralConfig) -> int:
    flow = _Flow("x", "tokens_per_expert")

    def grouped_linear(x: int, weight: str) -> int:
        ends = flow.step("cast", "to", flow.step("reduce", "cumsum", 1))
        matrices = flow.step("reshape", "transpose", flow.step("parameter", weight))
        return flow.step("matmul", "grouped_mm", x, matrices, ends)

    gate = flow.step("activation", "silu", grouped_linear(0, "w1"))
    grouped_linear(flow.step("mul", "mul", gate, grouped_linear(0, "w3")), "w2")
    up, down = (config.hidden_dim, config.dim), (config.dim, config.hidden_dim)
    return templates.add(
        "Experts",
        "experts",
        parameters=[(name, (config.n_experts, *matrix)) for name, matrix in (("w1", up), ("w2", down), ("w3", up))],
        attributes={"n_experts": config.n_experts},
        flow=flow,
    )


def _mixture(templates: _Templates, config: MixtralConfig) -> int:
    children = [
        ("router", templates.linear(config.dim, config.n_experts, bias=False)),
        ("experts", _experts(templates, config)),
    ]
    flow = _Flow("x")
    rows = flow.step("reshape", "flatten", 0)
    best = flow.step("index", "topk", flow.step("softmax", "softmax", flow.call("router", rows)))
    weights = flow.step("mul", "div", best, flow.step("reduce", "sum", best))
    weights = flow.step("cast", "type_as", weights, 0)
    order = flow.step("index", "argsort", flow.step("reshape", "flatten", best))
    counts = flow.step("reduce", "one_hot", flow.step("reshape", "flatten", best))
    counts = flow.step("reduce", "sum", counts)
    sorted_rows = flow.step("index", "getitem", rows, flow.step("other", "floordiv", order))
    outputs = flow.call("experts", sorted_rows, counts)
    back = flow.step("index", "argsort", order)
    outputs = flow.step("reshape", "view", flow.step("index", "getitem", outputs, back))
    weighted = flow.step("mul", "mul", outputs, flow.step("reshape", "unsqueeze", weights))
    flow.step("reshape", "view_as", flow.step("reduce", "sum", weighted), 0)
    attributes = {"n_experts": config.n_experts, "top_k": config.top_k}
    return templates.add("MoE", "moe", attributes=attributes, flow=flow, children=children)


def _block(
    templates: _Templates,
    class_name: str,
    *,
    names: tuple[str, str],
    norm: int,
    attention: int,
    feed_forward: int,
    ffn_norm: str,
    rotary: bool,
) -> int:
    """A block of two sublayers, each after a norm and added to the residual stream."""
    mixer, transformer = names
    flow = _Flow("x", "rope") if rotary else _Flow("x")
    beside = (1,) if rotary else ()
    x = flow.step("add", "add", 0, flow.call(mixer, flow.call("attention_norm", 0), *beside))
    flow.step("add", "add", x, flow.call(transformer, flow.call(ffn_norm, x)))
    children = [("attention_norm", norm), (mixer, attention), (ffn_norm, norm), (transformer, feed_forward)]
    return templates.add(class_name, "block", flow=flow, children=children)


def _through_blocks(flow: _Flow, h: int, n_layers: int, *beside: int) -> int:
    for index in range(n_layers):
        h = flow.call(f"layers.{index}", h, *beside)
    return flow.call("norm", h)


def _rotary_decoder(
    templates: _Templates,
    config: LlamaConfig | MixtralConfig,
    class_name: str,
    feed_forward: Callable[[], int],
) -> int:
    embedding = templates.embedding(config.vocab_size, config.dim)
    norm = templates.rms_norm(config.dim, config.norm_eps)
    block = _block(
        templates,
        "TransformerBlock",
        names=("attention", "feed_forward"),
        norm=norm,
        attention=_rotary_attention(templates, config),
        feed_forward=feed_forward(),
        ffn_norm="ffn_norm",
        rotary=True,
    )
    children = [
        ("tok_embeddings", embedding),
        ("layers", templates.blocks(config.n_layers, block)),
        ("norm", norm),
        ("output", templates.linear(config.dim, config.vocab_size, bias=False)),
    ]
    flow = _Flow("tokens")
    h = flow.call("tok_embeddings", 0)
    flow.call("output", _through_blocks(flow, h, config.n_layers, flow.step("buffer", "rope")))
    table = (config.max_seq_len, config.head_size // 2)
    return templates.add(class_name, "model", buffers=[("rope", table)], flow=flow, children=children)


def _llama(templates: _Templates, config: LlamaConfig) -> int:
    return _rotary_decoder(templates, config, "Llama", lambda: _swiglu(templates, config))


def _mixtral(templates: _Templates, config: MixtralConfig) -> int:
    return _rotary_decoder(templates, config, "Mixtral", lambda: _mixture(templates, config))


def _plain_block(templates: _Templates, config: GPTConfig | ViTConfig, norm: int, *, bias: bool) -> int:
    """A block of GPT or ViT: attention without rotation, and two layers with GELU between them."""
    layer = templates.linear(config.dim, config.dim, bias=bias)
    flow = _Flow("x")
    q, k, v = (flow.step("reshape", "transpose", _heads(flow, name, 0)) for name in ("wq", "wk", "wv"))
    _attended(flow, q, k, v)
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
    flow = _Flow("x")
    flow.call("down", flow.step("activation", "gelu", flow.call("up", 0)))
    mlp = templates.add("MLP", "feed_forward", flow=flow, children=[("up", up), ("down", down)])
    return _block(
        templates,
        "Block",
        names=("attention", "mlp"),
        norm=norm,
        attention=attention,
        feed_forward=mlp,
        ffn_norm="mlp_norm",
        rotary=False,
    )


def _gpt(templates: _Templates, config: GPTConfig) -> int:
    tok_embeddings = templates.embedding(config.vocab_size, config.dim)
    pos_embeddings = templates.embedding(config.max_seq_len, config.dim)
    norm = templates.layer_norm(config.dim, config.norm_eps, bias=config.bias)
    block = _plain_block(templates, config, norm, bias=config.bias)
    children = [
        ("tok_embeddings", tok_embeddings),
        ("pos_embeddings", pos_embeddings),
        ("layers", templates.blocks(config.n_layers, block)),
        ("norm", norm),
        ("output", templates.linear(config.dim, config.vocab_size, bias=False)),
    ]
    flow = _Flow("tokens")
    positions = flow.step("other", "arange")
    h = flow.call("tok_embeddings", 0)
    h = flow.step("add", "add", h, flow.call("pos_embeddings", flow.step("reshape", "unsqueeze", positions)))
    flow.call("output", _through_blocks(flow, h, config.n_layers))
    return templates.add("GPT", "model", flow=flow, children=children)


def _patch_embedding(templates: _Templates, config: ViTConfig) -> int:
    side = config.patch_size
    projection = templates.add(
        "Conv2d",
        "convolution",
        parameters=[("weight", (config.dim, config.n_channels, side, side)), ("bias", (config.dim,))],
        attributes={"in_channels": config.n_channels, "out_channels": config.dim},
        inputs=["input"],
    )
    flow = _Flow("images")
    patches = flow.step("reshape", "transpose", flow.step("reshape", "flatten", flow.call("projection", 0)))
    class_token = flow.step("reshape", "expand", flow.step("parameter", "class_token"))
    tokens = flow.step("reshape", "cat", class_token, patches)
    flow.step("add", "add", tokens, flow.step("parameter", "positions"))
    parameters = [("class_token", (1, 1, config.dim)), ("positions", (1, config.n_tokens, config.dim))]
    return templates.add(
        "PatchEmbedding", "other", parameters=parameters, flow=flow, children=[("projection", projection)]
    )


def _vit(templates: _Templates, config: ViTConfig) -> int:
    embedding = _patch_embedding(templates, config)
    norm = templates.layer_norm(config.dim, config.norm_eps, bias=True)
    block = _plain_block(templates, config, norm, bias=True)
    children = [
        ("embedding", embedding),
        ("layers", templates.blocks(config.n_layers, block)),
        ("norm", norm),
        ("head", templates.linear(config.dim, config.n_classes, bias=True)),
    ]
    flow = _Flow("images")
    h = _through_blocks(flow, flow.call("embedding", 0), config.n_layers)
    flow.call("head", flow.step("index", "getitem", h))
    return templates.add("ViT", "model", flow=flow, children=children)


_ROOTS: Mapping[type[ModelConfig], Callable[[_Templates, Any], int]] = {
    LlamaConfig: _llama,
    MixtralConfig: _mixtral,
    GPTConfig: _gpt,
    ViTConfig: _vit,
}
