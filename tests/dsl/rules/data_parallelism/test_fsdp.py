"""Rules about FSDP units and axes, against PyTorch on a fake group of eight ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.texts.rule_plans import codes, diagnostics, message, place

MESH = "mesh (dp_replicate = 2, dp_shard = 4)\n"


@pytest.mark.parametrize(
    ("axes", "legal"),
    [
        ("dp_shard", True),
        ("cp", True),
        ("dp_shard, cp", True),
        ("dp_replicate, dp_shard", True),
        ("dp_replicate, dp_shard, cp", True),
        ("dp_replicate", False),
        ("dp_shard, dp_replicate", False),
        ("cp, dp_shard", False),
    ],
)
def test_axes_are_replicas_then_shards(axes: str, legal: bool) -> None:
    assert ("LP321" not in codes(f"fsdp on {axes} {{ layers.* = unit }}")) == legal


def test_one_unit_for_the_whole_model_is_advised_against() -> None:
    assert message(MESH + "fsdp on dp_shard { root = unit }", "LP804") == (
        "all blocks of `layers` are gathered at once, since no unit holds them"
    )
    assert "2 blocks" in message(MESH + "fsdp on dp_shard { layers.{0..1} = unit }", "LP804")
    assert "LP804" not in codes(MESH + "fsdp on dp_shard { layers.*.feed_forward = unit }")


def test_the_last_unit_is_not_freed_between_forward_and_backward() -> None:
    assert place(MESH + "fsdp on dp_shard { layers.* = unit, output = unit }", "LP802") == "output"
    units = "fsdp on dp_shard { layers.* = unit, root = unit(reshard = after_forward) }"
    assert place(MESH + units, "LP802") == "after_forward"
    for root in ("unit", "unit(reshard = after_backward)", "unit(reshard = never)"):
        assert "LP802" not in codes(MESH + f"fsdp on dp_shard {{ layers.* = unit, root = {root} }}")


def test_zero_3_under_a_pipeline_is_advised_against() -> None:
    pipeline = "mesh (pp = 2, dp_shard = 4)\npipeline on pp\n"
    assert place(pipeline + "fsdp on dp_shard { layers.* = unit }", "LP803") == "layers.*"
    assert "LP803" not in codes(
        pipeline + "fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }"
    )
    assert "LP803" not in codes(MESH + "fsdp on dp_shard { layers.* = unit }")


def test_undecided_unit_has_no_diagnostic() -> None:
    assert not codes(MESH + "fsdp on dp_shard { layers.* = auto }") & {"LP802", "LP804"}
    assert "LP322" not in codes("mesh (dp_shard = auto)\nfsdp on dp_shard { layers.* = unit(reshard = 3) }")


def test_partial_reshard_requires_several_ranks() -> None:
    assert message("fsdp on dp_shard { layers.* = unit(reshard = 2) }", "LP322") == (
        "`reshard` = 2 does not divide the 1 rank of `dp_shard`"
    )


@pytest.mark.parametrize(("ranks", "legal"), [(2, "2"), (4, "2 and 4"), (24, "2, 3, 4, 6, 8, 12 and 24")])
def test_numbers_that_help_offers_are_legal(ranks: int, legal: str) -> None:
    text = f"cluster h100_sxm(devices = {ranks})\nmesh (dp_shard = {ranks})\n"
    text += "fsdp on dp_shard { layers.* = unit(reshard = N) }"
    [item] = [item for item in diagnostics(text.replace("N", "5")) if item.code == "LP322"]
    assert item.help == (f"legal numbers are {legal}",)
    for number in legal.replace(" and ", ", ").split(", "):
        assert not codes(text.replace("N", number)) & {"LP207", "LP322"}


def test_none_rule_for_the_root_unit_is_refused() -> None:
    assert place(MESH + "fsdp on dp_shard { layers.* = unit, root = none }", "LP327") == "root"
    assert "LP327" not in codes(MESH + "fsdp on dp_shard { layers.* = unit, layers.0 = none }")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
    dist.destroy_process_group()


def small(family: str) -> Any:
    import torch

    from legoai.specs.models import configs
    from legoai.specs.models.gpt import GPT
    from legoai.specs.models.llama import Llama

    with torch.device("cpu"):
        if family == "gpt":
            return GPT(configs.GPTConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=32, max_seq_len=16))
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 32, "vocab_size": 32}
        return Llama(configs.LlamaConfig(max_seq_len=16, **sizes))


def works(step: Callable[[], object]) -> bool:
    """Whether PyTorch does it without an error."""
    try:
        step()
    except (ValueError, RuntimeError, NotImplementedError):
        return False
    return True


def shard_and_step(model: Any, mesh: Any, units: dict[str, Any]) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard

    for path, reshard in units.items():
        fully_shard(model.get_submodule(path), mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("axes", ["dp_shard", "dp_replicate, dp_shard"])
def test_partial_reshard_must_divide_shard_ranks_as_in_pytorch(mesh: Any, size: int, axes: str) -> None:
    found = codes(MESH + f"fsdp on {axes} {{ layers.* = unit(reshard = {size}) }}")
    torch_mesh = mesh["dp_shard"] if axes == "dp_shard" else mesh
    legal = works(lambda: shard_and_step(small("llama"), torch_mesh, {"layers.0": size}))
    assert ("LP322" not in found) == legal


@pytest.mark.parametrize("path", ["layers", "layers.0", "layers.0.attention", "norm"])
def test_unit_must_be_a_called_module_as_in_pytorch(mesh: Any, path: str) -> None:
    found = codes(MESH + f"fsdp on dp_shard {{ {path} = unit }}")
    assert ("LP324" not in found) == works(lambda: shard_and_step(small("llama"), mesh["dp_shard"], {path: True}))


@pytest.mark.parametrize("units", [["layers.0"], ["tok_embeddings"], ["output"], ["tok_embeddings", "output"]])
def test_tied_parameters_must_share_a_unit_as_in_pytorch(mesh: Any, units: list[str]) -> None:
    rules = ", ".join(f"{path} = unit" for path in units)
    found = codes(f'model gpt2("small")\n{MESH}fsdp on dp_shard {{ {rules} }}')
    legal = works(lambda: shard_and_step(small("gpt"), mesh["dp_shard"], dict.fromkeys(units, True)))
    assert ("LP325" not in found) == legal


def test_empty_unit_is_reported_and_harmless(mesh: Any) -> None:
    rules = "layers.*.attention = unit, layers.*.attention.* = unit"
    assert place(MESH + f"fsdp on dp_shard {{ {rules} }}", "LP323") == "layers.*.attention"
    parts = [f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo")]
    assert works(
        lambda: shard_and_step(small("llama"), mesh["dp_shard"], dict.fromkeys([*parts, "layers.0.attention"], True))
    )
    assert "LP323" not in codes(MESH + "fsdp on dp_shard { layers.* = unit, layers.*.attention = unit, norm = unit }")


def test_replicated_shards_are_refused_as_in_pytorch(mesh: Any) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def wrap() -> None:
        model = small("llama")
        fully_shard(model, mesh=mesh["dp_shard"])
        DistributedDataParallel(model, process_group=mesh["dp_replicate"].get_group())(
            torch.zeros(1, 4, dtype=torch.long)
        )

    assert not works(wrap)
    text = MESH + "replicate on dp_replicate\n"
    found = [item for item in diagnostics(text + "fsdp on dp_shard { layers.* = unit }") if item.code == "LP331"]
    assert found[0].help == ("delete `replicate` and write `fsdp on dp_replicate, dp_shard`",)
    twice = [
        item
        for item in diagnostics(text + "fsdp on dp_replicate, dp_shard { layers.* = unit }")
        if item.code == "LP331"
    ]
    assert twice[0].help == ("delete `replicate`",)


@pytest.mark.parametrize(
    ("reshard", "said"), [("8", True), ("4", False), ("after_forward", False), ("auto in [8, after_forward]", False)]
)
def test_reshard_to_all_ranks_is_after_forward(reshard: str, said: bool) -> None:
    rules = f"{{ layers.* = unit(reshard = {reshard}) }}"
    assert ("LP329" in codes(f"mesh (dp_shard = 8)\nfsdp on dp_shard {rules}")) is said
    assert "LP329" not in codes(f"mesh (dp_shard = auto)\nfsdp on dp_shard {rules}")
