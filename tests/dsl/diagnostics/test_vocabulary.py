"""Words of other tools are recognised everywhere in a plan, and mapped to the language's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.diagnostics.model_names import our_model
from legoai.dsl.diagnostics.vocabulary import TABLE, TORCHTITAN, torchtitan
from legoai.dsl.lint import lint
from legoai.dsl.reporting.topics import topics
from legoai.lowering.program import lower
from legoai.specs.directives.kinds import REST
from legoai.specs.models.configs import DeepSeekConfig, GPTConfig, LlamaConfig, MixtralConfig
from legoai.specs.models.manifests import load
from legoai.specs.models.manifests.manifest import ManifestError

HEAD = """plan words

model   llama3("8b")
cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
batch   (global = 256, micro = 1, seq_len = 8192)
"""
SHARD = """shard on tp {
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo           = rowwise
  layers.*.feed_forward.{w1, w3}  = colwise
  layers.*.feed_forward.w2        = rowwise
}
"""
MESHES = (
    "mesh (dp_shard = 32)\n",
    "mesh (dp_replicate = 4, dp_shard = 8)\nfsdp on dp_replicate, dp_shard { layers.* = unit }\n",
    'model llama3("1b")\nmesh (dp_replicate = 32)\n',
    "mesh (dp_shard = 8, tp = 4)\n" + SHARD,
    "mesh (dp_shard = 8, tp = 4)\nshard standard on tp (sequence, loss_parallel)\n",
    "mesh (pp = 4, dp_shard = 8)\npipeline on pp\n",
    "mesh (dp_shard = 8, cp = 4)\ncontext on cp\n",
    'model mixtral("8x7b")\nmesh (dp_shard = 32, ep = 8)\nshard on ep { layers.*.feed_forward.experts = experts }\n',
    'model gpt2("xl")\nbatch (global = 256, micro = 1, seq_len = 1024)\nmesh (dp_shard = 32)\n',
    'model vit("b16")\nbatch (global = 256, micro = 1)\nmesh (dp_shard = 32)\n',
    'model gpt3("13b")\nbatch (global = 256, micro = 1, seq_len = 2048)\nmesh (dp_shard = 32)\n',
)
FORMS = sorted({entry.form for entry in TABLE if entry.form})


def over(form: str, beside: str) -> str:
    """A plan with ``form`` and the required statements that it lacks."""
    keyword = form.split()[0]
    plan = HEAD + beside
    if "fsdp" not in plan and "dp_shard" in plan and keyword not in ("fsdp", "replicate"):
        plan += "fsdp on dp_shard { layers.* = unit }\n"
    blocks = plan.replace("\nfsdp", "\n\nfsdp")
    kept: dict[str, str] = {}
    current = ""
    for line in blocks.splitlines():
        if line and line[0] not in " }":
            current = line.split()[0]
            kept[current] = ""
        if line:
            kept[current] += line + "\n"
    kept[keyword] = form + "\n"
    return "".join(kept.values())


@pytest.mark.parametrize("form", FORMS)
def test_every_suggested_form_lints_and_lowers(form: str):
    tried = []
    for beside in MESHES:
        linted = lint(over(form, beside), "words.plan", directory=Path())
        errors = [item for item in linted.diagnostics if item.severity == "error"]
        if not errors:
            assert linted.analysis is not None
            assert lower(linted.analysis).text
            return
        tried.append([f"{item.code} {item.message}" for item in errors])
    raise AssertionError(tried)


def test_every_torchtitan_option_maps_to_a_statement():
    rows = dict(torchtitan())
    assert len(rows) == len(TORCHTITAN)
    noted = [option for option, ours in rows.items() if ours.strip("`") not in FORMS]
    assert noted == ["`parallelism.disable_loss_parallel`"]


def test_every_suggested_name_is_in_the_language():
    ours = {item.name for item in topics()} | {REST}
    for config in (LlamaConfig, GPTConfig, MixtralConfig, DeepSeekConfig):
        ours |= set(config.__dataclass_fields__)
    unknown = {word for entry in TABLE for word in entry.ours.split()} - ours
    assert unknown == set()


def test_entries_have_content_and_normalised_words():
    for entry in TABLE:
        assert entry.ours or entry.form or entry.note, entry
        for word in entry.words.split():
            assert word == word.lower() and "-" not in word, word


KEYWORDS = {
    "recompute { layers.* = full }": "`checkpoint`",
    "activation_checkpointing { layers.* = full }": "`checkpoint`",
    "gradient_checkpointing (enabled = true)": "`checkpoint`",
    "zero (stage = 3)": "`fsdp`",
    "zero_optimization (stage = 2)": "`fsdp`",
    "fully_shard { layers.* = unit }": "`fsdp`",
    "ddp on dp_replicate": "`replicate`",
    "float8 { layers.*.feed_forward.* = rowwise }": "`precision`",
    "fp8 { layers.* = float8 }": "`precision`",
    "mixed_precision (param = bf16)": "`precision`",
    "lr_scheduler cosine(steps = 100)": "`schedule`",
    "gradient_clipping (norm = 1.0)": "`clip`",
    "parallelize_module on tp { output = colwise }": "`shard`",
    "torch_compile { layers.* = inductor }": "`compile`",
    "tensor_parallel (degree = 8)": "`mesh (dp_shard = rest, tp = 8)`",
    "data_parallel (degree = 8)": "`mesh (dp_shard = rest)`",
    "gradient_accumulation (steps = 4)": "accumulation follows",
    "flash_attention true": "`attention`",
    "cpu_offload (optimizer = all)": "`offload`",
    "hardware h100_sxm": "`cluster`",
    "constraint peak_memory": "`require`",
    "hsdp on dp_replicate, dp_shard { layers.* = unit }": "fsdp on dp_replicate, dp_shard",
    "loss_scale (initial = 4)": "nothing scales the loss",
}
OPTIONS = {
    "batch (global_batch_size = 256, micro = 1, seq_len = 8192)": "`global`",
    "batch (train_batch_size = 256, micro = 1, seq_len = 8192)": "`global`",
    "batch (global = 256, per_device_train_batch_size = 1, seq_len = 8192)": "`micro`",
    "batch (global = 256, train_micro_batch_size_per_gpu = 1, seq_len = 8192)": "`micro`",
    "batch (global = 256, local_batch_size = 1, seq_len = 8192)": "`micro`",
    "batch (global = 256, micro = 1, seq_length = 8192)": "`seq_len`",
    "batch (global = 256, micro = 1, max_position_embeddings = 8192)": "`batch` takes",
    "batch (global = 256, micro = 1, seq_len = 8192, gradient_accumulation_steps = 4)": "accumulation follows",
    "mesh (data_parallel_shard_degree = 32)": "`dp_shard`",
    "mesh (data_parallel_replicate_degree = 32)": "`dp_replicate`",
    "mesh (dp_shard = 4, tensor_model_parallel_size = 8)": "`tp`",
    "mesh (dp_shard = 4, tensor_parallel_degree = 8)": "`tp`",
    "mesh (dp_shard = 4, pipeline_model_parallel_size = 8)": "`pp`",
    "mesh (dp_shard = 4, context_parallel_degree = 8)": "`cp`",
    "mesh (dp_shard = 4, expert_model_parallel_size = 8)": "`ep`",
    "mesh (dp_shard = 4, fsdp = 8)": "`dp_shard`",
    "fsdp on dp_shard { layers.* = unit(reshard_after_forward = true) }": "`reshard`",
    "clip (max_norm = 1.0)": "`norm`",
    "clip (max_grad_norm = 1.0)": "`norm`",
    "optimizer adamw(learning_rate = 3e-4)": "`lr`",
    "optimizer adamw(beta1 = 0.9)": "`betas`",
    "schedule cosine(steps = 100, warmup_steps = 10)": "`warmup`",
    "schedule cosine(steps = 100, min_lr = 0.1)": "`floor`",
    "checkpoint (recompute_granularity = full) { layers.* = full }": "`checkpoint { layers.* = full }`",
    "precision (mixed_precision_param = bf16)": "`param`",
    "precision (param_dtype = bf16)": "`param`",
    "precision (reduce_dtype = fp32)": "`reduce`",
    "pipeline on pp (pipeline_parallel_schedule = 1F1B)": "`schedule`",
    "pipeline on pp (num_microbatches = 8)": "`microbatches`",
    "pipeline on pp (num_layers_per_virtual_pipeline_stage = 2)": "`stages`",
    "context on cp (load_balancer = head_tail)": "`balance`",
    "comm (overlap_comm = true)": "`prefetch`",
    "compile (enable_async_tensor_parallel = true) { layers.* = inductor }": "`async_tp`",
    "offload (offload_optimizer = all)": "`optimizer`",
    "cluster h100_sxm(num_nodes = 4, fabric = infiniband_ndr)": "`hosts`",
    "cluster h100_sxm(hosts = 4, gpus_per_node = 8, fabric = infiniband_ndr)": "`devices`",
    'model llama3("8b", num_hidden_layers = 4)': "`n_layers`",
    'model llama3("8b", hidden_size = 4096)': "`dim`",
    'model llama3("8b", num_key_value_heads = 8)': "`n_kv_heads`",
    'model llama3("8b", intermediate_size = 8192)': "`hidden_dim`",
    'model gpt2("small", n_embd = 768)': "`dim`",
    'model mixtral("8x7b", num_local_experts = 8)': "`n_experts`",
}
VALUES = {
    "precision (param = bfloat16)": "`bf16`",
    "precision (param = torch.bfloat16)": "`bf16`",
    "precision (reduce = torch.float32)": "`fp32`",
    "precision (param = half)": "`fp16`",
    'precision (param = "bfloat16")': "`bf16`",
    "precision { layers.*.feed_forward.* = fp8 }": "`float8`",
    "attention flash_attention_2": "`flash`",
    "attention sdpa": "`default`",
    "loss cross_entropy": "`fused`",
    "optimizer adamw_torch_fused": "`adamw`",
    "optimizer torch.optim.AdamW(lr = 3e-4)": "",
    "optimizer FusedAdam(lr = 3e-4)": "`adamw`",
    "schedule CosineAnnealingLR(steps = 100)": "`cosine`",
    "pipeline on pp (schedule = interleaved)": "`Interleaved1F1B`",
    "pipeline on pp (schedule = zero_bubble)": "`ZBVZeroBubble`",
    "pipeline on pp (schedule = DualPipe)": "`DualPipeV`",
    "fsdp on dp_shard { layers.* = FULL_SHARD }": "`unit`",
    "fsdp on dp_shard { layers.* = unit(reshard = always) }": "`after_forward`",
    "fsdp on dp_shard { layers.* = unit(reshard = zero2) }": "`after_backward`",
    "fsdp on dp { layers.* = unit }": "`dp_shard`",
    "fsdp on data_parallel { layers.* = unit }": "`dp_shard`",
    "shard on tensor { output = colwise }": "`tp`",
    "shard on model_parallel { output = colwise }": "`tp`",
    "pipeline on pipe": "`pp`",
    "shard on tp { output = ColwiseParallel }": "`colwise`",
    "shard on tp { output = column_parallel }": "`colwise`",
    "shard on tp { layers.*.attention.wo = RowParallelLinear }": "`rowwise`",
    "checkpoint { layers.* = sac }": "`selective`",
    "checkpoint { layers.* = recompute }": "`full`",
    "context on cp (rotate = all_to_all)": "`alltoall`",
    "context on cp (balance = headtail)": "`head_tail`",
    "offload (optimizer = cpu)": "`all`",
    "cluster h100(hosts = 4, fabric = infiniband_ndr)": "`h100_sxm`",
    "cluster H100_80GB(hosts = 4, fabric = infiniband_ndr)": "`h100_sxm`",
    "cluster a100(hosts = 4, fabric = infiniband_hdr)": "`a100_sxm80`",
    "cluster gpu(hosts = 4, fabric = infiniband_hdr)": "name the device",
    "cluster h100_sxm(hosts = 4, fabric = infiniband)": "`infiniband_ndr`",
    "cluster h100_sxm(hosts = 4, fabric = efa)": "`efa_p5`",
    "cluster h100_sxm(hosts = 4, fabric = nvlink)": "inside a host",
    "require max_memory_allocated <= 72GiB": "`peak_memory`",
    "require tps >= 100": "`tokens_per_s`",
    "require iteration_time <= 2s": "`step_time`",
    "mesh (dp_shard = -1)": "`rest`",
    "mesh (dp_shard = -1, tp = 8)": "`rest`",
    "batch (global = 256, micro = 1, seq_len = 8k)": "`8192`",
    "batch (global = 4M, micro = 1, seq_len = 8192)": "`4194304`",
    "model llama3(8b)": '`"8b"`',
    "model llama3(8B)": '`"8b"`',
    "model llama3(tiny)": '`"tiny"`',
    "model mixtral(8x7b)": '`"8x7b"`',
    "model llama3_8b": '`llama3("8b")`',
    'model "meta-llama/Llama-3.1-8B"': '`llama3("8b")`',
    "model meta-llama/Llama-3.1-8B": '`model llama3("8b")`',
    "model llama3-70b": '`model llama3("70b")`',
    'model llama3.1("8b")': '`model llama3("8b")`',
    'model llama("8b")': "`llama3`",
    'model llama3("meta-llama/Meta-Llama-3-8B")': '`llama3("8b")`',
    'model huggingface("meta-llama/Llama-3.1-8B")': '`llama3("8b")`',
    'model huggingface("Qwen/Qwen3-8B")': "nothing is downloaded",
    'model "Qwen/Qwen3-8B"': "config.json",
    'model qwen3("8b")': "`huggingface`",
    "tensor_parallel_degree = 8": "`mesh (",
    "seq_len = 8192": "`batch (seq_len = …)`",
    "recompute = full": "`checkpoint {",
}


def messages(statement: str) -> str:
    """The help of the diagnostics on a statement that takes the place of the like one of a plan."""
    keyword = statement.split()[0]
    rest = [line for line in HEAD.splitlines() if line and line.split()[0] != keyword]
    linted = lint("\n".join([*rest, statement]) + "\n", "words.plan", directory=Path())
    here = [item for item in linted.diagnostics if item.label.span.line == len(rest) + 1]
    assert any(item.severity == "error" for item in here), [item.message for item in linted.diagnostics]
    return "\n".join(line for item in here for line in [*item.help, *([item.fix.title] if item.fix else [])])


@pytest.mark.parametrize(("statement", "words"), [*KEYWORDS.items(), *OPTIONS.items(), *VALUES.items()])
def test_names_of_other_tools_are_mapped_to_ours(statement: str, words: str):
    assert words in messages(statement)


def test_factory_is_the_cure_for_an_unknown_architecture(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> None:
        raise ManifestError("unknown_architecture", "transformers knows no model type 'dit'")

    monkeypatch.setattr(load, "load_manifest", refused)
    assert '`model python("package.module:function")`' in messages('model huggingface("dit.json")')


PATHS = {
    "model.layers.*": "layers.*",
    "module.layers.*.attention": "layers.*.attention",
    "_orig_mod.layers.3": "layers.3",
    "transformer.h.*": "layers.*",
    "decoder.layers.*": "layers.*",
    "model.layers.*.self_attn": "layers.*.attention",
    "layers.*.mlp": "layers.*.feed_forward",
    "layers.*.self_attn.{q_proj, k_proj, v_proj}": "layers.*.attention.{wq, wk, wv}",
    "model.layers.*.mlp.down_proj": "layers.*.feed_forward.w2",
    "layers.*.mlp.gate_up_proj": "layers.*.feed_forward.{w1, w3}",
    "decoder.layers.*.self_attention.linear_qkv": "layers.*.attention.{wq, wk, wv}",
    "layers.*.input_layernorm": "layers.*.attention_norm",
    "layers.*.post_attention_layernorm": "layers.*.ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.norm": "norm",
    "blocks.*": "layers.*",
    "layrs.*.atention": "layers.*.attention",
}


@pytest.mark.parametrize("path", PATHS)
def test_module_names_of_other_models_are_mapped_to_this_model(path: str):
    assert f"did you mean `{PATHS[path]}`?" in messages(f"checkpoint {{ {path} = full }}")


@pytest.mark.parametrize("path", ["layers.*.mystery", "model", "model.zebra.*"])
def test_dissimilar_path_gets_no_suggestion(path: str):
    assert "did you mean `zebra" not in messages(f"checkpoint {{ {path} = full }}")
    assert "did you mean `layers.*.mystery`" not in messages(f"checkpoint {{ {path} = full }}")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Llama-3.1-8B", 'llama3("8b")'),
        ("meta-llama/Llama-3.1-405B-Instruct", 'llama3("405b")'),
        ("meta-llama/Meta-Llama-3-70B", 'llama3("70b")'),
        ("meta-llama/Llama-3.2-1B", 'llama3("1b")'),
        ("llama3_8b", 'llama3("8b")'),
        ("mistralai/Mixtral-8x22B-v0.1", 'mixtral("8x22b")'),
        ("deepseek-ai/DeepSeek-V3-Base", 'deepseek("v3")'),
        ("deepseek-ai/DeepSeek-V2-Lite", 'deepseek("v2_lite")'),
        ("openai-community/gpt2-xl", 'gpt2("xl")'),
        ("gpt2-1.5B", 'gpt2("1.5b")'),
        ("gpt2", 'gpt2("small")'),
        ("gpt3-175b", 'gpt3("175b")'),
        ("meta-llama/Llama-2-7b-hf", None),
        ("meta-llama/Llama-3.1-9B", None),
        ("Qwen/Qwen3-8B", None),
        ("zebra", None),
    ],
)
def test_hub_model_names_suggest_built_in_models(name: str, model: str | None):
    assert our_model(name) == model
