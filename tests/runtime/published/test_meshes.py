"""Published weights on meshes: each rank reads exactly its shard."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from legoai.runtime import RunError, RunOptions
from support.marks import slow_but
from support.models.published import CASES
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered
from support.training import corpus
from support.training.staged import together

data, own_cache = corpus.data, corpus.own_cache

DIMENSIONS = "n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 48, vocab_size = 256, max_seq_len = 256"
LLAMA = f'llama3("tiny", {DIMENSIONS}, rope_theta = 10000.0, norm_eps = 1e-6)'
MIXTRAL = f'mixtral("tiny", {DIMENSIONS})'
GPT = 'gpt2("small", n_layers = 2, dim = 32, n_heads = 4, hidden_dim = 128, vocab_size = 256, max_seq_len = 64)'
UNITS = "{ layers.* = unit, root = unit }\n"
KEPT = "{ layers.* = unit(reshard = after_backward), root = unit }\n"
EXPERTS = "shard on ep { layers.*.feed_forward.experts = experts }\n"
PLANS = {
    "fsdp": ("llama", LLAMA, f"mesh (dp_shard = 2)\nfsdp on dp_shard {UNITS}"),
    "fsdp of a dim that the ranks do not divide": ("llama", LLAMA, f"mesh (dp_shard = 3)\nfsdp on dp_shard {UNITS}"),
    "replicas": ("llama", LLAMA, "mesh (dp_replicate = 2)\nreplicate on dp_replicate\n"),
    "fsdp and tp": ("llama", LLAMA, f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}fsdp on dp_shard {UNITS}"),
    "pp and fsdp": ("llama", LLAMA, f"mesh (pp = 2, dp_shard = 2)\nfsdp on dp_shard {KEPT}pipeline on pp\n"),
    "the graph backend": ("llama", LLAMA, f"mesh (dp_shard = 2)\nfsdp on dp_shard (backend = graph) {UNITS}"),
    "the graph backend, uneven": ("llama", LLAMA, f"mesh (dp_shard = 3)\nfsdp on dp_shard (backend = graph) {UNITS}"),
    "experts elsewhere": ("mixtral", MIXTRAL, f"mesh (dp_shard = 4, ep = 2)\n{EXPERTS}fsdp on dp_shard {UNITS}"),
    "a router shorter than the ranks": ("mixtral", MIXTRAL, f"mesh (dp_shard = 3)\nfsdp on dp_shard {UNITS}"),
    "fused layers of gpt2": ("gpt2", GPT, f"mesh (dp_shard = 2)\nfsdp on dp_shard {UNITS}"),
    "fused layers of gpt2 on tp": ("gpt2", GPT, "mesh (tp = 2)\nshard standard on tp\n"),
    "stages of a config's model": (
        "llama",
        "HUB",
        "mesh (pp = 2, dp_shard = 2)\nfsdp on dp_shard { model.layers.* = unit(reshard = after_backward) }\n"
        "pipeline on pp\n",
    ),
    "experts of a config's model elsewhere": (
        "mixtral",
        "HUB",
        "mesh (dp_shard = 4, ep = 2)\nshard on ep { model.layers.*.mlp.experts = experts }\n"
        "fsdp on dp_shard { model.layers.* = unit, root = unit }\n",
    ),
}
TRAINING = "batch (global = 24, micro = 2, seq_len = 32)\nprecision (param = fp32)\noptimizer adamw(lr = 1e-2)\n"


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Published models, by name."""
    folder = tmp_path_factory.mktemp("hubs")
    for name in ("llama", "mixtral", "gpt2"):
        CASES[name].published().save_pretrained(folder / name, max_shard_size="30KB")
    return {name: folder / name for name in ("llama", "mixtral", "gpt2")}


def started(text: str, data: str, *, count: bool = False, **options) -> dict:
    """The weights with which a training starts on this rank, whole, and how many numbers it holds and has read."""
    from legoai.runtime.published.reader import PiecesReader

    namespace: dict = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    numbers = 0

    class Counted(PiecesReader):
        def _read(self, opened, item, planner) -> None:
            nonlocal numbers
            numbers += math.prod(item.lengths)
            super()._read(opened, item, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legoai.runtime.published.reader.PiecesReader", Counted)
        steps = options.pop("steps", 0)
        history = namespace["trainer"]().fit(
            RunOptions(**{"device": "cpu", "log_every": 0, "steps": steps, "data": data, **options})
        )
    parameters = dict(history.training.model.named_parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]
    return {
        "loss": [record.loss for record in history.steps],
        "norm": [],
        "validations": (),
        "resumed_from": history.resumed_from,
        "held": sum(part.numel() for part in local),
        "read": numbers,
        "parameters": {
            name.replace("_checkpoint_wrapped_module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
            for name, p in parameters.items()
        },
    }


def program(model: str, body: str) -> str:
    return lowered(HEAD.replace('llama3("tiny")', model) + TRAINING + body).text


@pytest.fixture(scope="module")
def alone(gloo, hubs, data) -> dict[str, dict]:
    """The weights on one process, which are those of `transformers`, as another test says."""
    models = {"llama": LLAMA, "mixtral": MIXTRAL, "gpt2": GPT}
    found = {}
    for name, model in models.items():
        [found[name]] = gloo(1)(started, program(model, ""), data, load_weights=hubs[name])
    return found


@pytest.mark.parametrize(
    "name",
    slow_but(
        PLANS,
        "fsdp of a dim that the ranks do not divide",
        "pp and fsdp",
        "a router shorter than the ranks",
        "fused layers of gpt2 on tp",
    ),
)
def test_each_rank_reads_only_its_shard(name, gloo, hubs, data, alone):
    family, model, body = PLANS[name]
    ranks = math.prod(
        int(part.split("=")[1]) for part in body.split("(")[1].split(")")[0].split(",") if "ep " not in part
    )
    wanted = alone[family]["parameters"]
    if model == "HUB":
        model = f'huggingface("{hubs[family] / "config.json"}")'
        wanted = dict(CASES[family].published().named_parameters())
    results = gloo(ranks)(started, program(model, body), data, load_weights=hubs[family])
    found = together(results)["parameters"]
    assert found.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.equal(found[tensor], value), tensor
    for result in results:
        assert result["read"] == result["held"] > 0
    if "replicas" not in name:
        assert max(result["read"] for result in results) < 0.8 * alone[family]["read"]


def test_planned_weights_start_a_run_and_checkpoints_resume_it(gloo, hubs, data, tmp_path):
    pool = gloo(2)
    body = f'weights (huggingface = "{hubs["llama"]}")\n{PLANS["fsdp"][2]}'
    text = program(LLAMA, body)
    assert f'load_weights="{hubs["llama"]}"' in text
    given = {"load_weights": hubs["llama"], "out": tmp_path}
    [first, _] = pool(started, text, data, steps=2, **given)
    [drawn, _] = pool(started, text, data, steps=2)
    assert first["loss"][0] != drawn["loss"][0]
    [again, _] = pool(started, text, data, steps=2, **given)
    assert again["resumed_from"] == 2 and again["read"] == 0
    assert all(torch.equal(value, first["parameters"][name]) for name, value in again["parameters"].items())


def test_error_on_one_rank_ends_all_ranks(gloo, hubs, data, tmp_path, monkeypatch):
    with pytest.raises(RunError, match="the shape"):
        gloo(2)(started, program(LLAMA.replace("dim = 32", "dim = 64"), PLANS["fsdp"][2]), data,
                load_weights=hubs["llama"])  # fmt: skip
    with pytest.raises(RunError, match="no complete checkpoint there, and no such folder"):
        gloo(2)(started, program(LLAMA, PLANS["fsdp"][2]), data, load_weights=tmp_path / "nowhere")
