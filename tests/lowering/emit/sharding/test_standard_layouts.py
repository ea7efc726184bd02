"""A standard layout trains as one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import legoai.runtime.training.trainer  # noqa: F401  what torch registers once must not come with an inspected model
from legoai.dsl.formatting.expand import expand
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.specs.models.layouts import HUGGING_FACE, StandardLayouts
from support.training.staged import DOUBLE, PLAIN_DOUBLE, assert_close, train

DECODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WITHOUT_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 16, "patch_size": 8}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "qwen2": {},
    "smollm3": {},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "gemma": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "starcoder2": WITHOUT_DROPOUT,
    "phi": {"num_key_value_heads": 4, "qk_layernorm": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "vit": {**IMAGES, "num_labels": 10, "architectures": ["ViTForImageClassification"]},
}
CLIP = {
    "architectures": ["CLIPModel"],
    "projection_dim": 16,
    "text_config": {**DECODER, "projection_dim": 16, "eos_token_id": 255},
    "vision_config": {**IMAGES, "projection_dim": 16},
}
SMALL = "dim = 32, n_layers = 2, n_heads = 4, hidden_dim = 64, vocab_size = 256, max_seq_len = 64"
BUILT_IN = {
    "llama3": f"llama3({SMALL}, n_kv_heads = 2, head_dim = 16, attention_bias = true, mlp_bias = true, qk_norm = true)",
    "llama3 tied": f"llama3({SMALL}, n_kv_heads = 2, tie_embeddings = true)",
    "gpt": f"gpt3({SMALL}, tie_embeddings = false)",
    "gpt tied": f"gpt3({SMALL})",
    "mixtral": f"mixtral({SMALL}, n_kv_heads = 2, n_experts = 4, top_k = 2, qk_norm = true, attention_bias = true)",
    "vit": 'vit("tiny", image_size = 24)',  # 9 patches and the class token
}
ROUNDED = 2e-5
"""Of Hugging Face models, which compute norms, or routers, in fp32."""
EXACT = 1e-10
BATCH = "optimizer adamw(lr = 1e-2, betas = [0.9, 0.95], weight_decay = 0.1)\nclip (norm = 1.0)\n"
STEPS = 2


class Case:
    """A model on one device, and in a layout on four."""

    def __init__(self, name: str, model: str, layouts: StandardLayouts | None, tolerance: float) -> None:
        self.name, self.model, self.layouts, self.tolerance = name, model, layouts, tolerance

    @property
    def length(self) -> str:
        return "" if self.name.startswith("vit") else ", seq_len = 16"

    def text(self, body: str, ranks: int) -> str:
        return (
            f"plan a\nmodel {self.model}\ncluster cpu(devices = {ranks})\n"
            f"batch (global = 8, micro = 2{self.length})\n{BATCH}{body}"
        )


def cases(tmp_path: Path) -> list[Case]:
    """Every family with a layout on `tp`."""
    found = [Case(name, model, None, EXACT) for name, model in BUILT_IN.items()]
    for family, layouts in HUGGING_FACE.items():
        if not layouts.tp:
            continue
        file = tmp_path / f"{family}.json"
        fields = CLIP if family == "clip" else {**(DECODER if family != "vit" else {}), **OTHERS[family]}
        file.write_text(json.dumps({"model_type": family, **fields}))
        batched = ', experts_implementation = "batched_mm"' if layouts.ep else ""
        found.append(Case(family, f'huggingface("{file.name}"{batched})', layouts, ROUNDED))
    return found


def program(text: str, folder: Path) -> str:
    found = lint(text, "a.plan", directory=folder)
    assert [item.message for item in found.diagnostics if item.severity == "error"] == [], text
    return lower(found.analysis).text


def trained(programs: list[tuple[str, str]], data: str) -> list[dict]:
    return [train(text, source or data, steps=STEPS) for text, source in programs]


def source(case: Case) -> str:
    return "synthetic" if case.name in ("vit", "clip") else ""


def compare(several: list[tuple[Case, str]], gloo, data: str, folder: Path) -> None:
    """Train each case as one process does, and on four with a layout and its options."""
    one = [(program(case.text(PLAIN_DOUBLE, 1), folder), source(case)) for case, _ in several]
    [alone] = gloo(1)(trained, one, data)
    four = [(program(case.text(body(case, options), 4), folder), source(case)) for case, options in several]
    for results in gloo(4)(trained, four, data):
        for (case, options), result, wanted in zip(several, results, alone, strict=True):
            try:
                assert_close(result, wanted, case.tolerance)
            except AssertionError as error:
                error.add_note(f"{case.name} {options}")
                raise


def body(case: Case, options: str) -> str:
    """The layout on four devices."""
    if case.name == "clip":  # of which `fsdp` cannot cut a parameter without dims
        return f"mesh (tp = 4)\nshard standard on tp\n{PLAIN_DOUBLE}"
    return f"mesh (dp_shard = rest, tp = 2)\nshard standard on tp {options}\nfsdp blocks on dp_shard\n{DOUBLE}"


def with_options(case: Case) -> list[tuple[Case, str]]:
    """The forms of a family's layout: the plain one, the one with sequence and loss parallelism, and with all."""
    words = ["sequence", "loss_parallel"] if case.name != "vit" or case.layouts is not None else ["sequence"]
    if case.layouts is not None:
        words = [word for word in words if case.layouts.has_form(word)]
    forms = [words, [*words, "overlap"]] if "sequence" in words else [words]
    return [(case, ""), *((case, f"({', '.join(form)})") for form in forms if form)]


@pytest.mark.slow
@pytest.mark.parametrize("share", ("built in", "dense", "mixtures", "qwen3", "rest"))
def test_standard_styles_and_units_equal_one_process(share: str, gloo, data, tmp_path: Path):
    chosen = {
        "built in": tuple(BUILT_IN),
        "mixtures": ("mixtral", "qwen2_moe", "qwen3_moe"),
        "qwen3": ("qwen3",),
        "rest": ("clip", "gemma2", "vit"),
    }
    named = {name for names in chosen.values() for name in names}
    found = cases(tmp_path)
    if share == "built in":
        several = [case for case in found if case.layouts is None]
    else:
        several = [case for case in found if case.layouts is not None]
        names = chosen.get(share, [case.name for case in several if case.name not in named])
        several = [case for case in several if case.name in names]
    assert several
    compare([item for case in several for item in with_options(case)], gloo, data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["sequence", "sequence, overlap"])
def test_sequence_layouts_of_hugging_face_models_run_in_stages(options: str, gloo, data, tmp_path: Path):
    [case] = [case for case in cases(tmp_path) if case.name == "qwen3"]
    model = case.model.replace(")", ", tie_word_embeddings = false)")
    staged = Case(case.name, model, case.layouts, case.tolerance)
    [alone] = gloo(1)(trained, [(program(staged.text(PLAIN_DOUBLE, 1), tmp_path), "")], data)
    body = f"mesh (pp = 2, tp = 2)\npipeline on pp (schedule = 1F1B)\nshard standard on tp ({options})\n{DOUBLE}"
    for [result] in gloo(4)(trained, [(program(staged.text(body, 4), tmp_path), "")], data):
        assert result["loss"] == pytest.approx(alone[0]["loss"], abs=ROUNDED)


@pytest.mark.parametrize("family", [name for name, layouts in HUGGING_FACE.items() if not layouts.tp])
def test_family_without_a_tp_layout_states_the_reason(family: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    text = (
        'plan a\nmodel huggingface("config.json")\ncluster cpu(devices = 2)\nbatch (global = 2, micro = 1)\n'
        "mesh (tp = 2)\nshard standard on tp\n"
    )
    [found] = resolve(text, "a.plan", directory=tmp_path).diagnostics
    assert (found.code, found.message) == (
        "LP227",
        f"the model has no standard layout on `tp`: {HUGGING_FACE[family].reasons['tp']}",
    )


def test_expansion_of_a_mixture_names_its_blocks_without_experts(tmp_path: Path):
    [case] = [case for case in cases(tmp_path) if case.name == "qwen2_moe"]
    found = resolve(case.text("mesh (tp = 2)\nshard standard on tp (sequence)\n", 2), "a.plan", directory=tmp_path)
    assert found.diagnostics == []
    text = expand(found).text
    assert "model.layers.1.mlp.{gate_proj, up_proj}" in text
    assert resolve(text, "a.plan", directory=tmp_path).plan.digest == found.plan.digest
