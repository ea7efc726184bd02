"""Compiled modules train as eager ones do, with FSDP, tensor parallelism and checkpointing."""

from __future__ import annotations

import pytest
import torch

from legoai.runtime.compiled import compile_with_hooks
from support.marks import some_slow
from support.models.read_weights import build
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered
from support.training.meshed import TRAINING, UNITS, text_of
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

BOTH = f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}\nfsdp on dp_shard {UNITS}{DOUBLE}"
SHARDED = f"mesh (dp_shard = 4)\nfsdp on dp_shard {UNITS}{DOUBLE}"
TENSOR = f"mesh (tp = 4)\n{SEQUENCE_PARALLEL}{PLAIN_DOUBLE}"
BLOCKS = "compile { layers.* = aot_eager }\n"
PLANS = {
    "fsdp, tensor parallel, some kept and some recomputed": f"""{BOTH}{BLOCKS}
checkpoint {{ layers.* = selective([attention, alternate_matmul]), layers.1 = full, layers.2 = none }}""",
    "tensor parallel alone": f"{TENSOR}{BLOCKS}",
    "layers inside of eager blocks": f"{BOTH}compile {{ layers.0.attention.{{wq, wo}} = aot_eager, norm = aot_eager }}",
}
MORE_PLANS = {
    "fsdp and tensor parallel": f"{BOTH}{BLOCKS}",
    "fsdp, tensor parallel, all recomputed": f"{BOTH}{BLOCKS}checkpoint {{ layers.* = full }}",
    "fully sharded": f"{SHARDED}{BLOCKS}checkpoint {{ layers.* = selective([matmul]) }}",
    "the whole model": f"{TENSOR}compile {{ root = aot_eager }}",
    "budgets of the compiler, one for each block": f"""{BOTH}{BLOCKS}
checkpoint {{ layers.* = first(2, budget(10%), budget(60%, by = greedy)) }}""",
    "the whole model within a budget": f"""{TENSOR}compile {{ root = aot_eager }}
checkpoint {{ root = budget(30%) }}""",
    "the whole model around units": f"{SHARDED}compile {{ root = aot_eager(fullgraph = false) }}",
    "modules with hooks, some kept and some recomputed": f"""{BOTH}
compile {{ layers.*.{{attention, feed_forward}} = aot_eager, tok_embeddings = aot_eager, output = aot_eager }}
checkpoint {{ layers.*.feed_forward = full, layers.*.attention = selective([attention, matmul]) }}""",
    "some blocks eager": f"{BOTH}compile {{ layers.* = aot_eager, layers.{{1, 2}} = none }}",
    "inductor": f"{BOTH}compile {{ layers.* = inductor }}",
}


def train_anew(text: str, data: str) -> dict:
    torch._dynamo.reset()  # compilations of other tests in this process count as recompilation
    return train(text, data)


@pytest.mark.parametrize(
    "name",
    some_slow(
        PLANS,
        "tensor parallel alone",
        "fsdp, tensor parallel, some kept and some recomputed",
        "layers inside of eager blocks",
    ),
)
def test_compiled_modules_equal_one_eager_process(name: str, gloo, data, alone):
    for result in gloo(4)(train_anew, text_of(PLANS[name]), data):
        assert_close(result, alone, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_PLANS)
def test_more_compiled_modules_equal_one_eager_process(name: str, gloo, data, alone):
    for result in gloo(4)(train_anew, text_of(MORE_PLANS[name]), data):
        assert_close(result, alone, TOLERANCE)


def test_layers_of_torch_are_compiled(gloo, data):
    """Compiled by their own method they would fail: dynamo finds nothing to compile in them."""
    layers = "layers.*.attention.{wq, wo} = aot_eager, layers.*.ffn_norm = aot_eager(fullgraph = false)"
    [eager] = gloo(1)(train_anew, text_of(PLAIN_DOUBLE), data)
    [compiled] = gloo(1)(compiled_frames, text_of(f"{PLAIN_DOUBLE}compile {{ {layers} }}"), data)
    assert_close(compiled["result"], eager, TOLERANCE)
    assert compiled["graphs"] >= 2


def test_hooks_of_styles_are_in_the_graphs_of_their_modules(gloo, data, alone):
    """A vocabulary-parallel embedding fails if its result leaves one graph for another before it is reduced."""
    plan = (
        f"mesh (tp = 2)\n{SEQUENCE_PARALLEL}{PLAIN_DOUBLE}compile {{ tok_embeddings = aot_eager, output = aot_eager }}"
    )
    for found in gloo(2)(compiled_frames, text_of(plan, HEAD.replace("devices = 4", "devices = 2")), data):
        assert_close(found["result"], alone, TOLERANCE)
        assert found["graphs"] == 2


def compiled_frames(text: str, data: str) -> dict:
    torch._dynamo.utils.counters.clear()
    result = train_anew(text, data)
    return {"result": result, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


@pytest.mark.slow
def test_blocks_beyond_the_recompile_limit_share_one_compilation(gloo, data):
    head = HEAD.replace('llama3("tiny")', 'llama3("tiny", n_layers = 12, dim = 64, hidden_dim = 64)')
    [eager] = gloo(1)(train_anew, text_of(PLAIN_DOUBLE, head), data)
    [compiled] = gloo(1)(train_anew, text_of(f"{PLAIN_DOUBLE}{BLOCKS}checkpoint {{ layers.* = every(2) }}", head), data)
    assert_close(compiled, eager, TOLERANCE)


def functions(body: str, cluster: str = "cpu(devices = 4)") -> list[str]:
    """The calls in `parallelize`, in their order."""
    text = lowered(f"{HEAD.replace('cpu(devices = 4)', cluster)}{TRAINING}{body}").text
    return [line.split("(")[0].strip() for line in text.splitlines() if line.startswith("    apply_")]


def test_compile_precedes_full_and_follows_selective_recomputation():
    blocks = "compile { layers.* = inductor }\n"
    assert functions(f"{blocks}checkpoint {{ layers.* = full }}") == ["apply_compile", "apply_checkpoint"]
    assert functions(f"{blocks}checkpoint {{ layers.* = selective([matmul]) }}") == [
        "apply_checkpoint",
        "apply_compile",
    ]
    mixed = f"{blocks}checkpoint {{ layers.* = selective([matmul]), layers.0 = full }}"
    assert functions(mixed) == ["apply_compile", "apply_checkpoint", "apply_compile_after_checkpoint"]
    assert functions("compile { layers.* = none }") == []


def test_options_become_torch_compile_arguments():
    def line(rule: str) -> str:
        text = lowered(f"{HEAD}{TRAINING}compile {{ root = {rule} }}").text
        return next(line for line in text.splitlines() if "model.compile(" in line).partition("  #")[0].strip()

    assert line("inductor") == "model.compile(fullgraph=True, dynamic=False)"
    assert line("aot_eager") == 'model.compile(backend="aot_eager", fullgraph=True)'
    assert line("aot_eager(fullgraph = false)") == 'model.compile(backend="aot_eager")'
    assert line("inductor(mode = max_autotune_no_cudagraphs, fullgraph = false, dynamic = true)") == (
        'model.compile(dynamic=True, mode="max-autotune-no-cudagraphs")'
    )
    assert line("inductor(mode = reduce_overhead)").endswith('mode="reduce-overhead")')


def test_budget_of_a_compiled_module_is_its_compilers():
    blocks = "checkpoint { layers.* = budget(25%), layers.0 = full }\n"
    program = lowered(f"{HEAD}{TRAINING}{blocks}compile {{ layers.* = inductor(mode = max_autotune) }}")
    assert 'backend=compile_within(0.25, by="knapsack"),  # tiny.plan:' in program.text
    assert 'mode="max-autotune"' in program.text
    assert "model.layers[0] = checkpoint_wrapper(" in program.text.replace('["0"]', "[0]")
    assert program.text.count("compile_within(") == 1
    assert "RecomputeWithin" not in program.text
    text = lowered(f"{HEAD}{TRAINING}{blocks}compile {{ layers.* = aot_eager }}").text
    assert 'compile_within(0.25, by="knapsack", backend="aot_eager")' in text


def test_outputs_into_compiled_modules_wait_for_collectives():
    text = lowered(f"{HEAD}{TRAINING}{BOTH}{BLOCKS}").text
    assert "    wait_for_output(model.tok_embeddings)  # tiny.plan:" in text
    assert text.count("wait_for_output(") == 1
    text = lowered(f"{HEAD}{TRAINING}{BOTH}compile {{ layers.*.attention.* = aot_eager }}").text
    assert "        wait_for_inputs(layer.attention)  # tiny.plan:" in text
    assert "wait_for" not in lowered(f"{HEAD}{TRAINING}{SHARDED}{BLOCKS}").text
    assert "wait_for" not in lowered(f"{HEAD}{TRAINING}{BOTH}").text


def test_async_tp_is_enabled_on_request():
    cluster = "h100_sxm(hosts = 1, devices = 4)"
    plan = f"{HEAD.replace('cpu(devices = 4)', cluster)}{TRAINING}{BOTH}"
    text = lowered(f"{plan}compile (async_tp = true) {{ layers.* = inductor }}").text
    assert "def apply_compile(model: nn.Module, mesh: DeviceMesh) -> None:\n    overlap_tensor_parallel(mesh[" in text
    assert "    apply_compile(model, mesh)" in text


def test_async_tp_without_symmetric_memory_is_an_error(gloo):
    with pytest.raises(Exception, match=r"RUN003.*symmetric memory"):
        gloo(1)(overlap)


def overlap() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from legoai.runtime import overlap_tensor_parallel

    overlap_tensor_parallel(init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))


@pytest.mark.parametrize("kind", ["attending", "sequential"])
def test_modules_with_a_forward_of_torch_are_compiled_with_their_hooks(kind: str):
    path = {"attending": "blocks.*.attention", "sequential": "blocks.*"}[kind]
    model = f'model python("support.models.read_weights:build", kind = "{kind}")'
    statements = f"batch (global = 8, micro = 2, seq_len = 16)\ncompile {{ {path} = aot_eager }}\n"
    text = lowered(f"plan net\n{model}\ncluster cpu(devices = 1)\n{statements}").text
    block = path.replace("blocks.*", "block")
    assert f'compile_with_hooks({block}, backend="aot_eager", fullgraph=True)' in text


@pytest.mark.parametrize("kind", ["attending", "sequential"])
def test_forward_of_torch_compiles_in_one_graph(kind: str):
    torch._dynamo.reset()
    model = build(kind)
    block = model.blocks[0]
    module = block.attention if kind == "attending" else block
    tokens = torch.arange(16).view(2, 8)
    model(tokens).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compile_with_hooks(module, backend="aot_eager", fullgraph=True)
    model(tokens).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
