"""Numbers far from every usual one are warned of, and the usual ones of published trainings are not."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, place

UNUSUAL = [
    ("optimizer adamw(lr = 3e4)", "3e4"),
    ("optimizer adamw(lr = 3)", "3"),
    ("optimizer adam(lr = 1e-12)", "1e-12"),
    ("optimizer sgd(lr = 30)", "30"),
    ("optimizer adamw(eps = 1e8)", "1e8"),
    ("optimizer adamw(weight_decay = 10)", "10"),
    ("optimizer sgd(momentum = 0.9999)", "0.9999"),
    ("optimizer adamw(betas = [0.95, 0.9])", "[0.95, 0.9]"),
    ("optimizer adamw(betas = [0.999, 0.9])", "[0.999, 0.9]"),
    ("optimizer adamw(betas = [0.9, 0.99999999])", "[0.9, 0.99999999]"),
    ("clip (norm = 1e9)", "1e9"),
    ("clip (norm = 1e-6)", "1e-6"),
    ("schedule cosine(steps = 1000, floor = 3e-5)", "3e-5"),
    ("schedule linear(steps = 1000, floor = 1e-6)", "1e-6"),
    ("batch (global = 4194304, micro = 1, seq_len = 256)", "4194304"),
    ("batch (global = 1048576, micro = 1, seq_len = 8192)", "1048576"),
    ("cluster h100_sxm(hosts = 100000, fabric = infiniband_ndr)", "100000"),
    ("mesh (dp_replicate = 8)\nreplicate on dp_replicate (bucket = 25B)", "25B"),
    ("mesh (dp_shard = 8)\nfsdp on dp_shard { layers.* = unit }\ncomm { layers.* = bucket(bytes(25KB)) }", "25KB"),
]


@pytest.mark.parametrize(("text", "underlined"), UNUSUAL)
def test_implausible_number_is_reported(text: str, underlined: str):
    assert place(text, "LP684") == underlined


USUAL = [
    "optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], eps = 1e-8, weight_decay = 0.1)",
    "optimizer adamw(lr = 1e-5, betas = [0.9, 0.999], eps = 1e-6, weight_decay = 0.3)",
    "optimizer adamw(lr = 0.0)",
    "optimizer adamw(eps = 0.0)",
    "optimizer adamw(betas = [0.9, 0.9])",
    "optimizer sgd(lr = 0.1, momentum = 0.9, weight_decay = 1e-4)",
    "optimizer sgd(lr = 4.8, momentum = 0.9)",
    "clip (norm = 0.1)",
    "clip (norm = 100)",
    "schedule cosine(steps = 1000, floor = 0.01)",
    "schedule cosine(steps = 1000, floor = 0.0)",
    "batch (global = 16384, micro = 1, seq_len = 8192)",
    "mesh (dp_replicate = 8)\nreplicate on dp_replicate (bucket = 25MB)",
    "cluster cpu(devices = 8)\nmesh (dp_replicate = 8)\nreplicate on dp_replicate (bucket = 25KB)",
]


@pytest.mark.parametrize("text", USUAL)
def test_usual_numbers_are_clean(text: str):
    assert "LP684" not in codes(text)
