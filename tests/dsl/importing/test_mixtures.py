"""Configs of models with experts: their plans, and what of them no plan says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.dsl.importing.python_config import read_python
from legoai.dsl.importing.python_modules import Module
from legoai.dsl.importing.translation import Imported, translated
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulated import in_a_fork
from support.texts.importing import import_config

RUNS = Path(__file__).parent / "configs" / "my_mixtures.py"
DEVICES = {"deepseek_671b": 512, "qwen3_235b_on_hosts": 128}
"""Of the functions; the others have 32."""
LOSSES = {"deepseek_in_float8": ["model_spec.converters"]}

HEAD = """\
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.{model} import model_registry
from torchtitan.trainer import Trainer
def a() -> Trainer.Config:
    config = Trainer.Config(model_spec=model_registry({flavour}), optimizer=default_adamw())
"""


def functions() -> list[str]:
    """The configs of the file, in its order."""
    module = Module.of(RUNS.read_text(), RUNS.name, RUNS)
    return [name for name in module.functions if not name.startswith("_")]


def cluster(devices: int) -> str:
    return "h100_sxm" if devices == 8 else f"h100_sxm(hosts = {devices // 8}, fabric = infiniband_ndr)"


def imported(body: str, model: str = "deepseek_v3", flavour: str = "'debugmodel'", devices: int = 8) -> Imported:
    """A config of August 2026 with these statements."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = f"{HEAD.format(model=model, flavour=flavour)}{lines}    return config\n"
    config = read_python(text, "runs.py", None, None, {})
    return translated(config, plan="some", cluster=cluster(devices), devices=devices)


def of_toml(model: str, flavour: str, options: str = "", devices: int = 8) -> Imported:
    """A config of January 2026 with these options of parallelism."""
    text = f'[model]\nname = "{model}"\nflavor = "{flavour}"\n[parallelism]\n{options}\n'
    return import_config(text, "x.toml", plan="some", cluster=cluster(devices), devices=devices)


@pytest.mark.parametrize("function", functions())
def test_config_becomes_a_clean_plan(function: str, golden: Callable[[Path, str], None]):
    devices = DEVICES.get(function, 32)
    config = read_python(RUNS.read_text(), RUNS.name, RUNS, function)
    found = translated(config, plan="some", cluster=cluster(devices), devices=devices)
    assert [item.code for item in found.diagnostics] == ["LP024"] * len(LOSSES.get(function, []))
    assert [item.name for item in found.unused if item.changes] == LOSSES.get(function, [])
    assert found.text is not None
    golden(RUNS.with_name(f"mixture_{function}.plan"), found.text)
    linted = lint(found.text, "some.plan", directory=Path())
    assert [item.message for item in linted.diagnostics if item.severity != "advice"] == []
    assert lower(linted.analysis).text


PUBLISHED = {
    ("qwen3", "30B-A3B"): 30.53e9, ("qwen3", "235B-A22B"): 235.1e9, ("deepseek_v3", "16B"): 15.71e9,
    ("deepseek_v3", "236B"): 235.7e9, ("deepseek_v3", "671B"): 671.0e9,
}  # fmt: skip
"""Parameters of the models, from their cards; that of V3 without multi-token prediction."""


def parameters(found: Imported) -> dict[str, tuple[int, ...]]:
    assert found.text is not None, found.diagnostics
    manifest = lint(found.text, "x.plan", directory=Path()).analysis.manifest
    return dict(manifest.parameters())


@pytest.mark.parametrize(("model", "flavour"), PUBLISHED)
def test_parameter_counts_equal_published_counts(model: str, flavour: str):
    for found in (of_toml(model, flavour, devices=512), imported("pass", model, repr(flavour), 512)):
        count = sum(map(math.prod, parameters(found).values()))
        assert count == pytest.approx(PUBLISHED[model, flavour], rel=1e-3)


def test_shapes_of_a_block_are_those_of_torchtitan():
    dim, hidden, experts, heads = 256, 256, 8, 16
    shapes = parameters(imported("pass"))
    block = {name.removeprefix("layers.1."): shape for name, shape in shapes.items() if name.startswith("layers.1.")}
    assert block == {
        "attention_norm.weight": (dim,), "ffn_norm.weight": (dim,),
        "attention.wq.weight": (heads * 192, dim), "attention.wkv_a.weight": (512 + 64, dim),
        "attention.kv_norm.weight": (512,), "attention.wkv_b.weight": (heads * 256, 512),
        "attention.wo.weight": (dim, heads * 128), "feed_forward.router.weight": (experts, dim),
        "feed_forward.experts.w1": (experts, hidden, dim), "feed_forward.experts.w2": (experts, dim, hidden),
        "feed_forward.experts.w3": (experts, hidden, dim), "feed_forward.shared.w1.weight": (2 * hidden, dim),
        "feed_forward.shared.w2.weight": (dim, 2 * hidden), "feed_forward.shared.w3.weight": (2 * hidden, dim),
    }  # fmt: skip
    assert shapes["layers.0.feed_forward.w1.weight"] == (1024, dim)
    block = parameters(imported("pass", "qwen3", "'debugmodel_moe'"))
    assert block["layers.7.feed_forward.experts.w2"] == (64, 256, 768)
    assert block["layers.7.attention.wk.weight"] == (8 * 128, 256)
    assert block["layers.7.attention.q_norm.weight"] == (128,)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ("tensor_parallel_degree = 2", "divides the hidden layer of each expert over the ranks of tensor parallelism"),
        ("tensor_parallel_degree = 4\nexpert_parallel_degree = 2",
         "2 ranks for experts are no multiple of the 4 of tensor parallelism"),
        ("tensor_parallel_degree = 2\nexpert_parallel_degree = 2\nexpert_tensor_parallel_degree = 2",
         "divides the hidden layer of each expert"),
        ("expert_parallel_degree = 2\nexpert_tensor_parallel_degree = 4", "TorchTitan takes 1 or the degree of tensor"),
        ("expert_parallel_degree = 3", "3 ranks for experts do not divide the 8 of `dp_shard` and `cp`"),
        ("expert_parallel_degree = 8\npipeline_parallel_degree = 2", "8 ranks for experts do not divide the 4"),
    ],
)  # fmt: skip
def test_layouts_that_no_plan_states_are_refused(degrees: str, message: str):
    found = of_toml("deepseek_v3", "debugmodel", degrees)
    assert found.text is None
    [problem] = found.diagnostics
    assert problem.code == "LP023"
    assert message in problem.message


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ("expert_parallel_degree=1", "divides the hidden layer"),
        ("expert_parallel_degree=2, enable_sequence_parallel=False", "take pieces of the sequence"),
    ],
)
def test_experts_of_august_on_ranks_of_tensor_parallelism_have_pieces(degrees: str, message: str):
    found = imported(f"config.parallelism = ParallelismConfig(tensor_parallel_degree=2, {degrees})")
    assert [item.code for item in found.diagnostics] == ["LP023"]
    assert message in found.diagnostics[0].message


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3"])
@pytest.mark.parametrize("ep", [2, 8])
def test_experts_are_put_on_ranks_of_tensor_parallelism_too(model: str, ep: int):
    flavour = "'debugmodel'" if model == "deepseek_v3" else "'debugmodel_moe'"
    degrees = f"tensor_parallel_degree=2, expert_parallel_degree={ep}"
    found = imported(f"config.parallelism = ParallelismConfig({degrees})", model, flavour)
    assert found.diagnostics == ()
    assert found.text is not None
    assert f"mesh (dp_shard = 4, tp = 2, ep = {ep})" in found.text
    assert "shard standard on tp (sequence, loss_parallel, across_tp)\n\nshard standard on ep (across_tp)" in found.text
    assert any("routes its own piece of the sequence" in note for note in found.notes)
    linted = lint(found.text, "some.plan", directory=Path())
    assert not linted.has_errors
    assert linted.analysis is not None
    assert lower(linted.analysis).text


def test_january_states_experts_on_ranks_of_tensor_parallelism():
    found = of_toml("deepseek_v3", "debugmodel", "tensor_parallel_degree = 2\nexpert_parallel_degree = 4")
    assert found.diagnostics == ()
    assert found.text is not None
    assert "shard standard on ep (across_tp)" in found.text


@pytest.mark.parametrize(
    ("degrees", "mesh"),
    [
        ("expert_parallel_degree=8", "mesh (dp_shard = 8, ep = 8)"),
        ("expert_parallel_degree=4, data_parallel_replicate_degree=2", "mesh (dp_replicate = 2, dp_shard = 4, ep = 4)"),
        ("expert_parallel_degree=8, context_parallel_degree=2", "mesh (dp_shard = 4, cp = 2, ep = 8)"),
        ("expert_parallel_degree=4, pipeline_parallel_degree=2", "mesh (pp = 2, dp_shard = 4, ep = 4)"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_of_experts_are_those_of_the_mesh(degrees: str, mesh: str, compiled: bool):
    found = imported(
        f"config.parallelism = ParallelismConfig({degrees}, num_pp_microbatches=4)\nconfig.compile.enable = {compiled}"
    )
    assert found.diagnostics == ()
    assert found.text is not None
    assert mesh in found.text
    assert "shard standard on ep" in found.text
    assert ("inductor(fullgraph = false)" in found.text) == compiled
    linted = lint(found.text, "some.plan", directory=Path())
    assert [item.message for item in linted.diagnostics if item.severity == "error"] == []
    assert lower(linted.analysis).text


@pytest.mark.parametrize(
    ("body", "flavour", "name"),
    [
        ("pass", "'debugmodel', moe_comm_backend='hybridep'", "model_spec.moe_comm_backend"),
        ("pass", "'debugmodel', non_blocking_capacity_factor=1.0", "model_spec.non_blocking_capacity_factor"),
        ("pass", "'debugmodel', num_mtp_layers=1", "model_spec.num_mtp_layers"),
        ("config.debug.moe_force_load_balance = True", "'debugmodel'", "debug.moe_force_load_balance"),
        ("pass", "'debugmodel', converters=[MXFP8GroupedExpertsConverter.Config()]", "model_spec.converters"),
    ],
)
def test_what_no_plan_says_of_experts_is_listed(body: str, flavour: str, name: str):
    found = imported(body, flavour=flavour)
    assert [item.code for item in found.diagnostics] == ["LP024"]
    assert [item.name for item in found.unused if item.changes] == [name]
    assert found.text is not None


def test_usual_options_of_experts_change_nothing():
    found = imported("pass", flavour="'debugmodel', moe_comm_backend='standard', num_mtp_layers=0")
    assert found.diagnostics == ()
    reasons = {item.name: item.why for item in found.unused}
    assert reasons["model_spec.moe_comm_backend"] == "tokens travel by all-to-all of `torch.distributed`"
    dense = imported("config.parallelism.expert_parallel_degree = 8", "qwen3", "'0.6B', moe_comm_backend='deepep'")
    assert dense.diagnostics == ()
    assert dense.text is not None
    assert " ep = " not in dense.text
    assert {item.why for item in dense.unused} == {"the model has no experts"}


def notes(found: Imported, word: str) -> int:
    return sum(word in note for note in found.notes)


def test_differences_of_routing_are_noted():
    whole = imported("pass", flavour="'236B'", devices=512)
    assert (notes(whole, "load_balance_coeff"), notes(whole, "groups of experts"), notes(whole, "routers")) == (1, 1, 1)
    assert notes(imported("pass", flavour="'671B'", devices=512), "groups of experts") == 0
    # Before, nothing changed the bias of Qwen3, and routers computed in bf16.
    old = of_toml("qwen3", "debugmodel_moe")
    assert (notes(old, "load_balance_coeff"), notes(old, "routers")) == (0, 0)
    assert notes(of_toml("deepseek_v3", "debugmodel"), "load_balance_coeff") == 1
    assert notes(imported("config.training.mixed_precision_param = 'float32'"), "experts in bf16 all the same") == 1


@pytest.mark.parametrize(
    ("length", "then", "now"), [(4096, "rope_scaling = 1.0", "rope_mscale = 0.7"), (8192, *["rope_mscale = 0.7"] * 2)]
)
def test_wavelengths_are_stretched_as_at_the_time(length: int, then: str, now: str):
    text = f'[model]\nname = "deepseek_v3"\nflavor = "16B"\n[training]\nseq_len = {length}\n'
    old = import_config(text, "x.toml", plan="some", cluster=cluster(32), devices=32)
    training = f"num_tokens_per_microbatch_per_dp_rank={length}, max_context_length={length}"
    new = imported(f"config.training = TrainingConfig({training})", flavour="'16B'", devices=32)
    assert old.text is not None
    assert new.text is not None
    assert then in old.text
    assert now in new.text
    assert "attention" not in [line.split(" ")[0] for line in new.text.splitlines()]  # no kernel but PyTorch's choice


def test_selective_checkpointing_keeps_what_torchtitan_keeps_of_experts():
    body = "config.activation_checkpoint = SelectiveAC.Config()\nconfig.parallelism.expert_parallel_degree = 2"
    found = imported(body)
    exchanged, choice = '"_c10d_functional.all_to_all_single.default"', '"aten.topk.default"'
    assert found.text is not None
    assert exchanged in found.text
    assert choice in found.text
    assert notes(found, "product of a router") == 1
    assert notes(found, "one matrix product") == 0  # which Qwen3 has
    counted = imported(f"{body}\nconfig.activation_checkpoint.force_recompute_mm_shapes_by_fqns = []")
    assert notes(counted, "product of a router") == 0
    alone = imported("config.activation_checkpoint = SelectiveAC.Config()", "qwen3", "'debugmodel_moe'")
    assert alone.text is not None
    assert exchanged not in alone.text


def peak_bytes(model: str, flavour: str, ep: int) -> int:
    """Most memory of rank 0 under the plan of a config."""
    found = imported(
        f"config.parallelism.expert_parallel_degree = {ep}\nconfig.activation_checkpoint = SelectiveAC.Config()",
        model, repr(flavour),
    )  # fmt: skip
    assert found.text is not None
    analysis = lint(found.text, "some.plan", directory=Path()).analysis
    return estimate(lower(analysis), analysis.plan, analysis.manifest).peak_active


@pytest.mark.slow
@pytest.mark.parametrize(("model", "flavour", "ep"), [("qwen3", "debugmodel_moe", 1), ("deepseek_v3", "debugmodel", 4)])
def test_plan_is_costed(model: str, flavour: str, ep: int):
    assert in_a_fork(peak_bytes, model, flavour, ep) > 0
