"""A standard layout trains as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.plans import lowered
from support.staged import DOUBLE, PLAIN_DOUBLE, TRAINING, assert_close, train

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = "dim = 32, n_layers = 2, n_heads = 4, hidden_dim = 64, vocab_size = 256, max_seq_len = 64"
MODELS = {
    "llama of Hugging Face": ("", "(loss_parallel)", 1e-6),  # its norms are computed in fp32
    "gpt": (f"gpt3({SMALL})", "(loss_parallel)", 1e-10),
    "mixtral": (f"mixtral({SMALL}, n_kv_heads = 2, n_experts = 4, top_k = 2)", "(sequence)", 1e-10),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "gpt" else name for name in MODELS]
)
def test_standard_styles_and_units_train_as_one_process_does(name: str, gloo, data, tmp_path: Path):
    model, options, tolerance = MODELS[name]
    if not model:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        model = f'huggingface("{tmp_path / "config.json"}")'
    head = f"plan a\nmodel {model}\ncluster cpu(devices = 4)\n{TRAINING}"
    [alone] = gloo(1)(train, lowered(f"{head}{PLAIN_DOUBLE}").text, data)
    body = f"mesh (dp_shard = rest, tp = 2)\nshard standard on tp {options}\nfsdp blocks on dp_shard\n{DOUBLE}"
    for result in gloo(4)(train, lowered(f"{head}{body}").text, data):
        assert_close(result, alone, tolerance)
