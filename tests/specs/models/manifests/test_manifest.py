"""Manifests agree with torch's own models."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from legoai.specs.models.families import FAMILIES
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource


def builtin(family: str, preset: str, **arguments) -> ModelSource:
    return ModelSource(kind="builtin", target=family, preset=preset, arguments=arguments)


def manifest_of(family: str, preset: str) -> Manifest:
    return load_manifest(builtin(family, preset), base_directory=".")


@pytest.mark.parametrize("family", ["llama3", "gpt2", "mixtral", "vit"])
def test_modules_and_parameters_equal_torch_in_order(family):
    preset = "small" if family == "gpt2" else "tiny"
    source = builtin(family, preset)
    module, name = FAMILIES[family].module, FAMILIES[family].class_name
    with torch.device("meta"):
        model = getattr(__import__(module, fromlist=[name]), name)(source.config())
    manifest = manifest_of(family, preset)
    assert list(manifest.modules) == [path for path, _ in model.named_modules()]
    assert list(manifest.parameters()) == [
        (path, tuple(parameter.shape)) for path, parameter in model.named_parameters(remove_duplicate=False)
    ]
    assert manifest.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    for path, module in model.named_modules():
        info = manifest.modules[path]
        assert info.path == path
        assert info.class_name == type(module).__name__
        assert list(info.children) == [name for name, _ in module.named_children()]
        parent, _, own_name = path.rpartition(".")
        assert not path or manifest.modules[parent].children[info.position] == own_name


def steps(info) -> list[tuple[str, str, tuple[int, ...]]]:
    return [tuple(step) for step in info.flow]


def test_llama_manifest_has_attributes_for_placement_rules():
    manifest = manifest_of("llama3", "8b")
    info = manifest.modules["layers.31.attention"]
    assert (info.kind, info.attributes) == ("attention", {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128})
    assert info.inputs == ("x", "rope")
    assert manifest.modules["layers.7.attention.wk"].attributes == {
        "in_features": 4096,
        "out_features": 1024,
        "bias": False,
    }
    assert manifest.modules["tok_embeddings"].attributes == {"num_embeddings": 128_256, "embedding_dim": 4096}
    assert (manifest.vocab_size, manifest.max_seq_len) == (128_256, 131_072)
    assert manifest.tied_parameters == ()
    [blocks] = manifest.block_lists
    assert (blocks.path, len(blocks), blocks.groups) == ("layers", 32, (tuple(range(32)),))
    kinds = {path: manifest.modules[path].kind for path in ("", "layers", "layers.0", "norm", "layers.0.feed_forward")}
    assert list(kinds.values()) == ["model", "container", "block", "norm", "feed_forward"]


def test_block_flow_has_norms_sublayers_and_residual_additions():
    manifest = manifest_of("llama3", "tiny")
    block = manifest.modules["layers.2"]
    assert steps(block) == [
        ("input", "x", ()),
        ("input", "rope", ()),
        ("call", "attention_norm", (0,)),
        ("call", "attention", (2, 1)),
        ("add", "add", (0, 3)),
        ("call", "ffn_norm", (4,)),
        ("call", "feed_forward", (5,)),
        ("add", "add", (4, 6)),
    ]
    assert block.outputs == (7,)
    assert steps(manifest.modules["layers.2.feed_forward"]) == [
        ("input", "x", ()),
        ("call", "w1", (0,)),
        ("activation", "silu", (1,)),
        ("call", "w3", (0,)),
        ("mul", "mul", (2, 3)),
        ("call", "w2", (4,)),
    ]
    root = [step for step in steps(manifest.modules[""]) if step[0] == "call"]
    assert [name for _, name, _ in root] == [
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
        "norm",
        "output",
    ]


def test_mixture_of_experts_manifest_has_router_and_experts():
    manifest = manifest_of("mixtral", "8x7b")
    assert manifest.modules["layers.0.feed_forward"].kind == "moe"
    assert manifest.modules["layers.0.feed_forward"].attributes == {"n_experts": 8, "top_k": 2}
    experts = manifest.modules["layers.0.feed_forward.experts"]
    assert (experts.kind, experts.attributes) == ("experts", {"n_experts": 8})
    assert [(item.name, item.shape) for item in experts.parameters] == [
        ("w1", (8, 14_336, 4096)),
        ("w2", (8, 4096, 14_336)),
        ("w3", (8, 14_336, 4096)),
    ]
    assert experts.inputs == ("x", "tokens_per_expert")


def test_tied_embeddings_are_one_group():
    assert manifest_of("gpt2", "xl").tied_parameters == (("tok_embeddings.weight", "output.weight"),)


def test_an_unknown_path_is_a_key_error():
    modules = manifest_of("llama3", "tiny").modules
    for path in ("layers.4", "layers.00", "layers.0.", ".", "layer", "norm.weight"):
        assert path not in modules
        with pytest.raises(KeyError):
            modules[path]


def test_manifest_json_round_trip():
    manifest = manifest_of("vit", "tiny")
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize("damage", [{"format": 0}, {"templates": None}, {"root": 10_000}, {"blocks": ["nowhere"]}])
def test_a_damaged_manifest_is_a_value_error(damage):
    raw = json.loads(manifest_of("vit", "tiny").to_json())
    with pytest.raises(ValueError, match="manifest"):
        Manifest({**raw, **damage})


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x, *, scale=None, shift=None):
        x = x + self.down(self.up(x).relu_())
        return x if scale is None else x * scale


class Uneven(nn.Module):
    """Layers of two widths, a keyword, a parameter of its own, a tensor that is never used, a module never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(16), Layer(16), Layer(32), Layer(16)])
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(2, 2)

    def example_inputs(self):
        return (torch.zeros(3, 8),)

    def forward(self, x):
        torch.zeros(4).add(1)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return {"result": x}


def test_blocks_are_grouped_by_structure():
    with torch.device("meta"):
        manifest = describe(Uneven(), "uneven")
    [blocks] = manifest.block_lists
    assert (blocks.path, blocks.groups) == ("blocks", ((0, 1, 3), (2,)))
    assert manifest.modules["blocks.2.up"].attributes["out_features"] == 32
    assert manifest.modules["blocks.3.up"].attributes["out_features"] == 16


def test_flow_records_parameters_keywords_and_in_place_operations():
    with torch.device("meta"):
        manifest = describe(Uneven(), "uneven")
    assert steps(manifest.modules[""]) == [
        ("input", "x", ()),
        ("parameter", "scale", ()),
        ("call", "blocks.0", (0, 1)),
        ("call", "blocks.1", (2, 1)),
        ("call", "blocks.2", (3, 1)),
        ("call", "blocks.3", (4, 1)),
    ]
    block = manifest.modules["blocks.0"]
    assert (block.inputs, block.keyword_inputs) == (("x",), ("scale",))
    assert steps(block) == [
        ("input", "x", ()),
        ("input", "scale", ()),
        ("call", "up", (0,)),
        ("activation", "relu", (2,)),
        ("call", "down", (3,)),
        ("add", "add", (0, 4)),
        ("mul", "mul", (5, 1)),
    ]
    assert manifest.modules["unused"].inputs == ()


class Drops(nn.Module):
    """Attention that drops where told."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x):
        heads = x.view(3, 2, 4, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.drop).view(3, 2, 8)


class Noisy(nn.Module):
    """Adds noise."""

    def forward(self, x):
        return x + torch.rand_like(x)


class Random(nn.Module):
    """Modules that draw random numbers, and others that look as if they did."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.nothing, self.uncalled = nn.Dropout(0.1), nn.Dropout(0.0), nn.Dropout(0.1)
        self.drops, self.keeps = Drops(0.1), Drops(0.0)
        self.noisy = Noisy()
        self.borrows = Borrows(self.noisy)
        self.twice = Second()
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def example_inputs(self):
        return (torch.zeros(3, 2, 8),)

    def forward(self, x):
        x = self.keeps(self.drops(self.nothing(self.dropout(x))))
        x = self.twice(self.twice(self.borrows(self.noisy(x))))
        return self.heads(x, x, x, need_weights=False)[0]


class Borrows(nn.Module):
    """Calls a module that another one holds, from inside of its own."""

    def __init__(self, borrowed: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.call = partial(borrowed)

    def forward(self, x):
        return self.call(self.inner(x))


class Second(nn.Module):
    """Draws only when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls == 1 else nn.functional.dropout(x)


def test_modules_with_random_forward_are_marked():
    with torch.device("meta"):
        manifest = describe(Random(), "random")
    assert manifest.flow_error is None
    drawing = {path for path, module in manifest.modules.items() if module.random}
    assert drawing == {"dropout", "uncalled", "drops", "noisy", "borrows", "twice", "heads"}


@pytest.mark.slow
def test_compiler_is_imported_before_operators_are_recorded():
    code = """
import sys
import torch
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.random_operators import RandomOperators

watch = RandomOperators.__enter__

def enter(self):
    assert "torch._dynamo" in sys.modules
    return watch(self)

RandomOperators.__enter__ = enter

class Drops(torch.nn.Dropout):
    def example_inputs(self):
        return (torch.empty(2),)

manifest = describe(Drops(0.1), "drops")
assert manifest.flow_error is None and manifest.modules[""].random
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_model_with_untraceable_forward_has_modules():
    with torch.device("meta"):
        manifest = describe(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), "picture")
    assert "forward failed on the meta device" in manifest.flow_error
    assert "example_inputs" in manifest.flow_error
    assert list(manifest.modules) == ["", "0", "1"]


def test_forward_that_uses_vmap_is_followed():
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(torch.vmap(torch.relu)(self.embed(tokens)))

    with torch.device("meta"):
        assert describe(Mapped(), "mapped", shapes=True).flow_error is None


def test_long_errors_of_a_forward_are_cut_between_words():
    class Fails(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            raise ValueError("several " * 99)

    error = describe(Fails(), "fails").flow_error
    tried = "2 samples of 8 and 4 samples of 128 tokens were tried"
    assert error.endswith(f"several ... ({tried}); a method example_inputs() may say what it takes")


def test_largest_manifest_is_computed_quickly_without_torch():
    code = """
import sys, time
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.source import ModelSource
times = []
for _ in range(5):
    start = time.process_time()
    manifest = load_manifest(ModelSource(kind="builtin", target="llama3", preset="405b"), base_directory=".")
    paths = list(manifest.modules)
    times.append(time.process_time() - start)
heavy = {"torch", "pydantic", "networkx", "numpy", "subprocess"} & set(sys.modules)
print(len(paths), min(times), sorted(heavy))
"""
    count, seconds, heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split(maxsplit=2)
    assert int(count) == 5 + 126 * 12
    assert float(seconds) < 0.03  # about 4 ms where nothing else runs
    assert heavy.strip() == "[]"
