"""Rules about recomputation, against PyTorch's checkpointing."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legoai.dsl.rules.computation.operator_names import is_operator_name
from support.texts.rule_plans import BASE, codes, message

SIX = 'model llama3("tiny", n_layers = 6)\n'


def test_every_pytorch_operator_name_is_accepted() -> None:
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        if "::" in schema.name:
            names.add(schema.name.replace("::", "."))
            names.add(f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}")
    assert len(names) > 2000
    assert [name for name in names if not is_operator_name(name)] == []


@pytest.mark.parametrize(
    "name", ["mm", "torch.mm", "nn.functional.linear", "aten::mm", "aten.", "aten.mm.default.x", ""]
)
def test_unknown_operator_names_are_refused(name: str) -> None:
    assert not is_operator_name(name)
    assert "LP653" in codes(f'checkpoint {{ layers.* = selective(["{name}"]) }}')


def test_checkpoint_of_a_module_list_is_reported() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])
            self.layers.register_forward_hook(lambda *_: pytest.fail("a list was called"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    Model()(torch.ones(1, 2))
    assert "LP651" in codes("checkpoint { layers = full }")
    assert "LP651" in codes("compile { layers = inductor }")
    assert "LP651" not in codes("checkpoint { layers = none }")
    assert "LP651" not in codes("checkpoint { layers.* = full }")


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("layers.0 = every(2)", True),
        ("layers.{0..1} = every(3)", True),
        ("layers.* = every(4)", False),
        ("layers.0 = every(1)", False),
    ],
)
def test_stride_over_a_single_module_is_reported(rule: str, found: bool) -> None:
    assert ("LP652" in codes(f"checkpoint {{ {rule} }}")) is found


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ("layers.{0..2} = none", False),
        ("layers.3 = none", True),
        ("layers.3 = full", True),
        ("layers.{0..3} = none", True),
        ("layers.2 = none", False),
    ],
)
def test_stride_without_recomputed_modules_is_reported(others: str, found: bool) -> None:
    """A stride counts the modules that its rule matches, as lowering does."""
    assert ("LP652" in codes(f"{SIX}checkpoint {{ layers.* = every(4), {others} }}")) is found


def test_stride_says_why_nothing_is_recomputed() -> None:
    text = message(f"{SIX}checkpoint {{ layers.* = every(3), layers.{{2, 5}} = none }}", "LP652")
    assert text == "`every(3)` recomputes nothing: another rule decides `layers.2` (and 1 more)"


@pytest.mark.parametrize(
    ("path", "keep", "found"),
    [
        ("layers.*", "[]", True),
        ("layers.*", "[attention, matmul]", False),
        ("layers.*.feed_forward", "[attention]", True),
        ("layers.*.feed_forward", "[matmul]", False),
        ("layers.*.attention_norm", "[alternate_matmul]", True),
        ("layers.*", "[collective]", True),
    ],
)
def test_selective_rule_without_effect_is_reported(path: str, keep: str, found: bool) -> None:
    assert ("LP654" in codes(f"checkpoint {{ {path} = selective({keep}) }}")) is found


@pytest.mark.parametrize(
    ("path", "keep", "param", "found"),
    [
        ("layers.*.feed_forward.experts", "[alternate_matmul]", "bf16", True),
        ("layers.*.feed_forward.experts", "[alternate_matmul]", "fp32", False),
        ("layers.*.feed_forward.experts", "[matmul]", "bf16", False),
        ("layers.*.feed_forward", "[alternate_matmul]", "bf16", False),
    ],
)
def test_grouped_products_are_not_counted(path: str, keep: str, param: str, found: bool) -> None:
    """In other dtypes than bf16 experts multiply one after another, by products of two matrices."""
    text = f'model mixtral("tiny")\nprecision (param = {param})\ncheckpoint {{ {path} = selective({keep}) }}'
    assert ("LP654" in codes(text)) is found


def test_keeping_collectives_has_an_effect_under_tensor_parallelism() -> None:
    plan = "mesh (tp = 8)\nshard on tp { layers.*.attention.wo = rowwise }\n"
    assert "LP654" not in codes(plan + "checkpoint { layers.* = selective([collective]) }")


@pytest.mark.parametrize(
    ("amount", "found"), [("0%", True), ("1.0", True), ("50%", False), ("90GiB", True), ("1GiB", False)]
)
def test_budget_without_effect_is_reported(amount: str, found: bool) -> None:
    assert ("LP655" in codes(f"checkpoint {{ layers.* = budget({amount}) }}")) is found


def test_nested_checkpoints_are_exact_and_get_advice_only() -> None:
    def gradient(inner: bool, outer: bool) -> torch.Tensor:
        torch.manual_seed(0)
        middle: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        middle = checkpoint_wrapper(middle) if inner else middle
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 1))
        model = checkpoint_wrapper(model) if outer else model
        model(torch.ones(2, 4)).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    assert torch.equal(gradient(inner=True, outer=True), gradient(inner=False, outer=False))
    plan = "checkpoint {{ layers.* = full, layers.*.feed_forward = {} }}"
    assert "recomputed as a part of `layers.0`" in message(plan.format("full"), "LP824")
    assert "LP824" in codes(plan.format("selective([matmul])"))
    assert "LP824" not in codes(plan.format("none"))
    strided = "checkpoint {{ layers.* = every(2), layers.{}.feed_forward = full }}"
    assert "recomputed as a part of `layers.1`" in message(strided.format(1), "LP824")
    assert "LP824" not in codes(strided.format(0)), "`layers.0` is not recomputed"


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and that still exist, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {item.untyped_storage().data_ptr() for item in tree_leaves(args) if isinstance(item, torch.Tensor)}
        for tensor in tree_leaves(results):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in given:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return results

    def free(self, size: int) -> None:
        self.now -= size


def test_recomputing_the_whole_model_does_not_lower_peak_memory() -> None:
    def peak(*, blocks: bool, root: bool) -> int:
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)]
        model: nn.Module = nn.Sequential(*(checkpoint_wrapper(layer) if blocks else layer for layer in layers))
        model = checkpoint_wrapper(model) if root else model
        with Alive() as alive:
            model(torch.ones(4096, 64, requires_grad=True)).sum().backward()
        return alive.peak

    kept = peak(blocks=False, root=False)
    assert peak(blocks=False, root=True) > 0.9 * kept
    assert peak(blocks=True, root=False) < 0.7 * kept
    assert "LP657" in codes("checkpoint { root = full }")
    assert "LP657" in codes("checkpoint { root = selective([matmul]) }")
    assert "LP657" in codes("checkpoint { root = full, layers.* = full }")
    assert "LP657" not in codes("checkpoint { root = none, layers.* = full }")
    assert "LP657" not in codes("checkpoint { layers.* = full }")


def test_selective_attention_is_without_effect_for_math_attention() -> None:
    checkpoint = "checkpoint { layers.* = selective([attention]) }"
    assert "`attention` keeps nothing" in message(f"attention math\n{checkpoint}", "LP654")
    assert "LP654" not in codes(f"attention flash\n{checkpoint}")


@pytest.mark.parametrize(
    ("value", "cluster", "found"), [(16, "cpu", True), (24, "cpu", False), (16, "h100_sxm", False)]
)
def test_selective_attention_is_without_effect_where_a_cpu_has_no_kernel(value: int, cluster: str, found: bool) -> None:
    """PyTorch computes attention on a CPU from products where values have another width than keys."""
    model = f'deepseek("v2_lite", n_layers = 2, nope_head_dim = 16, rope_head_dim = 8, v_head_dim = {value})'
    base = BASE.replace('llama3("tiny")', model).replace("cluster h100_sxm", f"cluster {cluster}")
    assert ("LP654" in codes("checkpoint { layers.* = selective([attention, matmul]) }", base=base)) is found
    query, key, values = (torch.zeros(1, 1, 2, width, requires_grad=True) for width in (24, 24, value))
    on_cpu = SDPBackend.MATH if value == 16 else SDPBackend.FLASH_ATTENTION
    assert torch._fused_sdp_choice(query, key, values, is_causal=True) == on_cpu.value


@pytest.mark.parametrize(
    ("layer", "path", "saves"),
    [
        (nn.Linear(64, 64), "layers.*.feed_forward.w2", False),
        (nn.Embedding(64, 64), "tok_embeddings", False),
        (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), "layers.*.feed_forward", True),
    ],
)
def test_recomputation_without_savings_is_reported(layer: nn.Module, path: str, saves: bool) -> None:
    """Between forward and backward a layer keeps as much with recomputation as without, or less."""

    def kept(module: nn.Module) -> int:
        inputs = (
            torch.ones(512, 64, requires_grad=True) if not isinstance(layer, nn.Embedding) else torch.ones(512).long()
        )
        with Alive() as alive:
            output = module(inputs)
            return alive.now - output.nbytes

    assert (kept(layer) > kept(checkpoint_wrapper(layer))) is saves
    assert ("LP827" not in codes(f"checkpoint {{ {path} = full }}")) is saves
    assert "LP827" not in codes(f"checkpoint {{ {path} = every(1000) }}"), "recomputes nothing"


def test_checkpoint_of_the_block_list_is_whole_model_recomputation() -> None:
    from support.texts.drawn_plans import CONFIGS

    base = BASE.replace('llama3("tiny")', 'huggingface("llama.json")')
    assert "LP657" in codes("checkpoint { model = selective([matmul]) }", CONFIGS, base)
    assert "LP657" not in codes("checkpoint { model.layers.* = full }", CONFIGS, base)


@pytest.mark.parametrize("code", ["LP653", "LP655"])
def test_both_treatments_of_a_split_rule_are_checked(code: str) -> None:
    wrong = {"LP653": 'selective(["torch.mm"])', "LP655": "budget(0%)"}[code]
    assert code in codes(f"checkpoint {{ layers.* = first(2, {wrong}) }}")
    assert code in codes(f"checkpoint {{ layers.* = first(2, full, others = {wrong}) }}")
