"""Rules about compilation report what PyTorch 2.13 cannot compile or compiles wrongly, and nothing else."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import BASE, codes, diagnostics, message, place

TENSOR_PARALLEL = """
mesh (dp_shard = 4, tp = 2)
shard on tp {
  tok_embeddings       = rowwise(input = replicate, output = shard(1))
  layers.*.{attention_norm, ffn_norm} = sequence
  layers.*.attention   = inputs(from = shard(1), to = replicate)
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo = rowwise(output = shard(1))
}
"""


def test_nested_compile_rule_has_no_effect() -> None:
    plan = "compile {{\n  layers.* = inductor\n  layers.*.feed_forward = {}\n}}"
    for treatment in ("inductor(mode = max_autotune)", "aot_eager", "none"):
        assert place(plan.format(treatment), "LP622") == "layers.*.feed_forward"
    assert "LP622" not in codes("compile { layers.*.attention = inductor, layers.*.feed_forward = none }")


@pytest.mark.parametrize(
    ("units", "compiled", "wrong"),
    [
        ("layers.* = unit", "root = inductor", True),
        ("layers.* = unit", "root = inductor(fullgraph = false)", False),
        ("layers.* = unit", "layers.* = inductor", False),
        ("root = unit", "root = inductor", False),
        ("layers.*.feed_forward = unit", "layers.* = aot_eager", True),
    ],
)
def test_full_graph_cannot_contain_unit_hooks(units: str, compiled: str, wrong: bool) -> None:
    plan = f"mesh (dp_shard = 8)\nfsdp on dp_shard {{ {units} }}\ncompile {{ {compiled} }}"
    assert ("LP623" in codes(plan)) is wrong


@pytest.mark.parametrize(
    ("replicas", "compiled", "wrong"),
    [
        ("(bucket = 64KiB)", "root = inductor", True),
        ("(bucket = 64KiB)", "root = inductor(fullgraph = false)", False),
        ("(bucket = 64KiB)", "layers.* = inductor", False),
        ("(bucket = 1GiB)", "root = inductor", False),
    ],
)
def test_full_graph_cannot_contain_hooks_of_replicas(replicas: str, compiled: str, wrong: bool) -> None:
    plan = f"mesh (dp_replicate = 8)\nreplicate on dp_replicate {replicas}\ncompile {{ {compiled} }}"
    assert ("LP623" in codes(plan)) is wrong


@pytest.mark.parametrize(
    ("mesh", "compiled", "wrong"),
    [
        ("tp = 8", "layers.* = inductor(dynamic = true)", True),
        ("tp = 8", "layers.*.feed_forward = inductor(dynamic = true)", True),
        ("tp = 8", "root = inductor(dynamic = true)", True),
        ("tp = 8", "layers.* = inductor", False),
        ("tp = 8", "layers.*.attention = inductor(dynamic = true)", False),
        ("tp = 1", "layers.* = inductor(dynamic = true)", False),
    ],
)
def test_shapes_of_tensor_parallel_modules_do_not_vary(mesh: str, compiled: str, wrong: bool):
    feed_forward = "layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise"
    plan = f"mesh ({mesh})\nshard on tp {{ {feed_forward} }}\ncompile {{ {compiled} }}"
    assert ("LP640" in codes(plan)) is wrong


@pytest.mark.parametrize(
    ("layouts", "compiled", "wrong"),
    [
        ("(sequence)", "layers.*", False),
        ("(sequence)", "layers.*.{attention, feed_forward}", False),
        ("(sequence)", "root", False),
        ("(sequence)", "output", False),
        ("(sequence)", "tok_embeddings", False),
        ("(sequence)", "layers.*.feed_forward.w1", True),
        ("(sequence)", "layers.*.attention.wo", True),
        ("", "layers.*.ffn_norm", False),
        ("", "layers.*.feed_forward", True),
    ],
)
def test_shapes_may_vary_where_pieces_of_sequences_are_gathered(layouts: str, compiled: str, wrong: bool):
    plan = f"mesh (tp = 8)\nshard standard on tp {layouts}\ncompile {{ {compiled} = inductor(dynamic = true) }}"
    assert ("LP640" in codes(plan)) is wrong


@pytest.mark.parametrize(
    ("units", "compiled", "wrong"),
    [
        ("fsdp blocks on dp_shard", "layers.*", True),
        ("fsdp blocks on dp_shard", "layers.*.attention", True),
        ("fsdp on dp_shard { root = unit }", "layers.*.attention", True),
        ("fsdp blocks on dp_shard", "layers.*.feed_forward", False),
        ("fsdp blocks on dp_shard", "output", False),
        ("", "layers.*", False),
    ],
)
def test_shapes_of_heads_do_not_vary_in_units_of_fsdp(units: str, compiled: str, wrong: bool):
    parallel = f"mesh (dp_shard = 4, tp = 2)\nshard standard on tp (sequence)\n{units}\n"
    assert ("LP640" in codes(f"{parallel}compile {{ {compiled} = inductor(dynamic = true) }}")) is wrong


@pytest.mark.slow
@pytest.mark.parametrize("units", [True, False])
def test_torch_cannot_compile_heads_of_gathered_pieces_in_units_for_shapes_that_vary(gloo, units: bool):
    errors = gloo(2)(compiled_heads, units)
    assert all("mul expected 2 arguments, got 3" in error if units else not error for error in errors)


def compiled_heads(units: bool) -> str:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    from legoai.runtime.compiled import compile_with_hooks

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim = 8
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(48, 48, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v = (layer(x).view(b, t, -1, self.head_dim) for layer in (self.wq, self.wk, self.wv))
            return self.wo((q * k + v).reshape(b, t, -1))

    torch._dynamo.reset()
    module, mesh = Heads(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    styles = {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{name: ColwiseParallel() for name in ("wq", "wk", "wv")},
        "wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(module, mesh["tp"], styles)
    compile_with_hooks(module, backend="aot_eager", fullgraph=True, dynamic=True)
    if units:
        fully_shard(module, mesh=mesh["dp_shard"])
    try:
        module(torch.ones(2, 16, 48, requires_grad=True)).sum().backward()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_torch_cannot_compile_shards_for_shapes_that_vary(gloo):
    [error] = gloo(1)(compiled_shards)
    assert "RecursionError" in error


def compiled_shards() -> str:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from legoai.specs.models.llama import FeedForward

    torch._dynamo.reset()
    module = FeedForward(48, 96, n_layers=1)
    module.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    styles = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (1,)), styles)
    try:
        module(torch.ones(2, 16, 48, requires_grad=True)).sum().backward()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("compiled", "wrong"),
    [
        ("layers.* = inductor", False),
        ("root = inductor", False),
        ("root = none", False),
        ("root = inductor(mode = max_autotune_no_cudagraphs)", False),
        ("root = inductor(mode = max_autotune)", True),
        ("layers.* = inductor(mode = reduce_overhead)", True),
        ("layers.* = inductor(dynamic = true)", True),
        ("layers.* = aot_eager(fullgraph = false)", True),
    ],
)
def test_graph_regions_refuse_breaks_cuda_graphs_and_dynamic_shapes(compiled: str, wrong: bool):
    plan = f"mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph) {{ layers.* = unit }}\ncompile {{ {compiled} }}"
    assert ("LP624" in codes(plan)) is wrong
    assert not codes(plan) & {"LP622", "LP623", "LP626"}


def test_budget_in_bytes_combines_with_compiled_graph_regions():
    plan = (
        "mesh (dp_shard = 8)\nfsdp on dp_shard {} {{ layers.* = unit }}\ncompile {{ layers.* = inductor }}\n"
        "checkpoint {{ layers.* = budget(1GiB) }}"
    )
    assert "LP628" in codes(plan.format(""))
    assert "LP628" not in codes(plan.format("(backend = graph)"))


def test_checkpoint_inside_compiled_tensor_parallel_module_is_refused() -> None:
    checkpoint = TENSOR_PARALLEL + "checkpoint { layers.* = full }\n"
    assert "LP625" in codes(checkpoint + "compile { root = inductor(fullgraph = false) }")
    assert "LP625" not in codes(checkpoint + "compile { layers.* = inductor }")
    without = "compile { root = inductor }\ncheckpoint { layers.* = full }"
    assert "LP625" not in codes(without)


def test_async_tensor_parallelism_needs_ranks_styles_symmetric_memory_and_inductor() -> None:
    blocks = "compile (async_tp = true) { layers.{1..3} = inductor }"
    assert "LP626" not in codes(TENSOR_PARALLEL + blocks)
    assert "`tp` has one rank" in message(blocks, "LP626")
    assert "nothing is sharded" in message("mesh (tp = 8)\n" + blocks, "LP626")
    assert "`a100_sxm80` lacks" in message("cluster a100_sxm80\n" + TENSOR_PARALLEL + blocks, "LP626")
    assert "no module is compiled by inductor" in message(
        TENSOR_PARALLEL + "compile (async_tp = true) { layers.{1..3} = aot_eager }", "LP626"
    )
    two_hosts = "cluster h100_sxm(hosts = 2, devices = 4, fabric = infiniband_ndr)\n"
    wide = TENSOR_PARALLEL.replace("dp_shard = 4, tp = 2", "tp = 8")
    assert "`tp` = 8 reach over hosts of 4 devices" in message(two_hosts + wide + blocks, "LP626")


@pytest.mark.parametrize(("tp", "hosts", "crosses"), [(3, 3, True), (6, 3, True), (4, 3, False), (3, 1, False)])
def test_groups_of_async_tp_do_not_reach_over_hosts(tp: int, hosts: int, crosses: bool) -> None:
    text = f"""cluster h100_sxm(hosts = {hosts}, devices = {8 if hosts > 1 else 3}, fabric = infiniband_ndr)
mesh (dp_shard = {8 * hosts // tp if hosts > 1 else 1}, tp = {tp})
shard standard on tp (sequence)
compile (async_tp = true) {{ layers.* = inductor }}"""
    base = BASE.replace('"tiny"', '"tiny", dim = 384, n_heads = 12, n_kv_heads = 12, hidden_dim = 768')
    found = [item.message for item in diagnostics(text, base=base) if item.code == "LP626"]
    assert [f"groups of `tp` = {tp} reach over hosts of 8 devices" in item for item in found] == [True] * crosses


@pytest.mark.parametrize(
    ("compiled", "has_effect"),
    [
        ("layers.* = inductor", True),
        ("layers.*.feed_forward = inductor", True),
        ("layers.*.feed_forward.w2 = inductor", True),
        ("output = inductor", True),
        ("layers.*.feed_forward.w1 = inductor", False),
        ("layers.*.attention.{wq, wk, wv} = inductor", False),
        ("norm = inductor", False),
        ("tok_embeddings = inductor", False),
        ("layers.* = aot_eager, norm = inductor", False),
    ],
)
def test_async_tp_needs_a_collective_beside_a_product(compiled: str, has_effect: bool) -> None:
    text = "mesh (dp_shard = 4, tp = 2)\nshard standard on tp (sequence)\n"
    found = [
        item.message
        for item in diagnostics(f"{text}compile (async_tp = true) {{ {compiled} }}")
        if item.code == "LP626"
    ]
    assert ["beside a product" in item for item in found] == [True] * (not has_effect)


def test_cuda_graphs_on_a_cpu_are_reported() -> None:
    plan = "cluster {}\ncompile {{ layers.* = inductor(mode = reduce_overhead) }}"
    assert "LP627" in codes(plan.format("cpu"))
    assert "LP627" not in codes(plan.format("h100_sxm"))


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("fsdp on dp_shard { layers.* = unit }\ncompile { layers.* = inductor(mode = max_autotune) }", True),
        ("fsdp on dp_shard { layers.* = unit }\ncompile { layers.* = inductor(mode = reduce_overhead) }", True),
        ("fsdp on dp_shard { root = unit }\ncompile { layers.*.feed_forward = inductor(mode = max_autotune) }", True),
        ("fsdp on dp_shard\ncompile { layers.* = inductor(mode = max_autotune_no_cudagraphs) }", False),
        ("fsdp on dp_shard\ncompile { layers.* = aot_eager }", False),
        ("fsdp on dp_shard (backend = graph)\ncompile { layers.* = inductor(mode = max_autotune) }", False),
        ("compile { layers.* = inductor(mode = max_autotune) }", False),
        ("cluster cpu(devices = 8)\nfsdp on dp_shard\ncompile { layers.* = inductor(mode = max_autotune) }", False),
    ],
)
def test_cuda_graphs_with_moving_parameters_are_reported(body: str, warned: bool) -> None:
    assert ("LP636" in codes(f"mesh (dp_shard = 8)\n{body}")) is warned
