"""Templates of which the manifests of built-in models are computed without torch: modules, shapes and flows.

Each function here states the modules, shapes and flow of one module class that several families share; a test compares
the manifests with an inspection of the models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from legoai.specs.models.config_checks import Scalar
from legoai.specs.models.configs import DeepSeekConfig, LlamaConfig, MixtralConfig
from legoai.specs.models.manifests.manifest import ModuleKind, StepOp

Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a module's own parameters or buffers."""

Children = Iterable[tuple[str, int] | tuple[int, int, int]]
"""Names and templates of a module's children; equal ones with numbers for names are one [first, last, template]."""


class Flow:
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


class Templates:
    """The templates of a manifest, shared by equal modules."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def add(
        self,
        class_name: str,
        kind: ModuleKind,
        *,
        parameters: Shapes = (),
        buffers: Shapes = (),
        attributes: Mapping[str, Scalar] | None = None,
        inputs: Sequence[str] = (),
        flow: Flow | None = None,
        children: Children = (),
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
        """`layers.Linear`."""
        parameters = [("weight", (out_features, in_features)), *([("bias", (out_features,))] if bias else [])]
        attributes = {"in_features": in_features, "out_features": out_features, "bias": bias}
        return self.add("Linear", "linear", parameters=parameters, attributes=attributes, inputs=["input"])

    def embedding(self, count: int, dim: int) -> int:
        """`layers.Embedding`."""
        attributes = {"num_embeddings": count, "embedding_dim": dim}
        return self.add(
            "Embedding", "embedding", parameters=[("weight", (count, dim))], attributes=attributes, inputs=["input"]
        )

    def rms_norm(self, dim: int, eps: float) -> int:
        """`torch.nn.RMSNorm`."""
        return self.add(
            "RMSNorm", "norm", parameters=[("weight", (dim,))], attributes={"dim": dim, "eps": eps}, inputs=["x"]
        )

    def layer_norm(self, dim: int, eps: float, *, bias: bool) -> int:
        """`torch.nn.LayerNorm`."""
        parameters = [("weight", (dim,)), *([("bias", (dim,))] if bias else [])]
        return self.add(
            "LayerNorm", "norm", parameters=parameters, attributes={"dim": dim, "eps": eps}, inputs=["input"]
        )

    def blocks(self, *runs: tuple[int, int]) -> int:
        """The list of a model's blocks, by the lengths of runs of equal ones, and their templates."""
        children, first = [], 0
        for count, block in runs:
            children.append((first, first + count - 1, block))
            first += count
        return self.add("ModuleDict", "container", children=children)


def rotated(flow: Flow, x: int, table: int, *, interleaved: bool = False) -> int:
    """`decoder.apply_rotary` of heads, by the rows of the table for their positions."""
    table = flow.step("reshape", "view_as_real", table)
    table = flow.step("reshape", "unsqueeze", table)
    cos = sin = flow.step("reshape", "unbind", table)
    if interleaved:
        left = right = flow.step("reshape", "unbind", flow.step("reshape", "view", x))
    else:
        left = right = flow.step("reshape", "chunk", x)
    one = flow.step("add", "sub", flow.step("mul", "mul", left, cos), flow.step("mul", "mul", right, sin))
    other = flow.step("add", "add", flow.step("mul", "mul", right, cos), flow.step("mul", "mul", left, sin))
    return flow.step("cast", "type_as", flow.step("reshape", "cat", one, other), x)


def cut_into_heads(flow: Flow, layer: str, x: int) -> int:
    """A linear layer of attention, its output cut into heads."""
    return flow.step("reshape", "view", flow.call(layer, x))


def attended(flow: Flow, q: int, k: int, v: int) -> None:
    """Attention to keys and values, each with heads before positions, and the layer after it."""
    mixed = flow.step("attention", "scaled_dot_product_attention", q, k, v)
    mixed = flow.step("reshape", "transpose", mixed)
    flow.call("wo", flow.step("reshape", "reshape", mixed))


def transformer_block(
    templates: Templates,
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
    flow = Flow("x", "rope") if rotary else Flow("x")
    beside = (1,) if rotary else ()
    x = flow.step("add", "add", 0, flow.call(mixer, flow.call("attention_norm", 0), *beside))
    flow.step("add", "add", x, flow.call(transformer, flow.call(ffn_norm, x)))
    children = [("attention_norm", norm), (mixer, attention), (ffn_norm, norm), (transformer, feed_forward)]
    return templates.add(class_name, "block", flow=flow, children=children)


def through_blocks(flow: Flow, h: int, n_layers: int, *beside: int) -> int:
    """Call every block, and the last norm."""
    for index in range(n_layers):
        h = flow.call(f"layers.{index}", h, *beside)
    return flow.call("norm", h)


def swiglu(templates: Templates, dim: int, hidden_dim: int, *, bias: bool = False) -> int:
    """`llama.FeedForward`."""
    children = [
        ("w1", templates.linear(dim, hidden_dim, bias=bias)),
        ("w2", templates.linear(hidden_dim, dim, bias=bias)),
        ("w3", templates.linear(dim, hidden_dim, bias=bias)),
    ]
    flow = Flow("x")
    gate = flow.step("activation", "silu", flow.call("w1", 0))
    flow.call("w2", flow.step("mul", "mul", gate, flow.call("w3", 0)))
    return templates.add("FeedForward", "feed_forward", flow=flow, children=children)


def stacked_experts(templates: Templates, config: MixtralConfig | DeepSeekConfig) -> int:
    """`mixtral.Experts`."""
    flow = Flow("x", "tokens_per_expert")

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


def routed(flow: Flow, choose: Callable[[int], tuple[int, int]]) -> int:
    """`mixtral.MoE.forward`, given the steps by which weights and experts are chosen from the router's logits."""
    rows = flow.step("reshape", "flatten", 0)
    weights, chosen = choose(flow.call("router", rows))
    weights = flow.step("cast", "type_as", weights, 0)
    order = flow.step("index", "argsort", flow.step("reshape", "flatten", chosen))
    counts = flow.step("reduce", "one_hot", flow.step("reshape", "flatten", chosen))
    counts = flow.step("reduce", "sum", counts)
    sorted_rows = flow.step("index", "getitem", rows, flow.step("other", "floordiv", order))
    outputs = flow.call("experts", sorted_rows, counts)
    back = flow.step("index", "argsort", order)
    outputs = flow.step("reshape", "view", flow.step("index", "getitem", outputs, back))
    weighted = flow.step("mul", "mul", outputs, flow.step("reshape", "unsqueeze", weights))
    return flow.step("reshape", "view_as", flow.step("reduce", "sum", weighted), 0)


def rotary_decoder(
    templates: Templates,
    config: LlamaConfig | MixtralConfig | DeepSeekConfig,
    class_name: str,
    *runs: tuple[int, Callable[[], int]],
    attention: Callable[[], int],
    rotated_features: int,
) -> int:
    """A decoder by the lengths of its runs of equal blocks, and the feed-forward of each."""
    embedding = templates.embedding(config.vocab_size, config.dim)
    norm = templates.rms_norm(config.dim, config.norm_eps)
    blocks = []
    for count, feed_forward in runs:
        built = transformer_block(
            templates,
            "TransformerBlock",
            names=("attention", "feed_forward"),
            norm=norm,
            attention=attention(),
            feed_forward=feed_forward(),
            ffn_norm="ffn_norm",
            rotary=True,
        )
        blocks.append((count, built))
    children = [
        ("tok_embeddings", embedding),
        ("layers", templates.blocks(*blocks)),
        ("norm", norm),
        ("output", templates.linear(config.dim, config.vocab_size, bias=False)),
    ]
    flow = Flow("tokens")
    h = flow.call("tok_embeddings", 0)
    flow.call("output", through_blocks(flow, h, config.n_layers, flow.step("buffer", "rope")))
    table = (config.max_seq_len, rotated_features // 2)
    return templates.add(class_name, "model", buffers=[("rope", table)], flow=flow, children=children)
