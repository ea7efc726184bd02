"""A dtype of units' outputs is refused exactly where torch would multiply matrices of two dtypes."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, message

MESH = "cluster cpu(devices = 1)\nmesh (dp_shard = 1)\nprecision (param = bf16, output = fp32)\n"
UNITS = {
    "blocks alone": (["layers.*"], True),
    "all that follows blocks": (["layers.*", "{norm, output}"], False),
    "the last layer": (["layers.*", "output"], False),
    "no units but the model": ([], False),
    "attention inside of blocks": (["layers.*", "{norm, output}", "layers.*.attention"], True),
    "both halves of blocks": (["layers.*", "output", "layers.*.{attention, feed_forward}"], False),
}


@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.parametrize("name", UNITS)
def test_output_dtype_must_match_the_next_units_layer(name: str, backend: str):
    units, wrong = UNITS[name]
    rules = ", ".join(f"{path} = unit" for path in [*units, "root"])
    found = codes(f"{MESH}fsdp on dp_shard (backend = {backend}) {{ {rules} }}")
    assert ("LP618" in found) == wrong


def test_message_names_the_layer_and_the_unit():
    found = message(f"{MESH}fsdp on dp_shard {{ layers.* = unit }}", "LP618")
    assert found == "`output` has weights in bf16 and gets what the unit `layers.*` gives, in fp32"
    assert "LP618" not in codes("mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\nprecision (output = bf16)")


@pytest.mark.parametrize(
    ("model", "bucket", "wrong"),
    [
        ("tie_embeddings = true", "300KB", True),
        ("tie_embeddings = true", "300MB", False),
        ("tie_embeddings = false", "1MB", False),
        ("tie_embeddings = false", "25KB", False),
    ],
)
def test_buckets_of_replicas_are_units(model: str, bucket: str, wrong: bool):
    small = f'model gpt2("small", n_layers = 4, dim = 64, n_heads = 4, hidden_dim = 256, vocab_size = 256, {model})\n'
    mesh = "cluster cpu(devices = 2)\nmesh (dp_replicate = 2)\nprecision (param = bf16, output = fp32)\n"
    assert ("LP618" in codes(f"{small}{mesh}replicate on dp_replicate (bucket = {bucket})")) == wrong


@pytest.mark.parametrize(("ranks", "wrong"), [(1, False), (2, True)])
def test_distributed_experts_are_units(ranks: int, wrong: bool):
    model = 'model mixtral("8x7b", n_layers = 2, dim = 64, n_heads = 4, n_kv_heads = 4, hidden_dim = 128)\n'
    mesh = f"cluster cpu(devices = 2)\nmesh (dp_shard = 2, ep = {ranks})\nprecision (param = bf16, output = fp32)\n"
    experts = "shard on ep { layers.*.feed_forward.experts = experts }\n" if ranks > 1 else ""
    assert ("LP618" in codes(f"{model}{mesh}{experts}fsdp on dp_shard")) == wrong


@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.parametrize("name", UNITS)
def test_torch_refuses_what_the_rule_refuses(name: str, backend: str, gloo):
    units, wrong = UNITS[name]
    [verdict] = gloo(1)(trains, units, backend)
    assert verdict == ("raises" if wrong else "trains")


def trains(units: list[str], backend: str) -> str:
    import torch
    import torch.distributed.fsdp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import legoai.lowering.graph
    from legoai.dsl.frontend.paths import Paths, pattern
    from legoai.specs.models.families import FAMILIES
    from legoai.specs.models.llama import Llama

    torch.manual_seed(0)
    model = Llama(FAMILIES["llama3"].presets["tiny"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    known = Paths([path for path, _ in model.named_modules()])
    paths = [path for unit in units for path in known.matching(pattern(unit))]
    make = torch.distributed.fsdp.fully_shard if backend == "eager" else legoai.lowering.graph.shard_unit
    for path in [*sorted(paths, key=lambda path: -path.count(".")), ""]:
        make(model.get_submodule(path), mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    try:
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    except RuntimeError as error:
        assert "dtype" in str(error)
        return "raises"
    return "trains"
