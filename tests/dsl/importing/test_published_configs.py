"""TorchTitan's published configs become clean plans that lower.

Keys and values of `configs/` are those of TorchTitan's `train_configs` at commit 658f94cb9 (January 2026), those that
end in `_2024` of ba2469780 (December 2024). The plans beside them are golden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.texts.importing import import_config

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.toml"))
HOSTS = {"llama3_8b": 8, "llama3_70b": 8, "llama3_405b": 16, "debug_model": 1, "qwen3_0.6b": 1, "qwen3_32b": 1}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_published_config_becomes_a_clean_plan(path: Path, golden: Callable[[Path, str], None]):
    hosts = HOSTS[path.stem.removesuffix("_2024")]
    device = "h100_sxm96" if path.stem == "qwen3_32b" else "h100_sxm"
    cluster = device if hosts == 1 else f"{device}(hosts = {hosts}, fabric = infiniband_ndr)"
    found = import_config(
        path.read_text(), path.name, plan=path.stem.replace(".", "_"), cluster=cluster, devices=8 * hosts
    )
    assert found.diagnostics == ()
    assert found.text is not None
    golden(path.with_suffix(".plan"), found.text)
    assert format_text(found.text, "x.plan").text == found.text
    linted = lint(found.text, f"{path.stem}.plan", directory=Path())
    assert [item.message for item in linted.diagnostics if item.severity != "advice" and item.code != "LP699"] == []
    assert lower(linted.analysis).text
    assert ("2024" in found.version) == path.stem.endswith("_2024")


PARAMETERS = {
    ("llama3", "8B"): 8.03e9, ("llama3", "70B"): 70.55e9, ("llama3", "405B"): 405.85e9,
    ("qwen3", "0.6B"): 0.596e9, ("qwen3", "1.7B"): 1.72e9, ("qwen3", "4B"): 4.02e9, ("qwen3", "8B"): 8.19e9,
    ("qwen3", "14B"): 14.77e9, ("qwen3", "32B"): 32.76e9,
}  # fmt: skip
"""Of the published models, from their cards; a tied weight counts once."""
MESHES = ("", "tensor_parallel_degree = 2", "context_parallel_degree = 2", "pipeline_parallel_degree = 2")


@pytest.mark.parametrize(("model", "flavour"), PARAMETERS)
def test_parameter_counts_equal_published_counts(model: str, flavour: str):
    for mesh in MESHES:
        text = f'[model]\nname = "{model}"\nflavor = "{flavour}"\n[parallelism]\n{mesh}\n'
        cluster = "h100_sxm(hosts = 64, fabric = infiniband_ndr)"
        found = import_config(text, "x.toml", plan="x", cluster=cluster, devices=512)
        assert found.text is not None
        linted = lint(found.text, "x.plan", directory=Path())
        tied = "tie_embeddings" in found.text and "pipeline" in mesh
        assert linted.has_errors == tied, [item.message for item in linted.diagnostics]
        if not tied:
            assert lower(linted.analysis).text
        manifest = linted.analysis.manifest
        once = {group[0]: group[1:] for group in manifest.tied_parameters}
        shared = {path for others in once.values() for path in others}
        count = sum(math.prod(shape) for path, shape in manifest.parameters() if path not in shared)
        assert count == pytest.approx(PARAMETERS[model, flavour], rel=2e-3)
