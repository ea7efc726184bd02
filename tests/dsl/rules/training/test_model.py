"""Rules about models."""

from __future__ import annotations

import pytest

from support.rule_plans import codes

GPU = "cluster h100_sxm\nmesh (dp_shard = 8)\nbatch (global = 8, micro = 1, seq_len = 1024)\n"
SPLIT = GPU.replace("dp_shard = 8", "dp_shard = 4, tp = 2") + "shard on tp { output = colwise(output = replicate) }\n"


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (f'model llama3("tiny", vocab_size = 50257)\n{GPU}', True),
        (f'model llama3("tiny", vocab_size = 50264)\n{GPU}', False),
        (f'model llama3("tiny", vocab_size = 50264)\n{SPLIT}', True),
        (f'model llama3("tiny", vocab_size = 50272)\n{SPLIT}', False),
        (f'model llama3("tiny", vocab_size = 50264)\n{SPLIT.replace("output =", "layers.*.attention.wq =", 1)}', False),
        (f'model llama3("tiny", vocab_size = 50257)\n{SPLIT}', False),  # `uneven-shards` says it
        (f'model llama3("tiny", vocab_size = 50257)\n{GPU}precision (param = fp32)\n', False),
        (f'model llama3("tiny", vocab_size = 50257)\n{GPU.replace("h100_sxm", "cpu(devices = 8)")}', False),
        (f'model vit("b16")\n{GPU.replace(", seq_len = 1024", "")}', False),
    ],
)
def test_vocabularies_in_half_precision_are_multiples_of_eight(plan: str, wrong: bool):
    assert ("LP836" in codes(plan)) == wrong
